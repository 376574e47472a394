"""SG Theorems 2 and 3 as printed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import mean_ratio, subsampling


@pytest.mark.parametrize(
    ("table", "sampling"),
    [
        ("subsampled_shuffle_theorem2_rdp", "fixed_size"),
        ("shuffled_checkin_theorem3_rdp", "poisson"),
    ],
)
def test_theorems_match_the_twenty_digit_values(reference, table, sampling):
    for row in reference[table]:
        slack = {"chernoff_slack": row["Delta"]} if "Delta" in row else {}
        rdp = subsampling.compute_rdp(
            noise_multiplier=row["sigma"],
            num_users=row["n"],
            sample_rate=row.get("rate", row.get("m", 0) / row["n"]),
            orders=row["order"],
            sampling=sampling,
            **slack,
        )
        assert rdp == pytest.approx(float(row["rdp"]), rel=1e-10), row


@settings(deadline=None, max_examples=50)
@given(st.floats(0.3, 20.0), st.integers(2, 10**6), st.floats(0.01, 0.9))
def test_theorem_2_is_never_below_the_exact_value(sigma, users, rate):
    if round(rate * users) < 1:
        return
    setting = {
        "noise_multiplier": sigma,
        "num_users": users,
        "sample_rate": rate,
        "orders": np.arange(2, 33),
    }
    printed = subsampling.compute_rdp(sampling="fixed_size", **setting)
    exact = mean_ratio.compute_rdp(sampling="fixed_size", **setting)
    assert np.all(printed >= exact * (1 - 1e-10))


@settings(deadline=None, max_examples=20)
@given(st.floats(0.5, 10.0), st.integers(10, 10**5), st.floats(0.01, 0.9), st.floats(0.0, 1.0))
def test_the_optimised_slack_is_never_worse_than_the_grid_around_a_given_one(
    sigma, users, rate, slack
):
    # Δ is optimised over a grid: against any single Δ it may lose what lies between two grid
    # points, no more.
    setting = {
        "noise_multiplier": sigma,
        "num_users": users,
        "sample_rate": rate,
        "orders": np.arange(2, 20),
    }
    best = subsampling.compute_rdp(sampling="poisson", **setting)
    given_slack = subsampling.compute_rdp(sampling="poisson", chernoff_slack=slack, **setting)
    low = min(0.5, 1 / np.sqrt(users * rate))
    grid = np.geomspace(low, 1.0, 32)
    above = grid[grid >= slack]
    if slack < low or not len(above):
        return
    neighbour = subsampling.compute_rdp(
        sampling="poisson", chernoff_slack=float(above[0]), **setting
    )
    assert np.all(best <= neighbour * (1 + 1e-12))
    assert np.all(best <= np.maximum(given_slack, neighbour) * (1 + 1e-12))


@pytest.mark.parametrize("sampling", ["fixed_size", "poisson"])
def test_the_printed_bounds_keep_rising_as_the_noise_falls(sampling):
    sigmas = np.geomspace(1.0, 1e-3, 40)
    rdp = [
        subsampling.compute_rdp(
            noise_multiplier=s, num_users=100, sample_rate=0.5, sampling=sampling, orders=[2, 5]
        )
        for s in sigmas
    ]
    assert np.all(np.diff(rdp, axis=0) > 0)


def test_theorem_3_as_printed_can_fall_below_the_exact_value_of_its_own_pair():
    # Why the accountants take the larger of the two: with n·γ < 1 the rate given one participant is
    # 1/n, not γ.
    setting = {
        "noise_multiplier": 2.0,
        "num_users": 2,
        "sample_rate": 1e-4,
        "sampling": "poisson",
        "orders": 40,
    }
    assert subsampling.compute_rdp(**setting) == pytest.approx(0.0178, abs=1e-4)
    assert mean_ratio.compute_rdp(**setting) == pytest.approx(4.0708, abs=1e-4)
