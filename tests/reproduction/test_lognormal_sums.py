"""Sums of log-normal terms: each distribution against what defines it.

References: the moments of S with hundreds of digits (Fenton–Wilkinson), integrals that use neither
the trapezoid rule nor Stein's lemma (Schwartz–Yeh), and sums with every term drawn (Monte Carlo).
Two samples of sizes m and n from one distribution have empirical CDFs that are further apart than
1.95·√(1/m + 1/n) with probability 1e-3 (Kolmogorov); the seeds are fixed.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc

import lognormal_sums
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lognormal_sums import (
    NormalDistribution,
    SampledDistribution,
    fenton_wilkinson,
    kernel_density,
    largest_error,
    least_squares,
    log_sum_of_two,
    monte_carlo,
    schwartz_yeh,
)
from scipy.integrate import quad
from scipy.stats import gaussian_kde

KOLMOGOROV = 1.95

stds = st.floats(1e-3, 20.0)
groups = st.lists(st.tuples(st.floats(-500, 500), st.integers(1, 10**12)), min_size=1, max_size=4)
distributions = st.builds(NormalDistribution, st.floats(-50, 50), stds)


def distance(samples, others):
    """The largest difference of two empirical CDFs."""
    both = np.concatenate([samples, others])
    return np.abs(
        SampledDistribution(samples).cdf(both) - SampledDistribution(others).cdf(both)
    ).max()


def distance_to(distribution, samples):
    """The largest difference of an empirical CDF and a distribution's."""
    places = np.sort(samples)
    steps = np.arange(len(places) + 1) / len(places)
    return max(
        np.abs(distribution.cdf(places) - steps[:-1]).max(),
        np.abs(distribution.cdf(places) - steps[1:]).max(),
    )


def agreement(samples, others=math.inf):
    return KOLMOGOROV * math.sqrt(1 / samples + 1 / others)


# ---- Fenton and Wilkinson
# ---------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(groups, stds)
def test_fenton_wilkinson_has_the_sums_own_mean_and_variance(terms, std):
    means, counts = zip(*terms, strict=True)
    distribution = fenton_wilkinson(means, std, counts)
    with mpmath.workdps(800):  # the exponentials span e^{±1000}
        s2 = mpmath.mpf(std) ** 2
        first = sum(n * mpmath.exp(mpmath.mpf(m) + s2 / 2) for m, n in terms)
        second = sum(n * mpmath.exp(2 * mpmath.mpf(m) + s2) * mpmath.expm1(s2) for m, n in terms)
        variance = mpmath.log1p(second / first**2)
        mean = mpmath.log(first) - variance / 2
        # 2⁻⁵² of each of some ten terms, none larger than 1500.
        assert abs(distribution.mean - float(mean)) <= 1e-11
        assert distribution.std == pytest.approx(float(mpmath.sqrt(variance)), rel=1e-11)


@given(st.floats(-1e5, 1e5), stds)
def test_one_term_is_its_own_distribution(mean, std):
    for distribution in (fenton_wilkinson(mean, std), schwartz_yeh(mean, std)):
        assert distribution.mean == pytest.approx(mean, abs=1e-10)
        assert distribution.std == pytest.approx(std, rel=1e-12)


@pytest.mark.parametrize("approximation", [fenton_wilkinson, schwartz_yeh])
def test_counts_are_repetitions_order_is_nothing_and_a_shift_is_a_shift(approximation):
    distribution = approximation([0.3, -1.0], 0.8, [3, 2])
    spelt_out = approximation([-1.0, 0.3, 0.3, -1.0, 0.3], 0.8)
    shifted = approximation([5.3, 4.0], 0.8, [3, 2])
    assert (spelt_out.mean, spelt_out.std) == pytest.approx(
        (distribution.mean, distribution.std), rel=1e-13
    )
    assert (shifted.mean, shifted.std) == pytest.approx(
        (distribution.mean + 5, distribution.std), rel=1e-13
    )


@pytest.mark.zoo
@settings(max_examples=25, deadline=None)
@given(
    st.floats(-1000, 1000),
    st.floats(1e-6, 100),
    st.integers(1, 10**12),
    st.sampled_from(["one_by_one", "doubling"]),
)
def test_nothing_overflows_between_ten_and_a_trillion_terms(mean, std, count, combine):
    wilkinson, yeh = (
        fenton_wilkinson(mean, std, count),
        schwartz_yeh(mean, std, count, combine=combine),
    )
    # Jensen, twice: log d + E Y is at most E log S, and that at most log E S; both approximations
    # keep it.
    for distribution in (wilkinson, yeh):
        assert math.isfinite(distribution.mean)
        assert 0 < distribution.std <= std * (1 + 1e-9)
        assert distribution.mean <= mean + math.log(count) + std**2 / 2 + 1e-8
    assert yeh.mean >= mean + math.log(count) - 1e-2 * std - 1e-8


# ---- Schwartz and Yeh
# -------------------------------------------------------------------------------------------------------


def moments_of_two(one, other):
    """Mean and std of log(e^{Y1} + e^{Y2}): w = Y2 − Y1 and Y1's regression on w, by adaptive quadrature."""
    deviation = math.hypot(one.std, other.std)
    centre = other.mean - one.mean
    bends = [(w - centre) / deviation for w in (-30.0, 0.0, 30.0)]
    ends = sorted({-14.0, -8.0, -4.0, 0.0, 4.0, 8.0, 14.0} | {z for z in bends if abs(z) < 14})

    def mean_of(function):
        def integrand(z):
            return function(z) * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

        return sum(
            quad(integrand, *part, epsabs=1e-14, epsrel=1e-13, limit=200)[0]
            for part in itertools.pairwise(ends)
        )

    def logarithm(z):  # E[log S | w] less the larger of the two means, w = centre + deviation·z
        w = centre + deviation * z
        larger = deviation * z if w > 0 else 0.0
        larger += min(centre, 0.0) if w > 0 else -max(centre, 0.0)
        return larger + math.log1p(math.exp(-abs(w))) - one.std**2 / deviation * z

    mean = mean_of(logarithm)
    left = (one.std * other.std / deviation) ** 2  # Var(Y1 | w): what of log S does not depend on w
    return max(one.mean, other.mean) + mean, math.sqrt(
        left + mean_of(lambda z: (logarithm(z) - mean) ** 2)
    )


@settings(max_examples=40, deadline=None)
@given(distributions, distributions)
def test_two_terms_have_their_exact_mean_and_variance(one, other):
    distribution, (mean, std) = log_sum_of_two(one, other), moments_of_two(one, other)
    assert distribution.mean == pytest.approx(mean, abs=1e-11)
    assert distribution.std == pytest.approx(std, rel=1e-9)
    turned = log_sum_of_two(other, one)
    assert (turned.mean, turned.std) == pytest.approx(
        (distribution.mean, distribution.std), rel=1e-12, abs=1e-14
    )


@pytest.mark.parametrize("std", [20.0, 50.0, 100.0])
def test_two_wide_terms_are_the_larger_of_them(std):
    distribution = log_sum_of_two(NormalDistribution(0.0, std), NormalDistribution(0.0, std))
    # 0 ≤ log(e^a + e^b) − max(a, b) ≤ log 2; the maximum of two normals has mean s/√π and variance
    # s²(1 − 1/π). A variable within [0, log 2] has standard deviation at most log 2 / 2
    # (Popoviciu), and so far can two standard deviations differ.
    assert 0 <= distribution.mean - std / math.sqrt(math.pi) <= math.log(2)
    assert abs(distribution.std - std * math.sqrt(1 - 1 / math.pi)) <= math.log(2) / 2


@pytest.mark.parametrize("combine", ["one_by_one", "doubling"])
@pytest.mark.parametrize("count", [2, 3, 1000, 10**8])
def test_narrow_terms_add_up_as_their_first_two_moments_say(combine, count):
    std = 1e-3
    distribution = schwartz_yeh(0.0, std, count, combine=combine)
    # log(Σ e^y / d) = mean of y + ½·(variance among the y) + O(std³), and what is left of a mean of
    # O(std³) terms is O(std⁴).
    assert distribution.mean - math.log(count) == pytest.approx(
        std**2 / 2 * (1 - 1 / count), abs=10 * std**4
    )
    assert distribution.std == pytest.approx(std / math.sqrt(count), rel=10 * std**2)


@pytest.mark.parametrize(("std", "error"), [(0.25, 1e-10), (1.0, 1e-8), (4.0, 1e-6), (20.0, 2e-3)])
def test_strides_change_little(monkeypatch, std, error):
    distribution = schwartz_yeh(0.0, std, 20_000)
    monkeypatch.setattr(lognormal_sums, "_STRIDE", 10**9)
    every_term = schwartz_yeh(0.0, std, 20_000)
    assert abs(distribution.mean - every_term.mean) <= 2 * error * every_term.std
    assert distribution.std == pytest.approx(every_term.std, rel=error)


def test_doubling_loses_the_tail_that_adding_one_by_one_keeps():
    samples = monte_carlo(
        0.0, 4.0, 10**6, repetitions=2000, generator=np.random.default_rng(5), largest=1000
    )
    doubling, one_by_one = (
        schwartz_yeh(0.0, 4.0, 10**6, combine=combine) for combine in ("doubling", "one_by_one")
    )
    assert distance_to(doubling, samples) > 0.99
    assert distance_to(one_by_one, samples) < 0.2


# ---- Monte Carlo
# ------------------------------------------------------------------------------------------------------------


def test_samples_of_one_term_are_normal():
    samples = monte_carlo(-2.0, 3.0, repetitions=20_000, generator=np.random.default_rng(0))
    assert distance_to(NormalDistribution(-2.0, 3.0), samples) < agreement(20_000)


def test_samples_are_sums_of_their_own_terms():
    means, counts, std = np.array([0.0, 2.0, -1.0]), np.array([5, 1, 3]), 1.5
    samples = monte_carlo(
        means, std, counts, repetitions=20_000, generator=np.random.default_rng(1)
    )
    draws = np.random.default_rng(2).normal(np.repeat(means, counts), std, size=(20_000, 9))
    assert distance(samples, np.log(np.exp(draws).sum(axis=1))) < agreement(20_000, 20_000)


@pytest.mark.zoo
@pytest.mark.parametrize("std", [0.1, 1.0, 4.0, 20.0])
def test_drawing_the_largest_terms_is_nearly_drawing_all(std):
    count, largest = 5000, 500
    every_term = monte_carlo(0.0, std, count, repetitions=1000, generator=np.random.default_rng(3))
    split = monte_carlo(
        0.0, std, count, repetitions=3000, generator=np.random.default_rng(4), largest=largest
    )
    assert distance(split, every_term) < largest_error(std, count, largest) + agreement(1000, 3000)


def test_mean_and_variance_survive_the_split():
    count, std, repetitions = 10**7, 1.0, 4000
    means, counts = [0.0, 8.0], [count, 3]
    samples = np.exp(
        monte_carlo(
            means,
            std,
            counts,
            repetitions=repetitions,
            generator=np.random.default_rng(6),
            largest=200,
        )
    )
    mean = (count + 3 * math.exp(8)) * math.exp(0.5)
    variance = (count + 3 * math.exp(16)) * math.exp(1) * math.expm1(1)
    assert abs(samples.mean() - mean) < 4 * math.sqrt(variance / repetitions)
    # The variance of a variance: (kurtosis − 1)/repetitions; a sum of independent terms has at most
    # one term's kurtosis.
    kurtosis = math.exp(4) + 2 * math.exp(3) + 3 * math.exp(2) - 3
    assert abs(samples.var() / variance - 1) < 4 * math.sqrt((kurtosis - 1) / repetitions)


@pytest.mark.parametrize(
    ("std", "count", "largest"), [(4.0, 10**8, 10_000), (0.25, 10**8, 1000), (20.0, 10**6, 1000)]
)
def test_the_split_error_is_berry_and_esseens(std, count, largest):
    share = largest / count
    level = float(mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(share)))

    def mean_of(function, bend=0.0):
        def integrand(z):
            return (
                function(math.exp(std * z))
                * math.exp(-(z**2) / 2)
                / (math.sqrt(2 * math.pi) * (1 - share))
            )

        ends = sorted({-13.0, -6.0, -3.0, 0.0, bend, level - 1, level - 0.1, level})
        return sum(
            quad(integrand, *part, epsabs=0, epsrel=1e-10, limit=200)[0]
            for part in itertools.pairwise(ends)
        )

    mean = mean_of(lambda x: x)
    variance = mean_of(lambda x: (x - mean) ** 2)
    third = mean_of(lambda x: abs(x - mean) ** 3, bend=math.log(mean) / std)
    bound = 0.4748 * third / variance**1.5 / math.sqrt(count)
    assert bound <= largest_error(std, count, largest) <= 1.03 * bound


def test_the_split_error_falls_with_what_is_drawn():
    errors = [largest_error(4.0, 10**8, largest) for largest in (100, 1000, 10**4, 10**5, 10**8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0
    assert 0 < errors[2] < 0.003


def test_memory_does_not_grow_with_the_terms():
    tracemalloc.start()
    try:
        monte_carlo(
            [0.0, 1.0],
            1.0,
            [4 * 10**6, 4 * 10**6],
            repetitions=2,
            generator=np.random.default_rng(0),
        )
        monte_carlo(0.0, 1.0, 2, repetitions=10**6, generator=np.random.default_rng(0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * 2**20  # 61 MiB are 8e6 draws alone


def test_a_generator_repeats_itself_and_none_does_not():
    def run(seed, **options):
        generator = None if seed is None else np.random.default_rng(seed)
        return monte_carlo(0.0, 1.0, 1000, repetitions=5, generator=generator, **options)

    for options in ({}, {"largest": 100}):
        np.testing.assert_array_equal(run(7, **options), run(7, **options))
        assert not np.any(run(None, **options) == run(None, **options))


# ---- fits
# -------------------------------------------------------------------------------------------------------------------


def test_least_squares_finds_the_line_through_exact_quantiles():
    scores = np.array(
        [mpmath.sqrt(2) * mpmath.erfinv(2 * (i + 0.5) / 41 - 1) for i in range(41)], dtype=float
    )
    distribution = least_squares(np.random.default_rng(0).permutation(3.0 + 0.7 * scores))
    assert (distribution.mean, distribution.std) == pytest.approx((3.0, 0.7), rel=1e-12)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50, unique=True))
def test_no_other_line_is_nearer(values):
    distribution = least_squares(values)
    scores = np.array(
        [
            float(mpmath.sqrt(2) * mpmath.erfinv((2 * i + 1) / len(values) - 1))
            for i in range(len(values))
        ]
    )

    def squares(mean, std):
        return float(((np.sort(values) - mean - std * scores) ** 2).sum())

    best = squares(distribution.mean, distribution.std)
    nudge = 1e-3 * distribution.std
    for mean, std in ((nudge, 0), (-nudge, 0), (0, nudge), (0, -nudge)):
        assert squares(distribution.mean + mean, distribution.std + std) >= best


def test_kernel_density_is_scipys():
    samples = np.random.default_rng(1).normal(size=200)
    distribution, scipys = kernel_density(samples), gaussian_kde(samples)
    places = np.linspace(-4, 4, 30).reshape(5, 6)
    expected = np.vectorize(lambda x: scipys.integrate_box_1d(-np.inf, x))(places)
    np.testing.assert_allclose(distribution.cdf(places), expected, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [least_squares, kernel_density, SampledDistribution],
    ids=["least squares", "kernel", "empirical"],
)
def test_every_fit_has_a_distribution_function(make):
    samples = np.random.default_rng(2).normal(5.0, 2.0, size=300)
    values = make(samples).cdf(np.linspace(-60, 70, 500))
    assert np.all(np.diff(values) >= 0)
    assert values[0] == pytest.approx(0, abs=1e-12)
    assert values[-1] == pytest.approx(1, abs=1e-12)


def test_the_empirical_distribution_counts():
    np.testing.assert_array_equal(
        SampledDistribution(np.array([3.0, 1.0, 2.0, 2.0])).cdf([0.9, 1.0, 2.0, 2.5, 3.0]),
        [0, 1 / 4, 3 / 4, 3 / 4, 1],
    )


# ---- refusals
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("means", lambda: fenton_wilkinson([], 1.0)),
        ("means", lambda: schwartz_yeh([0.0, math.nan], 1.0)),
        ("means", lambda: monte_carlo([[0.0]], 1.0)),
        ("means", lambda: fenton_wilkinson(math.inf, 1.0)),
        ("std", lambda: fenton_wilkinson(0.0, 0.0)),
        ("std", lambda: schwartz_yeh(0.0, math.nan)),
        ("std", lambda: monte_carlo(0.0, 101.0)),
        ("std", lambda: largest_error(-1.0, 100, 100)),
        ("counts", lambda: fenton_wilkinson(0.0, 1.0, 0)),
        ("counts", lambda: fenton_wilkinson(0.0, 1.0, 1.5)),
        ("counts", lambda: schwartz_yeh([0.0, 1.0], 1.0, [1])),
        ("counts", lambda: monte_carlo(0.0, 1.0, math.inf)),
        ("counts", lambda: fenton_wilkinson(0.0, 1.0, math.nan)),
        ("combine", lambda: schwartz_yeh(0.0, 1.0, combine="thirds")),
        ("repetitions", lambda: monte_carlo(0.0, 1.0, repetitions=0)),
        ("generator", lambda: monte_carlo(0.0, 1.0, generator=3)),
        ("largest", lambda: monte_carlo(0.0, 1.0, 1000, largest=10)),
        ("samples", lambda: least_squares([1.0])),
        ("samples", lambda: least_squares([1.0, 1.0])),
        ("samples", lambda: kernel_density([1.0, math.nan])),
        ("samples", lambda: SampledDistribution(np.zeros((2, 2)))),
        ("bandwidth", lambda: SampledDistribution(np.zeros(2), -1.0)),
    ],
)
def test_bad_input_is_named(name, call):
    with pytest.raises(ValueError, match=rf"^{name} must"):
        call()
