"""Moreau envelopes against closed forms and a general-purpose solver; SCO's Lemma 4.6.

Solver: ``scipy.optimize`` (SLSQP) on the epigraph of a maximum of affine functions. Its ``ftol`` of
1e-12 on a β-strongly convex function means a point within sqrt(2e-12/β) of the minimiser, 2.6e-6
for β ≥ 0.3; ``REFERENCE`` allows 1e-5. See docs/proofs/22.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.convex_problems import labelled, largest, normal, pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from opacus_shuffle.sco import (
    Box,
    L2Ball,
    MoreauEnvelope,
    Objective,
    absolute_loss,
    hinge_loss,
    logistic_loss,
    squared_loss,
)
from opacus_shuffle.sco.moreau import by_cutting_planes, relative_error, steps_for

REFERENCE = 1e-5
# Values here are below 1e4 and are reached in fewer than 1e3 operations of relative error 2⁻⁵³.
ROUNDING = 1e-9


def from_loss(loss, dimension):
    return Objective.from_loss(loss, dimension=dimension)


def general(loss, dimension):
    """The same loss, not recognised: it goes the general way."""
    return from_loss(lambda theta, batch: loss(theta, batch), dimension)


LARGEST, NORM = from_loss(largest, 3), from_loss(lambda t, x: (t - x).abs().sum(1), 1)


# ---- losses of a linear score


def huber(theta, batch, beta):
    """The envelope of |⟨θ, x⟩ − y|, in closed form."""
    x, y = batch
    residual, kappa = (x @ theta - y).abs(), x.square().sum(1) / beta
    return torch.where(residual <= kappa, residual**2 / (2 * kappa), residual - kappa / 2)


# SCO Definition 4.5.
@pytest.mark.parametrize("beta", [1e-3, 1.0, 50.0, 1e6])
def test_the_envelope_of_the_absolute_loss_is_hubers_loss(beta):
    data, theta = (normal(200, 3), normal(200, seed=1)), normal(3, seed=2)
    rows = torch.func.jacrev(huber)(theta, data, beta)
    envelope = MoreauEnvelope(from_loss(absolute_loss, 3), beta)
    torch.testing.assert_close(envelope.gradients(theta, data), rows, rtol=1e-10, atol=1e-12)
    values = huber(theta, data, beta)
    torch.testing.assert_close(envelope.losses(theta, data), values, rtol=1e-9, atol=1e-9)
    assert envelope.gradient_error == envelope.accuracy == 0
    assert envelope.smoothing_cost(3.0) == 9 / (2 * beta)


@pytest.mark.parametrize("loss", [logistic_loss, absolute_loss, hinge_loss, squared_loss])
@pytest.mark.parametrize("beta", [0.1, 10.0])
def test_the_gradient_is_the_losss_own_at_the_proximal_point(loss, beta):
    """a ∈ ∂h(s − κa), to the last digits: between h′ just below and just above that score."""
    (features, labels), theta = labelled(300, 3), normal(3, seed=2)
    envelope = MoreauEnvelope(from_loss(loss, 3), beta)
    gradients = envelope.gradients(theta, (features, labels))
    squares = features.square().sum(1)
    a = (gradients * features).sum(1) / squares
    torch.testing.assert_close(gradients, a[:, None] * features, rtol=1e-12, atol=1e-12)
    score = features @ theta - squares / beta * a
    step = 1e-10 * (1 + squares / beta)
    low, high = (loss.link.derivative(score + way * step, labels) for way in (-1, 1))
    assert bool(((low - 1e-12 <= a) & (a <= high + 1e-12)).all())


def test_scores_on_a_kink_and_records_without_features_are_fine():
    features = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    for loss in (absolute_loss, hinge_loss, squared_loss, logistic_loss):
        envelope = MoreauEnvelope(from_loss(loss, 2), 2.0)
        rows = envelope.gradients(torch.tensor([1.0, 5.0]), (features, torch.ones(3)))
        assert bool((rows[1] == 0).all())
        # Margin or residual is exactly that of the minimum.
        assert loss is logistic_loss or bool((rows == 0).all())


# ---- cutting planes


def reference_prox(slopes, offsets, theta, beta, *, radius=None):
    """The proximal point of one maximum of affine functions, within a ball about 0."""
    a, b, start = slopes.numpy(), offsets.numpy(), theta.numpy()
    above = {"fun": lambda v: v[-1] - a @ v[:-1] - b, "jac": lambda v: np.c_[-a, np.ones(len(a))]}
    within = {
        "fun": lambda v: radius**2 - v[:-1] @ v[:-1],
        "jac": lambda v: np.append(-2 * v[:-1], 0.0),
    }
    found = minimize(
        lambda v: v[-1] + beta / 2 * ((v[:-1] - start) ** 2).sum(),
        np.append(start, (a @ start + b).max()),
        jac=lambda v: np.append(beta * (v[:-1] - start), 1.0),
        constraints=[{"type": "ineq", **x} for x in ([above, within] if radius else [above])],
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    assert found.success, found.message
    return torch.from_numpy(found.x[:-1])


@pytest.mark.parametrize("beta", [0.3, 2.0, 40.0])
@pytest.mark.parametrize("radius", [None, 1.0])
def test_certified_errors_hold_against_a_general_purpose_solver(beta, radius):
    data, theta = pieces(), normal(3, seed=5)
    ball = None if radius is None else L2Ball(radius)
    theta = theta if ball is None else ball.project(3 * theta)
    true = torch.stack(
        [reference_prox(a, b, theta, beta, radius=radius) for a, b in zip(*data, strict=True)]
    )
    known = {"lipschitz": 1.0, "constraint": ball}
    for relative in (0.5, 0.05, 0.01):
        envelope = MoreauEnvelope(LARGEST, beta, accuracy=relative / beta, **known)
        tolerance = {"steps": steps_for(relative), "tolerance": envelope.accuracy}
        points, errors = by_cutting_planes(
            LARGEST, data, theta.expand(4, 3), beta=beta, **known, **tolerance
        )
        assert bool(((points - true).norm(dim=1) <= errors + REFERENCE).all())
        assert float(errors.max()) <= envelope.accuracy == pytest.approx(relative / beta)
        assert radius is None or float(points.norm(dim=1).max()) <= radius * (1 + 1e-12)
        wrong = (envelope.gradients(theta, data) - beta * (theta - true)).norm(dim=1)
        assert float(wrong.max()) <= envelope.gradient_error + beta * REFERENCE


@pytest.mark.parametrize("dimension", [5, 300])
def test_what_is_promised_holds_for_the_hardest_losses(dimension):
    # max_i θ_i needs a subgradient for each coordinate: the worst case in the lower bounds for such
    # methods.
    objective = from_loss(lambda t, x: (t + 0 * x).max(dim=1).values, dimension)
    records, theta = torch.zeros(1, dimension), torch.zeros(1, dimension, dtype=torch.float64)
    true = torch.full((dimension,), -1 / dimension, dtype=torch.float64)
    for steps in (20, 100, 400):
        points, errors = by_cutting_planes(
            objective, records, theta, beta=1.0, lipschitz=1.0, steps=steps, tolerance=0.0
        )
        assert float(errors) <= relative_error(steps)
        assert float((points[0] - true).norm()) <= float(errors) + ROUNDING


class OwnBall:
    """The same ball, in a class of a user's own."""

    diameter = 1.6

    def project(self, theta):
        return L2Ball(0.8).project(theta)


@pytest.mark.parametrize(
    "constraint",
    [
        pytest.param(L2Ball(0.8), marks=pytest.mark.zoo),
        Box(-0.5, 0.5, dimension=3),
        pytest.param(OwnBall(), marks=pytest.mark.zoo),
    ],
)
def test_envelopes_of_a_smooth_loss_within_a_set_are_right(constraint):
    """Projected gradient steps contract to the proximal point by H/(H + β), 2000 to rounding."""
    data, theta = labelled(10, 3), constraint.project(normal(3, seed=2))
    bound = float(data[0].norm(dim=1).max())
    objective, beta, curvature = from_loss(logistic_loss, 3), 0.3, bound**2 / 4
    true = theta.expand(10, 3)
    for _ in range(2000):
        slope = objective.gradients(true, data)
        step = (curvature * true + beta * theta - slope) / (curvature + beta)
        true = torch.stack([constraint.project(point) for point in step])
    envelope = MoreauEnvelope(
        objective, beta, lipschitz=bound, constraint=constraint, accuracy=0.05
    )
    wrong = (envelope.gradients(theta, data) - beta * (theta - true)).norm(dim=1)
    assert float(wrong.max()) <= envelope.gradient_error + ROUNDING


# ---- Lemma 4.6


# SCO Lemma 4.6.
@given(
    beta=st.floats(0.05, 50),
    dimension=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    exact=st.booleans(),
)
@settings(max_examples=60)
def test_lemma_4_6_holds_and_with_l_in_place_of_2l(beta, dimension, seed, exact):
    data, bound, region = labelled(3, dimension, seed=seed), 1.0, L2Ball(1.0)
    if exact:
        bound = float(data[0].norm(dim=1).max())
        envelope = MoreauEnvelope(from_loss(hinge_loss, dimension), beta, lipschitz=bound)
    else:
        data, region = pieces(3, 4, dimension, seed=seed), Box(-1.0, 1.0, dimension=dimension)
        known = {"lipschitz": 1.0, "constraint": region, "accuracy": 0.1 / beta}
        envelope = MoreauEnvelope(from_loss(largest, dimension), beta, **known)
    one, two = (region.project(2 * normal(dimension, seed=seed + k)) for k in (5, 6))
    first, slope = envelope.losses_and_gradients(one, data)
    second, other = envelope.losses_and_gradients(two, data)
    distance, error = float((one - two).norm()), envelope.gradient_error
    # The value at a point r off the minimiser of an L-Lipschitz function plus (β/2)‖·‖², where
    # β‖θ − p‖ ≤ L.
    excess = 2 * bound * envelope.accuracy + beta / 2 * envelope.accuracy**2 + ROUNDING
    # 1. Convex, L-Lipschitz, β-smooth.
    tangent = second + (other * (one - two)).sum(1)
    assert bool((first >= tangent - error * distance - excess).all())
    assert bool(((first - second).abs() <= bound * distance + excess).all())
    assert float((slope - other).norm(dim=1).max()) <= beta * distance + 2 * error + ROUNDING
    assert float(slope.norm(dim=1).max()) <= bound * (1 + 1e-12)
    # 3. The sandwich; 2. is what the gradients are tested against everywhere here.
    loss = envelope.objective.losses(one, data)
    assert bool((first <= loss + excess).all())
    assert bool((loss <= first + bound**2 / (2 * beta) + ROUNDING).all())


# ---- records by themselves


def solvers():
    """Every way to proximal points: an envelope and the records it takes."""
    data = labelled(6, 3)
    bound = 2 * float(data[0].norm(dim=1).max())
    logistic = general(logistic_loss, 3)
    within = MoreauEnvelope(logistic, 3.0, lipschitz=bound, constraint=L2Ball(5.0))
    return {
        "cuts within": (within, data),
        "cuts": (MoreauEnvelope(LARGEST, 1.0, lipschitz=1.0, accuracy=0.1), pieces(6)),
        "closed form": (MoreauEnvelope(from_loss(hinge_loss, 3), 2.0), data),
        "bisection": (MoreauEnvelope(from_loss(logistic_loss, 3), 2.0), data),
    }


@pytest.mark.parametrize("name", solvers())
def test_what_a_record_reports_depends_on_no_other_record_to_the_last_bit(name):
    envelope, data = solvers()[name]
    theta = 0.5 * normal(3, seed=7)
    rows = envelope.gradients(theta, data)
    for other in range(6):
        # The features alone: labels are to stay signs; 1.7 times them is within L, and 0.9 times
        # the slopes.
        for factor in (0.0, -0.9 if name == "cuts" else 1.7):
            changed = (data[0].clone(), data[1])
            changed[0][other] *= factor
            found = envelope.gradients(theta, changed)
            rest = torch.arange(6) != other
            assert torch.equal(found[rest], rows[rest])
            alone = envelope.gradients(theta, tuple(x[other : other + 1] for x in changed))
            torch.testing.assert_close(found[other : other + 1], alone, rtol=1e-9, atol=1e-9)
