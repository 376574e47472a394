"""Phases: how many, on whom, and what they gain."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    Quadratic,
    mean_excesses,
    solve,
)

from opacus_shuffle.sco import (
    L2Ball,
    PrivacyBudget,
    Problem,
    logistic_loss,
    shuffle_strongly_convex,
    squared_loss,
)
from opacus_shuffle.sco.accelerated_sgd import AcceleratedSGD
from opacus_shuffle.sco.solver import Start
from opacus_shuffle.sco.strongly_convex import METHODS, best_number_of_phases, bound_of_phases

# A mean of N independent terms lies within this many standard errors but for 6e-5 (the seeds are
# fixed).
ERRORS = 4


def test_phases_beat_one_phase_on_a_strongly_convex_loss():
    options = {"smoothness": 1.0, "strong_convexity": 1.0, "users": 20_000}
    _, single = mean_excesses(shuffle_strongly_convex, 1, phases=1, **options)
    _, double = mean_excesses(shuffle_strongly_convex, 1, phases=2, **options)
    _, default = mean_excesses(shuffle_strongly_convex, 1, **options)
    assert default < double < single / 2


def test_phases_end_nearer_where_steps_must_suit_the_distance():
    options = {
        "smoothness": 1.0,
        "strong_convexity": 1.0,
        "users": 5000,
        "method": "gradient_descent",
        "rounds": 20,
    }
    single, single_bound = mean_excesses(shuffle_strongly_convex, 8, phases=1, **options)
    several, several_bound = mean_excesses(shuffle_strongly_convex, 8, phases=4, **options)
    assert several_bound < single_bound
    error = math.sqrt((single.var() + several.var()) / 8)
    assert single.mean() - several.mean() > ERRORS * error


def accelerated(users=10**6, dimension=10, epsilon=0.01, smoothness=1.0, **budget):
    """Nothing but plans are asked of it, so all users share one record."""
    data = torch.zeros(1, dimension).expand(users, dimension)
    problem = Problem(
        Quadratic(dimension), data, constraint=L2Ball(1.0), lipschitz=1.0, smoothness=smoothness
    )
    return AcceleratedSGD(problem, PrivacyBudget(epsilon, 1e-6, **budget))


@pytest.mark.parametrize("smoothness", [1.0, None])
@pytest.mark.parametrize(
    ("users", "epsilon", "convexity"),
    [(1, 1.0, 0.1), (40, 1.0, 1.0), (3000, 2.0, 0.05), (50_000, 15, 1.0), (10**5, 0.1, 0.5)],
)
def test_the_chosen_number_of_phases_is_never_worse_than_the_papers(
    users, epsilon, convexity, smoothness
):
    solver = accelerated(users, 3, epsilon, smoothness)
    chosen = best_number_of_phases(solver, convexity)
    papers = max(1, math.ceil(math.log2(math.log2(users)))) if users > 2 else 1
    assert bound_of_phases(solver, convexity, chosen) <= bound_of_phases(solver, convexity, papers)


def test_one_phase_is_three_times_better_than_the_papers_five_where_noise_is_large():
    solver = accelerated()
    assert best_number_of_phases(solver, 0.1) == 1
    assert bound_of_phases(solver, 0.1, 5) >= 2.85 * bound_of_phases(solver, 0.1, 1)


@pytest.mark.parametrize("method", ["accelerated", "gradient_descent", "pan_private"])
def test_the_bound_of_phases_is_that_of_the_run_and_the_chosen_number_is_the_runs(method):
    budget, data = PrivacyBudget(**BUDGET), torch.zeros(2000, 3, dtype=torch.float64)
    problem = Problem(Quadratic(3), data, constraint=L2Ball(1.0), lipschitz=1.0, smoothness=1.0)
    choices = {"rounds": 5} if method == "gradient_descent" else {"batch_size": 50}
    solver = METHODS[method](problem, budget, **choices)
    for phases in (None, 1, 3):
        found = shuffle_strongly_convex(
            problem, budget, strong_convexity=1.0, method=method, phases=phases, **choices
        )
        count = len(found.choices["phases"])
        assert count == (phases or best_number_of_phases(solver, 1.0))
        assert found.excess_loss_bound == bound_of_phases(solver, 1.0, count)


def test_a_phase_is_not_taken_to_end_nearer_than_is_proved():
    data = torch.zeros(2000, 3, dtype=torch.float64)
    problem = Problem(
        Quadratic(3), data, constraint=L2Ball(1.0), lipschitz=1.0, smoothness=1.0, diameter=1e-3
    )
    solver = AcceleratedSGD(problem, PrivacyBudget(**BUDGET), batch_size=50)
    first = solver.bound(1000, Start(problem.initial, 1e-3))
    found = shuffle_strongly_convex(
        problem, PrivacyBudget(**BUDGET), strong_convexity=1.0, phases=2, batch_size=50
    )
    assert [each["distance"] for each in found.choices["phases"]] == [1e-3, math.sqrt(2 * first)]


def test_phases_too_small_for_a_batch_are_not_chosen():
    solver = METHODS["accelerated"](
        accelerated(100, 3, 15.0).problem, PrivacyBudget(15.0, 1e-6), batch_size=60
    )
    assert best_number_of_phases(solver, 1.0) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 3}, "rounds goes with method='gradient_descent'"),
        ({"method": "gradient_descent", "batch_size": 3}, "batch_size goes with the other methods"),
        ({"method": "newton"}, "method must be one of"),
        ({"method": "pan_private", "honest_fraction": 0.5}, "honest_fraction must be 1"),
        ({"strong_convexity": 2.0}, "smoothness must be at least strong_convexity"),
        ({"strong_convexity": 0.0}, "strong_convexity must be positive"),
        ({"lipschitz": 0.4}, r"strong_convexity must not exceed 2 \* lipschitz / diameter = 0.4"),
        ({"phases": 21}, r"phases must be .* \(and at most 20\)"),
        ({"phases": 0}, "phases must be a whole number"),
    ],
)
def test_nonsensical_phases_are_refused(change, message):
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 2.0,
        "smoothness": 1.0,
        "strong_convexity": 1.0,
        "dimension": 2,
        **BUDGET,
    }
    with pytest.raises(ValueError, match=message):
        solve(shuffle_strongly_convex, Quadratic(2), torch.zeros(20, 2), **{**options, **change})


@pytest.mark.parametrize(("link", "flat"), [(logistic_loss, True), (squared_loss, False)])
def test_the_promise_that_a_flat_loss_is_strongly_convex_is_doubted_aloud(link, flat):
    problem = Problem(
        link,
        (torch.eye(2), torch.ones(2)),
        constraint=L2Ball(1.0),
        lipschitz=2.0,
        smoothness=1.0,
        dimension=2,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shuffle_strongly_convex(problem, PrivacyBudget(4.0, 1e-6), strong_convexity=0.5, phases=1)
    assert (
        any(
            "strong_convexity=0.5 of the logistic loss is taken on trust" in str(each.message)
            for each in caught
        )
        == flat
    )
