"""Projections against what defines them: the nearest point z of a convex set has ⟨θ − z, y − z⟩ ≤ 0 for all y in the set."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.sco.constraints import Box, Constraint, L2Ball, as_constraint, project_rows

# A few operations on numbers below 1e3, each to 2⁻⁵³: products of two lengths are right to this.
ROUNDING = 1e6 * 2.0**-48

numbers = st.floats(-100, 100)
vectors = st.integers(1, 6).flatmap(
    lambda d: st.tuples(*[st.lists(numbers, min_size=d, max_size=d)] * 3)
)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@given(vectors, st.floats(0.1, 50), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_projection_onto_a_ball_is_the_nearest_point(points, radius, seed):
    theta, center, _ = map(tensor, points)
    ball = L2Ball(radius, center)
    nearest = ball.project(theta)
    assert float((nearest - center).norm()) <= radius * (1 + 1e-13) + ROUNDING
    other = torch.randn(
        len(theta), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    inside = center + other * (radius / other.norm().clamp_min(radius))
    assert float((theta - nearest) @ (inside - nearest)) <= ROUNDING


@given(vectors, st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_projection_onto_a_box_is_the_nearest_point(points, seed):
    theta, one, two = map(tensor, points)
    low, high = torch.minimum(one, two), torch.maximum(one, two) + 1
    box = Box(low, high)
    nearest = box.project(theta)
    assert bool((low <= nearest).all())
    assert bool((nearest <= high).all())
    inside = low + (high - low) * torch.rand(
        len(theta), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    assert float((theta - nearest) @ (inside - nearest)) <= ROUNDING


@pytest.mark.parametrize(
    "constraint",
    [L2Ball(2.0), L2Ball(2.0, torch.ones(3)), Box(-1.0, 0.5), Box(torch.zeros(3), 1.0)],
)
def test_points_of_the_set_stay_and_rows_are_points(constraint):
    rows = 5 * torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    projected = project_rows(constraint, rows)
    for row, nearest in zip(rows, projected, strict=True):
        assert torch.equal(constraint.project(row), nearest)
        torch.testing.assert_close(constraint.project(nearest), nearest, rtol=1e-14, atol=1e-14)
    inside = torch.full((3,), 0.25)
    assert torch.equal(constraint.project(inside), inside)


def test_diameters_are_of_the_farthest_points():
    assert L2Ball(3.0).diameter == 6
    assert Box(-1.0, 1.0, dimension=9).diameter == 6
    assert Box(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0])).diameter == 5
    assert Box(torch.tensor([0.0, 1.0]), 4.0).diameter == 5
    assert L2Ball(1.0, torch.zeros(4)).dimension == Box(0.0, 1.0, dimension=4).dimension == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: L2Ball(0.0), "radius must be positive"),
        (lambda: L2Ball(1.0, torch.tensor([math.nan])), "center must hold 1 finite numbers"),
        (lambda: L2Ball(1.0, torch.zeros(2, 2)), r"center must have shape \(d,\), got \(2, 2\)"),
        (
            lambda: L2Ball(1.0, torch.zeros(2)).project(torch.zeros(3)),
            "dimension 2 of L2Ball, got 3",
        ),
        (lambda: L2Ball(1.0).project(torch.tensor([math.nan])), "must be finite"),
        (lambda: L2Ball(1.0).project(torch.tensor([1])), "floating-point"),
        (lambda: Box(1.0, 0.0), "low must not exceed high"),
        (lambda: Box(1.0, 1.0), "below it somewhere"),
        (lambda: Box(0.0, math.inf), "high must be a finite number"),
        (lambda: Box(torch.zeros(2), torch.ones(3)), "must agree"),
        (lambda: Box(torch.zeros(2), 1.0, dimension=3), "must agree"),
        (lambda: Box(0.0, 1.0).diameter, "dimension must be given"),
        (lambda: Box(0.0, 1.0, dimension=2).project(torch.zeros(3)), "dimension 2 of Box, got 3"),
        (lambda: as_constraint(lambda theta: theta), "diameter must be given"),
        (lambda: as_constraint(None), "constraint must be"),
        (lambda: as_constraint(L2Ball, 1.0), "constraint must be"),
        (lambda: as_constraint(lambda theta: theta, 0.0), "diameter must be positive"),
        (lambda: as_constraint(Box(0.0, 1.0)), "dimension must be given"),
        (
            lambda: as_constraint(lambda theta: theta[:1], 1.0).project(torch.zeros(2)),
            r"shape \(2,\)",
        ),
        (lambda: as_constraint(lambda theta: None, 1.0).project(torch.zeros(2)), "got NoneType"),
        (
            lambda: as_constraint(lambda theta: theta / 0, 1.0).project(torch.ones(2)),
            "NaN or infinity",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_callables_and_own_classes_are_constraints():
    class Simplex:
        diameter = math.sqrt(2)

        def project(self, theta):
            return torch.softmax(theta, 0)

    own, ball = Simplex(), L2Ball(1.0)
    assert as_constraint(own) is own
    assert as_constraint(ball) is ball
    assert isinstance(ball, Constraint)
    orthant = as_constraint(lambda theta: theta.clamp_(min=0), diameter=4)
    theta = torch.tensor([-1.0, 2.0])
    assert orthant.project(theta).tolist() == [0, 2]
    assert theta.tolist() == [-1, 2]  # although the callable works in place
    assert orthant.diameter == 4
    assert project_rows(orthant, torch.stack([theta, -theta])).tolist() == [[0, 2], [1, 0]]


def test_an_object_without_a_diameter_is_refused():
    class Unbounded:
        def project(self, theta):
            return theta

    with pytest.raises(ValueError, match="must have a diameter"):
        as_constraint(Unbounded(), 3.0)


def test_a_box_given_by_numbers_has_them_in_double_precision():
    assert Box(0.0, 0.1, dimension=2).project(torch.ones(2, dtype=torch.float64)).tolist() == [
        0.1,
        0.1,
    ]
