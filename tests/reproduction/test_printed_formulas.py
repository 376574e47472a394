"""The printed formulas are the paper's."""

from __future__ import annotations

import math

import printed_formulas
import pytest
import torch
from helpers.convex_problems import Quadratic

from opacus_shuffle.sco import L2Ball, PrivacyBudget, Problem
from opacus_shuffle.sco.accelerated_sgd import (
    accelerated_step_sizes,
)


def ac_sa(steps):
    """AC-SA as Lan (2012) writes it on θ²/2 from 1, slowly."""
    theta = aggregate = 1.0
    for t, size in enumerate(steps, 1):
        alpha = 2 / (t + 2)
        theta -= (alpha * theta + (1 - alpha) * aggregate) / size
        aggregate = alpha * theta + (1 - alpha) * aggregate
    return aggregate


@pytest.mark.parametrize("rounds", [10, 100])
def test_the_printed_steps_diverge_where_ours_converge(rounds):
    options = {"rounds": rounds, "smoothness": 1.0, "deviation": 0.0}
    printed = printed_formulas.accelerated_step_sizes(problem(), **options)
    ours = accelerated_step_sizes(distance=1.0, **options)
    assert abs(ac_sa(printed)) > 5
    assert abs(ac_sa(ours)) < 1e-5


def problem(users=5000, dimension=7, lipschitz=1.5, diameter=2.5):
    """A ball about the start."""
    data, ball = torch.zeros(1, dimension).expand(users, dimension), L2Ball(diameter / 2)
    return Problem(Quadratic(dimension), data, constraint=ball, lipschitz=lipschitz, smoothness=1.0)


def test_the_printed_formulas_are_the_papers():
    n, d, lip, diam, eps, delta, beta = 5000, 7, 1.5, 2.5, 0.7, 1e-5, 3.0
    both, p = (problem(n, d, lip, diam), PrivacyBudget(eps, delta)), printed_formulas
    log = math.log(d / delta)
    assert p.sgd_batch_size(*both) == round(math.sqrt(d) * log / eps)
    assert p.sgd_step_size(*both, batch_size=60, rounds=83) == pytest.approx(
        eps * 60 * diam / (lip * math.sqrt(83) * (eps * 60 + math.sqrt(d) * lip * log))
    )
    assert p.accelerated_batch_size(*both, smoothness=beta) == round(
        n**0.6 * d**0.2 * lip**0.4 * log**0.4 / (eps**0.4 * beta**0.4 * diam**0.4)
    )
    assert p.accelerated_smoothing(*both) == pytest.approx(
        eps ** (2 / 3) * n ** (2 / 3) * lip / (d ** (1 / 3) * diam * log ** (2 / 3))
    )
    assert p.accelerated_deviation(*both, batch_size=60) == pytest.approx(
        math.sqrt(lip**2 / 60 + d * lip**2 * log**2 / (60**2 * eps**2))
    )
    full = math.log(n * d / delta)
    assert p.descent_rounds(*both) == min(n, round(eps**2 * n**2 / (d * full**2)))
    assert p.descent_step_size(both[0], rounds=50) == pytest.approx(diam / (lip * math.sqrt(50)))
    assert p.descent_smoothing(*both) == pytest.approx(
        lip / diam * min(math.sqrt(n), eps * n / (math.sqrt(d) * full**1.5))
    )
    steps = p.accelerated_step_sizes(both[0], rounds=3, smoothness=2.0, deviation=0.5)
    assert steps[1] == pytest.approx((5**1.5 * 0.5 / diam + 2.0) / 3)
