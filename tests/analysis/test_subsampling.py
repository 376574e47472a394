"""SG Theorems 2 and 3 as printed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import mean_ratio, subsampling


def theorem_2(order, sigma, reports, rate):
    """E[R^λ] by Theorem 2, from the exact RDP of that many reports: λ an integer, term by term."""

    def shuffled(power):  # e^{(j−1)·ε(j)}
        rdp = mean_ratio.compute_rdp(noise_multiplier=sigma, num_users=reports, orders=power)
        return math.exp((power - 1) * rdp)

    second = min(4 * (shuffled(2) - 1), 2 * shuffled(2))
    total = 1 + rate**2 * math.comb(order, 2) * second
    return total + sum(
        2 * rate**power * math.comb(order, power) * shuffled(power) for power in range(3, order + 1)
    )


def theorem_3(order, sigma, users, rate, slack):
    """The RDP by Theorem 3 at one Δ: few reports have the probability e^{−Δ²nγ/2} at most."""
    few = math.exp(-(slack**2) * users * rate / 2) * theorem_2(order, sigma, 1, rate)
    many = theorem_2(order, sigma, int((1 - slack) * users * rate) + 1, rate)
    return math.log(few + many) / (order - 1)


def test_theorems_match_the_twenty_digit_values(reference):
    for row in reference["subsampled_shuffle_theorem2_rdp"]:
        rdp = subsampling.compute_rdp(
            noise_multiplier=row["sigma"],
            num_users=row["n"],
            sample_rate=row["m"] / row["n"],
            orders=row["order"],
            sampling="fixed_size",
        )
        assert rdp == pytest.approx(float(row["rdp"]), rel=1e-10), row
    for row in reference["shuffled_checkin_theorem3_rdp"]:
        setting = row["sigma"], row["n"], row["rate"]
        printed = theorem_3(row["order"], *setting, row["Delta"])
        assert printed == pytest.approx(float(row["rdp"]), rel=1e-9), row


@pytest.mark.parametrize(
    ("sigma", "users", "rate"),
    [(2.0, 500, 0.1), (1.0, 40, 0.3), (5.0, 10**5, 0.01), (3.0, 9, 0.05)],
)
@pytest.mark.parametrize("order", [2, 3, 9])
def test_theorem_3_takes_the_best_of_32_values_of_delta(sigma, users, rate, order):
    # Of those that leave the same number of reports the largest counts, which is the best.
    slacks = np.geomspace(min(0.5, 1 / math.sqrt(users * rate)), 1.0, 32)
    best = min(theorem_3(order, sigma, users, rate, float(slack)) for slack in slacks)
    rdp = subsampling.compute_rdp(
        noise_multiplier=sigma,
        num_users=users,
        sample_rate=rate,
        orders=order,
        sampling="poisson",
    )
    assert rdp == pytest.approx(best, rel=1e-9)


@settings(max_examples=50)
@given(st.floats(0.3, 20.0), st.integers(2, 10**6), st.floats(0.01, 0.9))
def test_theorem_2_is_never_below_the_exact_value(sigma, users, rate):
    if round(rate * users) < 1:
        return
    setting = {"noise_multiplier": sigma, "num_users": users, "sample_rate": rate}
    printed, exact = (
        module.compute_rdp(sampling="fixed_size", orders=np.arange(2, 33), **setting)
        for module in (subsampling, mean_ratio)
    )
    assert np.all(printed >= exact * (1 - 1e-10))


def test_theorem_3_as_printed_can_fall_below_the_exact_value_of_its_own_pair():
    # Why the accountants take the larger of the two: with n·γ < 1 the rate given one participant is
    # 1/n, not γ.
    setting = {"num_users": 2, "sample_rate": 1e-4, "sampling": "poisson", "orders": 40}
    printed, exact = (
        module.compute_rdp(noise_multiplier=2.0, **setting) for module in (subsampling, mean_ratio)
    )
    assert (printed, exact) == (pytest.approx(0.0178, abs=1e-4), pytest.approx(4.0708, abs=1e-4))
