"""Estimates speak."""

from __future__ import annotations

import torch
from helpers.convex_problems import BUDGET, half_square, solve

from opacus_shuffle.sco import Estimate, L2Ball, shuffle_gradient_descent, shuffle_sgd

OPTIONS = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "dimension": 2, **BUDGET}


def test_results_speak():
    data = torch.zeros(300, 2, dtype=torch.float64)
    told = str(solve(shuffle_sgd, half_square, data, batch_size=50, steps="practical", **OPTIONS))
    for words in (
        "2 parameters after 6 rounds",
        "nothing is proved for these settings",
        "epsilon = 1",
        "batch_size=50",
    ):
        assert words in told
    full = solve(shuffle_gradient_descent, half_square, data, smoothness=1.0, rounds=4, **OPTIONS)
    assert "expected excess loss at most" in str(full)


def test_choices_of_phases_are_as_short_as_any():
    estimate = solve(shuffle_sgd, half_square, torch.zeros(9, 2), **OPTIONS)
    phases = [{"rounds": 9, "steps": [number / 3 for number in range(1, 10)], "sizes": (1 / 3, 2)}]
    told = str(
        Estimate(
            theta=estimate.theta, privacy=estimate.privacy, history=[], choices={"phases": phases}
        )
    )
    assert told.splitlines()[1] == "phases=[(rounds=9, steps=[0.3333, …, 3], sizes=[0.3333, 2])]"
