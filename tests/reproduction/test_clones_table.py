"""The table's row to every printed digit.

The composition that it uses is held against the theorem in 40 digits.
"""

from __future__ import annotations

import math

import clones
import mpmath
import pytest
from clones_table import closed_form_epsilon, strong_composition_epsilon, table_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

PRINTED = [0.18623, 0.38461, 0.59516, 0.79355, 1.02241, 1.22689, 1.43138]
SETTING = {"num_users": 60_000, "delta": 1 / 60_000}


def test_the_closed_form_is_the_theorem_as_printed():
    printed = closed_form_epsilon(local_epsilon=4.0, num_users=100_000, delta=1e-6)
    growth = math.exp(4) / 1e5
    spread = 8 * (math.sqrt(growth * math.log(4e6)) + growth)
    assert printed == pytest.approx(
        math.log1p(math.expm1(4) / (math.exp(4) + 1) * spread), rel=1e-8
    )
    # The authors' released program: another denominator than the printed theorem, and a little
    # more.
    released = math.log1p((1 - math.exp(-4)) / (1 + math.exp(-4) / (1 + spread)) * spread)
    assert round(released, 4) == 0.5378
    assert released * 0.99 < printed < released
    assert closed_form_epsilon(local_epsilon=1.5, num_users=1, delta=1e-6) == 1.5


@settings(max_examples=40)
@given(st.floats(0.01, 5), st.integers(1000, 10**7), st.floats(1e-12, 1e-2))
def test_numeric_epsilon_never_exceeds_closed_form_nor_local_epsilon(local_epsilon, users, delta):
    numeric = clones.compute_epsilon(local_epsilon=local_epsilon, num_users=users, delta=delta)
    assert 0 <= numeric <= local_epsilon
    if local_epsilon <= math.log(users / (16 * math.log(2 / delta))):
        closed = closed_form_epsilon(local_epsilon=local_epsilon, num_users=users, delta=delta)
        assert numeric <= closed <= local_epsilon


# SG Table 1, row "Clones".
@pytest.mark.parametrize(("rounds", "published"), list(enumerate(PRINTED, start=1)))
def test_the_papers_clones_row_comes_out_to_every_printed_digit(rounds, published):
    assert round(table_epsilon(noise_multiplier=9.476, rounds=rounds, **SETTING), 5) == published
    assert table_epsilon(noise_multiplier=9.48, rounds=rounds, **SETTING) == pytest.approx(
        published, rel=7e-4
    )


@given(st.floats(0, 5), st.floats(0, 0.01), st.integers(1, 10**4), st.floats(1e-12, 0.1))
def test_strong_composition_is_the_least_branch_of_the_theorem(epsilon, delta, rounds, slack):
    composed, total = strong_composition_epsilon(
        epsilon=epsilon, delta=delta, rounds=rounds, delta_slack=slack
    )
    with mpmath.workdps(40):
        e, k = mpmath.mpf(epsilon), mpmath.mpf(rounds)
        mean = k * e * mpmath.expm1(e) / (mpmath.exp(e) + 1)
        drv = mean + e * mpmath.sqrt(2 * k * mpmath.log(1 / mpmath.mpf(slack)))
        kov = mean + e * mpmath.sqrt(
            2 * k * mpmath.log(mpmath.e + mpmath.sqrt(k * e**2) / mpmath.mpf(slack))
        )
        least = min(k * e, drv, kov)
        assert least * (1 - mpmath.mpf(10) ** -30) <= composed <= least * (1 + 1e-12) + 1e-300
        kept = (1 - mpmath.mpf(delta)) ** rounds
        if composed < float(k * e) * (1 - 1e-12):
            kept *= 1 - mpmath.mpf(slack)
        assert 1 - kept <= total + 1e-30
        assert total <= (1 - kept) * (1 + mpmath.mpf(10) ** -10) + slack * (
            composed >= float(k * e) * (1 - 1e-12)
        )


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (table_epsilon, {"noise_multiplier": 9, "num_users": 10, "delta": 1e-5, "rounds": 0}),
        (table_epsilon, {"noise_multiplier": 9, "num_users": 10, "delta": 1e-5, "scan_start": 0}),
        (strong_composition_epsilon, {"epsilon": -1, "delta": 0, "rounds": 1}),
        (strong_composition_epsilon, {"epsilon": 1, "delta": 1, "rounds": 1}),
        (
            strong_composition_epsilon,
            {"epsilon": 1, "delta": 0, "rounds": 1, "delta_slack": math.nan},
        ),
        (strong_composition_epsilon, {"epsilon": 1e308, "delta": 0, "rounds": 10}),
    ],
)
def test_bad_arguments_are_refused(function, arguments):
    with pytest.raises(ValueError, match=r"must (be|lie)"):
        function(**arguments)
