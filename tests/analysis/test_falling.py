"""ε that never rises with δ."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from opacus_shuffle import ShuffleGauss, compute_epsilon, privacy_bound
from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.analysis.falling import FIRST, SMALL, falling_epsilon

DELTAS = [1e-3, 2.4e-3, 3.8e-3, 6.7e-3, 7.8e-3, 0.0121, 0.0187, 0.0335, 0.05, 0.08, 0.11, 0.127, 0.2, 0.3, 0.4, 0.7, 0.9, 0.99]


def test_a_wavering_search_is_made_to_fall():
    draws = np.random.default_rng(0)
    noise = {}

    def wavering(delta):
        return noise.setdefault(delta, max(0.0, 0.02 * (0.3 - delta)) + 0.004 * float(draws.random()) * (draws.random() < 0.7))

    deltas = np.sort(draws.uniform(FIRST, 1, 300))
    found = [falling_epsilon(wavering, float(delta)) for delta in deltas]
    assert all(later <= earlier for earlier, later in itertools.pairwise(found))
    assert max(found) <= SMALL


def test_a_large_epsilon_or_a_small_delta_is_left_alone():
    assert falling_epsilon(lambda delta: 1 / delta, 0.3) == 1 / 0.3
    assert falling_epsilon(lambda delta: 0.01, 1e-5) == 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "run"),
    [
        ("shuffle_gauss", {"noise_multiplier": 9.48, "num_users": 60_000, "steps": 7}),
        ("shuffle_gauss", {"noise_multiplier": 4.0, "num_users": 10_000, "steps": 1}),
        ("shuffle_gauss", {"noise_multiplier": 1.662, "num_users": 30_877, "steps": 766}),
        ("shuffled_checkin", {"noise_multiplier": 5.0, "num_users": 6000, "sample_rate": 0.1, "steps": 50}),
        ("subsampled_shuffle", {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.1, "steps": 10}),
    ],
)
def test_epsilon_falls_with_delta_and_zeroing_never_costs_more_than_replacing(mechanism, run):
    zeroed, replaced = (
        [compute_epsilon(mechanism, delta=delta, adjacency=adjacency, **run) for delta in DELTAS]
        for adjacency in ("zero_out", "replace")
    )
    for found in (zeroed, replaced):
        assert all(later <= earlier for earlier, later in itertools.pairwise(found))
    assert all(less <= more for less, more in zip(zeroed, replaced, strict=True))


def test_epsilon_of_a_round_of_many_falls_with_delta():
    """It was 0 at 3.7e-3 (nearly) and 1.6e-6 at 6.7e-3, above that of replacement."""
    run = {"noise_multiplier": 9.48, "num_users": 60_000, "steps": 7}
    deltas = (3.4e-3, 3.729e-3, 6.694e-3, 7.749e-3)
    zeroed = [compute_epsilon("shuffle_gauss", delta=delta, **run) for delta in deltas]
    assert all(later <= earlier for earlier, later in itertools.pairwise(zeroed))
    assert zeroed[-1] <= compute_epsilon("shuffle_gauss", delta=deltas[-1], adjacency="replace", **run)


@pytest.mark.parametrize(
    ("noise_multiplier", "steps", "deltas"), [(1.0, 20, (0.06, 0.061, 0.065)), (1.2, 10, (2.8e-7, 3.3e-7, 4.2e-7))]
)
def test_a_large_epsilon_falls_where_that_without_a_shuffler_passes_a_guess_of_it(noise_multiplier, steps, deltas):
    """Guesses double: where ε without a shuffler fell below 16, that guess was left out, and ε rose from 13.8 to 15.9."""
    run = {"noise_multiplier": noise_multiplier, "num_users": 500, "steps": steps}
    found = [compute_epsilon("shuffle_gauss", delta=delta, **run) for delta in deltas]
    assert all(later < earlier for earlier, later in itertools.pairwise(found))
    assert privacy_bound("shuffle_gauss", delta=deltas[-1], bound="pair", **run).epsilon <= found[-1]


@pytest.mark.slow
def test_a_large_epsilon_of_many_kinds_of_rounds_falls_with_delta():
    """It was 14.09 at 0.015, 13.89 at 0.017 and 15.76 at 0.02."""
    draws = np.random.default_rng(0).uniform(0.8, 6, 15)
    rounds = [(ShuffleGauss(noise_multiplier=float(sigma), num_users=500), 3) for sigma in draws]
    found = [compute_bound(rounds, delta=delta, bound="certified").epsilon for delta in (0.015, 0.017, 0.02)]
    assert all(later < earlier for earlier, later in itertools.pairwise(found))


RUNS = {
    "shuffle_gauss": {"noise_multiplier": 2.0, "num_users": 500},
    "subsampled_shuffle": {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.3},
    "shuffled_checkin": {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.3},
    "shuffled_fw": {"noise_multiplier": 1.0, "sample_rate": 0.1, "dimension": 100, "clip": 1.0, "batch_clip": 1.0},
    "shuffled_sums": {"noise_multiplier": 2.0, "num_users": 1000, "sample_rate": 0.3, "dimension": 4},
}
ALL = {"steps": 10, "delta": 1e-5}
DEARER = {
    "noise_multiplier": [1.5, 1.3, 1.1, 1.0, 0.8, 0.6, 0.4],
    "steps": [0.1, 0.5, 1, 1.3, 3, 10, 40],
    "delta": [5e4, 2e4, 1e4, 3e3, 300, 10, 1, 1e-2, 1e-5],
    "sample_rate": [0.1, 0.3, 1, 1.2, 2, 3],
    "num_users": [10, 3, 1.2, 1, 0.7, 0.3],
}
"""Shares of the numbers above, the cheaper ones first."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mechanism", "changed"),
    # Sums of another number of users have another grid, and up to 2.5 % more noise than they were asked for.
    [
        (name, key)
        for name, run in RUNS.items()
        for key in DEARER
        if key in ALL | run and (name, key) != ("shuffled_sums", "num_users")
    ],
)
def test_epsilon_falls_with_noise_and_delta_and_users_and_grows_with_steps_and_rate(mechanism, changed):
    base = {**ALL, **RUNS[mechanism]}
    whole = changed in ("steps", "num_users")
    values = [round(base[changed] * share) if whole else base[changed] * share for share in DEARER[changed]]
    # The printed formulas are no such functions of the number of users and the rate, nor is Theorem 6 of anything.
    printed = [] if changed in ("sample_rate", "num_users") or mechanism == "shuffled_fw" else ["published"]
    pair = [] if mechanism == "shuffled_sums" else ["pair"]
    found = {
        (bound, adjacency): [
            compute_epsilon(mechanism, bound=bound, adjacency=adjacency, **{**base, changed: value}) for value in values
        ]
        for bound, adjacency in [("certified", "replace"), *((each, "zero_out") for each in ["certified", *pair, *printed])]
    }
    for epsilons in found.values():
        assert all(cheaper <= dearer for cheaper, dearer in itertools.pairwise(epsilons)), (values, epsilons)
    both = found["certified", "zero_out"], found["certified", "replace"]
    assert all(less <= more for less, more in zip(*both, strict=True))
