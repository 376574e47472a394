"""``shuffled_sums``: its bounds, its accountant, and the bits that its noise follows from.

Under samples of fixed size, all samples, values and noise of a small protocol are enumerated.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from helpers.accountants import compute_baseline
from helpers.binomial_enumeration import binomial_distribution, both_ways, rounded
from helpers.changed_files import through_json
from helpers.hockey_sticks import gaussian_delta
from opacus.accountants import create_accountant

from opacus_shuffle import Guarantee, ShuffledSums, ShuffleVectorSum
from opacus_shuffle.accountants import ShuffleAccountant, compute_bound
from opacus_shuffle.accountants.mechanisms.shuffled_sums import ROUND_DELTA
from opacus_shuffle.analysis import binomial_sums, gaussian, sampled_sums
from opacus_shuffle.analysis.binomial_sums import BinomialNoise, BinomialSum
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.core.guarantees import Adjacency

TIGHT = ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=1e-6)
LOOSE = ShuffleVectorSum(50, 200, 1.0, epsilon=2.0, delta=1e-5, rounds=20)
COINS = ShuffledSums.build(noise_multiplier=1.0, num_users=500, sample_rate=0.1, dimension=20)
protocols = pytest.mark.parametrize("protocol", [TIGHT, LOOSE], ids=["one round", "20 rounds"])
adjacencies = pytest.mark.parametrize("adjacency", ["zero_out", "replace"])


def mechanism_of(protocol, users=1000):
    return ShuffledSums.of_protocol(protocol, num_users=users)


def bound_of(protocol, *, users=1000, steps=20, delta=1e-5, **options):
    return compute_bound([(mechanism_of(protocol, users), steps)], delta=delta, **options)


def test_what_is_built_of_plain_numbers_is_the_protocol_of_this_noise():
    for sampling, reports, who in (
        ("poisson", 500, {"sample_rate": 0.1}),
        ("fixed_size", 50, {"num_users": 500}),
        ("random_allocation", 500, {"num_batches": 10}),
    ):
        everyone = {"zero_on_grid": True, "rate": 0.1} if reports == 500 else {}
        protocol = ShuffleVectorSum.with_noise_multiplier(
            reports, 20, 1.0, 1.0, delta=ROUND_DELTA, **everyone
        )
        built = ShuffledSums.build(
            noise_multiplier=1.0, num_users=500, sample_rate=0.1, dimension=20, sampling=sampling
        )
        assert built == ShuffledSums.of_protocol(protocol, **who)


def accountant_of(protocol=TIGHT, *, users=1000, steps=20):
    accountant = ShuffleAccountant(ShuffledSums)
    accountant.plan(mechanism_of(protocol, users))
    accountant.record(accountant.planned, steps)
    return accountant


# --- bounds


@protocols
@adjacencies
@pytest.mark.parametrize("users", [50, 1000])
def test_certified_is_proved_and_no_less_than_a_trusted_server_s_epsilon(
    protocol, adjacency, users
):
    certified = bound_of(protocol, users=users, adjacency=adjacency)
    assert (certified.guarantee, certified.trusted) == (Guarantee.PROVED, "the shuffler")
    assert certified.adversary.startswith("sees every shuffled message")
    rounds = [(mechanism_of(protocol, users), 20)]
    server = compute_baseline(rounds, delta=1e-5, baseline="central", adjacency=adjacency)
    assert server.trusted == "the server"
    assert server.epsilon <= certified.epsilon * 1.005


@pytest.mark.parametrize(
    ("mechanism", "adjacency", "share"),
    [
        *((mechanism_of(TIGHT, users), "replace", 0.85) for users in (50, 1000)),
        (COINS, "zero_out", 0.9),
    ],
)
def test_a_pair_of_data_sets_is_never_above_and_nearly_reaches_the_certificate(
    mechanism, adjacency, share
):
    answer = compute_bound([(mechanism, 200)], delta=1e-5, adjacency=adjacency)
    assert share * answer.epsilon <= answer.lower <= answer.epsilon


@pytest.mark.parametrize(("adjacency", "share"), [("zero_out", 0.5), ("replace", 1.0)])
def test_zeroing_is_half_a_replacement_where_everyone_takes_part(adjacency, share):
    mu = share * TIGHT.mu * math.sqrt(5)
    expected = gaussian.compute_epsilon(mu=mu, delta=1e-5 - 5 * TIGHT.lost)
    answer = bound_of(TIGHT, users=50, steps=5, adjacency=adjacency)
    assert answer.epsilon == pytest.approx(expected, rel=1e-7)
    assert answer.proof == "everyone in every round"
    mechanism = mechanism_of(TIGHT, 50)
    server = compute_baseline(
        [(mechanism, 5)], delta=1e-5, baseline="central", adjacency=adjacency
    ).epsilon
    mu = share * 2 / mechanism.noise_std * math.sqrt(5)
    assert server == pytest.approx(gaussian.compute_epsilon(mu=mu, delta=1e-5), rel=1e-7)


LOST = 1e-4
"""Of δ's own size, where protocols lose a millionth of it.

Then it shows whether it was taken off.
"""


@pytest.mark.parametrize(("adjacency", "share"), [("zero_out", 0.5), ("replace", 1.0)])
def test_what_the_tails_of_all_rounds_lose_is_taken_off_delta_wherever_rounds_are_sums(
    adjacency, share
):
    root, lost = share * math.sqrt(3), TIGHT.lost
    mu = mechanism_of(TIGHT, 50).mu
    # Of 3.6 times what one round loses, 0.6 are left for three rounds.
    answer = bound_of(TIGHT, users=50, steps=3, delta=3.6 * lost, adjacency=adjacency).epsilon
    assert gaussian_delta(root * mu, answer) <= 0.6 * lost * (1 + 1e-6)
    everyone, zeroed = [(SampledSum(mu=0.7, lost=LOST), 3)], adjacency == "zero_out"
    answer = sampled_sums.compute_epsilon(everyone, delta=3.6 * LOST, zeroed=zeroed)
    assert gaussian_delta(root * 0.7, answer) <= 0.6 * LOST
    sums = BinomialSum(noise=BinomialNoise(trials=40_000, probability=0.5), shift=70, dimension=2)
    part = binomial_sums.LOST_SHARE * LOST / 3
    slope, lost = binomial_sums.gaussian_equivalent(sums, lost=part)
    answer = binomial_sums.compute_epsilon([(sums, 3)], delta=LOST)
    assert gaussian_delta(math.sqrt(3) * slope, answer) <= LOST - 3 * lost


# --- the accountant


def test_the_history_is_opacus_s_and_a_checkpoint_restores_everything():
    accountant = accountant_of(steps=3)
    assert accountant.history == [(TIGHT.noise_multiplier, 0.05, 3)]
    restored = create_accountant("shuffled_sums")
    restored.load_state_dict(through_json(accountant.state_dict()))
    assert (restored.planned, restored.rounds) == (accountant.planned, accountant.rounds)
    assert restored.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)


def planned_again(protocol=TIGHT, **options):
    accountant_of().plan(mechanism_of(protocol, **options))


def built(**fields):
    return ShuffledSums.build(noise_multiplier=1.0, num_users=1000, dimension=5, **fields)


REFUSALS = {
    "for another run": lambda: planned_again(users=500),
    "use a new PrivacyEngine": lambda: planned_again(LOOSE),
    "state_dict is of a run": lambda: accountant_of().load_state_dict(
        accountant_of(LOOSE).state_dict()
    ),
    r"num_users=50 is for samples of fixed size": lambda: ShuffledSums.of_protocol(
        TIGHT, num_users=50, sample_rate=0.1
    ),
    "is 1 over the number of batches": lambda: built(sampling="random_allocation", sample_rate=0.3),
    "batches of an epoch, got 5e-324": lambda: built(
        sampling="random_allocation", sample_rate=5e-324
    ),
    "epsilons and deltas add up": lambda: compute_bound(
        [(COINS, 1), (dataclasses.replace(COINS, sampling="random_allocation"), 10)], delta=1e-5
    ),
    "num_batches=3 for random allocation: pass one": lambda: ShuffledSums.of_protocol(
        TIGHT, sample_rate=0.5, num_batches=3
    ),
    "sampling must be one of 'poisson', 'fixed_size'": lambda: built(sampling="own"),
    "is described by its bits": lambda: built(tail=1e-9),
    r"ShuffledSums\.build": lambda: ShuffledSums(noise_multiplier=1.0, num_users=9, dimension=5),
    "local_noise": lambda: ShuffleAccountant(ShuffledSums, local_noise=True),
    "larger delta": lambda: bound_of(
        ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=0.4), delta=1e-7
    ),
    "must be one of 'certified'": lambda: accountant_of().get_epsilon(1e-5, bound="pair"),
    "orders": lambda: accountant_of().get_epsilon(1e-5, orders=[2.0]),
}


@pytest.mark.parametrize("named", REFUSALS)
def test_what_no_such_run_can_be_is_refused_by_name(named):
    with pytest.raises(ValueError, match=named):
        REFUSALS[named]()


def test_dishonest_users_know_who_is_in_a_sample_but_nothing_of_others_coins():
    half = ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=1e-6, honest_fraction=0.5)
    assert mechanism_of(half, users=50).honest_fraction == 0.5
    with pytest.raises(ValueError, match=r"honest_fraction=0\.5 goes with sampling='poisson'"):
        mechanism_of(half)
    coins, everyone = (
        compute_bound([(ShuffledSums.of_protocol(half, sample_rate=rate), 20)], delta=1e-5)
        for rate in (0.1, None)
    )
    assert (coins.guarantee, coins.proof) == (Guarantee.PROVED, "secret coins")
    assert coins.epsilon < everyone.epsilon / 2


# --- the mechanism


@protocols
def test_the_noise_follows_from_the_bits(protocol):
    mechanism = mechanism_of(protocol)
    assert protocol.mu <= mechanism.mu <= protocol.mu * (1 + 1e-12)
    noise = 2 * math.sqrt(protocol.sum_round.noise.variance) / protocol.granularity
    assert mechanism.noise_std == pytest.approx(noise)
    # Within the tolerance for another SciPy's tails it is taken as it is; beyond, either way, it is
    # refused.
    sigma = mechanism.noise_multiplier
    near = dataclasses.replace(mechanism, noise_multiplier=sigma * (1 + 5e-7))
    assert near.same_run_as(mechanism)
    spoilt = [
        *({"noise_multiplier": sigma * factor} for factor in (10.0, 1.001, 0.999, 0.1)),
        {"tail": mechanism.tail / 1e3},
        {"granularity": 2 * mechanism.granularity},
    ]
    for change in spoilt:
        with pytest.raises(ValueError, match=r"must follow from the protocol's own bits"):
            dataclasses.replace(mechanism, **change)


DELTA, BATCH = 1e-3, 2
PROTOCOL = ShuffleVectorSum.with_noise_multiplier(
    BATCH, 1, 1.0, 1.5, delta=DELTA, rounding_share=1.0
)
PAIRS = {
    "zero_out": [(1.0, 0.0), (-1.0, 0.0), (0.7, 0.0)],
    "replace": [(1.0, -1.0), (0.3, -1.0), (1.0, 0.0)],
}


def rounds_of(users, steps):
    return [(ShuffledSums.of_protocol(PROTOCOL, num_users=users), steps)]


@functools.cache
def counts(values):
    """The distribution of one round's count.

    A uniform sample of two of these values, each rounded at random, and the noise.
    """
    grid, noise = PROTOCOL.granularity, PROTOCOL.sum_round.noise
    samples = list(itertools.combinations(values, BATCH))
    total = np.zeros(noise.trials + BATCH * (grid + 1) + 1)
    for sample in samples:
        masses = binomial_distribution(noise.trials, noise.probability)[1]
        for value in sample:
            place = (value + 1) * grid / 2
            masses = np.convolve(masses, rounded(place, grid + 2))
        total += masses / len(samples)
    return total


def exact_delta(users, steps, pair, others, epsilon):
    """The larger of both directions' δ, in ``steps`` rounds with fresh samples."""
    one, other = (counts((value, *others[: users - 1])) for value in pair)
    return both_ways([(one, other)] * steps, epsilon)


OTHERS = [(0.0,) * 5, (1.0,) * 5, (-1.0,) * 5, (1.0, -1.0, 0.2, -0.6, 1.0)]


@pytest.mark.parametrize(("users", "steps"), [(2, 1), (2, 2), (3, 1), (3, 2), (6, 1), (6, 2)])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_the_certified_epsilon_holds_for_its_adjacency_whoever_the_others_are(
    users, steps, adjacency
):
    epsilon = compute_bound(rounds_of(users, steps), delta=DELTA, adjacency=adjacency).epsilon
    for pair, others in itertools.product(PAIRS[adjacency], OTHERS):
        assert exact_delta(users, steps, pair, others, epsilon) <= DELTA


@pytest.mark.parametrize(("users", "steps"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_zeroing_is_not_answered_by_replacing(users, steps):
    """Some replacement is beyond the ε of zeroing, so that it is no ε of replacement's."""
    zeroing = compute_bound(rounds_of(users, steps), delta=DELTA, adjacency="zero_out").epsilon
    assert max(exact_delta(users, steps, (1.0, -1.0), others, zeroing) for others in OTHERS) > DELTA


@pytest.mark.parametrize("users", [2, 3, 6, 20, 60, 200])
def test_where_zeroing_costs_what_replacing_costs_the_meaning_says_so(users):
    """Hiding the samples is proved for replacement alone.

    Seen samples are proved for either by itself.
    """
    bounds = {
        neighbours.value: compute_bound(rounds_of(users, 40), delta=DELTA, adjacency=neighbours)
        for neighbours in Adjacency
    }
    zeroing, replacing = bounds["zero_out"], bounds["replace"]
    assert zeroing.epsilon <= replacing.epsilon
    same = "the same epsilon holds if the record is replaced"
    assert (same in zeroing.meaning) == (zeroing.epsilon == replacing.epsilon)
    assert same not in replacing.meaning
