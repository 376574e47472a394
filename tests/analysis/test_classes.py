"""Few classes for many different rounds."""

from __future__ import annotations

import numpy as np
import pytest

from opacus_shuffle.accountants import bounds_of, compute_bound
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.analysis.classes import classes
from opacus_shuffle.analysis.shuffled_rounds import MOST_SHUFFLED_KINDS, ShuffledRound, coarsen, merge

FIELDS = {
    "shuffle_gauss": {"num_users": 6000},
    "subsampled_shuffle": {"num_users": 6000, "sample_rate": 0.1},
    "shuffled_checkin": {"num_users": 6000, "sample_rate": 0.1},
    "shuffled_fw": {"dimension": 1000, "sample_rate": 0.02},
}


def test_neighbours_are_joined_where_that_costs_least():
    sizes = np.array([9.0, 8.0, 3.0, 2.9, 2.8])
    assert classes(sizes, np.ones(5, int), np.zeros(5, bool), most=2) == [slice(0, 2), slice(2, 5)]
    assert classes(sizes, np.ones(5, int), np.array([False, True, False, False, False]), most=2)[0] == slice(0, 1)
    assert len(classes(sizes, np.ones(5, int), np.array([False] + 4 * [True]), most=2)) == 5


@pytest.mark.parametrize(("side", "sign"), [("upper", 1), ("lower", -1)])
def test_noise_is_rounded_to_the_safe_side_and_no_round_is_lost(side, sign):
    rounds = merge([(ShuffledRound(noise_multiplier=float(x), num_users=100), 2) for x in np.geomspace(0.5, 50, 1500)])
    few = coarsen(rounds, side)
    assert len(few) <= MOST_SHUFFLED_KINDS
    assert sum(count for _, count in few) == 3000
    exact = sorted((each.noise_multiplier for each, count in rounds for _ in range(count)), reverse=sign < 0)
    rounded = sorted((each.noise_multiplier for each, count in few for _ in range(count)), reverse=sign < 0)
    assert all(sign * near <= sign * true for near, true in zip(rounded, exact, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", FIELDS)
def test_a_history_of_a_thousand_different_noises_lies_between_its_ends(mechanism):
    """Minutes before, for every bound but the published ones."""
    kind = MECHANISMS[mechanism]

    def rounds(sigmas):
        return [(kind.build(noise_multiplier=float(sigma), **FIELDS[mechanism]), 1) for sigma in sigmas]

    for bound in bounds_of(kind):
        least, found, most = (
            compute_bound(rounds(sigmas), delta=1e-5, bound=bound).epsilon
            for sigmas in (np.full(1000, 5.0), np.linspace(5, 2, 1000), np.full(1000, 2.0))
        )
        assert least <= found <= most
