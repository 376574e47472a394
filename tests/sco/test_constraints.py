"""Projections against what defines them: the nearest point z to θ has ⟨θ − z, y − z⟩ ≤ 0.

That holds for every y in the set, and for no other point z of it.
"""

import pytest
import torch
from helpers.convex_problems import normal
from hypothesis import given
from hypothesis import strategies as st

from opacus_shuffle.sco.constraints import Box, L2Ball

# A few operations on numbers below 1e3, each to 2⁻⁵³: products of two lengths are right to this.
ROUNDING = 1e6 * 2.0**-48


def corners(dimension, seed):
    """Two vectors, the second above the first."""
    one, two = 100 * normal(2, dimension, seed=seed).clamp(-2, 2)
    return torch.minimum(one, two), torch.maximum(one, two) + 1


@given(dimension=st.integers(1, 6), seed=st.integers(0, 2**31), radius=st.floats(0.1, 50))
def test_a_projection_is_the_nearest_point(dimension, seed, radius):
    center, theta, other = 50 * normal(3, dimension, seed=seed)
    low, high = corners(dimension, seed)
    inside_ball = center + other * (radius / other.norm().clamp_min(radius))
    inside_box = low + (high - low) * torch.sigmoid(other)
    for region, inside in ((L2Ball(radius, center), inside_ball), (Box(low, high), inside_box)):
        nearest = region.project(theta)
        assert float((theta - nearest) @ (inside - nearest)) <= ROUNDING
        if isinstance(region, Box):
            assert bool(((low <= nearest) & (nearest <= high)).all())
        else:
            assert float((nearest - center).norm()) <= radius * (1 + 1e-13) + ROUNDING


@pytest.mark.parametrize(
    "constraint",
    [L2Ball(2.0), L2Ball(2.0, torch.ones(3)), Box(-1.0, 0.5), Box(torch.zeros(3), 1.0)],
)
def test_points_of_the_set_stay_and_rows_are_points(constraint):
    rows = 5 * normal(20, 3, seed=1)
    projected = constraint.project(rows)
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
    assert L2Ball(1.0, torch.zeros(4)).dimension == Box(torch.zeros(4), 1.0).dimension == 4


def test_a_box_given_by_numbers_has_them_in_double_precision():
    nearest = Box(0.0, 0.1, dimension=2).project(torch.ones(2, dtype=torch.float64))
    assert nearest.tolist() == [0.1, 0.1]
