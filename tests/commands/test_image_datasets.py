"""Standard files in, normalised tensors out; anything else is refused with the file's name."""

from __future__ import annotations

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from opacus_shuffle.commands.image_datasets import (
    DEBIAN_FASHION_MNIST,
    load_image_dataset,
    read_idx,
)


def idx(array):
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_idx_set(folder, *, compress, records=(7, 3)):
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    written = []
    for stem, count in zip(("train", "t10k"), records, strict=True):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        for name, array in (
            (f"{stem}-images-idx3-ubyte", images),
            (f"{stem}-labels-idx1-ubyte", labels),
        ):
            raw = idx(array)
            (folder / (name + ".gz" if compress else name)).write_bytes(
                gzip.compress(raw) if compress else raw
            )
        written.append((images, labels))
    return written


def write_cifar(folder, *, labels_key=b"labels"):
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        batch = {
            b"data": generator.integers(0, 256, (4, 3072), dtype=np.uint8),
            labels_key: [1, 2, 3, 4],
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("inside", ["", "MNIST/raw", "raw"])
def test_idx_files_are_read_wherever_they_usually_lie(tmp_path, compress, inside):
    (images, labels), _ = write_idx_set(tmp_path / inside, compress=compress)
    train, test = load_image_dataset("mnist", tmp_path)
    assert (len(train), len(test)) == (7, 3)
    assert torch.equal(train.tensors[1], torch.from_numpy(labels.astype(np.int64)))
    expected = (images[0].astype(np.float32) / 255 - 0.1307) / 0.3081
    assert np.allclose(train[0][0].numpy()[0], expected, atol=1e-6)


def test_fashion_mnist_can_come_from_a_folder(tmp_path):
    write_idx_set(tmp_path, compress=True)
    train, _ = load_image_dataset("fashion-mnist", tmp_path)
    assert tuple(train[0][0].shape) == (1, 28, 28)


@pytest.mark.skipif(
    not DEBIAN_FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_debian_s_fashion_mnist_is_whole():
    train, test = load_image_dataset("fashion-mnist")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert abs(train.tensors[0].mean()) < 0.01
    assert abs(train.tensors[0].std() - 1) < 0.01


def test_mnist_5k_is_split_the_same_way_every_time():
    (train, test), (again, _) = load_image_dataset("mnist-5k"), load_image_dataset("mnist-5k")
    assert (len(train), len(test)) == (4000, 1000)
    assert torch.equal(train.tensors[0], again.tensors[0])
    assert set(train.tensors[1].tolist()) == set(test.tensors[1].tolist()) == set(range(10))


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar_batches_are_read(tmp_path, inside):
    write_cifar(tmp_path / "data" / inside)
    train, test = load_image_dataset("cifar10", tmp_path / "data")
    assert (len(train), len(test)) == (20, 4)
    assert tuple(train[0][0].shape) == (3, 32, 32)
    assert train.tensors[1].tolist()[:4] == [1, 2, 3, 4]


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, ("touch " + str(tmp_path / "ran"),))

    write_cifar(tmp_path / "data")
    (tmp_path / "data" / "test_batch").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(ValueError, match="test_batch"):
        load_image_dataset("cifar10", tmp_path / "data")
    assert not (tmp_path / "ran").exists()


def test_a_cifar_batch_without_labels_is_refused(tmp_path):
    write_cifar(tmp_path / "data", labels_key=b"fine_labels")
    with pytest.raises(ValueError, match="data_batch_1"):
        load_image_dataset("cifar10", tmp_path / "data")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda raw: b"\x00\x00\x08\x01" + raw[4:], "IDX"),
        (lambda raw: raw[:-1], "holds"),
        (lambda raw: raw[:6], "IDX"),
        (lambda raw: b"", "IDX"),
    ],
)
def test_a_spoilt_idx_file_is_refused(tmp_path, spoil, named):
    path = tmp_path / "images"
    path.write_bytes(spoil(idx(np.zeros((2, 3, 3), np.uint8))))
    with pytest.raises(ValueError, match=named):
        read_idx(path, dimensions=3)


def test_images_and_labels_must_be_as_many(tmp_path):
    write_idx_set(tmp_path, compress=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(6, np.uint8)))
    with pytest.raises(ValueError, match="7 images but 6 labels"):
        load_image_dataset("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "root"), [("mnist", None), ("cifar10", None), ("mnist-5k", "/tmp"), ("svhn", None)]
)
def test_what_cannot_be_found_says_where_it_was_looked_for(name, root):
    with pytest.raises(ValueError, match=r"root|name"):
        load_image_dataset(name, root)
