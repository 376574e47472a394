"""The table's row to every printed digit, and the composition that it uses against the theorem in 40 digits."""

from __future__ import annotations

import math

import clones
import mpmath
import pytest
from clones_table import closed_form_epsilon, strong_composition_epsilon, table_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import gaussian

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


@settings(deadline=None, max_examples=40)
@given(st.floats(0.01, 5), st.integers(1000, 10**7), st.floats(1e-12, 1e-2))
def test_numeric_epsilon_never_exceeds_closed_form_nor_local_epsilon(local_epsilon, users, delta):
    numeric = clones.compute_epsilon(local_epsilon=local_epsilon, num_users=users, delta=delta)
    assert 0 <= numeric <= local_epsilon
    if local_epsilon <= math.log(users / (16 * math.log(2 / delta))):
        closed = closed_form_epsilon(local_epsilon=local_epsilon, num_users=users, delta=delta)
        assert numeric <= closed <= local_epsilon


def test_the_closed_form_beyond_its_range_is_refused_with_the_remedy():
    for delta in (1e-6, 5e-324):
        with pytest.raises(ValueError, match=r"local_epsilon .* clones.compute_epsilon"):
            closed_form_epsilon(local_epsilon=8.0, num_users=1000, delta=delta)
    assert closed_form_epsilon(local_epsilon=0.5, num_users=10**6, delta=5e-324) <= 0.5


@pytest.mark.parametrize(("rounds", "published"), list(enumerate(PRINTED, start=1)))
def test_the_papers_clones_row_comes_out_to_every_printed_digit(rounds, published):
    assert round(table_epsilon(noise_multiplier=9.476, rounds=rounds, **SETTING), 5) == published
    assert table_epsilon(noise_multiplier=9.48, rounds=rounds, **SETTING) == pytest.approx(
        published, rel=7e-4
    )


def test_the_papers_noise_is_the_classical_formula_at_sensitivity_two():
    assert round(2 * math.sqrt(2 * math.log(1.25 * 60_000)), 3) == 9.476


def test_the_papers_classical_formula_is_sound_at_its_own_settings():
    for share in (1e-10, 1.25e-11):
        classical = 2 * math.sqrt(2 * math.log(1.25 / share)) / 9.476
        assert gaussian.log_delta(mu=2 / 9.476, epsilon=classical) < math.log(share)


def test_many_rounds_compose_below_the_linear_branch():
    assert table_epsilon(noise_multiplier=9.48, rounds=1000, **SETTING) < 1000 * PRINTED[0]
    linear, delta = strong_composition_epsilon(epsilon=0.2, delta=1e-7, rounds=7, delta_slack=1e-6)
    assert linear == pytest.approx(1.4)
    assert 7e-7 * (1 - 1e-6) < delta <= 7e-7  # the slack is not spent


@settings(deadline=None)
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


def test_noise_too_small_for_the_closed_form_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="gaussian_epsilon"):
        table_epsilon(noise_multiplier=0.5, **SETTING)


def test_a_slack_below_the_smallest_normal_double_is_no_arithmetic_error():
    assert (
        strong_composition_epsilon(epsilon=1.0, delta=0.0, rounds=9, delta_slack=5e-324)[0] >= 9.0
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
