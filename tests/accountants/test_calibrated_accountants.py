"""The noise that is found for a budget meets it, for every accountant and every bound."""

from __future__ import annotations

import pytest
from helpers.accountants import (
    DELTA,
    every_bound,
    spent,
    weights_of,
)
from opacus.accountants.utils import get_noise_multiplier

import opacus_shuffle
from opacus_shuffle.core.guarantees import Adjacency

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


@pytest.mark.zoo
@every_bound
def test_opacus_own_calibration_works(kind, bound):
    sigma = get_noise_multiplier(
        target_epsilon=20.0,  # Theorems 2 and 3 keep terms that no noise removes: smaller targets are out of their reach
        target_delta=DELTA,
        sample_rate=0.1,
        steps=20,
        accountant=kind.name,
        num_users=2000,
        bound=bound,
        **weights_of(kind),
    )
    assert spent(kind, [(sigma, 0.1, 20)], bound=bound, num_users=2000, local_noise=False) <= 20.0


@pytest.mark.zoo
@every_bound
def test_the_calibrated_noise_meets_the_budget_and_a_little_less_does_not(kind, bound):
    name = kind.name
    target = 12.0 if bound == "published" else 1.0  # Theorems 2 and 3 keep terms that no noise removes
    run = {"num_users": 3000, "steps": 20, "sample_rate": 1.0 if name == "shuffle_gauss" else 0.2, "bound": bound}
    run |= weights_of(kind)
    sigma = opacus_shuffle.compute_noise_multiplier(name, target_epsilon=target, target_delta=DELTA, **run)
    assert opacus_shuffle.compute_epsilon(name, noise_multiplier=sigma, delta=DELTA, **run) <= target
    # Grids and groups of pool sizes move ε by some tenths of a percent; σ moves it at least as much as itself.
    assert opacus_shuffle.compute_epsilon(name, noise_multiplier=0.98 * sigma, delta=DELTA, **run) > target


@pytest.mark.zoo
def test_replacement_takes_more_noise_than_zero_out():
    run = {"target_epsilon": 1.0, "target_delta": DELTA, "num_users": 300, "steps": 5}
    zero_out, replace = (
        opacus_shuffle.compute_noise_multiplier("shuffle_gauss", adjacency=adjacency, **run) for adjacency in Adjacency
    )
    assert replace > zero_out
    spent_then = opacus_shuffle.compute_epsilon(
        "shuffle_gauss",
        noise_multiplier=replace,
        num_users=300,
        steps=5,
        delta=DELTA,
        adjacency="replace",
    )
    assert spent_then <= 1.0
