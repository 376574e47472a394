"""ε falls with δ, and is never below the truth where it nears zero."""

import itertools

import numpy as np
import pytest
from helpers.accountants import compute_baseline

from opacus_shuffle import compute_epsilon, privacy_bound
from opacus_shuffle.accountants import compute_bound
from opacus_shuffle.accountants.mechanisms import MECHANISMS

OFTEN = {"noise_multiplier": 9.48, "num_users": 60_000, "steps": 7}
ONCE = {"noise_multiplier": 4.0, "num_users": 10_000, "steps": 1}


def falls(epsilons):
    return all(later <= earlier for earlier, later in itertools.pairwise(epsilons))


def alone(sigma, steps=1):
    return {"noise_multiplier": sigma, "num_users": 1, "steps": steps}


@pytest.mark.parametrize(
    ("mechanism", "run", "delta", "truth"),
    [
        ("shuffle_gauss", alone(3.56829), 0.0905, 0.0499),
        ("shuffle_gauss", alone(224.7, steps=100), 0.003, 0.0499),
        ("shuffle_gauss", alone(9.28), 0.02312, 0.0499),
        # Identical others at -1 show 0.0474: two reports of a thousand are all that hides.
        (
            "shuffled_checkin",
            {"noise_multiplier": 0.2, "num_users": 1000, "sample_rate": 0.0015, "steps": 1},
            0.00148092,
            0.0474,
        ),
        ("shuffle_gauss", {**alone(1.0), "adjacency": "replace"}, 0.9, 0.0),
    ],
)
def test_no_small_epsilon_is_below_the_truth(mechanism, run, delta, truth):
    fields = {name: run[name] for name in run if name not in ("steps", "adjacency")}
    rounds = [(MECHANISMS[mechanism].build(**fields), run["steps"])]
    asked = {"delta": delta, "adjacency": run.get("adjacency", "zero_out")}
    local = compute_baseline(rounds, baseline="local", **asked).epsilon
    # The truth is rounded to four digits.
    assert truth - 5e-5 <= compute_bound(rounds, **asked).epsilon <= local


@pytest.mark.parametrize("run", [pytest.param(OFTEN, marks=pytest.mark.zoo), ONCE])
def test_epsilon_falls_with_delta_until_it_is_zero_and_stays_there(run):
    """It was 0 or 2e-6 by chance, up to ten times the δ from which 0 can be proved."""
    deltas = np.geomspace(1e-3, 0.02, 7)[[0, 2, 3, 6]].tolist()
    epsilons = [compute_epsilon("shuffle_gauss", delta=delta, **run) for delta in deltas]
    assert falls(epsilons)
    assert epsilons[2] == 0.0  # δ = 4.5e-3
    for delta, epsilon in list(zip(deltas, epsilons, strict=True))[::2]:
        replaced = compute_epsilon("shuffle_gauss", delta=delta, adjacency="replace", **run)
        assert replaced >= epsilon


@pytest.mark.parametrize(
    ("noise_multiplier", "steps", "deltas"),
    [(1.0, 20, (0.06, 0.061, 0.065)), (1.2, 10, (2.8e-7, 3.3e-7, 4.2e-7))],
)
def test_a_large_epsilon_falls_where_that_without_a_shuffler_passes_a_guess_of_it(
    noise_multiplier, steps, deltas
):
    """Guesses double: where ε without a shuffler fell below 16, that guess was left out.

    ε rose from 13.8 to 15.9.
    """
    run = {"noise_multiplier": noise_multiplier, "num_users": 500, "steps": steps}
    epsilons = [compute_epsilon("shuffle_gauss", delta=delta, **run) for delta in deltas]
    assert falls(epsilons)
    pair = privacy_bound("shuffle_gauss", delta=deltas[-1], bound="pair", **run)
    assert pair.epsilon <= epsilons[-1] < epsilons[0]
