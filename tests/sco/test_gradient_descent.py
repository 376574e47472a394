"""SGD's and gradient descent's bounds, steps, batches and rounds against brute force.

The bound of gradient descent is proved in docs/proofs/21.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    Quadratic,
    best_in_ball,
    logistic_data,
    normal,
    seeded,
    solve,
)
from hypothesis import given
from hypothesis import strategies as st

from opacus_shuffle.sco import (
    L2Ball,
    PrivacyBudget,
    Problem,
    logistic_loss,
    shuffle_gradient_descent,
    shuffle_sgd,
)
from opacus_shuffle.sco.gradient_descent import (
    DescentBound,
    GradientDescent,
    clamp,
    sgd_bound,
)
from opacus_shuffle.sco.solver import Oracle, Start

BOUND = DescentBound(
    rounds=200,
    num_users=500,
    oracle=Oracle(lipschitz=1.0, dimension=10, variance=50.0),
    granularity=6,
    distance=1.0,
)


# ---- SGD


# SCO Definition B.1: ``second_moment`` of its noisy gradients.
@given(st.floats(0.1, 10), st.integers(1, 100), st.floats(1e-3, 1e4), st.integers(1, 10_000))
def test_the_sgd_batch_size_minimises_its_bound(lipschitz, dimension, variance, users):
    oracle = Oracle(lipschitz=lipschitz, dimension=dimension, variance=variance)

    def value(size):  # D L_G / √T, squared, but for D² and with T = n/b
        return oracle.second_moment(size) * size

    chosen = clamp(oracle.ratio, users)
    assert 1 <= chosen <= users
    neighbours = [size for size in (chosen - 1, chosen + 1) if 1 <= size <= users]
    # b = s rounded: b + s²/b is flat there, its neighbours at most (1/2)²/(s b) better
    assert all(value(chosen) <= value(size) * (1 + 0.25 / chosen**2) for size in neighbours)


# SCO Lemma 4.2, SCO Lemma B.2.
def test_the_sgd_bound_is_lemma_4_2_and_least_at_the_default_step():
    def bound(step):
        return sgd_bound(rounds=100, step_size=step, second_moment=4.0, distance=3.0)

    best = 3.0 / math.sqrt(4.0 * 100)
    assert bound(best) == pytest.approx(3.0 * 2.0 / 10)
    assert bound(best) < min(bound(0.9 * best), bound(1.1 * best))


# SCO Algorithm 3.
def test_a_run_of_sgd_without_noise_has_the_mean_of_its_iterates_for_an_answer(silent):
    """Users who all have one record: then their order does not matter."""
    record, ball = normal(2, seed=1), L2Ball(0.7)
    known = {"constraint": ball, "lipschitz": 9.0, "batch_size": 4, "step_size": 0.3, **BUDGET}
    estimate = solve(shuffle_sgd, Quadratic(2), record.repeat(20, 1), **known)
    iterates = [torch.zeros(2).double()]
    for _ in range(4):
        iterates.append(ball.project(iterates[-1] - 0.3 * (iterates[-1] - record)))
    assert torch.allclose(estimate.theta, torch.stack(iterates).mean(0))
    assert estimate.excess_loss_bound == pytest.approx(
        sgd_bound(rounds=5, step_size=0.3, second_moment=81.0, distance=0.7)
    )


# ---- gradient descent


# SCO Lemma B.4, SCO Lemma B.6: their bounds together.
@pytest.mark.parametrize("smoothness", [0.01, 1.0, 20.0, 500.0])
def test_the_descent_step_is_the_best_allowed(smoothness):
    step = BOUND.best_step(smoothness=smoothness)
    grid = step * np.geomspace(0.01, 100, 401)
    least = min(BOUND.value(x, smoothness=smoothness) for x in grid if x <= 2 / smoothness)
    assert step <= 2 / smoothness
    assert BOUND.value(step, smoothness=smoothness) <= least * (1 + 1e-6)
    assert BOUND.value(2.01 / smoothness, smoothness=smoothness) is None


# SCO Lemma B.5.
def test_two_runs_drift_apart_no_faster_than_is_proved():
    """Huber losses, data that differ in one user, rounding coupled as in the proof; 400 pairs."""
    rng = np.random.default_rng(1)
    users, dimension, rounds, g, step, pairs = 20, 3, 60, 2, 0.8, 400
    width = 2.0 / g
    targets = rng.normal(size=(users, dimension))
    other = targets.copy()
    other[0] = -targets[0] * 2

    def gradients(theta, data):  # of Huber's loss of the norm: 1-Lipschitz, 1-smooth
        offset = theta[:, None, :] - data[None]
        return offset / np.maximum(np.linalg.norm(offset, axis=2, keepdims=True), 1.0)

    def rounded(values, uniforms):
        return width * (np.floor((values + 1.0) / width + uniforms)) - 1.0

    first = second = np.zeros((pairs, dimension))
    oracle = Oracle(lipschitz=1.0, dimension=dimension, variance=1.0)
    run = {"rounds": rounds, "num_users": users, "oracle": oracle, "granularity": g}
    total = np.zeros(pairs)
    for _ in range(rounds):
        total += np.linalg.norm(first - second, axis=1) / rounds
        shared = rng.uniform(size=(pairs, users, dimension))
        apart = shared.copy()
        apart[:, 0] = rng.uniform(size=(pairs, dimension))
        noise = rng.normal(size=(pairs, dimension)) * 0.3
        first = first - step * (rounded(gradients(first, targets), shared).mean(1) + noise)
        second = second - step * (rounded(gradients(second, other), apart).mean(1) + noise)
    drift = dataclasses.replace(BOUND, **run).drift(step, 1.0)
    assert total.mean() + 4 * total.std() / math.sqrt(pairs) <= drift
    assert drift > step * rounds / users  # what Lemma B.5 would say


def test_the_chosen_number_of_rounds_is_the_best_candidate():
    known = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "smoothness": 1.0}
    problem = Problem(Quadratic(4), torch.zeros(300, 4), **known)

    def proved(rounds):
        descent = GradientDescent(problem, PrivacyBudget(1.0, 1e-5), rounds=rounds)
        return descent.bound(300, Start(problem.initial, problem.distance))

    assert proved(None) == min(proved(rounds) for rounds in (1, 2, 4, 8, 16, 32, 64, 128, 256))


# SCO Algorithm 5.
@pytest.mark.parametrize("radius", [0.5, pytest.param(50.0, marks=pytest.mark.zoo)])
def test_a_run_without_noise_finds_the_minimiser(silent, radius):
    data = logistic_data(200)
    least, where = best_in_ball(logistic_loss, data, 3, radius)
    known = {"constraint": L2Ball(radius), "lipschitz": 1.0, "smoothness": 0.25, "dimension": 3}
    how = {"rounds": 1000, "step_size": 4.0, "steps": "practical"}
    estimate = solve(shuffle_gradient_descent, logistic_loss, data, **known, **how, **BUDGET)
    assert float(logistic_loss(estimate.theta, data).mean()) <= least + 1e-7
    assert torch.allclose(estimate.theta, where, atol=2e-3)


# ---- practical steps

LOGISTIC = {"constraint": L2Ball(4.0), "lipschitz": 1.0, "smoothness": 0.25, "dimension": 3}


@pytest.mark.parametrize(
    ("run", "users", "sizes"),
    [
        pytest.param(shuffle_sgd, 8000, {}, marks=pytest.mark.zoo),
        (shuffle_gradient_descent, 1000, {"rounds": 50}),
    ],
)
def test_practical_steps_find_less_loss_by_the_same_messages_and_claim_no_bound(run, users, sizes):
    data = logistic_data(users)

    def solutions(steps):
        options = {"steps": steps, **sizes, **LOGISTIC, **BUDGET}
        return [
            solve(run, logistic_loss, data, generator=seeded(seed), **options) for seed in range(6)
        ]

    proved, practical = solutions("proved"), solutions("practical")
    assert practical[0].privacy == proved[0].privacy
    assert proved[0].excess_loss_bound is not None
    assert practical[0].excess_loss_bound is None
    assert "nothing is proved for these settings" in str(practical[0])
    losses = torch.tensor(
        [
            [float(logistic_loss(estimate.theta, data).mean()) for estimate in estimates]
            for estimates in (practical, proved)
        ]
    )
    # Both ways draw alike from a seed, so that their difference varies less than either.
    gained = losses[1] - losses[0]
    assert gained.mean() > 3 * gained.std() / math.sqrt(6)


@pytest.mark.parametrize(("smoothness", "first"), [(None, None), (50.0, 1 / 50)])
def test_practical_steps_fall_evenly_from_one_that_smoothness_bounds(silent, smoothness, first):
    """Of one record: each iterate is nearer to it by the share that the step is."""
    record = torch.tensor([0.1, -0.2], dtype=torch.float64)
    known = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "smoothness": smoothness}
    options = {"steps": "practical", "rounds": 4, **known, **BUDGET}
    estimate = solve(shuffle_gradient_descent, Quadratic(2), record.repeat(60, 1), **options)
    step = estimate.choices["step_size"]
    assert first is None or step == pytest.approx(first)
    shares = [1 - step * share for share in (1, 0.75, 0.5, 0.25)]
    assert torch.allclose(estimate.theta, record * (1 - math.prod(shares)))
