"""Per-record gradients of losses against plain autograd, one record at a time; what has none is refused."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers.convex_problems import by_autograd, normal
from torch import nn

from opacus_shuffle.sco.objective import Objective
from opacus_shuffle.sco.records import number_of_users, take

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def ridge(theta, batch):
    x, y = batch
    return (torch.tanh(x @ theta[:-1] + theta[-1]) - y) ** 2 + 0.1 * (theta**2).sum()


@pytest.mark.parametrize("chunk_size", [1, 7, 1024])
def test_gradients_are_those_of_autograd_record_by_record(chunk_size):
    data, theta = (normal(20, 4), normal(20, seed=1)), normal(5, seed=2)
    objective = Objective.from_loss(ridge, dimension=5, chunk_size=chunk_size)
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
    objective = Objective.from_loss(ridge, dimension=4, chunk_size=4)
    values, rows = objective.losses_and_gradients(points, data)
    for i in range(6):
        value, row = objective.losses_and_gradients(points[i], take(data, [i]))
        torch.testing.assert_close((values[i], rows[i]), (value[0], row[0]), **CLOSE)
    torch.testing.assert_close(objective.losses(points, data), values, **CLOSE)


@pytest.mark.parametrize("own_points", [False, True])
def test_a_loss_that_cannot_be_vectorised_is_computed_record_by_record_with_one_warning(own_points):
    def branching(theta, batch):
        x, y = batch
        residual = x @ theta - y
        return residual**2 / 2 if residual.abs().item() < 1 else residual.abs() - 0.5

    def huber(theta, batch):
        x, y = batch
        return nn.functional.huber_loss((x * theta).sum(1), y, reduction="none")

    data = normal(9, 3), normal(9, seed=1)
    theta = normal(9, 3, seed=2) if own_points else normal(3, seed=2)
    objective = Objective.from_loss(branching, dimension=3, chunk_size=4)
    with pytest.warns(UserWarning, match="cannot be vectorised"):
        rows = objective.gradients(theta, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values, again = objective.losses_and_gradients(theta, data)
    expected = Objective.from_loss(huber, dimension=3).losses_and_gradients(theta, data)
    torch.testing.assert_close((values, rows), expected, **CLOSE)
    assert torch.equal(again, rows)


def test_data_in_single_precision_and_structures_are_fine():
    def loss(theta, batch):
        return ((batch["x"][0] @ theta)[:, None] - batch["x"][1]).square().sum(1) * batch["k"]

    data = {"x": [normal(5, 2).float(), normal(5, 3, seed=1).float()], "k": torch.tensor([1, 2, 3, 4, 0])}
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
            lambda: Objective.from_loss(square, dimension=2).gradients(torch.zeros(3), torch.zeros(4, 2)),
            r"theta must be .*\(2,\)",
        ),
        (lambda: Objective.from_loss(square, dimension=2).losses(torch.tensor([0, 1]), torch.zeros(4, 2)), "int64"),
        (lambda: Objective.from_loss(square, dimension=2).gradients([0.0, 1.0], torch.zeros(4, 2)), "theta must be"),
        (
            lambda: Objective.from_loss(square, dimension=1).losses(torch.tensor([math.nan]), torch.zeros(4, 1)),
            "theta must be finite",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: x @ t.repeat(2, 1).T, dimension=1).losses(
                torch.zeros(1), torch.zeros(3, 1)
            ),
            "one loss",
        ),
        (lambda: Objective.from_loss(lambda t, x: 1.0, dimension=1).gradients(torch.zeros(1), torch.zeros(3, 1)), "got float"),
        (
            lambda: Objective.from_loss(lambda t, x: (x @ t).log(), dimension=1).gradients(
                torch.ones(1), torch.tensor([[1.0], [0.0], [2.0], [0.0]])
            ),
            "NaN or infinity among them",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: (x + torch.rand(1)) @ t, dimension=1).gradients(
                torch.ones(1), torch.ones(3, 1)
            ),
            "random",
        ),
        (
            lambda: Objective.from_loss(lambda t, x: torch.tensor([float(t.detach().numpy().sum())]), dimension=1).gradients(
                torch.ones(1), torch.ones(3, 1)
            ),
            "depend on theta",
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


def test_a_wrong_dimension_of_a_loss_function_is_named():
    objective = Objective.from_loss(lambda t, batch: (batch[0] @ t - batch[1]) ** 2, dimension=3)
    with pytest.raises(ValueError, match=r"theta of shape \(3,\) and a batch of one of shape \(1, 2\), \(1,\), but"):
        objective.gradients(torch.zeros(3), (torch.zeros(4, 2), torch.zeros(4)))

    def broken(theta, x):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        Objective.from_loss(broken, dimension=1).gradients(torch.zeros(1), torch.zeros(4, 1))
