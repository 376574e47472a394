"""Proximal points against closed forms and a general-purpose solver (docs/proofs/22).

Solver: ``scipy.optimize`` (SLSQP) on the epigraph of a maximum of affine functions. Its ``ftol`` of
1e-12 on a β-strongly convex function means a point within sqrt(2e-12/β) of the minimiser, 2.6e-6
for β ≥ 0.3; ``REFERENCE`` allows 1e-5.
"""

from __future__ import annotations

import math

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
    as_constraint,
    hinge_loss,
    logistic_loss,
)
from opacus_shuffle.sco.moreau import by_cutting_planes, relative_error, steps_for

REFERENCE = 1e-5


# Values here are below 1e4 and are reached in fewer than 1e3 operations of relative error 2⁻⁵³.
ROUNDING = 1e-9


def reference_prox(slopes, offsets, theta, beta, *, radius=None):
    """The proximal point of one maximum of affine functions, within a ball about 0."""
    a, b, start = slopes.numpy(), offsets.numpy(), theta.numpy()
    conditions = [
        {
            "type": "ineq",
            "fun": lambda v: v[-1] - a @ v[:-1] - b,
            "jac": lambda v: np.c_[-a, np.ones(len(a))],
        }
    ]
    if radius is not None:
        conditions.append(
            {
                "type": "ineq",
                "fun": lambda v: radius**2 - v[:-1] @ v[:-1],
                "jac": lambda v: np.append(-2 * v[:-1], 0.0),
            }
        )
    found = minimize(
        lambda v: v[-1] + beta / 2 * ((v[:-1] - start) ** 2).sum(),
        np.append(start, (a @ start + b).max()),
        jac=lambda v: np.append(beta * (v[:-1] - start), 1.0),
        constraints=conditions,
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    assert found.success, found.message
    return torch.from_numpy(found.x[:-1])


@pytest.mark.parametrize("loss", [absolute_loss, hinge_loss])
def test_cutting_planes_agree_with_closed_forms(loss):
    data, theta = labelled(50, 3), normal(3, seed=2)
    bound = float(data[0].norm(dim=1).max())
    exact = MoreauEnvelope(Objective.from_loss(loss, dimension=3), 2.0, lipschitz=bound)
    general = MoreauEnvelope(
        Objective.from_loss(lambda *a: loss(*a), dimension=3),
        2.0,
        lipschitz=bound,
        accuracy=0.01 * bound,
    )
    points = general.proximal_points(theta, data)
    distance = (points.points - exact.proximal_points(theta, data).points).norm(dim=1)
    assert bool((distance <= points.errors + ROUNDING).all())
    assert float(points.errors.max()) < 1e-6  # one kink: a few steps find it


@pytest.mark.parametrize("beta", [0.3, 2.0, 40.0])
@pytest.mark.parametrize("radius", [None, 1.0])
def test_certified_errors_hold_against_a_general_purpose_solver(beta, radius):
    data, theta = pieces(), normal(3, seed=5)
    theta = theta if radius is None else L2Ball(radius).project(3 * theta)
    objective = Objective.from_loss(largest, dimension=3)
    true = torch.stack(
        [reference_prox(a, b, theta, beta, radius=radius) for a, b in zip(*data, strict=True)]
    )
    for relative in (0.5, 0.05, 0.01):
        envelope = MoreauEnvelope(
            objective,
            beta,
            lipschitz=1.0,
            constraint=None if radius is None else L2Ball(radius),
            accuracy=relative / beta,
        )
        found = envelope.proximal_points(theta, data)
        assert bool(((found.points - true).norm(dim=1) <= found.errors + REFERENCE).all())
        assert float(found.errors.max()) <= envelope.accuracy == pytest.approx(relative / beta)
        wrong = (envelope.gradients(theta, data) - beta * (theta - true)).norm(dim=1)
        assert float(wrong.max()) <= envelope.gradient_error + beta * REFERENCE
        assert radius is None or float(found.points.norm(dim=1).max()) <= radius * (1 + 1e-12)


def test_soft_thresholding_is_found_in_any_dimension():
    records, theta = 2 * normal(5, 8), normal(8, seed=3)
    envelope = MoreauEnvelope(
        Objective.from_loss(lambda t, x: (t - x).abs().sum(1), dimension=8),
        2.0,
        lipschitz=math.sqrt(8),
        accuracy=0.02,
    )
    offset = theta - records
    true = records + torch.sign(offset) * (offset.abs() - 0.5).clamp_min(0)
    found = envelope.proximal_points(theta, records)
    assert bool(((found.points - true).norm(dim=1) <= found.errors).all())
    assert float(found.errors.max()) <= 0.02


@given(
    dimension=st.integers(1, 12),
    count=st.integers(1, 12),
    beta=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=12, deadline=None)
def test_what_is_promised_beforehand_is_certified_afterwards(dimension, count, beta, seed):
    data = pieces(3, count, dimension, seed=seed)
    objective = Objective.from_loss(largest, dimension=dimension)
    theta = normal(dimension, seed=seed + 2).expand(3, dimension)
    for steps in (1, 17, 60):
        found = by_cutting_planes(
            objective, data, theta, beta=beta, lipschitz=1.0, steps=steps, tolerance=0.0
        )
        assert float(found.errors.max()) * beta <= relative_error(steps) + math.sqrt(beta) * 1e-6


@pytest.mark.parametrize("dimension", [5, 300])
def test_what_is_promised_holds_for_the_hardest_losses(dimension):
    # max_i θ_i needs a subgradient for each coordinate: the worst case in the lower bounds for such
    # methods.
    objective = Objective.from_loss(lambda t, x: (t + 0 * x).max(dim=1).values, dimension=dimension)
    records, theta = torch.zeros(1, dimension), torch.zeros(1, dimension, dtype=torch.float64)
    true = torch.full((dimension,), -1 / dimension, dtype=torch.float64)
    for steps in (20, 100, 400):
        found = by_cutting_planes(
            objective, records, theta, beta=1.0, lipschitz=1.0, steps=steps, tolerance=0.0
        )
        assert float(found.errors) <= relative_error(steps)
        assert float((found.points[0] - true).norm()) <= float(found.errors) + ROUNDING


@pytest.mark.parametrize(
    "constraint",
    [L2Ball(0.8), Box(-0.5, 0.5, dimension=3), as_constraint(L2Ball(0.8).project, diameter=1.6)],
)
def test_constrained_proximal_points_of_a_smooth_loss_are_certified(constraint):
    """Projected gradient steps contract to the proximal point by q = H/(H + β) or better, 2000 of them to rounding."""
    data, theta = labelled(10, 3), constraint.project(normal(3, seed=2))
    bound = float(data[0].norm(dim=1).max())
    objective, beta, curvature = Objective.from_loss(logistic_loss, dimension=3), 0.3, bound**2 / 4
    true = theta.expand(10, 3)
    for _ in range(2000):
        step = (curvature * true + beta * theta - objective.gradients(true, data)) / (
            curvature + beta
        )
        true = torch.stack([constraint.project(point) for point in step])
    envelope = MoreauEnvelope(
        objective, beta, lipschitz=bound, constraint=constraint, accuracy=0.05
    )
    solved = envelope.proximal_points(theta, data)
    assert bool(((solved.points - true).norm(dim=1) <= solved.errors + ROUNDING).all())
    assert float(solved.errors.max()) <= 0.05


def test_steps_and_what_they_promise_are_inverse():
    for relative in (0.9, 0.5, 0.1, 0.02):
        steps = steps_for(relative)
        assert relative_error(steps) <= relative * (1 + 1e-12)
        assert steps == 1 or relative_error(steps - 1) > relative
