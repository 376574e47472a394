"""One pair of gradients under weight shuffling.

Its exact ε against integrals, and against a test that anyone can make.
"""

import functools
import math

import numpy as np
import pytest
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm as normal

from opacus_shuffle.accountants import compute_bound
from opacus_shuffle.accountants.mechanisms import ShuffledWeights

DELTA = 1e-5


def answer(*, delta=DELTA, steps=1, **run):
    """``pair`` on equal steps."""
    return compute_bound([(ShuffledWeights(num_users=1, **run), steps)], delta=delta, bound="pair")


def call(strike, count, sigma, points=120):
    """E(X₁ + … + X_count − strike)₊ of independent ratios X = exp((2x − 1)/2σ²), x ~ N(0, σ²).

    One in closed form, others by integrals over the standard normal z = x/σ.

    What X exceeds the strike by itself is in closed form, too; the rest ends where X reaches it, in
    a point of unbounded derivatives, for which double exponential quadrature is made. Twice the
    points say the same to 1e-14.
    """
    strike = np.asarray(strike, dtype=float)
    positive = np.maximum(strike, 1e-300)
    edge = sigma * np.log(positive) + 0.5 / sigma
    told = (count - 1 - strike) * ndtr(-edge) + ndtr(1 / sigma - edge)
    if count > 1:
        t, step = np.linspace(-3.2, 3.2, points, retstep=True)
        half = (edge[..., None] + 12) / 2
        z = edge[..., None] - half * np.exp(-np.pi / 2 * np.sinh(t)) / np.cosh(
            np.pi / 2 * np.sinh(t)
        )
        mass = (
            step
            * half
            * np.pi
            / 2
            * np.cosh(t)
            / np.cosh(np.pi / 2 * np.sinh(t)) ** 2
            * normal.pdf(z)
        )
        left = positive[..., None] * -np.expm1((z - edge[..., None]) / sigma)
        told = told + np.where(half > 0, mass * call(left, count - 1, sigma, points), 0).sum(-1)
    return np.where(strike > 0, told, count - strike)


def brute_force(epsilon, *, d, sigma, rate=1.0, points=120):
    """δ of the pair, the larger of both directions, one step: R = 1 − q + q·(X₁ + … + X_d)/d."""
    above, below = (d * (math.expm1(loss) / rate + 1) for loss in (epsilon, -epsilon))
    forwards = call(above, d, sigma, points)
    backwards = call(below, d, sigma, points) - (d - below) if below > 0 else 0.0
    return rate / d * float(max(forwards, math.exp(epsilon) * backwards))


# WS Definition 6.
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize(
    ("sigma", "rate", "delta"),
    [(0.5, 1.0, 1e-3), (1.0, 1.0, 1e-5), (0.7, 0.2, 1e-4), (2.0, 0.6, 1e-3)],
)
def test_tight_encloses_the_pair_by_brute_force(d, sigma, rate, delta):
    told = answer(noise_multiplier=sigma, sample_rate=rate, dimension=d, delta=delta)
    exact = functools.partial(brute_force, d=d, sigma=sigma, rate=rate)
    assert exact(told.epsilon) <= delta * (1 + 1e-7)
    assert 0 < told.lower <= told.epsilon < 1.02 * told.lower
    assert exact(told.lower) >= delta * (1 - 1e-7)


# WS Definition 2: how far one record moves the clipped sum.
@pytest.mark.parametrize("batch_clip", [0.25, 0.9, 1.0, 3.0])
def test_a_record_whose_sum_is_clipped_below_its_own_norm_moves_less(batch_clip):
    distance = min(1.0, batch_clip)
    told = answer(noise_multiplier=0.6, dimension=2, batch_clip=batch_clip, delta=1e-3)
    assert brute_force(told.epsilon, d=2, sigma=0.6 / distance) <= 1e-3 * (1 + 1e-7)
    assert brute_force(told.lower, d=2, sigma=0.6 / distance) >= 1e-3 * (1 - 1e-7)
    scaled = answer(
        noise_multiplier=0.6, dimension=2, clip=10.0, batch_clip=10 * batch_clip, delta=1e-3
    )
    assert scaled.epsilon == pytest.approx(told.epsilon, rel=1e-12)


def test_the_largest_coordinate_is_a_test_that_the_pair_s_epsilon_covers():
    # Each threshold is a lower bound on δ of one sampled step, and the composition of 500 such
    # steps costs no less.
    sigma, d, rate = 0.27372, 85_800_000, 0.02
    epsilon = answer(noise_multiplier=sigma, sample_rate=rate, dimension=d, delta=1e-4).epsilon
    t = np.linspace(1.0, 2.5, 3001)
    nothing = -np.expm1(d * np.log1p(-ndtr(-t / sigma)))
    record = -np.expm1((d - 1) * np.log1p(-ndtr(-t / sigma)) + log_ndtr((t - 1) / sigma))
    sampled = (1 - rate) * nothing + rate * record
    assert 0 < (sampled - math.exp(epsilon) * nothing).max() <= 1e-4
    assert (
        answer(noise_multiplier=sigma, sample_rate=rate, dimension=d, delta=1e-4, steps=500).epsilon
        > epsilon
    )
