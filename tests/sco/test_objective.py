"""Losses and gradients of single records against plain autograd; what has none is refused."""

import math

import pytest
import torch
from helpers.convex_problems import by_autograd, labelled, normal
from hypothesis import given
from hypothesis import strategies as st

from opacus_shuffle.sco import losses
from opacus_shuffle.sco.objective import LinearObjective, Objective
from opacus_shuffle.sco.records import number_of_users, take

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
LINEAR = [losses.logistic_loss, losses.absolute_loss, losses.hinge_loss, losses.squared_loss]


def ridge(theta, batch):
    x, y = batch
    return (torch.tanh(x @ theta[:-1] + theta[-1]) - y) ** 2 + 0.1 * (theta**2).sum()


def from_loss(loss, dimension=1):
    return Objective.from_loss(loss, dimension=dimension)


@pytest.mark.parametrize("chunk_size", [1, 7, 1024])
def test_losses_and_gradients_are_those_of_autograd_record_by_record(chunk_size):
    data, theta = (normal(20, 4), normal(20, seed=1)), normal(5, seed=2)
    for loss in (ridge, lambda theta, batch: ridge(theta, batch).mean()):
        objective = from_loss(loss, 5)
        objective.chunk_size = chunk_size
        values, rows = by_autograd(ridge, theta, data)
        torch.testing.assert_close(
            objective.losses_and_gradients(theta, data), (values, rows), **CLOSE
        )
        assert torch.equal(
            objective.losses(theta, data), objective.losses_and_gradients(theta, data)[0]
        )


def test_data_in_single_precision_and_structures_are_fine():
    def loss(theta, batch):
        return ((batch["x"][0] @ theta)[:, None] - batch["x"][1]).square().sum(1) * batch["k"]

    data = {
        "x": [normal(5, 2).float(), normal(5, 3, seed=1).float()],
        "k": torch.tensor([1, 2, 3, 4, 0]),
    }
    theta = normal(2, seed=2)
    doubled = {"x": [x.double() for x in data["x"]], "k": data["k"]}
    rows = from_loss(loss, 2).gradients(theta.float().requires_grad_(), data)
    assert rows.dtype == torch.float64
    assert not rows.requires_grad
    torch.testing.assert_close(rows, by_autograd(loss, theta.float().double(), doubled)[1], **CLOSE)
    assert number_of_users(data) == 5
    assert torch.equal(take(data, torch.tensor([4, 0]))["k"], torch.tensor([0, 1]))


# ---- losses of a linear score


@pytest.mark.parametrize("loss", LINEAR)
def test_a_built_in_loss_is_recognised_and_gives_the_same_as_autograd(loss):
    data, theta = labelled(30, 4), normal(4, seed=5)
    objective = from_loss(loss, 4)
    assert isinstance(objective, LinearObjective)
    expected = by_autograd(loss, theta, data)
    torch.testing.assert_close(objective.losses_and_gradients(theta, data), expected, **CLOSE)
    wrapped = from_loss(lambda theta, batch: loss(theta, batch), 4)
    torch.testing.assert_close(wrapped.losses_and_gradients(theta, data), expected, **CLOSE)


# SCO Definition 2.10, SCO Definition 2.11.
@given(
    loss=st.sampled_from(LINEAR),
    s=st.floats(-50, 50),
    t=st.floats(-50, 50),
    label=st.sampled_from([-1.0, 1.0]),
)
def test_links_are_convex_with_the_constants_they_claim(loss, s, t, label):
    link, ends = loss.link, torch.tensor([s, t], dtype=torch.float64)
    values, slopes = (f(ends, torch.full_like(ends, label)) for f in (link.value, link.derivative))
    # The tangent at t is below h(s); a few operations on numbers below 51²/2.
    assert float(values[0]) >= float(values[1] + slopes[1] * (s - t)) - 1e-10
    if link.lipschitz is not None:
        assert float(slopes.abs().max()) <= link.lipschitz


def test_the_logistic_loss_keeps_its_digits_far_out():
    value = losses.logistic_loss(
        torch.tensor([30.0], dtype=torch.float64), (torch.ones(1, 1), torch.ones(1))
    )
    assert float(value) == pytest.approx(math.log1p(math.exp(-30)), rel=1e-12)


ONE, RECORDS = torch.ones(1), torch.ones(3, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 19])
def test_no_loss_or_gradient_that_is_not_finite_is_returned(value, place):
    """Whichever record it is of: the squared loss of such a target, and its gradient."""
    features, targets = normal(20, 3), normal(20, seed=1)
    objective = from_loss(losses.squared_loss, 3)
    objective.losses_and_gradients(torch.ones(3), (features, targets))
    targets[place] = value
    with pytest.raises(ValueError, match="losses must be finite"):
        objective.losses_and_gradients(torch.ones(3), (features, targets))


@pytest.mark.parametrize("slope", [math.nan, math.inf, -math.inf])
def test_no_gradient_that_is_not_finite_is_returned_where_losses_are(slope):
    link = losses.Link("steep", lambda s, y: 0 * s, lambda s, y: torch.where(y > 0, slope, 1.0))
    objective = LinearObjective(link, dimension=2)
    with pytest.raises(ValueError, match="gradients must be finite"):
        objective.losses_and_gradients(torch.ones(2), (torch.ones(3, 2), torch.arange(3.0)))
