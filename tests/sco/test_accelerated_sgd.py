"""AC-SA's step sizes, batch sizes and bound against slow runs and brute force (docs/proofs/20)."""

import math

import numpy as np
import pytest
import torch
from helpers.convex_problems import BUDGET, Quadratic, ac_sa, normal, solve
from hypothesis import given
from hypothesis import strategies as st

from opacus_shuffle.sco import L2Ball, shuffle_accelerated_sgd
from opacus_shuffle.sco.accelerated_sgd import (
    accelerated_batch_size,
    accelerated_bound,
    accelerated_step_sizes,
    best_smoothing,
)
from opacus_shuffle.sco.solver import Oracle


def closed_form(rounds, smoothness, deviation, distance, gap, weight):
    """The bound for L_t = (2β + s)/(t+1), as derived by hand."""
    start = 2 / ((rounds + 1) * (rounds + 2)) * (gap + (2 * smoothness + weight) * distance**2 / 2)
    return start + deviation**2 * (2 * rounds + 3) / (6 * weight)


def best_weight(rounds, deviation, distance):
    return deviation / distance * math.sqrt((rounds + 1) * (rounds + 2) * (2 * rounds + 3) / 6)


@given(
    curvatures=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4).map(np.array),
    rounds=st.integers(1, 60),
    slack=st.floats(1.0, 5.0),
    seed=st.integers(0, 2**31),
)
def test_the_bound_holds_without_noise_on_every_quadratic(curvatures, rounds, slack, seed):
    start = np.random.default_rng(seed).normal(size=len(curvatures))
    known = {
        "smoothness": slack * float(curvatures.max()),
        "deviation": 0.0,
        "distance": float(np.linalg.norm(start)),
    }

    def value(theta):
        return float((curvatures * theta**2).sum() / 2)

    steps = accelerated_step_sizes(rounds=rounds, **known)
    bound = accelerated_bound(rounds=rounds, start_gap=value(start), **known)
    assert value(ac_sa(steps, lambda theta, t: curvatures * theta, start)) <= bound * (1 + 1e-9)


# SCO Lemma 4.4, SCO Lemma B.3.
@given(st.integers(1, 300), st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.1, 10))
def test_the_bound_is_at_most_the_closed_form_and_its_weight_is_the_best(
    rounds, smoothness, deviation, distance
):
    known = {"smoothness": smoothness, "deviation": deviation, "distance": distance}
    steps = accelerated_step_sizes(rounds=rounds, **known)
    bound = accelerated_bound(rounds=rounds, start_gap=3.0, **known)
    weight = best_weight(rounds, deviation, distance)
    assert 2 * steps[0] - 2 * smoothness == pytest.approx(weight, rel=1e-6, abs=1e-9 * smoothness)
    least = closed_form(rounds, smoothness, deviation, distance, 3.0, weight)
    assert bound <= least * (1 + 1e-9)
    for other in (0.9, 1.1):
        assert least <= closed_form(rounds, smoothness, deviation, distance, 3.0, other * weight)


@pytest.mark.parametrize("smoothness", [0.01, 1.0, 30.0, None])
@pytest.mark.parametrize("users", [1, 7, 600])
@pytest.mark.parametrize("variance", [1e-4, 1.0, 300.0])
def test_the_batch_size_is_the_best_of_all(smoothness, users, variance):
    oracle = Oracle(lipschitz=1.3, dimension=5, variance=variance)

    def value(size):
        rounds = users // size
        deviation = oracle.deviation(size)
        beta = smoothness or best_smoothing(rounds=rounds, lipschitz=1.3, distance=2.0)
        cost = 0.0 if smoothness else 1.3**2 / (2 * beta)
        weight = best_weight(rounds, deviation, 2.0)
        return closed_form(rounds, beta, deviation, 2.0, 1.3 * 2.0, weight) + cost

    chosen = accelerated_batch_size(oracle, num_users=users, smoothness=smoothness, distance=2.0)
    assert value(chosen) <= min(value(size) for size in range(1, users + 1)) * (1 + 1e-9)


# SCO Algorithm 4.
@pytest.mark.parametrize("radius", [0.3, 50.0])
def test_a_run_without_noise_is_ac_sa_on_the_batches(silent, radius):
    """Users who all have one record: then the order of the users does not matter."""
    record, ball = normal(2, seed=1), L2Ball(radius)
    known = {"constraint": ball, "lipschitz": 60.0, "smoothness": 1.0, "batch_size": 4, **BUDGET}
    estimate = solve(shuffle_accelerated_sgd, Quadratic(2), record.repeat(24, 1), **known)
    steps = estimate.choices["inverse_step_sizes"]
    assert len(steps) == 6
    expected = ac_sa(steps, lambda theta, t: theta - record, torch.zeros(2).double(), ball.project)
    assert torch.allclose(estimate.theta, expected)
