"""Few kinds for many different rounds."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest

from opacus_shuffle.accountants import bounds_of, compute_bound
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.analysis.merge import merged_kinds
from opacus_shuffle.analysis.ratio_distribution import mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import (
    MOST_SHUFFLED_KINDS,
    ShuffledRound,
    coarsen,
    merge,
)

FIELDS = {
    "shuffle_gauss": {"num_users": 6000},
    "subsampled_shuffle": {"num_users": 6000, "sample_rate": 0.1},
    "shuffled_checkin": {"num_users": 6000, "sample_rate": 0.1},
    "shuffled_fw": {"dimension": 1000, "sample_rate": 0.02},
    "shuffled_sums": {"dimension": 4, "num_users": 10_000},
}


def test_those_are_joined_that_cost_least_together():
    def cost(worst):
        return worst[:, 0]

    sizes = np.array([[9.0], [2.9], [8.0], [3.0], [2.8]])
    assert merged_kinds(sizes, np.ones(5), cost, most=2) == [[0, 2], [1, 3, 4]]
    for most in (5, 9):
        assert merged_kinds(sizes, np.ones(5), cost, most=most) == [[0], [1], [2], [3], [4]]
    assert merged_kinds(sizes, np.ones(5), cost, most=1) == [[0, 1, 2, 3, 4]]
    # Many rounds of a kind are worth a class of their own.
    assert [0] in merged_kinds(sizes, np.array([1, 1, 1e3, 1, 1]), cost, most=2)
    # Of two numbers each class counts the larger ones, wherever they come from.
    crossed = np.array([[1.0, 9.0], [9.0, 1.0], [1.0, 8.0], [8.0, 1.0]])
    assert merged_kinds(crossed, np.ones(4), lambda worst: worst.prod(axis=1), most=2) == [
        [0, 2],
        [1, 3],
    ]


def test_kinds_are_joined_as_by_trying_every_pair_at_each_step():
    draws = np.random.default_rng(0)
    kinds, counts = draws.uniform(1, 2, (40, 3)), draws.integers(1, 9, 40)

    def cost(worst):
        return worst.prod(axis=1)

    def together(members):
        return float(cost(kinds[members].max(axis=0)[None])[0] * counts[members].sum())

    tried = [[index] for index in range(40)]
    while len(tried) > 5:
        pairs = itertools.combinations(tried, 2)
        one, other = min(
            pairs,
            key=lambda pair: together(pair[0] + pair[1]) - together(pair[0]) - together(pair[1]),
        )
        tried = [members for members in tried if members not in (one, other)] + [one + other]
    assert sorted(merged_kinds(kinds, counts, cost, most=5)) == sorted(
        sorted(members) for members in tried
    )


@pytest.mark.parametrize(("side", "sign"), [("upper", 1), ("lower", -1)])
def test_noise_is_rounded_to_the_safe_side_and_no_round_is_lost(side, sign):
    rounds = merge(
        [
            (ShuffledRound(noise_multiplier=float(x), num_users=100), 2)
            for x in np.geomspace(0.5, 50, 1500)
        ]
    )
    few = coarsen(rounds, side)
    assert len(few) <= MOST_SHUFFLED_KINDS
    assert sum(count for _, count in few) == 3000
    exact = sorted(
        (each.noise_multiplier for each, count in rounds for _ in range(count)), reverse=sign < 0
    )
    rounded = sorted(
        (each.noise_multiplier for each, count in few for _ in range(count)), reverse=sign < 0
    )
    assert all(sign * near <= sign * true for near, true in zip(rounded, exact, strict=True))


@pytest.mark.parametrize("sampling", [None, "poisson", "fixed_size"])
@pytest.mark.parametrize(("side", "worse"), [("upper", operator.le), ("lower", operator.ge)])
def test_rounds_that_differ_in_everything_become_few_that_are_worse_in_everything(
    sampling, side, worse
):
    draws = np.random.default_rng(1)

    def one():
        rate = {} if sampling is None else {"sample_rate": float(draws.uniform(0.01, 0.5))}
        return ShuffledRound(
            noise_multiplier=float(draws.uniform(1, 3)),
            num_users=int(draws.integers(50, 900)),
            sampling=sampling,
            **rate,
        )

    def numbers(each):
        drawn = (
            round(each.sample_rate * each.num_users)
            if sampling == "fixed_size"
            else each.sample_rate
        )
        return each.noise_multiplier, each.num_users, -drawn

    def tells(kind, each):  # whether it tells at least as much in everything, or at most
        *both, (drawn, least) = zip(numbers(kind), numbers(each), strict=True)
        return all(worse(*pair) for pair in both) and (worse(drawn, least) or kind.sample_rate == 1)

    rounds = merge([(one(), 1) for _ in range(1200)])
    few = coarsen(rounds, side)
    assert len(few) <= 3 * MOST_SHUFFLED_KINDS
    assert sum(count for _, count in few) == 1200
    assert all(any(tells(kind, each) for kind, _ in few) for each, _ in rounds)


def test_a_larger_sample_of_fewer_users_tells_more():
    """What coarsen relies on, for the pair."""

    def sticks(users, sample):
        ratio = mean_distribution(
            noise_multiplier=1.0,
            num_users=users,
            sample_rate=sample / users,
            sampling="fixed_size",
            side="lower",
        )
        return np.array([ratio.hockey_stick(epsilon) for epsilon in (0.0, 0.1, 0.5, 1.0)])

    assert np.all(sticks(60, 6) <= sticks(50, 6) * 1.01)
    assert np.all(sticks(60, 6) <= sticks(60, 9) * 1.01)
    assert np.all(sticks(60, 30) <= sticks(20, 20) * 1.01)


VARIED = {
    "shuffle_gauss": {"num_users": range(1000, 2000)},
    "subsampled_shuffle": {"sample_rate": np.linspace(0.05, 0.2, 1000)},
    "shuffled_checkin": {"sample_rate": np.linspace(0.05, 0.2, 1000)},
    "shuffled_fw": {"sample_rate": np.linspace(0.02, 0.1, 1000)},
    "shuffled_sums": {"sample_rate": np.linspace(0.02, 0.1, 100)},
}


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
@pytest.mark.parametrize("mechanism", VARIED)
def test_a_history_of_many_sample_rates_or_sizes_lies_between_its_ends(mechanism, adjacency):
    """Minutes before, or no answer."""
    kind, [(name, values)] = MECHANISMS[mechanism], VARIED[mechanism].items()
    fixed = {"noise_multiplier": 4.0, **FIELDS[mechanism]}

    def epsilon(chosen):
        rounds = [
            (kind.build(**{**fixed, name: value if name == "num_users" else float(value)}), 1)
            for value in chosen
        ]
        return compute_bound(rounds, delta=1e-5, adjacency=adjacency).epsilon

    ends = sorted(epsilon([end] * len(values)) for end in (values[0], values[-1]))
    assert ends[0] <= epsilon(values) <= ends[1] * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", sorted(FIELDS.keys() - {"shuffled_sums"}))
def test_a_history_of_a_thousand_different_noises_lies_between_its_ends(mechanism):
    """Minutes before, for every bound but the published ones."""
    kind = MECHANISMS[mechanism]

    def rounds(sigmas):
        return [
            (kind.build(noise_multiplier=float(sigma), **FIELDS[mechanism]), 1) for sigma in sigmas
        ]

    for bound in bounds_of(kind):
        least, found, most = (
            compute_bound(rounds(sigmas), delta=1e-5, bound=bound).epsilon
            for sigmas in (np.full(1000, 5.0), np.linspace(5, 2, 1000), np.full(1000, 2.0))
        )
        assert least <= found <= most
