"""WS Theorems 1 and 2 against many digits, and the budget of a step against what it spends."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import advanced_composition
from opacus_shuffle.analysis.advanced_composition import compose, step_budget, subsample


def log_floats(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


# WS Theorem 2.
@settings(max_examples=200)
@given(log_floats(1e-6, 1e6), log_floats(1e-6, 1.0))
@example(699.9999999, 0.3)
@example(700.0000001, 0.3)
@example(1e6, 1e-6)
@example(1e6, 1.0)
def test_sampling_is_theorem_2_without_overflow(epsilon, rate):
    with mpmath.workdps(40):
        exact = mpmath.log1p(mpmath.mpf(rate) * mpmath.expm1(mpmath.mpf(epsilon)))
        assert subsample(epsilon, sample_rate=rate) == pytest.approx(float(exact), rel=1e-12)


# WS Theorem 1.
@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.one_of(st.just(0.0), log_floats(1e-300, 1e6)), st.integers(1, 10**6)),
        min_size=1,
        max_size=4,
    ),
    log_floats(1e-300, 0.9),
)
def test_composition_is_theorem_1_rounded_up(epsilons, slack):
    with mpmath.workdps(40):
        total = sum(mpmath.mpf(e) * n for e, n in epsilons)
        squares = sum(mpmath.mpf(e) ** 2 * n for e, n in epsilons)
        exact = min(
            total, squares / 2 + mpmath.sqrt(2 * mpmath.log(1 / mpmath.mpf(slack)) * squares)
        )
        epsilon = compose(epsilons, slack=slack)
        assert exact <= epsilon <= exact * (1 + mpmath.mpf(2e-12))


@settings(max_examples=200)
@given(
    log_floats(1e-6, 1e6),
    log_floats(1e-12, 0.1),
    st.integers(1, 10**5),
    log_floats(1e-4, 1.0),
    st.floats(0.05, 0.95),
)
@example(1e6, 1e-9, 1, 1e-3, 0.5)
@example(0.5, 5e-6, 500, 0.02, 0.5)
def test_the_budget_of_a_step_spends_the_whole_budget_and_no_more(
    epsilon, delta, steps, rate, split
):
    step_epsilon, its_delta = step_budget(
        epsilon=epsilon, delta=delta, steps=steps, sample_rate=rate, delta_split=split
    )
    assert 0 < step_epsilon < math.inf
    assert 0 < its_delta < 1
    assert its_delta == pytest.approx(min(split * delta / (rate * steps), 1.0), rel=1e-12)
    spent_then = compose(
        [(subsample(step_epsilon, sample_rate=rate), steps)], slack=(1 - split) * delta
    )
    # Rounded down by 1e-12 here, up by as much there; e^ε − 1 over q passes a relative error on at
    # most ε/(1 − e^{−ε})-fold.
    assert spent_then == pytest.approx(epsilon, rel=1e-10)


@pytest.mark.parametrize("delta_split", [0.1, 0.5, 0.9])
def test_what_the_steps_and_the_composition_take_of_delta_add_up_to_it(delta_split):
    """The composition's share is read off its ε.

    Of k steps of ε₀ it is exp(−(ε/ε₀ − kε₀/2)²/2k).
    """
    shares, small, count, rate, delta = [], 1e-3, 400, 0.25, 1e-5

    def step(share):
        shares.append(share)
        return math.log1p(math.expm1(small) / rate)  # ε₀ = 1e-3 after sampling

    epsilon = advanced_composition.compute_epsilon(
        [(step, rate, count)], delta=delta, delta_split=delta_split
    )
    slack = math.exp(-((epsilon / small - count * small / 2) ** 2) / (2 * count))
    assert count * rate * shares[-1] + slack == pytest.approx(delta, rel=1e-9)
