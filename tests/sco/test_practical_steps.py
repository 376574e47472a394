"""Practical steps cost the same privacy as proved ones, find less loss, and claim no bound."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    Quadratic,
    best_in_ball,
    half_square,
    logistic_data,
    seeded,
    solve,
)

from opacus_shuffle.sco import (
    L2Ball,
    PrivacyBudget,
    Problem,
    absolute_loss,
    logistic_loss,
    shuffle_gradient_descent,
    shuffle_sgd,
)
from opacus_shuffle.sco.gradient_descent import SGD, GradientDescent
from opacus_shuffle.sco.solver import Start

METHODS = {shuffle_sgd: SGD, shuffle_gradient_descent: GradientDescent}
both_methods = pytest.mark.parametrize("run", METHODS)
LOGISTIC = {
    "constraint": L2Ball(4.0),
    "lipschitz": 1.0,
    "smoothness": 0.25,
    "dimension": 3,
    **BUDGET,
}


@both_methods
def test_privacy_is_that_of_proved_steps_and_no_excess_loss_is_claimed(run):
    data = logistic_data(500)
    proved, practical = (
        solve(run, logistic_loss, data, generator=seeded(0), steps=steps, **LOGISTIC)
        for steps in ("proved", "practical")
    )
    assert practical.privacy == proved.privacy
    assert proved.excess_loss_bound is not None
    assert practical.excess_loss_bound is None
    assert "excess loss: nothing is proved" in str(practical)
    assert practical.choices["steps"] == "practical"


@pytest.mark.parametrize(
    ("run", "users"),
    [pytest.param(shuffle_sgd, 20_000, marks=pytest.mark.zoo), (shuffle_gradient_descent, 1000)],
)
def test_practical_steps_find_less_loss(run, users):
    data = logistic_data(users)
    least, _ = best_in_ball(logistic_loss, data, 3, 4.0)

    def excesses(steps):
        found = [
            solve(run, logistic_loss, data, generator=seeded(seed), steps=steps, **LOGISTIC)
            for seed in range(6)
        ]
        return torch.tensor(
            [float(logistic_loss(each.theta, data).mean()) - least for each in found]
        )

    proved, practical = excesses("proved"), excesses("practical")
    error = math.sqrt((proved.var() + practical.var()) / 6)
    assert practical.mean() + 4 * error < proved.mean()


@pytest.mark.parametrize("smoothness", [None, 1.0, 50.0])
@both_methods
def test_the_steps_fall_from_the_longest_that_neither_a_gradient_nor_all_noise_leads_astray(
    run, smoothness
):
    data = torch.zeros(60, 3)
    known = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "smoothness": smoothness}
    problem, rounds = Problem(Quadratic(3), data, **known), 4
    solver = METHODS[run](problem, PrivacyBudget(**BUDGET), steps="practical")
    size = 60 if run is shuffle_gradient_descent else 15
    noise = math.sqrt(3 * solver.protocol(size, rounds).variance) / size
    first = min(
        1.0 / max(2.0, math.sqrt(rounds) * noise), 1 / smoothness if smoothness else math.inf
    )
    plan = solver.plan(size, rounds, Start(problem.initial, 1.0))
    assert plan.steps == pytest.approx([first, 0.75 * first, 0.5 * first, 0.25 * first])
    assert plan.gradients.smoothing_cost == 0


@both_methods
def test_a_step_size_is_the_first_one(run):
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 2.0,
        "steps": "practical",
        "step_size": 0.25,
        **BUDGET,
    }
    size = {"rounds": 5} if run is shuffle_gradient_descent else {"batch_size": 40}
    estimate = solve(run, half_square, torch.zeros(200, 2), dimension=2, **options, **size)
    assert estimate.choices["step_size"] == 0.25
    assert estimate.excess_loss_bound is None


def test_kinks_are_not_smoothed():
    features = torch.nn.functional.normalize(
        torch.randn(200, 2, generator=seeded(0), dtype=torch.float64), dim=1
    )
    options = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "dimension": 2, "rounds": 3, **BUDGET}
    found = solve(
        shuffle_gradient_descent,
        absolute_loss,
        (features, features[:, 0]),
        steps="practical",
        **options,
    )
    assert "smoothness" not in found.choices


@both_methods
def test_other_steps_are_refused(run):
    with pytest.raises(ValueError, match="steps must be one of 'proved', 'practical', got 'tuned'"):
        solve(
            run,
            half_square,
            torch.zeros(20, 2),
            constraint=L2Ball(1.0),
            lipschitz=2.0,
            dimension=2,
            steps="tuned",
            **BUDGET,
        )
