"""Nobody takes part more often than is said."""

from __future__ import annotations

import pytest
import torch
from helpers.convex_problems import solve

from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco import (
    L2Ball,
    Objective,
    pan_private_accelerated_sgd,
    shuffle_accelerated_sgd,
    shuffle_gradient_descent,
    shuffle_sgd,
    shuffle_strongly_convex,
)


class Recorder(Objective):
    """A quadratic that remembers whose records it saw; a record is (user, value)."""

    def __init__(self):
        self.dimension, self.seen, self.inner = 1, [], Objective.from_loss(half_square, dimension=1)

    def gradients(self, theta, batch):
        self.seen += batch[:, 0].long().tolist()
        return self.inner.gradients(theta, batch)

    def _evaluate(self, theta, batch):
        return self.inner._evaluate(theta, batch)


def half_square(theta, batch):
    return (batch[:, 1:] - theta).square().sum(1) / 2


def users_and_values(count):
    return torch.stack(
        [
            torch.arange(count, dtype=torch.float64),
            torch.linspace(-0.5, 0.5, count, dtype=torch.float64),
        ],
        dim=1,
    )


COMMON = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "epsilon": 0.9, "delta": 1e-6}


@pytest.mark.parametrize(
    ("run", "smooth"),
    [
        (shuffle_sgd, {}),
        (shuffle_accelerated_sgd, {"smoothness": 1.0}),
        (pan_private_accelerated_sgd, {"smoothness": 1.0}),
    ],
)
@pytest.mark.parametrize("batch_size", [7, 50, 103])
def test_sequential_algorithms_ask_each_user_at_most_once_and_count_them(run, smooth, batch_size):
    recorder = Recorder()
    estimate = solve(
        run, recorder, users_and_values(103), batch_size=batch_size, **smooth, **COMMON
    )
    assert (
        len(recorder.seen)
        == len(set(recorder.seen))
        == estimate.privacy.num_users
        == 103 // batch_size * batch_size
    )
    assert estimate.privacy.rounds_per_user == 1
    assert estimate.privacy.rounds == len(estimate.history) == 103 // batch_size


@pytest.mark.parametrize("method", ["accelerated", "pan_private"])
def test_phases_share_no_user(method):
    recorder = Recorder()
    estimate = solve(
        shuffle_strongly_convex,
        recorder,
        users_and_values(101),
        strong_convexity=1.0,
        smoothness=1.0,
        method=method,
        phases=3,
        batch_size=5,
        **COMMON,
    )
    assert len(recorder.seen) == len(set(recorder.seen)) == estimate.privacy.num_users == 3 * 30
    assert len(estimate.history) == 18


def test_full_interaction_asks_everyone_in_every_round_and_says_so():
    recorder = Recorder()
    estimate = solve(
        shuffle_gradient_descent, recorder, users_and_values(40), smoothness=1.0, rounds=6, **COMMON
    )
    assert sorted(recorder.seen) == sorted(6 * list(range(40)))
    assert (
        estimate.privacy.rounds,
        estimate.privacy.rounds_per_user,
        estimate.privacy.num_users,
    ) == (6, 6, 40)


class Flat(Objective):
    """Loses nothing anywhere: what a round sums is noise."""

    dimension = 400

    def _evaluate(self, theta, batch):
        return theta.new_zeros(len(batch)), theta.new_zeros(len(batch), self.dimension)


@pytest.mark.parametrize("steps", ["proved", "practical"])
@pytest.mark.parametrize("rounds", [2, 9])
def test_every_round_of_full_interaction_has_noise_that_all_rounds_together_need(rounds, steps):
    """The mean of 400 squares of nearly Gaussian numbers has a standard deviation of 7 % of it, and is given five of these."""
    users, budget = 30, {"epsilon": 1.0, "delta": 1e-6}
    options = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "smoothness": 1.0, "steps": steps}
    estimate = solve(
        shuffle_gradient_descent,
        Flat(),
        torch.zeros(users, 1),
        rounds=rounds,
        generator=torch.Generator().manual_seed(0),
        **options,
        **budget,
    )
    needed, of_one = (
        ShuffleVectorSum(users, 400, 1.0, **budget, rounds=each).variance for each in (rounds, 1)
    )
    assert of_one < 0.6 * needed
    squares = [(norm * users) ** 2 / (400 * needed) for norm in estimate.history]
    assert len(squares) == rounds
    assert all(0.65 < each < 1.35 for each in squares)
