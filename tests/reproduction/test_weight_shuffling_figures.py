"""WS's figures: sums of log-normal terms against their definitions, and the noise of the runs.

References: the moments of S with hundreds of digits (Fenton–Wilkinson), integrals that use neither
the trapezoid rule nor Stein's lemma (Schwartz–Yeh), and sums with every term drawn (Monte Carlo).
Two samples of sizes m and n from one distribution have empirical CDFs that are further apart than
1.95·√(1/m + 1/n) with probability 1e-3 (Kolmogorov); the seeds are fixed.
"""

import json
import math

import mpmath
import numpy as np
import pytest
import weight_shuffling_figures as figures
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lognormal_sums import (
    NormalDistribution,
    SampledDistribution,
    fenton_wilkinson,
    least_squares,
    log_sum_of_two,
    monte_carlo,
    schwartz_yeh,
)
from step_budgets import step_budget

from opacus_shuffle.analysis.advanced_composition import compose, subsample
from opacus_shuffle.analysis.fenton_wilkinson import compute_delta

KOLMOGOROV = 1.95

stds = st.floats(1e-3, 20.0)
groups = st.lists(st.tuples(st.floats(-500, 500), st.integers(1, 10**12)), min_size=1, max_size=4)


def distance(samples, others):
    """The largest difference of two empirical CDFs."""
    both = np.concatenate([samples, others])
    return np.abs(
        SampledDistribution(samples).cdf(both) - SampledDistribution(others).cdf(both)
    ).max()


def agreement(samples, others=math.inf):
    return KOLMOGOROV * math.sqrt(1 / samples + 1 / others)


# ---- Fenton and Wilkinson
# ----------------------------------------------------------------------


# WS Lemma 1.
@pytest.mark.zoo
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


# ---- Schwartz and Yeh
# ----------------------------------------------------------------------


TWO = [(0.0, 1.0, 0.5, 0.3), (-2.0, 20.0, 1.0, 0.01), (3.0, 4.0, 3.0, 4.0), (50.0, 1.0, -50.0, 9.0)]


@pytest.mark.zoo
@pytest.mark.parametrize(("mean", "std", "mean2", "std2"), TWO)
def test_two_terms_have_their_exact_mean_and_variance(mean, std, mean2, std2):
    """By the trapezoidal rule on the plane, whose error is below e^{-90} with so short steps."""
    z, step = np.linspace(-12, 12, 2401, retstep=True)
    weights = np.exp(-(z**2) / 2) * step / math.sqrt(2 * math.pi)
    logs = np.logaddexp.outer(mean + std * z, mean2 + std2 * z)
    expected = weights @ logs @ weights
    found = log_sum_of_two(NormalDistribution(mean, std), NormalDistribution(mean2, std2))
    assert found.mean == pytest.approx(expected, abs=1e-10)
    assert found.std**2 == pytest.approx(weights @ (logs - expected) ** 2 @ weights, rel=1e-9)


# ---- Monte Carlo
# ----------------------------------------------------------------------


def test_samples_are_sums_of_their_own_terms():
    means, counts, std = np.array([0.0, 2.0, -1.0]), np.array([5, 1, 3]), 1.5
    samples = monte_carlo(
        means, std, counts, repetitions=20_000, generator=np.random.default_rng(1)
    )
    draws = np.random.default_rng(2).normal(np.repeat(means, counts), std, size=(20_000, 9))
    assert distance(samples, np.log(np.exp(draws).sum(axis=1))) < agreement(20_000, 20_000)


# ---- fits
# ----------------------------------------------------------------------


@pytest.mark.zoo
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


# ---- the noise of the runs
# ----------------------------------------------------------------------


NORMS = [figures.NORMS[0], *(pytest.param(n, marks=pytest.mark.zoo) for n in figures.NORMS[1:])]


def test_the_vits_run_is_five_hundred_steps_of_the_known_budget():
    run = figures.RUNS["ViT"]
    assert run.steps == 500
    epsilon, delta = run.budget(0.5)
    assert round(epsilon, 4) == 0.1976
    assert delta == pytest.approx(2.5e-7, rel=1e-12)


# WS Figure 3: σ over ε.
@pytest.mark.zoo
@pytest.mark.parametrize("name", figures.RUNS)
def test_every_configuration_spends_its_step_and_no_less(name):
    run = figures.RUNS[name]
    for norm in (0.1, 10.0):
        sigma = figures.noise(run, epsilon=1.0, norm=norm)
        epsilon, delta = run.budget(1.0)
        spent = compute_delta(
            epsilon=epsilon, noise_std=sigma, dimension=run.dimension, batch_clip=norm
        )
        assert spent == pytest.approx(delta, rel=1e-4)


# WS Figure 4.
@pytest.mark.zoo
@pytest.mark.parametrize("norm", NORMS)
def test_noise_falls_with_epsilon_and_with_dimension(norm):
    rows = figures.figure_4(norm=norm)
    sigmas = np.array([[row[name] for name in list(row)[1:]] for row in rows])
    assert sigmas.shape == (6, len(figures.DIMENSIONS))
    assert np.all(np.diff(sigmas, axis=0) < 0)
    assert np.all(np.diff(sigmas[:, 1:], axis=1) < 0)
    assert np.all(sigmas[:, 1:] < sigmas[:, :1])


@pytest.mark.parametrize(("epsilon", "target"), [(0.197617, 2.5e-7), (2.0, 1e-3)])
def test_the_last_crossing_counts_though_the_curve_is_not_monotone(epsilon, target):
    def delta(sigma):
        return compute_delta(epsilon=epsilon, noise_std=sigma, dimension=85_800_000)

    noise = np.geomspace(0.05, 50, 2000)
    values = np.array([delta(sigma) for sigma in noise])
    assert np.any(np.diff(values[values.argmin() :]) > 0)
    sigma = figures.noise_std(epsilon, target, 85_800_000)
    assert delta(sigma) <= target < delta(sigma * (1 - 1e-6))
    assert sigma >= noise[values > target].max()
    assert epsilon > 1 or f"{sigma:.5f}" == "0.27372"


@pytest.mark.zoo
@pytest.mark.parametrize("norm", NORMS)
def test_the_order_is_one_over_the_root_of_log_d(norm):
    assert figures.exponent(figures.RUNS["ViT"], norm=norm) == pytest.approx(-0.5, abs=0.02)


# WS Figure 2, WS Figure 4.
@pytest.mark.zoo
def test_figures_are_written_with_distribution_functions(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures, "DIMENSIONS", (1, 100, 10**6))
    for figure in ("2", "4"):
        figures.main(["--figure", figure, "--repetitions", "200", "--output", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {
        f"figure_{n}.{k}" for n in (2, 4) for k in ("json", "csv", "png")
    }
    for reading in json.loads((tmp_path / "figure_2.json").read_text()).values():
        for method, values in reading["cdf"].items():
            assert 0 <= values[0] <= values[-1] <= 1, method
            assert np.all(np.diff(values) >= 0), method


def log_floats(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


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
