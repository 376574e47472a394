"""The certificate against the true mechanism.

Every data set tried here is one that it must hold for.

Cutting the line into cells and looking at the cells only is post-processing, so δ of the shuffled
*cells* is at most the true δ. It is a finite sum, so a certificate that it exceeds is wrong: no
tolerance but ``ROUNDING``. What is tested is proved in docs/proofs/01_gaussian_clones.md.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from helpers.shuffled_reports import (
    ROUNDING,
    hockey_stick,
    merged_cells,
    one_round,
    shuffled_cells,
    view_cells,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import gaussian_clones
from opacus_shuffle.analysis.gaussian_clones import compute_epsilon
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, pair_epsilon, unshuffled_epsilon

KINDS = ("mended", "truncated")
DELTAS = (0.1, 0.03, 0.01, 1e-3, 1e-5)

both_kinds = pytest.mark.parametrize("clones", KINDS)


@pytest.mark.parametrize("adjacency", ["zero_out", pytest.param("replace", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_few_clones_are_not_thrown_away(sampling, adjacency):
    """Rounds with less than half a clone on average counted as unshuffled.

    ε more than halved from one σ to the next.
    """

    def epsilon(sigma):
        kind = ShuffledRound(
            noise_multiplier=sigma, num_users=4000, sample_rate=0.1, sampling=sampling
        )
        return gaussian_clones.smallest_epsilon([(kind, 20)], delta=1e-5, adjacency=adjacency)[0]

    epsilons = [epsilon(0.9 * 1.04**step) for step in range(4)]
    assert all(before > after > before / 2 for before, after in itertools.pairwise(epsilons)), (
        epsilons
    )


# ---- two and three users, cell by cell
# ----------------------------------------------------------------------


def assert_certified(moved, still, rounds, *, adjacency="zero_out", deltas=DELTAS, clones):
    for delta in deltas:
        epsilon = compute_epsilon(rounds, delta=delta, adjacency=adjacency, clones=clones)
        assert hockey_stick(moved, still, epsilon) <= delta + ROUNDING, (rounds, delta, epsilon)


def other_records(users):
    random = np.random.default_rng(users).uniform(-1, 1, (2, users - 1))
    return [
        *itertools.combinations_with_replacement((-1.0, 0.0, 1.0), users - 1),
        *map(tuple, random.tolist()),
    ]


@pytest.mark.parametrize(("users", "deltas"), [(2, (1e-2, 1e-3, 1e-5)), (3, (0.03, 1e-3, 1e-5))])
@both_kinds
def test_the_certificate_is_put_to_the_test_with_two_and_three_users(users, deltas, clones):
    # Below the unshuffled bound: otherwise the brute force that follows would only test that.
    for delta in deltas:
        rounds = one_round(10.0, users)
        assert compute_epsilon(rounds, delta=delta, clones=clones) < unshuffled_epsilon(
            rounds, delta=delta
        )


@pytest.mark.parametrize(
    ("users", "sigma", "stays", "adjacency"),
    [
        *((users, sigma, 0.0, "zero_out") for users, sigma in ((2, 1.0), (3, 1.0), (3, 10.0))),
        *((users, sigma, -1.0, "replace") for users, sigma in ((2, 3.0), (3, 1.0))),
        *(
            pytest.param(users, sigma, -1.0, "replace", marks=pytest.mark.zoo)
            for users, sigma in ((2, 1.0), (2, 10.0), (3, 3.0), (3, 10.0))
        ),
    ],
)
def test_all_small_data_sets_are_certified(users, sigma, stays, adjacency):
    rounds = one_round(sigma, users)
    for others in other_records(users):
        moved, still = (shuffled_cells((record, *others), sigma) for record in (1.0, stays))
        for clones in KINDS:
            assert_certified(moved, still, rounds, adjacency=adjacency, clones=clones)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
@pytest.mark.parametrize(
    ("users", "rate", "repetitions"),
    [
        (2, 0.5, 2),
        *(
            pytest.param(users, rate, repetitions, marks=pytest.mark.zoo)
            for users, rate, repetitions in ((2, 1 / 3, 1), (3, 1 / 3, 2), (3, 2 / 3, 1))
        ),
    ],
)
def test_random_participants_are_certified_for_two_and_three_users(
    users, rate, repetitions, sampling
):
    rate = round(rate * users) / users if sampling == "fixed_size" else rate
    for sigma in (3.0, 10.0):
        rounds = one_round(sigma, users, rate, sampling, repetitions)
        for others in ((-1.0,) * (users - 1), (0.0,) * (users - 1), other_records(users)[-1]):
            for stays, adjacency in ((0.0, "zero_out"), (-1.0, "replace")):
                views = [
                    view_cells((record, *others), sigma, rate, sampling) for record in (1.0, stays)
                ]
                if repetitions == 2:
                    views = [np.outer(view, view).ravel() for view in merged_cells(*views)]
                for clones in KINDS:
                    assert_certified(*views, rounds, adjacency=adjacency, clones=clones)


# ---- properties
# ----------------------------------------------------------------------

# δ far below the reports' total variation, so that ε is not next to zero, where relative changes
# mean nothing.
sigmas = st.floats(0.6, 10.0)
populations = st.integers(1, 500).map(lambda tens: 10 * tens)  # so that a rate of 0.3 is one
deltas = st.floats(-9, -5).map(lambda exponent: 10**exponent)
samplings = st.sampled_from([(1.0, None), (0.3, "poisson"), (0.3, "fixed_size")])
kinds = st.sampled_from(KINDS)
few = settings(max_examples=2)

# Pool sizes are rounded down to 7 bits, by 1.6 % at most and 0.6 % on average, ε by half of that;
# the margin t is searched for by an approximation. Neither is monotone; both only ever raise ε.
WIGGLE = 1.005


@few
@given(sigmas, populations, deltas, samplings, st.integers(1, 5), kinds)
def test_the_certificate_lies_between_the_pair_and_the_unshuffled_reports(
    sigma, users, delta, sampled, repetitions, clones
):
    rounds = one_round(sigma, users, *sampled, repetitions=repetitions)
    epsilon = compute_epsilon(rounds, delta=delta, clones=clones)
    assert (
        0
        <= pair_epsilon(rounds, delta=delta)[0]
        <= epsilon
        <= unshuffled_epsilon(rounds, delta=delta)
        < math.inf
    )
    replaced = compute_epsilon(rounds, delta=delta, adjacency="replace", clones=clones)
    assert epsilon <= replaced <= unshuffled_epsilon(rounds, delta=delta, distance=2.0) < math.inf


@both_kinds
def test_one_user_is_the_unshuffled_gaussian(clones):
    rounds = one_round(2.0, 1)
    assert compute_epsilon(rounds, delta=1e-5, clones=clones) == unshuffled_epsilon(
        rounds, delta=1e-5
    )
    assert compute_epsilon([], delta=1e-5, clones=clones) == 0.0


@pytest.mark.parametrize("sigma", [1e-6, 1e-3, 0.04, 1e6])
@both_kinds
def test_extreme_noise_stays_certified_by_the_unshuffled_bound(sigma, clones):
    for adjacency, distance in (("zero_out", 1.0), ("replace", 2.0)):
        rounds = one_round(sigma, 1000)
        epsilon = compute_epsilon(rounds, delta=1e-5, adjacency=adjacency, clones=clones)
        assert 0 <= epsilon <= unshuffled_epsilon(rounds, delta=1e-5, distance=distance) < math.inf


def test_a_search_that_does_not_settle_begins_again_where_gaussian_mixtures_do():
    often = [
        (
            ShuffledRound(
                noise_multiplier=1.0, num_users=60_000, sample_rate=0.1, sampling="poisson"
            ),
            500,
        )
    ]
    assert (
        compute_epsilon(often, delta=1e-5, clones="truncated") < 8.33
    )  # 9.32 on the way from zero alone


@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
@both_kinds
def test_a_coarse_certificate_promises_no_more_than_a_fine_one_and_little_less(clones, adjacency):
    fine, coarse = (
        compute_epsilon(
            one_round(2.0, 1000), delta=1e-5, adjacency=adjacency, clones=clones, coarse=coarse
        )
        for coarse in (False, True)
    )
    assert fine <= coarse <= 1.1 * fine
