"""Phases: how many, on whom, and what they gain."""

import math
import warnings

import pytest
import torch
from helpers.convex_problems import Quadratic, mean_excesses

from opacus_shuffle.sco import (
    L2Ball,
    PrivacyBudget,
    Problem,
    logistic_loss,
    shuffle_strongly_convex,
    squared_loss,
)
from opacus_shuffle.sco.solver import Start
from opacus_shuffle.sco.strongly_convex import METHODS, best_number_of_phases, bound_of_phases

STRONG = {"smoothness": 1.0, "strong_convexity": 1.0}


def solver(users, dimension=3, epsilon=1.0, method="accelerated", sizes=None, **options):
    """Its users share one record."""
    data = torch.zeros(1, dimension).expand(users, dimension)
    known = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "smoothness": 1.0, **options}
    problem = Problem(Quadratic(dimension), data, **known)
    return METHODS[method](problem, PrivacyBudget(epsilon, 1e-6), **(sizes or {}))


def test_more_phases_prove_less():
    run = shuffle_strongly_convex
    bounds = [mean_excesses(run, 1, phases=k, users=10_000, **STRONG)[1] for k in (None, 2, 1)]
    assert bounds[0] < bounds[1] < bounds[2] / 2


@pytest.mark.zoo
def test_four_phases_end_nearer_than_one():
    run = shuffle_strongly_convex
    options = {**STRONG, "users": 5000, "method": "gradient_descent", "rounds": 20}
    single, several = (mean_excesses(run, 8, phases=k, **options)[0] for k in (1, 4))
    # A mean of N independent terms lies within 4 standard errors but for 6e-5 (seeds are fixed).
    assert single.mean() - several.mean() > 4 * math.sqrt((single.var() + several.var()) / 8)


# SCO Theorem 4.8.
@pytest.mark.parametrize(
    ("users", "epsilon", "convexity"),
    [
        *((1, 1.0, 0.1), (40, 1.0, 1.0), (3000, 2.0, 0.05)),
        *(
            pytest.param(*run, marks=pytest.mark.zoo)
            for run in [(50_000, 15, 1.0), (10**5, 0.1, 0.5)]
        ),
    ],
)
def test_the_chosen_number_of_phases_is_never_worse_than_the_papers(users, epsilon, convexity):
    run = solver(users, 3, epsilon, smoothness=1.0)
    chosen = best_number_of_phases(run, convexity)
    papers = max(1, math.ceil(math.log2(math.log2(users)))) if users > 2 else 1
    assert bound_of_phases(run, convexity, chosen) <= bound_of_phases(run, convexity, papers)


@pytest.mark.parametrize("method", METHODS)
def test_the_bound_of_phases_is_that_of_the_run_and_the_chosen_number_is_the_runs(method):
    sizes = {"rounds": 5} if method == "gradient_descent" else {"batch_size": 50}
    run = solver(2000, method=method, sizes=sizes)
    how = {"strong_convexity": 1.0, "method": method, **sizes}
    for phases in (None, 1, 3):
        estimate = shuffle_strongly_convex(run.problem, run.budget, phases=phases, **how)
        count = len(estimate.choices["phases"])
        assert count == (phases or best_number_of_phases(run, 1.0))
        assert estimate.excess_loss_bound == bound_of_phases(run, 1.0, count)


# SCO Lemma B.7.
def test_a_phase_is_not_taken_to_end_nearer_than_is_proved():
    run = solver(2000, sizes={"batch_size": 50}, diameter=1e-3)
    first = run.bound(1000, Start(run.problem.initial, 1e-3))
    how = {"strong_convexity": 1.0, "phases": 2, "batch_size": 50}
    estimate = shuffle_strongly_convex(run.problem, run.budget, **how)
    starts = [phase["distance"] for phase in estimate.choices["phases"]]
    assert starts == [1e-3, math.sqrt(2 * first)]


# SCO Definition 2.11.
@pytest.mark.parametrize(("loss", "doubts"), [(logistic_loss, 1), (squared_loss, 0)])
def test_the_promise_that_a_flat_loss_is_strongly_convex_is_doubted_aloud(loss, doubts):
    data, ball = (torch.eye(2), torch.ones(2)), {"constraint": L2Ball(1.0), "lipschitz": 2.0}
    problem = Problem(loss, data, smoothness=1.0, dimension=2, **ball)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shuffle_strongly_convex(problem, PrivacyBudget(4.0, 1e-6), strong_convexity=0.5, phases=1)
    told = "strong_convexity=0.5 of the logistic loss is assumed"
    assert sum(told in str(warning.message) for warning in caught) == doubts
