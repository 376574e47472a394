"""What all optimisers share: who takes part is who is said to, and what a run says is so."""

import dataclasses

import pytest
import torch
from helpers.convex_problems import BUDGET, Quadratic, half_square, seeded, solve

from opacus_shuffle.core.guarantees import Guarantee
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco import (
    L2Ball,
    Objective,
    shuffle_accelerated_sgd,
    shuffle_gradient_descent,
    shuffle_sgd,
    shuffle_strongly_convex,
)

COMMON = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "smoothness": 1.0, **BUDGET, "epsilon": 0.9}
SEQUENTIAL = (shuffle_sgd, shuffle_accelerated_sgd)


# ---- who takes part


class Recorder(Objective):
    """A flat loss that remembers whose records it saw; a record is a user's number."""

    def __init__(self, dimension=1):
        self.dimension, self.seen = dimension, []

    def _evaluate(self, theta, batch):
        self.seen += batch.long().tolist()
        return theta.new_zeros(len(batch)), theta.new_zeros(len(batch), self.dimension)


# SCO Definition 2.7.
@pytest.mark.parametrize("run", SEQUENTIAL)
@pytest.mark.parametrize("batch_size", [7, 50, 103])
def test_sequential_algorithms_ask_each_user_at_most_once_and_count_them(run, batch_size):
    recorder = Recorder()
    estimate = solve(run, recorder, torch.arange(103.0), batch_size=batch_size, **COMMON)
    used = 103 // batch_size * batch_size
    assert len(recorder.seen) == len(set(recorder.seen)) == estimate.privacy.num_users == used
    assert estimate.privacy.rounds_per_user == 1
    assert estimate.privacy.rounds == len(estimate.history) == 103 // batch_size
    assert batch_size == 103 or recorder.seen != list(range(used))  # the order is random


def test_phases_share_no_user():
    recorder, phases = Recorder(), {"strong_convexity": 1.0, "phases": 3, "batch_size": 5}
    estimate = solve(shuffle_strongly_convex, recorder, torch.arange(101.0), **phases, **COMMON)
    assert len(recorder.seen) == len(set(recorder.seen)) == estimate.privacy.num_users == 3 * 30
    assert len(estimate.history) == estimate.privacy.rounds == 18


# SCO Definition 2.8.
def test_full_interaction_asks_everyone_in_every_round_and_says_so():
    recorder = Recorder()
    privacy = solve(
        shuffle_gradient_descent, recorder, torch.arange(40.0), rounds=6, **COMMON
    ).privacy
    assert sorted(recorder.seen) == sorted(6 * list(range(40)))
    assert (privacy.rounds, privacy.rounds_per_user, privacy.num_users) == (6, 6, 40)


def test_users_whose_gradients_do_not_fit_into_memory_together_all_take_part(silent):
    recorder = Recorder(dimension=2**22)  # two gradients are a block
    solve(shuffle_gradient_descent, recorder, torch.arange(3.0), rounds=1, **COMMON)
    assert sorted(recorder.seen) == [0, 1, 2]


@pytest.mark.parametrize("steps", ["proved", "practical"])
@pytest.mark.parametrize("rounds", [2, 9])
def test_every_round_of_full_interaction_has_noise_that_all_rounds_together_need(rounds, steps):
    """The mean of 400 squares of nearly normal numbers deviates by 7 %; five times that is fine."""
    users, budget = 30, {"epsilon": 1.0, "delta": 1e-6}
    options = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "smoothness": 1.0, "steps": steps}
    estimate = solve(
        shuffle_gradient_descent,
        Recorder(400),
        torch.zeros(users),
        rounds=rounds,
        generator=seeded(0),
        **options,
        **budget,
    )
    needed, of_one = (
        ShuffleVectorSum(users, 400, 1.0, **budget, rounds=count).variance for count in (rounds, 1)
    )
    assert of_one < 0.6 * needed
    squares = [(norm * users) ** 2 / (400 * needed) for norm in estimate.history]
    assert len(squares) == rounds
    assert all(0.65 < square < 1.35 for square in squares)


# ---- what is said


# SCO Corollary B.8, Corollary B.9, Corollary B.10, Corollary B.11: ``bits_per_user``.
def test_statements_say_what_the_protocols_do():
    data, common = torch.zeros(1000, 2), {**COMMON, "honest_fraction": 0.8}
    estimate = solve(shuffle_sgd, Quadratic(2), data, batch_size=300, **common)
    protocol = ShuffleVectorSum(300, 2, 2.0, 0.9, 1e-6, honest_fraction=0.8)
    three = {"rounds": 3, "num_users": 900, "interaction": "sequential"}
    assert estimate.privacy == dataclasses.replace(protocol.statement(), **three)
    assert estimate.privacy.guarantee is Guarantee.PROVED
    full = solve(shuffle_gradient_descent, Quadratic(2), data, rounds=5, **common)
    protocol = ShuffleVectorSum(1000, 2, 2.0, 0.9, 1e-6, honest_fraction=0.8, rounds=5)
    assert full.privacy == protocol.statement()
    how = {"method": "gradient_descent", "strong_convexity": 1.0, "phases": 2, "rounds": 5}
    phases = solve(shuffle_strongly_convex, Quadratic(2), data, **how, **common)
    protocol = ShuffleVectorSum(500, 2, 2.0, 0.9, 1e-6, honest_fraction=0.8, rounds=5)
    assert phases.privacy == dataclasses.replace(protocol.statement(), rounds=10, num_users=1000)


# SCO Fact 2.4: what is published is a post-processing of the rounds.
@pytest.mark.parametrize(
    ("run", "more"),
    [(shuffle_accelerated_sgd, {}), (shuffle_strongly_convex, {"strong_convexity": 1.0})],
)
def test_nothing_but_the_estimate_and_its_history_depends_on_the_data(run, more):
    options = {**COMMON, **more, "clip": True}
    first, second = (solve(run, Quadratic(2), x * torch.ones(500, 2), **options) for x in (0, 50))
    assert first.choices == second.choices
    assert first.privacy == second.privacy
    assert first.excess_loss_bound == second.excess_loss_bound


@pytest.mark.parametrize("run", [*SEQUENTIAL, shuffle_gradient_descent])
def test_runs_repeat_with_the_same_generator_and_ignore_the_global_one(run):
    data = torch.randn(400, 2, generator=seeded(0), dtype=torch.float64)
    size = {"rounds": 3} if run is shuffle_gradient_descent else {"batch_size": 80}

    def theta(seed, generator):
        torch.manual_seed(seed)
        options = {**COMMON, **size, "dimension": 2, "clip": True, "generator": generator}
        return solve(run, half_square, data, **options).theta

    assert torch.equal(theta(0, seeded(5)), theta(1, seeded(5)))
    assert not torch.equal(theta(0, None), theta(0, None))
