"""Estimates speak and draw, and their histories are short."""

from __future__ import annotations

import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    half_square,
    solve,
)

from opacus_shuffle.sco.constraints import L2Ball
from opacus_shuffle.sco.gradient_descent import shuffle_gradient_descent, shuffle_sgd
from opacus_shuffle.sco.result import Estimate, History


def test_results_speak_and_draw():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    data = torch.zeros(300, 2, dtype=torch.float64)
    estimate = solve(
        shuffle_sgd,
        half_square,
        data,
        constraint=L2Ball(1.0),
        lipschitz=1.0,
        dimension=2,
        batch_size=50,
        average=False,
        **BUDGET,
    )
    assert estimate.excess_loss_bound is None
    for words in ("2 parameters after 6 rounds", "nothing is proved for these settings", "epsilon = 1", "batch_size=50"):
        assert words in str(estimate)
    axes = estimate.plot()
    assert axes.get_xlabel() == "users so far"
    assert len(axes.lines[0].get_xdata()) == 6
    drawn = estimate.plot(value=lambda theta: float(theta.norm())).lines[0].get_ydata()
    assert drawn[-1] == pytest.approx(float(estimate.theta.norm()))
    full = solve(
        shuffle_gradient_descent,
        half_square,
        data,
        constraint=L2Ball(1.0),
        lipschitz=1.0,
        smoothness=1.0,
        dimension=2,
        rounds=4,
        **BUDGET,
    )
    assert "expected excess loss at most" in str(full)
    assert full.plot(axes).get_xlabel() == "rounds"


def test_choices_of_phases_are_as_short_as_any():
    estimate = solve(shuffle_sgd, half_square, torch.zeros(9, 2), constraint=L2Ball(1.0), lipschitz=1.0, dimension=2, **BUDGET)
    phases = [{"rounds": 9, "steps": [number / 3 for number in range(1, 10)], "sizes": (1 / 3, 2)}]
    told = str(Estimate(theta=estimate.theta, privacy=estimate.privacy, history=[], choices={"phases": phases}))
    assert told.splitlines()[1] == "phases=[(rounds=9, steps=[0.3333, …, 3], sizes=[0.3333, 2])]"


@pytest.mark.parametrize(("rounds", "kept"), [(1, 1), (200, 200), (201, 101), (5000, 200)])
def test_histories_keep_few_snapshots_and_always_the_last(rounds, kept):
    history = History()
    history.begin(rounds=rounds, users=7)
    for step in range(rounds):
        history.add(users=2, gradient=torch.ones(1), theta=torch.full((1,), float(step)))
    assert [each.users for each in history.rounds] == [min(2 * step, 7) for step in range(1, rounds + 1)]
    assert sum(each.theta is not None for each in history.rounds) == kept
    assert float(history.rounds[-1].theta) == rounds - 1
    history.begin(rounds=1, users=3)
    history.add(users=1, gradient=torch.ones(1), theta=torch.ones(1))
    assert (history.rounds[-1].number, history.rounds[-1].users) == (rounds, min(2 * rounds, 7) + 1)
