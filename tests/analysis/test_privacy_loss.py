"""Composed ε against the exact Gaussian, a mixture of Gaussians, and published figures."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.privacy_loss import Mixture, compute_epsilon, lower_epsilon
from opacus_shuffle.analysis.ratio_distribution import mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import (
    ShuffledRound,
    pair_epsilon,
    unshuffled_epsilon,
)


def alone(sigma, steps):
    return [(ShuffledRound(noise_multiplier=sigma, num_users=1), steps)]


def gaussian_by_distributions(sigmas_and_steps, delta):
    """The unshuffled Gaussian through distributions, grids and FFT: (lower, upper)."""

    def distributions(side):
        return [
            (
                Mixture.of(
                    mean_distribution(noise_multiplier=sigma, num_users=1, side=side, tail=19.0)
                ),
                steps,
            )
            for sigma, steps in sigmas_and_steps
        ]

    return lower_epsilon(distributions("lower"), delta=delta), compute_epsilon(
        distributions("upper"), delta=delta
    )


@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12, 1e-60])
@pytest.mark.parametrize(
    "history",
    [
        [(2.0, 1)],
        [(2.0, 100)],
        [(30.0, 10_000)],
        [(0.5, 3)],
        [(2.0, 10), (5.0, 30)],
        [(20.0, 9), (1.0, 1), (3.0, 4)],
    ],
)
def test_the_composed_gaussian_is_enclosed_within_a_percent(history, delta):
    mu = math.sqrt(sum(steps / sigma**2 for sigma, steps in history))
    exact = gaussian.compute_epsilon(mu=mu, delta=delta)
    lower, upper = gaussian_by_distributions(history, delta)
    assert lower <= exact <= upper * (1 + 1e-8)  # the exact one is rounded up itself
    assert upper - lower <= 0.01 * upper + 1e-3 * (exact == 0)


PROTOTYPE = [  # n, σ, T, δ, sampling, γ: this library's earlier prototype, five digits
    (60_000, 9.48, 1, 1 / 60_000, None, 1.0, 0.00059456),
    (60_000, 9.48, 7, 1 / 60_000, None, 1.0, 0.0020472),
    (60_000, 9.48, 1000, 1 / 60_000, None, 1.0, 0.036357),
    (60_000, 0.86, 50_000, 1e-5, "fixed_size", 0.001, 0.15677),
    (60_000, 5.0, 5540, 1 / 60_000, "poisson", 0.1, 0.05382),
]


# SG Figure 1b is among the settings.
@pytest.mark.parametrize(
    ("users", "sigma", "steps", "delta", "sampling", "rate", "prototype"), PROTOTYPE
)
def test_both_sides_lie_within_a_percent_of_each_other_and_of_the_prototype(
    users, sigma, steps, delta, sampling, rate, prototype
):
    rounds = [
        (
            ShuffledRound(
                noise_multiplier=sigma, num_users=users, sample_rate=rate, sampling=sampling
            ),
            steps,
        )
    ]
    lower, upper = pair_epsilon(rounds, delta=delta)
    assert lower <= upper
    assert (upper - lower) / upper <= 0.01
    assert upper == pytest.approx(prototype, rel=0.01)
    assert lower == pytest.approx(prototype, rel=0.01)


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.1, 2.0, 40), (0.5, 0.8, 3)])
def test_rounds_without_the_user_cost_nothing(rate, sigma, steps):
    rounds = [
        (
            ShuffledRound(
                noise_multiplier=sigma, num_users=1000, sample_rate=rate, sampling="poisson"
            ),
            steps,
        )
    ]

    def delta_at(epsilon):
        weights = binom.pmf(np.arange(steps + 1), steps, rate)
        return sum(
            weight * math.exp(gaussian.log_delta(mu=math.sqrt(k) / sigma, epsilon=epsilon))
            for k, weight in enumerate(weights)
            if k
        )

    exact = brentq(lambda epsilon: delta_at(epsilon) - 1e-5, 0, 200, xtol=1e-12)
    spent = unshuffled_epsilon(rounds, delta=1e-5)
    assert exact <= spent <= exact * 1.003


def test_what_is_lost_adds_to_delta_and_too_much_of_it_leaves_nothing():
    distribution = mean_distribution(noise_multiplier=3.0, num_users=100)

    def epsilon(lost=0.0, slack=0.0):
        rounds = [(Mixture(((1.0, distribution),), lost=lost), 10)]
        return compute_epsilon(rounds, delta=1e-5, slack=(slack, slack))

    assert epsilon() < min(epsilon(lost=5e-7), epsilon(slack=2e-6)) < math.inf
    assert epsilon(lost=2e-6) == epsilon(slack=5e-6) == math.inf


def test_a_slack_that_grows_from_zero_is_paid_for_as_it_grows():
    distribution, least = mean_distribution(noise_multiplier=2.0, num_users=1), 3e-3
    rounds, delta = [(Mixture.of(distribution), 1)], 0.01
    epsilon = compute_epsilon(rounds, delta=delta, slack=(-least, least))
    spent = math.exp(gaussian.log_delta(mu=0.5, epsilon=epsilon)) + least * math.expm1(epsilon)
    assert 0.99 * delta <= spent <= delta
