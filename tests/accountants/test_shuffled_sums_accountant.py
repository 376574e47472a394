"""``shuffled_sums``: its bits and what follows from them, its bounds, and its accountant."""

from __future__ import annotations

import dataclasses
import math

import pytest
from helpers.changed_files import through_json
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import create_accountant
from scipy.special import ndtr

from opacus_shuffle import Guarantee, ShuffledSums, ShuffleVectorSum
from opacus_shuffle.accountants import ShuffleAccountant, bounds_of, compute_baseline, compute_bound
from opacus_shuffle.accountants.bounds.shuffled_sums import gaussian_epsilons, round_epsilon
from opacus_shuffle.analysis import binomial_sums, gaussian, sampled_sums
from opacus_shuffle.analysis.binomial_sums import BinomialNoise, BinomialSum
from opacus_shuffle.analysis.sampled_sums import SampledSum

TIGHT = ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=1e-6)
PUBLISHED = ShuffleVectorSum(
    50, 200, 1.0, epsilon=2.0, delta=1e-5, rounds=20, calibration="published"
)


def mechanism_of(protocol, users=1000):
    return ShuffledSums.of_protocol(protocol, num_users=users)


def bound_of(protocol, *, users=1000, steps=20, delta=1e-5, **options):
    return compute_bound([(mechanism_of(protocol, users), steps)], delta=delta, **options)


def accountant_of(protocol, *, users=1000, steps=20):
    accountant = ShuffleAccountant(ShuffledSums)
    accountant.plan(mechanism_of(protocol, users))
    accountant.record(accountant.planned, steps)
    return accountant


# --- bounds
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [TIGHT, PUBLISHED], ids=["tight", "published"])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
@pytest.mark.parametrize("users", [50, 1000])
def test_every_bound_is_proved_and_certified_is_the_smaller(protocol, adjacency, users):
    answers = {
        name: bound_of(protocol, users=users, bound=name, adjacency=adjacency)
        for name in bounds_of(ShuffledSums)
    }
    assert set(answers) == {"published", "certified"}
    for answer in answers.values():
        assert answer.guarantee is Guarantee.PROVED
        assert answer.adversary.startswith("sees every shuffled message")
        assert answer.trusted == "the shuffler"
        assert answer.meaning
        assert math.isfinite(answer.epsilon)
    assert answers["certified"].epsilon <= answers["published"].epsilon
    rounds = [(mechanism_of(protocol, users), 20)]
    server = compute_baseline(rounds, delta=1e-5, baseline="central", adjacency=adjacency)
    assert server.trusted == "the server"
    assert server.epsilon <= answers["certified"].epsilon * 1.005


@pytest.mark.parametrize("users", [50, 1000])
def test_a_pair_of_data_sets_is_never_above_and_nearly_reaches_the_certificate(users):
    answer = bound_of(TIGHT, users=users, steps=200, adjacency="replace")
    assert answer.lower is not None
    assert 0.85 * answer.epsilon <= answer.lower <= answer.epsilon


def test_zeroing_is_half_a_replacement_where_everyone_takes_part():
    half = gaussian.compute_epsilon(mu=TIGHT.mu / 2 * math.sqrt(5), delta=1e-5 - 5 * TIGHT.lost)
    whole = gaussian.compute_epsilon(mu=TIGHT.mu * math.sqrt(5), delta=1e-5 - 5 * TIGHT.lost)
    for adjacency, expected in (("zero_out", half), ("replace", whole)):
        found = bound_of(TIGHT, users=50, steps=5, adjacency=adjacency)
        assert found.epsilon == pytest.approx(expected, rel=1e-7)
        assert found.proof == "everyone in every round"


def test_one_round_of_the_paper_s_protocol_is_what_it_was_made_for():
    protocol = ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=1e-6, calibration="published")
    mechanism = mechanism_of(protocol, users=50)
    assert compute_bound([(mechanism, 1)], delta=1e-6, bound="published").epsilon == 1.0
    # At another δ the same noise is that of the protocol made for the ε found.
    other = round_epsilon(mechanism, 1e-8)
    again = ShuffleVectorSum(50, 200, 1.0, epsilon=other, delta=1e-8, calibration="published")
    assert again.noise_bits * again.bit_probability == pytest.approx(
        protocol.noise_bits * protocol.bit_probability, rel=1e-9
    )
    assert again.granularity == protocol.granularity


@pytest.mark.zoo
def test_the_paper_s_rounds_meet_the_budget_they_were_made_for_at_any_number_of_steps():
    for steps in (2, 500):
        protocol = ShuffleVectorSum(
            50, 200, 1.0, epsilon=2.0, delta=1e-5, rounds=steps, calibration="published"
        )
        spent = bound_of(protocol, steps=steps, bound="published").epsilon
        assert spent <= 2.0
        each, share = protocol.round_epsilon, 1e-5 / (steps + 1)
        advanced = steps * each**2 / 2 + each * math.sqrt(2 * steps * math.log(1 / share))
        assert spent == pytest.approx(min(steps * each, advanced), rel=1e-9)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_with_secret_coins_one_pair_of_data_sets_nearly_reaches_the_certificate(adjacency):
    coins = ShuffledSums.build(noise_multiplier=1.0, num_users=500, sample_rate=0.1, dimension=20)
    answer = compute_bound([(coins, 50)], delta=1e-5, adjacency=adjacency)
    assert answer.lower is not None
    assert 0 < answer.lower <= answer.epsilon
    assert answer.proof == "secret coins"
    assert "counts on every user to draw and hide" in answer.meaning
    if adjacency == "zero_out":
        assert answer.lower >= 0.9 * answer.epsilon


def gaussian_delta(mu, epsilon):
    """δ(ε) of the Gaussian mechanism."""
    return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


def test_with_secret_coins_a_replacement_costs_its_share_of_the_whole_distance():
    """One round, by h of Theorem 8.2: a record that is replaced is no record that becomes zero."""
    coins = ShuffledSums.build(noise_multiplier=1.0, num_users=500, sample_rate=0.1, dimension=20)

    def spent(epsilon):
        return 0.1 * (gaussian_delta(coins.mu, math.log1p(math.expm1(epsilon) / 0.1)) + coins.lost)

    for delta in (1e-3, 1e-5, 1e-8):
        found = compute_bound([(coins, 1)], delta=delta, adjacency="replace").epsilon
        assert (
            spent(found) <= delta < spent(found * (1 - 0.005))
        )  # a grid of one report is some tenths of a percent off


LOST = 1e-4
"""Of δ's own size, where protocols lose a millionth of it: then it shows whether it was taken off."""


@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_what_the_tails_of_all_rounds_lose_is_taken_off_delta_wherever_rounds_are_sums(adjacency):
    steps, lost, delta = 3, TIGHT.lost, 3.6 * TIGHT.lost  # 0.6 of which are left for three rounds
    distance = {"zero_out": 0.5, "replace": 1.0}[adjacency]
    mu = mechanism_of(TIGHT, 50).mu
    found = bound_of(TIGHT, users=50, steps=steps, delta=delta, adjacency=adjacency).epsilon
    assert gaussian_delta(distance * mu * math.sqrt(steps), found) <= delta - steps * lost
    one = round_epsilon(mechanism_of(TIGHT, 50), 1.2 * lost)
    assert gaussian_delta(mu, one) <= 0.2 * lost * (1 + 1e-6)
    everyone = [(SampledSum(mu=0.7, lost=LOST), steps)]
    found = sampled_sums.compute_epsilon(everyone, delta=3.6 * LOST, zeroed=adjacency == "zero_out")
    assert gaussian_delta(distance * 0.7 * math.sqrt(steps), found) <= 0.6 * LOST
    sums = BinomialSum(noise=BinomialNoise(trials=40_000, probability=0.5), shift=70, dimension=2)
    slope, share = binomial_sums.gaussian_equivalent(
        sums, lost=binomial_sums.LOST_SHARE * LOST / steps
    )
    found = binomial_sums.compute_epsilon([(sums, steps)], delta=LOST, distance=distance)
    assert gaussian_delta(distance * slope * math.sqrt(steps), found) <= LOST - steps * share


@pytest.mark.parametrize("seen", [False, True])
def test_of_a_sample_what_is_lost_is_taken_off_delta_too(seen):
    """A sample that is seen loses all of it; of one that is not, what its share is."""
    rounds, none = ([(SampledSum(mu=1.0, sample_rate=0.5, lost=lost), 2)] for lost in (LOST, 0.0))
    if seen:
        found, less = (
            gaussian_epsilons(each, delta=delta)["samples that are seen"]
            for each, delta in ((rounds, 3 * LOST), (none, LOST))
        )
    else:
        found, less = (
            sampled_sums.compute_epsilon(each, delta=delta)
            for each, delta in ((rounds, 3 * LOST), (none, 2 * LOST))
        )
    # The share that clipping may take of δ, and of the slack of the other round, is 1e-4 of each; ε
    # falls with log δ or slower.
    assert found == pytest.approx(less, rel=1e-3)


# --- the accountant
# -------------------------------------------------------------------------------------------------


def test_the_history_is_opacus_s_and_a_checkpoint_restores_everything():
    accountant = accountant_of(TIGHT, steps=3)
    assert accountant.history == [(TIGHT.noise_multiplier, 0.05, 3)]
    assert len(accountant) == 3
    restored = create_accountant("shuffled_sums")
    restored.load_state_dict(through_json(accountant.state_dict()))
    assert (restored.planned, restored.rounds) == (accountant.planned, accountant.rounds)
    for name in bounds_of(ShuffledSums):
        assert restored.get_epsilon(1e-5, bound=name) == accountant.get_epsilon(1e-5, bound=name)


def changed(place, **fields):
    def change(saved):
        (saved["rounds"][0][0] if place == "rounds" else saved[place]).update(fields)
        return saved

    return change


@pytest.mark.parametrize(
    ("protocol", "spoil"),
    [
        (TIGHT, changed("rounds", sigma=1)),
        (TIGHT, lambda saved: accountant_of(PUBLISHED).state_dict()),
        (
            TIGHT,
            changed("rounds", noise_multiplier=10 * TIGHT.noise_multiplier),
        ),  # which would be printed as proved
        (TIGHT, changed("planned", sample_rate=0.5)),
        (PUBLISHED, changed("rounds", round_epsilon=mechanism_of(PUBLISHED).round_epsilon / 10)),
    ],
    ids=["unknown field", "another", "noise", "rate", "published"],
)
def test_state_that_is_no_such_run_s_is_refused_and_changes_nothing(protocol, spoil):
    accountant = accountant_of(protocol)
    before = (accountant.planned, accountant.rounds)
    with pytest.raises(ValueError, match=r"state_dict|noise_multiplier must follow|round_epsilon"):
        accountant.load_state_dict(spoil(accountant.state_dict()))
    assert (accountant.planned, accountant.rounds) == before


def planned(protocol=TIGHT, **options):
    accountant = ShuffleAccountant(ShuffledSums)
    accountant.plan(mechanism_of(TIGHT))
    accountant.plan(mechanism_of(protocol, **options))
    return accountant


REFUSALS = {
    "use a new PrivacyEngine": lambda: planned(PUBLISHED),
    "for another run": lambda: planned(users=500),
    r"sample_rate must be 0\.05 as planned": lambda: planned().step(
        noise_multiplier=TIGHT.noise_multiplier, sample_rate=0.5
    ),
    r"num_users=50 is for samples of fixed size": lambda: ShuffledSums.of_protocol(
        TIGHT, num_users=50, sample_rate=0.1
    ),
    "sampling must be one of 'poisson', 'fixed_size'": lambda: ShuffledSums.build(
        noise_multiplier=1.0, num_users=500, dimension=20, sampling="own"
    ),
    "local_noise": lambda: ShuffleAccountant(ShuffledSums, local_noise=True),
    r"ShuffledSums\.build": lambda: ShuffledSums(
        noise_multiplier=1.0, num_users=1000, sample_rate=0.1, dimension=5
    ),
    "granularity and noise_trials": lambda: ShuffledSums.build(
        noise_multiplier=1.0, num_users=1000, dimension=5, tail=1e-9
    ),
    "larger delta": lambda: bound_of(
        ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=0.4), delta=1e-7
    ),
    "'certified', 'published'": lambda: accountant_of(TIGHT).get_epsilon(1e-5, bound="pair"),
    "orders": lambda: accountant_of(TIGHT).get_epsilon(1e-5, orders=[2.0]),
}


@pytest.mark.parametrize("named", REFUSALS)
def test_what_no_such_run_can_be_is_refused_by_name(named):
    with pytest.raises(ValueError, match=named):
        REFUSALS[named]()


def test_dishonest_users_know_who_is_in_a_sample_but_nothing_of_others_coins():
    half = ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=1e-6, honest_fraction=0.5)
    assert mechanism_of(half, users=50).honest_fraction == 0.5
    with pytest.raises(
        ValueError, match=r"honest_fraction=0\.5 goes with sampling='poisson' or sample_rate=1"
    ):
        mechanism_of(half)
    coins = ShuffledSums.of_protocol(half, sample_rate=0.1)
    found, everyone = (
        compute_bound([(each, 20)], delta=1e-5) for each in (coins, ShuffledSums.of_protocol(half))
    )
    assert found.guarantee is Guarantee.PROVED
    assert found.proof == "secret coins"
    assert found.epsilon < everyone.epsilon / 2


# --- the mechanism
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol", [TIGHT, pytest.param(PUBLISHED, marks=pytest.mark.slow)], ids=["tight", "published"]
)
def test_the_noise_follows_from_the_bits(protocol):
    mechanism = mechanism_of(protocol)
    assert protocol.mu <= mechanism.mu <= protocol.mu * (1 + 1e-12)
    noise = protocol.sum_round.noise
    assert mechanism.noise_std == pytest.approx(
        2 * math.sqrt(noise.variance) / protocol.granularity
    )
    # within the tolerance for another SciPy's tails it is taken as it is; beyond, either way, it is
    # refused
    near = dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier * (1 + 5e-7))
    assert near.same_run_as(mechanism)
    for factor in (10.0, 1.001, 0.999, 0.1):
        with pytest.raises(ValueError, match="must follow from the protocol's own bits"):
            dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier * factor)
    with pytest.raises(ValueError, match="must follow from the protocol's own bits"):
        dataclasses.replace(mechanism, tail=mechanism.tail / 1e3)
    with pytest.raises(ValueError, match="must follow from the protocol's own bits"):
        dataclasses.replace(mechanism, granularity=2 * mechanism.granularity)


def test_a_published_epsilon_is_that_of_its_bits():
    mechanism = mechanism_of(PUBLISHED)
    assert mechanism.calibration == "published"
    for changes in ({"round_epsilon": 0.01}, {"round_delta": 1e-9}, {"round_epsilon": None}):
        with pytest.raises(ValueError, match="round_epsilon"):
            dataclasses.replace(mechanism, **changes)
    with pytest.raises(ValueError, match="round_epsilon"):
        dataclasses.replace(mechanism_of(TIGHT), round_epsilon=0.1, round_delta=1e-6)


@settings(max_examples=6, deadline=None)
@given(sigma=st.floats(0.5, 50), reports=st.integers(10, 2000), dimension=st.integers(1, 10**5))
def test_bits_are_built_for_a_noise_multiplier_as_dp_sgd_has_it(sigma, reports, dimension):
    built = ShuffledSums.build(
        noise_multiplier=sigma, num_users=10 * reports, sample_rate=0.1, dimension=dimension
    )
    assert sigma <= built.noise_multiplier <= 1.03 * sigma
    assert round(built.expected_reports) == reports
