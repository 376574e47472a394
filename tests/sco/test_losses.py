"""Losses of a linear score: convex, with the constants that they claim, each record by itself."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.convex_problems import by_autograd, labelled, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.sco import LinearObjective, Link, Objective
from opacus_shuffle.sco import losses as builtin
from opacus_shuffle.sco.losses import LINKS, as_link

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


BUILTIN = {
    "logistic": builtin.logistic_loss,
    "absolute": builtin.absolute_loss,
    "hinge": builtin.hinge_loss,
    "squared": builtin.squared_loss,
}


@pytest.mark.parametrize("name", BUILTIN)
def test_a_built_in_loss_is_recognised_and_gives_the_same_as_autograd(name):
    data, theta = labelled(30, 4), normal(4, seed=5)
    objective = Objective.from_loss(BUILTIN[name], dimension=4)
    assert isinstance(objective, LinearObjective)
    expected = by_autograd(BUILTIN[name], theta, data)
    torch.testing.assert_close(objective.losses_and_gradients(theta, data), expected, **CLOSE)
    torch.testing.assert_close(objective.losses(theta, data), expected[0], **CLOSE)
    wrapped = Objective.from_loss(lambda theta, batch: BUILTIN[name](theta, batch), dimension=4)
    torch.testing.assert_close(wrapped.losses_and_gradients(theta, data), expected, **CLOSE)


@given(
    name=st.sampled_from(list(LINKS)),
    s=st.floats(-50, 50),
    t=st.floats(-50, 50),
    label=st.sampled_from([-1.0, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_links_are_convex_with_the_constants_they_claim(name, s, t, label):
    link = LINKS[name]
    ends, y = (
        torch.tensor([s, t], dtype=torch.float64),
        torch.full((2,), label, dtype=torch.float64),
    )
    values, slopes = link.value(ends, y), link.derivative(ends, y)
    # The tangent at t is below h(s); a few operations on numbers below 51²/2.
    assert float(values[0]) >= float(values[1] + slopes[1] * (s - t)) - 1e-10
    if link.lipschitz is not None:
        assert float(slopes.abs().max()) <= link.lipschitz


def test_the_logistic_loss_keeps_its_digits_far_out():
    value = builtin.logistic_loss(
        torch.tensor([30.0], dtype=torch.float64), (torch.ones(1, 1), torch.ones(1))
    )
    assert float(value) == pytest.approx(math.log1p(math.exp(-30)), rel=1e-12)


@pytest.mark.parametrize("name", ["logistic", "hinge"])
def test_labels_of_zero_and_one_are_refused(name):
    data = torch.ones(2, 1), torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match=r"2 \* y - 1"):
        Objective.from_loss(BUILTIN[name], dimension=1).gradients(torch.ones(1), data)


def test_a_link_can_be_a_function_alone():
    link = as_link(lambda s, y: (s - y) ** 4)
    s, y = normal(5), normal(5, seed=1)
    torch.testing.assert_close(link.derivative(s, y), 4 * (s - y) ** 3, **CLOSE)
    assert as_link(link) is link
    assert as_link("hinge") is LINKS["hinge"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: as_link("cauchy"), "link must be one of"),
        (lambda: Link("x", 3), "value must be a callable"),
        (lambda: Link("x", torch.abs, lipschitz=-1.0), "lipschitz must be positive"),
        (lambda: LinearObjective("hinge", dimension=1), "link must be a Link"),
        (
            lambda: LinearObjective(LINKS["squared"], dimension=2).losses(
                torch.zeros(2), torch.zeros(3, 2)
            ),
            "pair",
        ),
        (
            lambda: LinearObjective(LINKS["squared"], dimension=2).losses(
                torch.zeros(2), (torch.zeros(3, 3), torch.zeros(3))
            ),
            "shape",
        ),
        (
            lambda: LinearObjective(LINKS["squared"], dimension=2).losses(
                torch.zeros(2), (torch.zeros(3, 2), torch.zeros(3, 1))
            ),
            "one value per record",
        ),
        (
            lambda: as_link(lambda s, y: s.sum()).derivative(torch.zeros(3), torch.zeros(3)),
            r"of shape \(1,\) for a batch of one",
        ),
        (
            lambda: Link("x", lambda s, y: s.sum(), elementwise=True).derivative(
                torch.zeros(3), torch.zeros(3)
            ),
            "as many values",
        ),
        (lambda: Link("x", torch.abs, elementwise="yes"), "elementwise must be True or False"),
        (lambda: Link("x", torch.abs, coefficient=3), "coefficient must be a callable"),
    ],
)
def test_links_that_are_none_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_a_link_that_mixes_records_finds_none_to_mix():
    def mixing(scores, targets):
        return (scores - targets) ** 2 * targets.sum()

    features, targets = normal(5, 2), normal(5, seed=1).abs()
    for link in (Link("given", mixing), Link("given", mixing, lambda s, y: s * y.sum())):
        objective, theta = LinearObjective(link, dimension=2), normal(2, seed=3)
        before = objective.losses_and_gradients(theta, (features, targets))
        changed = targets.clone()
        changed[3] = 50.0
        after = objective.losses_and_gradients(theta, (features, changed))
        others = [0, 1, 2, 4]
        assert all(torch.equal(x[others], y[others]) for x, y in zip(before, after, strict=True))
        torch.testing.assert_close(before[0], (features @ theta - targets) ** 2 * targets, **CLOSE)
        assert objective.losses(theta, (features[:0], targets[:0])).shape == (0,)


def test_a_promise_lets_a_link_have_whole_batches():
    sizes = []

    def value(scores, targets):
        sizes.append(len(scores))
        return scores - targets

    for promise, wanted in ((True, [4]), (False, [1])):
        sizes.clear()
        Link("x", value, elementwise=promise).value(torch.zeros(4), torch.zeros(4))
        assert sizes == wanted
