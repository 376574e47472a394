"""The scripts of the tutorials: readers of standard image files, and training of the small CNN."""

import gzip
import pickle
import struct

import image_datasets
import numpy as np
import pytest
import torch
import train_small_cnn
from helpers.changed_files import Touching
from torch.utils.data import TensorDataset

from opacus_shuffle.commands.images import load_images

RANDOM = np.random.default_rng(0)


def idx(array):
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


def write_files(folder, name, *, compress=False):
    """Writes the standard files of a data set with 7 training images or more and 3 test images."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, count in (("train", 7), ("t10k", 3)) if name != "cifar10" else ():
        arrays = {
            "images-idx3": RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            "labels-idx1": RANDOM.integers(0, 10, count, dtype=np.uint8),
        }
        for part, array in arrays.items():
            raw = gzip.compress(idx(array)) if compress else idx(array)
            (folder / f"{stem}-{part}-ubyte{'.gz' if compress else ''}").write_bytes(raw)
    for batch in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch") * (name == "cifar10"):
        images = RANDOM.integers(0, 256, (3, 3072), dtype=np.uint8)
        content = pickle.dumps({b"data": images, b"labels": [1, 2, 3]}, protocol=2)
        (folder / batch).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "inside", "compress"),
    [
        ("mnist", "", True),
        ("mnist", "MNIST/raw", False),
        ("fashion-mnist", "raw", False),
        ("cifar10", "", False),
        ("cifar10", "cifar-10-batches-py", False),
    ],
)
def test_standard_files_are_read_and_converted_for_compare(tmp_path, name, inside, compress):
    write_files(tmp_path / inside, name, compress=compress)
    train, test = image_datasets.load_image_dataset(name, tmp_path)
    assert (len(train), len(test)) == ((15, 3) if name == "cifar10" else (7, 3))
    output = str(tmp_path / "images.npz")
    image_datasets.main([name, "--root", str(tmp_path), "--output", output])
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in image_datasets.MEAN_AND_STD[name])
    for converted, read in zip(load_images(output), (train, test), strict=True):
        torch.testing.assert_close((converted.tensors[0] - mean) / std, read.tensors[0])
        assert converted.tensors[1].equal(read.tensors[1])


@pytest.mark.parametrize("content", [Touching("ran"), {b"data": np.zeros((4, 3072), np.uint8)}])
def test_a_cifar_batch_that_runs_code_or_has_no_labels_is_refused(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, "cifar10")
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match="test_batch is not a Python batch of CIFAR-10"):
        image_datasets.load_image_dataset("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x00\x08\x01" + idx(np.zeros((2, 3, 3), np.uint8))[4:], "IDX"),
        (idx(np.zeros((2, 3, 3), np.uint8))[:-1], "should have .* but has 17"),
        (b"", "IDX"),
        (b"\x1f\x8b", "is not a whole gzip file"),
        (b"\x1f\x8b\x08\x00" + b"\x00" * 6 + b"\xff" * 40, "is not a whole gzip file"),
        (idx(np.zeros((6, 28, 28), np.uint8)), "6 images but 7 labels"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, content, message):
    write_files(tmp_path, "mnist")
    path = tmp_path / "train-images-idx3-ubyte"
    path.rename(f"{path}.gz" if "gzip" in message else path).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        image_datasets.load_image_dataset("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "root"),
    [
        *(("mnist", root) for root in (None, "", "/nowhere", "/etc/passwd", "\x00", "a" * 5000)),
        ("cifar10", None),
        ("mnist-5k", "/tmp"),
        ("svhn", None),
    ],
)
def test_a_data_set_that_cannot_be_found_is_refused(name, root):
    with pytest.raises(ValueError, match=r"root|name"):
        image_datasets.load_image_dataset(name, root)


@pytest.mark.zoo
@pytest.mark.parametrize("accountant", ["secret_checkin", "shuffled_fw", "shuffled_sums"])
def test_the_training_script_ends_with_accuracy_and_a_report(accountant, capsys, monkeypatch):
    few = [TensorDataset(*data[:400]) for data in load_images("mnist-5k")]
    monkeypatch.setattr(train_small_cnn, "load_image_dataset", lambda *_: few)
    arguments = ["--accountant", accountant, "--epochs", "1", "--batch-size", "40", "--seed", "0"]
    train_small_cnn.main(arguments)
    printed = capsys.readouterr().out
    assert "test accuracy" in printed
    assert f"{accountant}, 10 rounds" in " ".join(printed.split())
