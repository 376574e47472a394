"""Random allocation against exact integrals.

Sums of bits with random allocation are enumerated with the best adaptive record, and compared with
the Gaussian for many bits. Proofs: docs/proofs/11_random_allocation.md.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from helpers.accountants import compute_baseline
from helpers.binomial_enumeration import binomial_distribution
from helpers.report_ratios import Exact
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from opacus_shuffle import (
    RandomAllocation,
    ShuffledSums,
    ShuffleVectorSum,
    compute_epsilon,
    privacy_bound,
)
from opacus_shuffle.accountants.bounds.random_allocation import epochs_of
from opacus_shuffle.analysis.binomial_sums import BinomialNoise, BinomialSum, gaussian_equivalent
from opacus_shuffle.analysis.random_allocation import (
    epoch,
    replacement_epsilon,
    zero_out_epsilon,
)
from opacus_shuffle.core.rounding import round_up

SETTINGS = [
    *((0.5, 1e-3), (3.0, 0.02)),
    *(pytest.param(*one, marks=pytest.mark.zoo) for one in [(1.0, 1e-5), (1.0, 0.05), (3.0, 1e-6)]),
]


@pytest.mark.parametrize(("sigma", "delta"), SETTINGS)
def test_two_batches_cost_what_the_double_integral_says(sigma, delta):
    lower, upper = zero_out_epsilon([(epoch(sigma, 2), 1)], delta=delta)
    exact = Exact("gaussian", sigma, 1.0, (0.0, 1.0))  # the mean of two batches' ratios
    assert exact.zeroed(math.exp(upper)) <= delta * (1 + 1e-6)
    assert lower == 0 or exact.zeroed(math.exp(lower)) >= delta * (1 - 1e-6)
    assert upper - lower <= 0.005 * upper
    asked = {"noise_multiplier": sigma, "num_batches": 2, "delta": delta}
    for steps in (1, 2):  # an epoch that was begun counts in full
        assert compute_epsilon("random_allocation", steps=steps, **asked) == upper
        replaced = compute_epsilon("random_allocation", adjacency="replace", steps=steps, **asked)
        assert exact.replaced(math.exp(replaced)) <= delta * (1 + 1e-6)
        assert replaced > 10 or exact.replaced(math.exp(0.97 * replaced)) > delta


@pytest.mark.zoo
@pytest.mark.parametrize("sigma", [0.15, 0.02])
def test_next_to_no_noise_costs_what_it_costs_unsampled(sigma):
    for epochs in ([(epoch(sigma, 3), 1)], [(epoch(sigma, 2), 1), (epoch(1.0, 3), 2)]):
        assert 10 < replacement_epsilon(epochs, delta=1e-5) < math.inf


@pytest.mark.parametrize(
    "sigma", [0.0393, 0.0396, 0.043, 0.0465, 0.05, pytest.param(0.15, marks=pytest.mark.zoo)]
)
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


ADJACENCIES = ("zero_out", "replace")


def sums_of(noise, granularity, batches, *, tail=1e-12):
    """One round of these bits, the noise multiplier as the covering Gaussian has it."""
    bits = BinomialSum(noise=noise, shift=granularity, dimension=1)
    return ShuffledSums(
        noise_multiplier=2 / gaussian_equivalent(bits, lost=tail)[0],
        num_users=1,
        sample_rate=1 / batches,
        sampling="random_allocation",
        dimension=1,
        granularity=granularity,
        noise_trials=noise.trials,
        bit_probability=noise.probability,
        tail=tail,
    )


def worst_of_two_rounds(noise, granularity, epsilon, adjacency, cell):
    """The hockey stick of an epoch of two rounds, all others at zero, over all outcomes.

    In the first round the record has any of five values, in the second the one that is best for the
    first one's outcome; so has the record in its place, which for zero-out is zero. So many
    outcomes are lumped into a cell, which only hides something.
    """
    _, masses = binomial_distribution(noise.trials, noise.probability, reach=8)
    values = np.unique(np.linspace(0, granularity, 5).round().astype(int)).tolist()
    rows = np.zeros((granularity + 1, len(masses) + granularity))
    for value in values:
        rows[value, value : value + len(masses)] = masses
    rows = np.add.reduceat(rows, np.arange(0, rows.shape[1], cell), axis=1)
    middle, tau = granularity // 2, np.exp(epsilon)
    worlds = [list(itertools.product(values, values))]
    if adjacency == "zero_out":
        worlds = [[(value, middle) for value in values], [(middle, value) for value in values]]
    sticks = []
    for pairs in worlds:
        steps = [rows[one] - tau * rows[other] for one, other in pairs]
        for step in steps:
            known = np.outer(step, rows[middle])
            given_the_first = [
                np.maximum(known + np.outer(rows[middle], later), 0).sum(1) for later in steps
            ]
            sticks.append(np.max(given_the_first, axis=0).sum() / 2)
    return max(sticks)


FEW = BinomialNoise(trials=60, probability=0.5)
MANY = BinomialNoise(trials=90_000, probability=0.4)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(
    ("noise", "granularity", "cell", "share"),
    [
        (FEW, 2, 1, 0.0),
        (BinomialNoise(trials=900, probability=0.2), 12, 1, 0.4),
        (MANY, 200, 20, 0.93),
    ],
)
@pytest.mark.parametrize("delta", [1e-3, 0.05])
def test_no_record_costs_more_than_is_certified_and_with_many_bits_one_nearly_does(
    noise, granularity, cell, share, delta, adjacency
):
    epsilon = privacy_bound(
        sums_of(noise, granularity, 2, tail=1e-7), steps=2, delta=delta, adjacency=adjacency
    ).epsilon
    attack = functools.partial(
        worst_of_two_rounds, noise, granularity, adjacency=adjacency, cell=cell
    )
    assert attack(epsilon) <= delta * (1 + 1e-9)
    assert share == 0 or attack(share * epsilon) > delta


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_with_many_bits_it_costs_what_gaussian_noise_of_that_size_costs_a_server(adjacency):
    """A million bits of a coordinate: the covering Gaussian has 1 % less noise (Remark 2.7)."""
    run = sums_of(BinomialNoise(trials=10**6, probability=0.5), 1000, 100)
    asked = {"delta": 1e-5, "adjacency": adjacency}
    spent = privacy_bound(run, steps=300, **asked)
    least, most = (
        compute_epsilon(
            RandomAllocation(noise_multiplier=share * run.noise_std, num_batches=100),
            steps=300,
            **asked,
        )
        for share in (1.0, 0.99)
    )
    assert least <= spent.epsilon <= most
    assert compute_baseline([(run, 300)], baseline="central", **asked).epsilon == least
    # Whoever sees the draws sees one Gaussian mechanism in each of the three epochs.
    everyone = dataclasses.replace(run, sampling="poisson", sample_rate=1.0)
    seen = compute_epsilon(everyone, steps=3, **asked)
    assert f"(if that is seen: {round_up(seen)})" in spent.meaning


@settings(max_examples=5)
@given(
    batches=st.integers(1, 40),
    more=st.integers(1, 40),
    epochs=st.integers(1, 5),
    adjacency=st.sampled_from(ADJACENCIES),
)
def test_an_epoch_costs_less_with_more_batches_and_all_of_it_before_its_end(
    batches, more, epochs, adjacency
):
    def spent(batches, steps):
        return compute_epsilon(
            sums_of(MANY, 200, batches), steps=steps, delta=1e-5, adjacency=adjacency
        )

    close = 1.01  # the grids' rounding up is 0.5 % at most
    whole = spent(batches, epochs * batches)
    assert spent(batches + more, epochs * (batches + more)) <= close * whole
    assert spent(batches, (epochs - 1) * batches + 1) <= close * whole


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_an_epoch_of_one_batch_has_everyone_in_its_round(adjacency):
    run = sums_of(MANY, 200, 1)
    everyone = dataclasses.replace(run, sampling="fixed_size")
    spent = [
        compute_epsilon(kind, steps=7, delta=1e-5, adjacency=adjacency) for kind in (run, everyone)
    ]
    assert spent[0] == pytest.approx(spent[1], rel=1e-6)


def test_tails_of_all_steps_are_taken_off_delta_and_must_leave_some_of_it():
    run = sums_of(MANY, 200, 4, tail=1e-6)
    server = RandomAllocation(noise_multiplier=run.noise_multiplier, num_batches=4)
    for adjacency in ADJACENCIES:
        left = compute_epsilon(server, steps=8, delta=2 * run.lost, adjacency=adjacency)
        spent = compute_epsilon(run, steps=8, delta=10 * run.lost, adjacency=adjacency)
        assert spent == pytest.approx(left, rel=1e-9)
    with pytest.raises(ValueError, match="larger delta"):
        compute_epsilon(run, steps=8, delta=8 * run.lost)


def test_what_follows_from_the_number_of_batches():
    protocol = ShuffleVectorSum(30, 5, 1.0, epsilon=1.0, delta=1e-6, honest_fraction=0.5)
    run = ShuffledSums.of_protocol(protocol, num_batches=49)
    assert (run.sampling, run.num_batches, run.reports, run.reporting_rate) == (
        "random_allocation",
        49,
        30,
        1.0,
    )
    built = ShuffledSums.build(
        noise_multiplier=1.0, num_users=1, sample_rate=1 / 3, sampling=run.sampling, dimension=5
    )
    assert (built.num_batches, built.granularity % 2) == (3, 0)  # zero is on the grid
