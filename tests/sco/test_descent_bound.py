"""Gradient descent's bound, steps and rounds against brute force (docs/proofs/21)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.convex_problems import Quadratic

from opacus_shuffle.sco import L2Ball, PrivacyBudget, Problem
from opacus_shuffle.sco.descent_bound import MOST_ROUNDS, DescentBound, Oracle, descent_candidates
from opacus_shuffle.sco.gradient_descent import GradientDescent
from opacus_shuffle.sco.solver import Start

BOUND = DescentBound(
    rounds=200,
    num_users=500,
    oracle=Oracle(lipschitz=1.0, dimension=10, variance=50.0),
    granularity=6,
    distance=1.0,
    diameter=2.0,
)


@pytest.mark.parametrize("bias", [0.0, 0.01])
@pytest.mark.parametrize("smoothness", [0.01, 1.0, 20.0, 500.0])
def test_the_descent_step_is_the_best_allowed(smoothness, bias):
    bound = dataclasses.replace(BOUND, oracle=dataclasses.replace(BOUND.oracle, bias=bias))
    step = bound.best_step(smoothness=smoothness)
    grid = [
        factor * step for factor in np.geomspace(0.01, 100, 401) if factor * step <= 2 / smoothness
    ]
    assert step <= 2 / smoothness
    assert bound.value(step, smoothness=smoothness) <= min(
        bound.value(x, smoothness=smoothness) for x in grid
    ) * (1 + 1e-6)


def test_smoothing_and_step_are_the_best_together():
    def value(step, beta):
        proved = BOUND.value(step, smoothness=beta)
        return math.inf if proved is None else proved + 1.0 / (2 * beta)

    step = BOUND.best_step(smoothness=None)
    pairs = [
        (a * step, 2 * b / step) for a in np.geomspace(0.2, 5, 41) for b in np.geomspace(0.2, 5, 41)
    ]
    # a longer step with less smoothing, or the reverse, never gains: β is at its cap, where the
    # drift is largest
    assert value(step, 2 / step) <= min(value(a, b) for a, b in pairs if b >= 2 / a * 0.999) * (
        1 + 1e-3
    )


def test_steps_beyond_two_over_beta_have_no_bound():
    assert BOUND.value(2.0, smoothness=1.0) is not None
    assert BOUND.value(2.01, smoothness=1.0) is None


def test_two_runs_drift_apart_no_faster_than_is_proved():
    """Huber losses, data that differ in one user, the rounding coupled as in the proof; mean over independent pairs of runs."""
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
    bound = DescentBound(
        rounds=rounds,
        num_users=users,
        oracle=Oracle(lipschitz=1.0, dimension=dimension, variance=1.0),
        granularity=g,
        distance=1.0,
        diameter=2.0,
    )
    total = np.zeros(pairs)
    for _ in range(rounds):
        total += np.linalg.norm(first - second, axis=1) / rounds
        shared = rng.uniform(size=(pairs, users, dimension))
        apart = shared.copy()
        apart[:, 0] = rng.uniform(size=(pairs, dimension))
        noise = rng.normal(size=(pairs, dimension)) * 0.3
        first = first - step * (rounded(gradients(first, targets), shared).mean(1) + noise)
        second = second - step * (rounded(gradients(second, other), apart).mean(1) + noise)
    plain = step * rounds / users  # what Lemma B.5 would say
    assert total.mean() + 4 * total.std() / math.sqrt(pairs) <= bound.drift(step, 1.0)
    assert bound.drift(step, 1.0) > plain


def test_candidates_are_powers_of_two_up_to_the_lemmas_number():
    noisy = Oracle(lipschitz=1.0, dimension=1, variance=10_000.0)  # s = 100
    assert descent_candidates(noisy, num_users=1000) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert descent_candidates(dataclasses.replace(noisy, variance=1e-9), num_users=6) == [
        1,
        2,
        4,
        6,
    ]


def test_no_more_rounds_are_chosen_than_a_person_would_wait_for():
    many = Oracle(lipschitz=1.0, dimension=10, variance=1.0)
    assert descent_candidates(many, num_users=10**6) == [1, 2, 4, 8, 16, 32, 64, 128, MOST_ROUNDS]


def test_the_chosen_number_of_rounds_is_the_best_candidate():
    problem = Problem(
        Quadratic(4), torch.zeros(300, 4), constraint=L2Ball(1.0), lipschitz=1.0, smoothness=1.0
    )

    def proved(rounds):
        descent = GradientDescent(problem, PrivacyBudget(1.0, 1e-5), rounds=rounds)
        return descent.bound(300, Start(problem.initial, problem.distance))

    assert proved(None) == min(proved(rounds) for rounds in (1, 2, 4, 8, 16, 32, 64, 128, 256))
