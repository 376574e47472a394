"""Where one user reports, every ε is the Gaussian mechanism's.

Whatever turns one ε into another is held to its exact curve.

The curve is Balle and Wang's (2018, Theorem 8), with 40 digits and no part of the library. Proofs:
docs/proofs/10_*.md.
"""

import math
from decimal import Decimal

import mpmath
import pytest
from helpers.accountants import compute_baseline
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opacus_shuffle import compute_noise_multiplier
from opacus_shuffle.accountants import compute_bound
from opacus_shuffle.accountants.mechanisms import (
    RandomAllocation,
    ShuffledCheckIn,
    ShuffledWeights,
    ShuffleGauss,
    SubsampledShuffle,
)
from opacus_shuffle.analysis import (
    advanced_composition,
    composition,
    gaussian,
    sampled_sums,
)
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.rounding import round_down, round_up

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


def hockey_stick(mu, epsilon):
    """H_{e^ε} of the μ-Gaussian mechanism, 40 digits."""
    with mpmath.workdps(40):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        first, second = (mpmath.ncdf(sign * mu / 2 - epsilon / mu) for sign in (1, -1))
        return first - mpmath.exp(epsilon) * second


def holds(epsilon, *, mu, delta):
    """Whether ε is no less than the curve has it at δ.

    (1 + 1e-15) is what the rounding of μ is worth.
    """
    return hockey_stick(mu * (1 - 1e-15), epsilon) <= delta


def close(epsilon, *, mu, delta):
    """Whether 1e-7 less, or what the search may be off, would not do.

    The search may be off by 1e-12 of the interval that it searches in.
    """
    less = epsilon * (1 - 1e-7) - 1e-11 * mu * (mu + math.sqrt(-2 * math.log(delta)))
    return less < 0 or hockey_stick(mu, less) > delta


logarithmic = st.floats(math.log(0.3), math.log(300)).map(math.exp)
deltas = st.one_of(st.floats(math.log(1e-9), math.log(0.99)).map(math.exp), st.floats(1e-3, 0.99))
runs = given(
    sigma=logarithmic,
    delta=deltas,
    steps=st.sampled_from([1, 7, 100]),
    adjacency=st.sampled_from(Adjacency),
)
ROUNDS = {
    "everyone": lambda sigma: ShuffleGauss(noise_multiplier=sigma, num_users=1),
    "check-in": lambda sigma: ShuffledCheckIn(noise_multiplier=sigma, num_users=1, sample_rate=1.0),
    "samples": lambda sigma: SubsampledShuffle(
        noise_multiplier=sigma, num_users=1, sample_rate=1.0
    ),
    "a server": lambda sigma: ShuffledWeights(noise_multiplier=sigma, dimension=3, sample_rate=1.0),
    "one batch": lambda sigma: RandomAllocation(noise_multiplier=sigma, num_batches=1),
}


# SG Definition 1: of either adjacency, replacement having twice the sensitivity.
@runs
@example(sigma=3.56829, delta=0.0905, steps=1, adjacency=Adjacency.ZERO_OUT)
@example(sigma=7.13658, delta=0.0905, steps=1, adjacency=Adjacency.REPLACE)
@example(sigma=224.7, delta=0.003, steps=100, adjacency=Adjacency.ZERO_OUT)
@example(sigma=1.0, delta=0.9, steps=1, adjacency=Adjacency.REPLACE)
def test_the_least_of_all_proofs_is_the_gaussian_mechanism_s_epsilon(
    sigma, delta, steps, adjacency
):
    exact = {"mu": adjacency.distance * math.sqrt(steps) / sigma, "delta": delta}
    for name, round_of in ROUNDS.items():
        rounds = [(round_of(sigma), steps)]
        certified = compute_bound(rounds, delta=delta, adjacency=adjacency).epsilon
        assert holds(certified, **exact), name
        assert close(certified, **exact), name
        if name in ("a server", "one batch"):
            continue
        for baseline in ("local", "secure_aggregation", "central"):
            baseline_epsilon = compute_baseline(
                rounds, delta=delta, baseline=baseline, adjacency=adjacency
            ).epsilon
            assert holds(baseline_epsilon, **exact), (name, baseline)
            assert certified <= baseline_epsilon or baseline != "local"


@settings(max_examples=30)
@runs
def test_rounds_that_are_joined_cost_no_less_than_what_they_stand_for(
    sigma, delta, steps, adjacency
):
    """Some kinds more than are computed apart, of nearly the same noise."""
    kinds = [sigma * (1 + 0.002 * number) for number in range(45)]
    mu = adjacency.distance * math.sqrt(sum(steps / deviation**2 for deviation in kinds))
    for round_of in (ROUNDS["everyone"], ROUNDS["a server"]):
        baseline_epsilon = compute_bound(
            [(round_of(deviation), steps) for deviation in kinds], delta=delta, adjacency=adjacency
        ).epsilon
        assert holds(baseline_epsilon, mu=mu, delta=delta)
    summed = [(SampledSum(mu=2 / deviation), steps) for deviation in kinds]
    assert holds(
        sampled_sums.compute_epsilon(summed, delta=delta),
        mu=2 / adjacency.distance * mu,
        delta=delta,
    )


@runs
def test_orders_splits_and_printed_digits_never_fall_below_the_curve(
    sigma, delta, steps, adjacency
):
    mu = adjacency.distance * math.sqrt(steps) / sigma
    exact = {"mu": mu, "delta": delta}
    own = gaussian.compute_epsilon(**exact)
    assert holds(own, **exact)
    by_orders = composition.epsilon_from_rdp(
        lambda orders: orders * mu**2 / 2, delta=delta, orders=[1.1, 1.5, 3, 8, 50]
    )[0]
    assert holds(by_orders, **exact)
    step = adjacency.distance / sigma
    each_step = [(lambda share: gaussian.compute_epsilon(mu=step, delta=share), 1.0, steps)]
    assert holds(advanced_composition.compute_epsilon(each_step, delta=delta), **exact)
    assert (
        Decimal(round_down(own))
        <= Decimal(own)
        <= Decimal(round_up(own))
        <= Decimal(own) * Decimal("1.001")
    )


@given(
    sigma=logarithmic, delta=deltas, rate=st.floats(0.01, 1), adjacency=st.sampled_from(Adjacency)
)
@example(sigma=0.3, delta=0.06, rate=0.1, adjacency=Adjacency.ZERO_OUT)
def test_a_sample_that_is_seen_costs_its_share_of_the_hockey_stick(sigma, delta, rate, adjacency):
    rounds = [(ShuffledCheckIn(noise_multiplier=sigma, num_users=1, sample_rate=rate), 1)]
    baseline_epsilon = compute_bound(rounds, delta=delta, adjacency=adjacency).epsilon
    assert rate * hockey_stick(adjacency.distance / sigma, baseline_epsilon) <= delta * (1 + 1e-15)
    assert baseline_epsilon == 0 or rate > delta


@pytest.mark.parametrize("steps", [1, pytest.param(7, marks=pytest.mark.zoo), 100])
@pytest.mark.parametrize(("sigma", "delta"), [(0.5, 1e-9), (3.6, 0.09), (30.0, 0.003)])
@pytest.mark.parametrize("kinds", [1, 15])
def test_a_pair_s_two_values_enclose_the_curve(sigma, delta, steps, kinds):
    """For the lower value of many kinds as few, those that tell less."""
    sigmas = [sigma * (1 + 0.01 * number) for number in range(kinds)]
    pair = compute_bound(
        [(ROUNDS["everyone"](deviation), steps) for deviation in sigmas], delta=delta, bound="pair"
    )
    mu = math.sqrt(sum(steps / deviation**2 for deviation in sigmas))
    assert holds(pair.epsilon, mu=mu, delta=delta)
    assert hockey_stick(mu, pair.lower) >= delta * (1 - 1e-15) or pair.lower == 0


@settings(max_examples=5)
@given(
    target=st.floats(math.log(0.01), math.log(20)).map(math.exp),
    delta=deltas,
    steps=st.sampled_from([1, 7, 100]),
    adjacency=st.sampled_from(Adjacency),
)
def test_calibrated_noise_keeps_its_budget_on_the_curve(target, delta, steps, adjacency):
    sigma = compute_noise_multiplier(
        "shuffle_gauss",
        num_users=1,
        steps=steps,
        target_epsilon=target,
        target_delta=delta,
        adjacency=adjacency,
    )
    assert (
        sigma == 1e-3
        or hockey_stick(adjacency.distance * math.sqrt(steps) / sigma, target) <= delta
    )
