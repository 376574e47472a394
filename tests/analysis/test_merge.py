"""Few kinds for many different rounds."""

import operator

import numpy as np
import pytest
from helpers.hockey_sticks import hockey_stick

from opacus_shuffle.analysis.merge import grouped, merge
from opacus_shuffle.analysis.ratio_distribution import mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import MOST_SHUFFLED_TYPES, ShuffledRound, coarsen


@pytest.mark.parametrize("seed", range(20))
def test_two_groups_are_those_of_the_cheapest_cut(seed):
    draws = np.random.default_rng(seed)
    rows, counts = draws.uniform(1, 9, (12, 2)), draws.integers(1, 50, 12)
    orders = np.argsort(rows, axis=0).T
    cuts = [(order[:at], order[at:]) for order in orders for at in range(1, 12)]
    cheapest = min(
        sum(rows[part].max(axis=0).prod() * counts[part].sum() for part in cut) for cut in cuts
    )
    groups = grouped(rows, counts, lambda worst: worst.prod(axis=1), most=2)
    assert sum(worst.prod() * rounds for worst, _, rounds in groups) == pytest.approx(cheapest)


@pytest.mark.parametrize(("side", "sign"), [("upper", 1), ("lower", -1)])
def test_noise_is_rounded_to_the_safe_side_and_no_round_is_lost(side, sign):
    sigmas = np.geomspace(0.5, 50, 1500).tolist()
    rounds = merge([(ShuffledRound(noise_multiplier=x, num_users=100), 2) for x in sigmas])
    few = coarsen(rounds, side)
    assert len(few) <= MOST_SHUFFLED_TYPES
    exact, rounded = (
        sorted(sign * kind.noise_multiplier for kind, count in kinds for _ in range(count))
        for kinds in (rounds, few)
    )
    assert all(near <= true for near, true in zip(rounded, exact, strict=True))


@pytest.mark.parametrize(
    "sampling", [None, "poisson", pytest.param("fixed_size", marks=pytest.mark.zoo)]
)
@pytest.mark.parametrize(("side", "worse"), [("upper", operator.le), ("lower", operator.ge)])
def test_rounds_that_differ_in_everything_become_few_that_are_worse_in_everything(
    sampling, side, worse
):
    draws = np.random.default_rng(1)

    def one():
        rate = {} if sampling is None else {"sample_rate": float(draws.uniform(0.01, 0.5))}
        sizes = float(draws.uniform(1, 3)), int(draws.integers(50, 900))
        return ShuffledRound(
            noise_multiplier=sizes[0], num_users=sizes[1], sampling=sampling, **rate
        )

    def numbers(kind):
        drawn = round(kind.sample_rate * kind.num_users)
        rate = drawn if sampling == "fixed_size" else kind.sample_rate
        return kind.noise_multiplier, kind.num_users, -rate

    def tells(kind, true):  # whether it tells at least as much in everything, or at most
        *both, (drawn, least) = zip(numbers(kind), numbers(true), strict=True)
        return all(worse(*pair) for pair in both) and (worse(drawn, least) or kind.sample_rate == 1)

    rounds = merge([(one(), 1) for _ in range(1200)])
    few = coarsen(rounds, side)
    assert len(few) <= 3 * MOST_SHUFFLED_TYPES
    assert sum(count for _, count in few) == 1200
    assert all(any(tells(kind, true) for kind, _ in few) for true, _ in rounds)


def test_a_larger_sample_of_fewer_users_tells_more():
    """What coarsen relies on, for the pair."""

    def sticks(users, sample):
        fields = {"num_users": users, "sample_rate": sample / users, "sampling": "fixed_size"}
        ratio = mean_distribution(noise_multiplier=1.0, side="lower", **fields)
        return np.array([hockey_stick(ratio, epsilon) for epsilon in (0.0, 0.1, 0.5, 1.0)])

    for quiet, telling in (((60, 6), (50, 6)), ((60, 6), (60, 9)), ((60, 30), (20, 20))):
        assert np.all(sticks(*quiet) <= sticks(*telling) * 1.01)
