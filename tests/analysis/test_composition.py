"""Composition of rounds: RDP to (ε, δ), WS Theorems 1 and 2, and the unshuffled Gaussian.

References have many digits.
"""

import math
import warnings

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import advanced_composition, gaussian, mean_ratio
from opacus_shuffle.analysis.advanced_composition import compose, subsample
from opacus_shuffle.analysis.composition import RELATIVE_ERROR, OrderCapWarning, epsilon_from_rdp

TABLE_1 = {"noise_multiplier": 9.48, "num_users": 60_000}
DELTA = 1 / 60_000


def rounds(count):
    return lambda orders: count * mean_ratio.compute_rdp(orders=orders, **TABLE_1)


# SG Table 1, row "Ours".
def test_table_1_of_the_paper_comes_out_with_orders_up_to_thirty():
    ours = [
        epsilon_from_rdp(rounds(count), delta=DELTA, orders=range(2, 31))[0]
        for count in range(1, 8)
    ]
    assert [round(value, 5) for value in ours] == [
        0.22820,
        0.22820,
        0.22821,
        0.22821,
        0.22821,
        0.22822,
        0.22822,
    ]


# SG Figure 1a (arXiv), with and without shuffling; no numbers are printed.
@pytest.mark.parametrize("count", [1, 10, 100, 1000, 10_000])
def test_shuffling_gains_more_than_a_hundredfold(count):
    shuffled, _ = epsilon_from_rdp(rounds(count), delta=DELTA)
    assert shuffled < gaussian.compute_epsilon(mu=count**0.5 / 9.48, delta=DELTA) / 100


# SG Lemma 1, SG Lemma 2: rounds add up, and the best order is taken.
@settings(max_examples=10)
@given(st.floats(0.5, 30), st.integers(1, 10**5), st.integers(1, 10**4), st.floats(1e-12, 0.1))
def test_epsilon_is_the_minimum_over_all_orders_and_rounded_up(sigma, users, count, delta):
    def rdp(orders):
        return count * mean_ratio.compute_rdp(
            noise_multiplier=sigma, num_users=users, orders=orders
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error", OrderCapWarning)
        try:
            epsilon, order = epsilon_from_rdp(rdp, delta=delta)
        except OrderCapWarning:
            return
    top = int(2 * order) + 64
    orders = np.arange(2, min(top, mean_ratio.MAX_ORDER))
    lemma = rdp(orders) + (
        math.log(1 / delta) + (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
    ) / (orders - 1)
    best = max(lemma.min(), 0.0)
    assert epsilon <= best * (1 + 2 * RELATIVE_ERROR) + 1e-15
    if order >= 2:
        assert epsilon >= best


def test_the_cap_on_orders_warns_and_stays_valid():
    with pytest.warns(OrderCapWarning, match="16384"):
        epsilon, order = epsilon_from_rdp(lambda orders: 1e-13 * orders, delta=1e-9)
    assert order == mean_ratio.MAX_ORDER
    assert 0 < epsilon < 1e-2


def test_an_rdp_that_is_not_finite_never_becomes_an_epsilon():
    with pytest.raises(ValueError, match="not finite"):
        epsilon_from_rdp(lambda orders: np.full_like(orders, np.nan), delta=1e-5)
    with pytest.raises(ValueError, match="not finite"):
        epsilon_from_rdp(lambda orders: np.where(orders > 5, np.inf, 1.0), delta=1e-5)


def log_floats(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


# WS Theorem 2.
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
    assert count * rate * shares[-1] == pytest.approx(delta_split * delta, rel=1e-12)
    slack = math.exp(-((epsilon / small - count * small / 2) ** 2) / (2 * count))
    assert count * rate * shares[-1] + slack == pytest.approx(delta, rel=1e-9)


# SG Definition 2, SG Definition 4: (ε, δ) of one Gaussian report.
@pytest.mark.parametrize(
    ("mu", "delta"), [(1e-12, 1e-30), (1e-12, 1e-14), (1e-10, 1e-30), (1e-8, 1e-13), (1e-4, 1e-9)]
)
def test_epsilon_of_a_very_noisy_step_is_no_less_than_the_exact_one(mu, delta):
    epsilon = gaussian.compute_epsilon(mu=mu, delta=delta)
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)

        def exact(e):
            return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)

        assert exact(e) <= delta
        assert (
            exact(e * (1 - mpmath.mpf("1e-7"))) > delta
        )  # and no more than its stated error above it


@pytest.mark.parametrize("mu", [1e5, 9e6, 1e7, 1e10, 1.18e21, 1e150])
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.999])
def test_an_epsilon_too_large_for_the_difference_of_two_tails_is_no_less_than_the_exact_one(
    mu, delta
):
    epsilon = gaussian.compute_epsilon(mu=mu, delta=delta)
    with mpmath.workdps(400):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        assert mpmath.ncdf(m / 2 - e / m) <= delta * (
            1 + mpmath.mpf("1e-6")
        )  # what is taken off is a share of 40/μ of it
    assert epsilon <= mu**2 / 2 + 40 * mu + 1e-7 * epsilon


def test_an_epsilon_beyond_double_precision_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^mu must be at most 1e\+150, got 1e\+308"):
        gaussian.compute_epsilon(mu=1e308, delta=1e-5)
