"""Nobody takes part twice, whoever chose the batches."""

from __future__ import annotations

import pytest
import torch
from helpers.convex_problems import solve
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.accelerated_sgd import shuffle_accelerated_sgd
from opacus_shuffle.sco.constraints import L2Ball
from opacus_shuffle.sco.gradient_descent import SGD, shuffle_gradient_descent, shuffle_sgd
from opacus_shuffle.sco.objective import Objective
from opacus_shuffle.sco.pan_private import pan_private_accelerated_sgd
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.records import UserLedger
from opacus_shuffle.sco.solver import Choices, Start
from opacus_shuffle.sco.strongly_convex import shuffle_strongly_convex


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
    return torch.stack([torch.arange(count, dtype=torch.float64), torch.linspace(-0.5, 0.5, count, dtype=torch.float64)], dim=1)


COMMON = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "epsilon": 0.9, "delta": 1e-6}


@settings(max_examples=60, deadline=None)
@given(st.permutations(list(range(30))), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_disjoint_batches_pass_and_any_repetition_is_named(order, sizes, data):
    ledger, first, batches = UserLedger(30), 0, []
    for size in sizes:
        batch = order[first : first + size]
        if batch:
            assert ledger.claim(torch.tensor(batch)).tolist() == batch
            batches.append(batch)
        first += size
    used = [user for batch in batches for user in batch]
    assert ledger.used == len(used) == len(set(used))
    again = data.draw(st.sampled_from(used))
    fresh = [user for user in range(30) if user not in used][:2]
    with pytest.raises(ValueError, match=rf"user {again} is in batch {len(batches)} and was in batch \d+; leave it out"):
        ledger.claim([*fresh, again])
    assert ledger.used == len(used)  # the refused batch has marked nobody
    if fresh:
        assert ledger.claim(fresh).tolist() == fresh


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**31))
def test_batches_are_whole_and_disjoint(users, size, seed):
    generator = torch.Generator().manual_seed(seed)
    data, size = torch.zeros(users, 1), min(size, users)
    problem = Problem(half_square, data, constraint=L2Ball(1.0), lipschitz=1.0, dimension=1, generator=generator)
    budget, choices = PrivacyBudget(COMMON["epsilon"], COMMON["delta"]), Choices(batch_size=size)
    batches = SGD(problem, budget, choices).groups(torch.arange(users), Start(problem.initial, 1.0))
    members = [user for batch in batches for user in batch.tolist()]
    assert [len(batch) for batch in batches] == [size] * (users // size)
    assert len(set(members)) == len(members)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([0, 0], "user 0 is twice in batch 0"),
        ([0, 5], "from 0 to 4, but batch 0 holds 5"),
        ([-1], "from 0 to 4, but batch 0 holds -1"),
        ([], "non-empty vectors of whole numbers"),
        ([0.0, 1.0], "whole numbers"),
        ([True, False, True, False, True], "not a mask"),
        ([[0, 1]], "shape"),
        ("all", "batch 0 is str"),
    ],
)
def test_batches_that_are_none_are_refused(batch, message):
    ledger = UserLedger(5)
    with pytest.raises(ValueError, match=message):
        ledger.claim(batch)
    assert ledger.used == ledger.batches == 0


def test_no_batches_at_all_are_refused():
    with pytest.raises(ValueError, match="at least one batch"):
        UserLedger(5).claim_all([])
    for batches in (3, "all"):
        with pytest.raises(ValueError, match="batches must be a list of vectors of user numbers"):
            UserLedger(5).claim_all(batches)
    with pytest.raises(ValueError, match="num_users must be a whole number"):
        UserLedger(0)


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
    estimate = solve(run, recorder, users_and_values(103), batch_size=batch_size, **smooth, **COMMON)
    assert len(recorder.seen) == len(set(recorder.seen)) == estimate.privacy.num_users == 103 // batch_size * batch_size
    assert estimate.privacy.rounds_per_user == 1
    assert estimate.privacy.rounds == len(estimate.history) == 103 // batch_size
    assert estimate.history[-1].users == len(recorder.seen)


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
    assert [each.users for each in estimate.history] == list(range(5, 91, 5))


def test_full_interaction_asks_everyone_in_every_round_and_says_so():
    recorder = Recorder()
    estimate = solve(shuffle_gradient_descent, recorder, users_and_values(40), smoothness=1.0, rounds=6, **COMMON)
    assert sorted(recorder.seen) == sorted(6 * list(range(40)))
    assert (estimate.privacy.rounds, estimate.privacy.rounds_per_user, estimate.privacy.num_users) == (6, 6, 40)


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
    needed, of_one = (ShuffleVectorSum(users, 400, 1.0, **budget, rounds=each).variance for each in (rounds, 1))
    assert of_one < 0.6 * needed
    squares = [(each.gradient_norm * users) ** 2 / (400 * needed) for each in estimate.history]
    assert len(squares) == rounds
    assert all(0.65 < each < 1.35 for each in squares)


@pytest.mark.parametrize("run", [shuffle_sgd, shuffle_accelerated_sgd])
def test_given_batches_are_checked_before_anyone_is_asked(run):
    recorder, extra = Recorder(), {} if run is shuffle_sgd else {"smoothness": 1.0}
    with pytest.raises(ValueError, match="user 3 is in batch 1 and was in batch 0"):
        solve(run, recorder, users_and_values(10), batches=[torch.tensor([3, 4]), torch.tensor([5, 3])], **extra, **COMMON)
    assert recorder.seen == []
    estimate = solve(run, recorder, users_and_values(10), batches=[[3, 4], [5]], **extra, **COMMON)
    assert recorder.seen == [3, 4, 5]
    assert (estimate.privacy.num_users, estimate.choices["batch_size"]) == (3, 1)
    with pytest.raises(ValueError, match="batch_size must be left out"):
        solve(run, recorder, users_and_values(10), batches=[[3]], batch_size=2, **extra, **COMMON)
    with pytest.raises(ValueError, match="batch_size must not exceed the 10 users"):
        solve(run, recorder, users_and_values(10), batch_size=11, **extra, **COMMON)
