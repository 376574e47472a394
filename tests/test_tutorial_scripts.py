"""The scripts of the tutorials: readers of standard image files, and training of the small CNN."""

from __future__ import annotations

import gzip
import os
import pickle
import struct

import image_datasets
import numpy as np
import pytest
import torch
import train_small_cnn
from image_datasets import DEBIAN_FASHION_MNIST, load_image_dataset
from torch.utils.data import TensorDataset

from opacus_shuffle.commands.images import load_images

MORE = ("random_allocation", "secret_checkin", "shuffled_fw", "shuffled_sums")


def idx(array):
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_idx_set(folder, *, compress):
    """Seven images to train on and three to test with, in the four files of MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, written = np.random.default_rng(0), []
    for stem, count in (("train", 7), ("t10k", 3)):
        written.append(generator.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        written.append(generator.integers(0, 10, count, dtype=np.uint8))
        for kind, array in zip(("images-idx3", "labels-idx1"), written[-2:], strict=True):
            raw = gzip.compress(idx(array)) if compress else idx(array)
            (folder / f"{stem}-{kind}-ubyte{'.gz' if compress else ''}").write_bytes(raw)
    return written


def write_cifar(folder):
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        batch = {b"data": images, b"labels": [1, 2, 3, 4]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(
    ("name", "inside", "mean", "std"),
    [
        ("mnist", "", 0.1307, 0.3081),
        ("mnist", "MNIST/raw", 0.1307, 0.3081),
        ("mnist", "raw", 0.1307, 0.3081),
        ("fashion-mnist", "", 0.2860, 0.3530),
    ],
)
def test_idx_files_are_read_wherever_they_usually_lie(tmp_path, compress, name, inside, mean, std):
    images, labels, *_ = write_idx_set(tmp_path / inside, compress=compress)
    train, test = load_image_dataset(name, tmp_path)
    assert (len(train), len(test)) == (7, 3)
    assert torch.equal(train.tensors[1], torch.from_numpy(labels.astype(np.int64)))
    expected = (images[0].astype(np.float32) / 255 - mean) / std
    assert np.allclose(train[0][0].numpy()[0], expected, atol=1e-6)


@pytest.mark.skipif(
    not DEBIAN_FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_debian_s_fashion_mnist_is_whole():
    train, test = load_image_dataset("fashion-mnist")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert abs(train.tensors[0].mean()) < 0.01
    assert abs(train.tensors[0].std() - 1) < 0.01


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar_batches_are_read(tmp_path, inside):
    write_cifar(tmp_path / "data" / inside)
    train, test = load_image_dataset("cifar10", tmp_path / "data")
    assert (len(train), len(test)) == (20, 4)
    assert tuple(train[0][0].shape) == (3, 32, 32)
    assert train.tensors[1].tolist()[:4] == [1, 2, 3, 4]


class Evil:
    """Makes a file where it is read by a common unpickler."""

    def __reduce__(self):
        return (os.system, ("touch ran",))


@pytest.mark.parametrize("content", [Evil(), {b"data": np.zeros((4, 3072), np.uint8)}])
def test_a_cifar_batch_that_runs_code_or_has_no_labels_is_refused(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path / "data")
    (tmp_path / "data" / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match="test_batch is not a Python batch of CIFAR-10"):
        load_image_dataset("cifar10", tmp_path / "data")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\x00\x00\x08\x01" + idx(np.zeros((2, 3, 3), np.uint8))[4:], "IDX"),
        (idx(np.zeros((2, 3, 3), np.uint8))[:-1], "should have .* but has 17"),
        (b"", "IDX"),
        (b"no gzip file", "is not an IDX file"),
        (b"\x1f\x8b", "is not a whole gzip file"),
        (b"\x1f\x8b\x08\x00" + b"\x00" * 6 + b"\xff" * 40, "is not a whole gzip file"),
        (idx(np.zeros((6, 28, 28), np.uint8)), "6 images but 7 labels"),
    ],
)
def test_a_spoilt_file_is_named(tmp_path, content, named):
    write_idx_set(tmp_path, compress=False)
    plain = tmp_path / "train-images-idx3-ubyte"
    if "gzip" in named:
        plain = plain.rename(f"{plain}.gz")
    plain.write_bytes(content)
    with pytest.raises(ValueError, match=named):
        load_image_dataset("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("mnist", None),
        ("cifar10", None),
        ("mnist-5k", "/tmp"),
        ("svhn", None),
        *(
            (name, folder)
            for name in ("mnist", "fashion-mnist", "cifar10")
            for folder in ("", "/nowhere", "/etc/passwd", "\x00", "a" * 5000)
        ),
    ],
)
def test_a_data_set_that_cannot_be_found_is_refused(name, root):
    with pytest.raises(ValueError, match=r"root|name"):
        load_image_dataset(name, root)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_an_archive_written_by_the_script_is_read_by_compare(tmp_path, name):
    if name == "mnist":
        write_idx_set(tmp_path, compress=False)
    else:
        write_cifar(tmp_path / "cifar-10-batches-py")
    output = str(tmp_path / "images.npz")
    image_datasets.main([name, "--root", str(tmp_path), "--output", output])
    mean, std = image_datasets.MEAN_AND_STD[name]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    read = zip(load_images(output), load_image_dataset(name, tmp_path), strict=True)
    for (pixels, labels), (expected, targets) in ((a.tensors, b.tensors) for a, b in read):
        torch.testing.assert_close(pixels, expected * std + mean)
        assert labels.equal(targets)


@pytest.mark.filterwarnings("ignore:This run is not private")
@pytest.mark.parametrize(
    "accountant", ["shuffled_checkin", *(pytest.param(a, marks=pytest.mark.zoo) for a in MORE)]
)
def test_the_training_script_ends_with_accuracy_and_a_report(accountant, capsys, monkeypatch):
    few = [TensorDataset(*data[:400]) for data in load_images("mnist-5k")]
    monkeypatch.setattr(train_small_cnn, "load_image_dataset", lambda *_: few)
    arguments = ["--accountant", accountant, "--epochs", "1", "--batch-size", "40", "--seed", "0"]
    train_small_cnn.main(arguments)
    printed = capsys.readouterr().out
    assert "test accuracy" in printed
    assert f"{accountant}, 10 rounds" in " ".join(printed.split())
