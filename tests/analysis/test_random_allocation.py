"""Random allocation against exact integrals, and against records that choose what they show.

Proofs: docs/proofs/11_random_allocation.md.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from opacus_shuffle import RandomAllocation, compute_epsilon, privacy_bound
from opacus_shuffle.accountants.bounds.random_allocation import epochs_of
from opacus_shuffle.analysis.random_allocation import (
    epoch,
    replacement_epsilon,
    zero_out_epsilon,
)

SETTINGS = [
    *((0.5, 1e-3), (1.0, 1e-5), (3.0, 0.02)),
    *(pytest.param(*one, marks=pytest.mark.zoo) for one in [(1.0, 0.05), (3.0, 1e-6)]),
]
DIRECTIONS = ("moved against zero", "zero against moved")


def call(strike, sigma):
    """E(X − strike)₊ for X log-normal of mean one and log-variance 1/σ² (Black and Scholes)."""
    if strike <= 0:
        return 1 - strike
    far = (-math.log(strike) + 0.5 / sigma**2) * sigma
    return norm.cdf(far) - strike * norm.cdf(far - 1 / sigma)


def ratio(z, sigma):
    return math.exp(z / sigma - 0.5 / sigma**2)


def integral(function):
    """The mean of a function of a standard normal number; the integrand is a density beyond ±12."""
    points = {"points": np.linspace(-10, 10, 41), "limit": 400, "epsabs": 1e-13, "epsrel": 1e-9}
    return quad(lambda z: function(z) * norm.pdf(z), -12, 12, **points)[0]


def two_batches(epsilon, sigma, direction):
    """The hockey stick at t = 2, exactly."""
    tau = math.exp(epsilon)

    def given_the_first(z):
        if direction == DIRECTIONS[0]:
            return call(2 * tau - ratio(z, sigma), sigma) / 2
        # (1 − τR)₊, as (s − X)₊ = (X − s)₊ − 1 + s
        strike = 2 / tau - ratio(z, sigma)
        return tau / 2 * (call(strike, sigma) - 1 + strike)

    return integral(given_the_first)


def two_batches_replaced(epsilon, sigma):
    """The hockey stick at t = 2 of a record that becomes its opposite, exactly."""
    tau = math.exp(epsilon)

    def difference(z):
        return ratio(z, sigma) - tau * ratio(-z, sigma)

    def given_the_first(first):
        known = difference(first)
        root = brentq(lambda z: known + difference(z), -150 * sigma, 150 * sigma)
        above = norm.cdf(1 / sigma - root) - tau * norm.cdf(-1 / sigma - root)
        return known * norm.cdf(-root) + above

    return integral(given_the_first) / 2


def largest(epsilon, sigma):
    return max(two_batches(epsilon, sigma, direction) for direction in DIRECTIONS)


@pytest.mark.parametrize(("sigma", "delta"), SETTINGS)
def test_two_batches_cost_what_the_double_integral_says(sigma, delta):
    lower, upper = zero_out_epsilon([(epoch(sigma, 2), 1)], delta=delta)
    assert largest(upper, sigma) <= delta * (1 + 1e-6)
    assert lower == 0 or largest(lower, sigma) >= delta * (1 - 1e-6)
    assert upper - lower <= 0.005 * upper
    asked = {"noise_multiplier": sigma, "num_batches": 2, "delta": delta}
    for steps in (1, 2):  # an epoch that was begun counts in full
        assert compute_epsilon("random_allocation", steps=steps, **asked) == upper
        replaced = compute_epsilon("random_allocation", adjacency="replace", steps=steps, **asked)
        assert two_batches_replaced(replaced, sigma) <= delta * (1 + 1e-6)
        assert replaced > 10 or two_batches_replaced(0.97 * replaced, sigma) > delta


@pytest.mark.parametrize("sigma", [0.15, pytest.param(0.02, marks=pytest.mark.zoo)])
def test_next_to_no_noise_costs_what_it_costs_unsampled(sigma):
    for epochs in ([(epoch(sigma, 3), 1)], [(epoch(sigma, 2), 1), (epoch(1.0, 3), 2)]):
        assert 10 < replacement_epsilon(epochs, delta=1e-5) < math.inf


@pytest.mark.parametrize("sigma", [0.0393, 0.0396, 0.043, 0.0465, 0.05, 0.15])
def test_with_next_to_no_noise_replacement_is_exact_for_one_batch_and_never_below_zeros(sigma):
    """Below 0.0465 no likelihood ratio within nine standard deviations differs from 0."""
    one, *several = (
        (replacement_epsilon([(epoch(sigma, t), 1)], delta=1e-6), t) for t in (1, 2, 10)
    )
    for replaced, batches in several:
        assert replaced >= zero_out_epsilon([(epoch(sigma, batches), 1)], delta=1e-6)[0]
    epsilons = one[0] * np.array([1 - 1e-6, 1 + 1e-6])
    # Of the Gaussian mechanism at distance 2.
    gained, lost = (norm.logcdf(sign / sigma - epsilons * sigma / 2) for sign in (1, -1))
    below, above = np.exp(gained) - np.exp(epsilons + lost)
    assert below > 1e-6 > above


@pytest.mark.parametrize(
    ("batches", "sigma", "epochs", "delta", "interval"),
    [
        (1000, 1.0, 1, 1e-5, (0.1387, 0.1391)),
        (1000, 1.0, 5, 1e-8, (0.4844, 0.4855)),
        (1000, 0.6, 10, 1e-5, (2.4005, 2.4061)),
        (100, 0.7, 10, 1e-5, (4.2724, 4.2795)),
        (250, 1.1, 20, 1e-5, (1.2322, 1.2344)),
    ],
)
def test_known_values(batches, sigma, epochs, delta, interval):
    """Each is inside of the interval that PLD_accounting 2.0 proves, which is ten times wider."""
    bound = privacy_bound(
        "random_allocation",
        noise_multiplier=sigma,
        num_batches=batches,
        steps=batches * epochs,
        delta=delta,
    )
    assert interval[0] <= bound.lower <= bound.epsilon <= interval[1]


# ---- a record that chooses what it shows by what it has seen ----------------------------------

STEP = 0.025
Z = np.arange(-9, 9, STEP)
WEIGHTS = STEP * norm.pdf(Z)  # of smooth functions exact to 1e-12


def shown(lengths, sigma):
    """Ratios of a step that shows vectors of these lengths, against noise alone: (lengths, z)."""
    scaled = np.asarray(lengths)[..., None] / sigma
    return np.exp(scaled * Z - scaled**2 / 2)


def strategies(count):
    """Adaptive choices at t = 2: a first length, and a second one for each first noise."""
    random = np.random.default_rng(0)
    for _ in range(count):
        first = random.uniform(-1, 1) if random.random() < 0.5 else 1.0
        cuts, values = np.sort(random.uniform(-4, 4, 3)), random.choice([-1, 0, 0.5, 1], 4)
        yield first, values[np.searchsorted(cuts, Z)]


@pytest.mark.parametrize("sigma", [0.7, pytest.param(1.5, marks=pytest.mark.zoo)])
def test_no_adaptive_record_costs_more(sigma):
    """A record that chooses its second vector by what the first step showed, zeroed or replaced.

    Where the hockey stick has its edge its slope changes by at most 2τ/σ, at a density of at most
    0.4, so that sums over the grid are off by at most 0.1·τ·STEP²/σ.
    """
    taus = np.exp([0.1, 1.0])
    plain = [largest(math.log(tau), sigma) for tau in taus]
    replaced = [two_batches_replaced(math.log(tau), sigma) for tau in taus]
    chosen = list(strategies(6))
    for (first, second), (other, otherwise) in zip(chosen, reversed(chosen), strict=True):
        here = (shown(first, sigma)[:, None] + shown(second, sigma)) / 2
        there = (shown(other, sigma)[:, None] + shown(otherwise, sigma)) / 2
        for tau, bound, bound_replaced in zip(taus, plain, replaced, strict=True):
            error = 0.1 * tau * STEP**2 / sigma
            for gap in (here - tau, 1 - tau * here):
                assert WEIGHTS @ np.maximum(gap, 0) @ WEIGHTS <= bound + error
            gap = np.maximum(here - tau * there, 0)
            assert WEIGHTS @ gap @ WEIGHTS <= bound_replaced + error


# ---- steps become epochs ----------------------------------------------------------------------


def step_by_step(rounds):
    """The same epochs, one step at a time."""
    steps = [kind for kind, count in rounds for _ in range(count)]
    epochs, current = [], []
    for batches, sigma in ((step.num_batches, step.noise_multiplier) for step in steps):
        if current and (batches != current[0][0] or len(current) == batches):
            epochs.append(current)
            current = []
        current.append((batches, sigma))
    epochs.append(current)
    return [epoch(min(sigma for _, sigma in one), one[0][0]) for one in epochs]


kinds = st.builds(
    RandomAllocation,
    noise_multiplier=st.sampled_from([0.5, 1.0, 2.0]),
    num_batches=st.sampled_from([1, 3, 4]),
)


@given(st.lists(st.tuples(kinds, st.integers(1, 11)), min_size=1, max_size=6))
def test_steps_are_cut_into_epochs_in_the_order_in_which_they_ran(rounds):
    assert [kind for kind, count in epochs_of(rounds) for _ in range(count)] == step_by_step(rounds)
