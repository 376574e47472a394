"""Per-record gradients of losses against plain autograd, one record at a time; what has none is refused."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.convex_problems import by_autograd, normal

from opacus_shuffle.sco.objective import Objective
from opacus_shuffle.sco.records import number_of_users, take

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def ridge(theta, batch):
    x, y = batch
    return (torch.tanh(x @ theta[:-1] + theta[-1]) - y) ** 2 + 0.1 * (theta**2).sum()


@pytest.mark.parametrize("chunk_size", [1, 7, 1024])
def test_gradients_are_those_of_autograd_record_by_record(chunk_size):
    data, theta = (normal(20, 4), normal(20, seed=1)), normal(5, seed=2)
    objective = Objective.from_loss(ridge, dimension=5)
    objective.chunk_size = chunk_size
    values, rows = by_autograd(ridge, theta, data)
    torch.testing.assert_close(objective.gradients(theta, data), rows, **CLOSE)
    torch.testing.assert_close(objective.losses(theta, data), values, **CLOSE)
    both = objective.losses_and_gradients(theta, data)
    torch.testing.assert_close(both, (values, rows), **CLOSE)


def test_losses_may_be_written_for_batches_or_for_their_mean():
    data, theta = (normal(6, 3), normal(6, seed=1)), normal(4, seed=2)
    mean = Objective.from_loss(lambda theta, batch: ridge(theta, batch).mean(), dimension=4)
    rows = Objective.from_loss(ridge, dimension=4).gradients(theta, data)
    torch.testing.assert_close(mean.gradients(theta, data), rows, **CLOSE)


def test_every_record_can_have_a_point_of_its_own():
    data, points = (normal(6, 3), normal(6, seed=1)), normal(6, 4, seed=2)
    objective = Objective.from_loss(ridge, dimension=4)
    objective.chunk_size = 4
    values, rows = objective.losses_and_gradients(points, data)
    for i in range(6):
        value, row = objective.losses_and_gradients(points[i], take(data, [i]))
        torch.testing.assert_close((values[i], rows[i]), (value[0], row[0]), **CLOSE)
    torch.testing.assert_close(objective.losses(points, data), values, **CLOSE)


def test_data_in_single_precision_and_structures_are_fine():
    def loss(theta, batch):
        return ((batch["x"][0] @ theta)[:, None] - batch["x"][1]).square().sum(1) * batch["k"]

    data = {
        "x": [normal(5, 2).float(), normal(5, 3, seed=1).float()],
        "k": torch.tensor([1, 2, 3, 4, 0]),
    }
    theta = normal(2, seed=2)
    doubled = {"x": [x.double() for x in data["x"]], "k": data["k"]}
    rows = Objective.from_loss(loss, dimension=2).gradients(theta.float().requires_grad_(), data)
    assert rows.dtype == torch.float64
    assert not rows.requires_grad
    torch.testing.assert_close(rows, by_autograd(loss, theta.float().double(), doubled)[1], **CLOSE)
    assert number_of_users(data) == 5
    assert torch.equal(take(data, torch.tensor([4, 0]))["k"], torch.tensor([0, 1]))


def test_no_records_have_no_gradients():
    objective = Objective.from_loss(ridge, dimension=4)
    assert objective.gradients(torch.zeros(4), (torch.zeros(0, 3), torch.zeros(0))).shape == (0, 4)
    assert objective.losses(torch.zeros(4), (torch.zeros(0, 3), torch.zeros(0))).shape == (0,)
    assert take(torch.zeros(3, 2), []).shape == (0, 2)


def square(theta, x):
    return (x @ theta) ** 2


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Objective.from_loss(3, dimension=1), "loss must be a callable"),
        (lambda: Objective.from_loss(square, dimension=0), "dimension"),
        (
            lambda: Objective.from_loss(square, dimension=2).gradients(
                torch.zeros(3), torch.zeros(4, 2)
            ),
            r"theta must be .*\(2,\)",
        ),
        (
            lambda: Objective.from_loss(square, dimension=2).losses(
                torch.tensor([0, 1]), torch.zeros(4, 2)
            ),
            "int64",
        ),
        (
            lambda: Objective.from_loss(square, dimension=2).gradients(
                [0.0, 1.0], torch.zeros(4, 2)
            ),
            "theta must be",
        ),
        (
            lambda: Objective.from_loss(square, dimension=1).losses(
                torch.tensor([math.nan]), torch.zeros(4, 1)
            ),
            "theta must be finite",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: x @ t.repeat(2, 1).T, dimension=1).losses(
                torch.zeros(1), torch.zeros(3, 1)
            ),
            "one loss",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: 1.0, dimension=1).gradients(
                torch.zeros(1), torch.zeros(3, 1)
            ),
            "got float",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: (x @ t).log(), dimension=1).gradients(
                torch.ones(1), torch.tensor([[1.0], [0.0], [2.0], [0.0]])
            ),
            "NaN or infinity among them",
        ),
        (
            lambda: Objective.from_loss(
                lambda t, x: (x + torch.rand(1)) @ t, dimension=1
            ).gradients(torch.ones(1), torch.ones(3, 1)),
            "random",
        ),
        (
            lambda: Objective.from_loss(
                lambda t, x: (x @ t) ** 2 if x.sum().item() else x @ t, dimension=1
            ).gradients(torch.ones(1), torch.ones(3, 1)),
            "no branches on values",
        ),
        (
            lambda: Objective.from_loss(
                lambda t, batch: (batch[0] @ t - batch[1]) ** 2, dimension=3
            ).gradients(torch.zeros(3), (torch.zeros(4, 2), torch.zeros(4))),
            r"theta has shape \(3,\): is the dimension right",
        ),
        (
            lambda: Objective.from_loss(
                lambda t, x: torch.tensor([float(t.detach().numpy().sum())]), dimension=1
            ).gradients(torch.ones(1), torch.ones(3, 1)),
            "must run under torch.func.vmap",
        ),
        (lambda: number_of_users(torch.tensor(1.0)), r"shape \(\)"),
        (lambda: number_of_users((torch.zeros(2), torch.zeros(3))), r"\[2, 3\]"),
        (lambda: number_of_users(()), "no tensor"),
        (lambda: number_of_users([1, 2]), "got int"),
    ],
)
def test_what_cannot_be_is_refused_by_name(act, message):
    with pytest.raises(ValueError, match=message):
        act()
