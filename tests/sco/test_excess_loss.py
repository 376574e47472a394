"""The mean excess loss over users and noise is below the proved bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    Quadratic,
    mean_excesses,
    seeded,
    solve,
)

from opacus_shuffle.sco import (
    Box,
    L2Ball,
    absolute_loss,
    shuffle_accelerated_sgd,
    shuffle_gradient_descent,
    shuffle_sgd,
    shuffle_strongly_convex,
)

# A mean of N independent terms lies within this many standard errors but for 6e-5 (the seeds are
# fixed).
ERRORS = 4


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (shuffle_sgd, {}),
        pytest.param(shuffle_sgd, {"step_size": 0.3}, marks=pytest.mark.slow),
        (shuffle_accelerated_sgd, {"smoothness": 1.0}),
        (shuffle_accelerated_sgd, {"smoothness": 1.0, "honest_fraction": 0.5}),
        (shuffle_accelerated_sgd, {"smoothness": 1.0, "batch_size": 100}),
        (shuffle_gradient_descent, {"smoothness": 1.0, "rounds": 50}),
        (shuffle_strongly_convex, {"smoothness": 1.0, "strong_convexity": 1.0}),
        pytest.param(
            shuffle_strongly_convex,
            {
                "smoothness": 1.0,
                "strong_convexity": 1.0,
                "method": "gradient_descent",
                "rounds": 20,
            },
            marks=pytest.mark.slow,  # by default test_strongly_convex.py runs such phases
        ),
        (
            shuffle_strongly_convex,
            {"smoothness": 1.0, "strong_convexity": 1.0, "method": "pan_private"},
        ),
    ],
)
def test_the_mean_excess_is_below_the_bound(run, options):
    excesses, bound = mean_excesses(run, 12, **options)
    assert excesses.mean() - ERRORS * excesses.std() / math.sqrt(12) <= bound
    assert bound < 1.8 * 2  # and says more than L·diameter


def test_no_bound_exceeds_what_the_lipschitz_constant_says():
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 1.8,
        "batch_size": 30,
        "calibration": "published",
        **BUDGET,
    }
    for run, more in [(shuffle_sgd, {}), (shuffle_accelerated_sgd, {"smoothness": 1.0})]:
        assert (
            solve(run, Quadratic(3), torch.zeros(60, 3), **more, **options).excess_loss_bound
            == 1.8 * 2
        )


def test_the_mean_excess_is_below_the_bound_where_the_loss_is_smoothed():
    """Medians: E|X − θ| for X uniform on [0.1, 0.7] has its minimum at 0.4; there it exceeds it by (θ − 0.4)²/0.6."""
    for run, options in [(shuffle_accelerated_sgd, {}), (shuffle_gradient_descent, {"rounds": 30})]:
        excesses = []
        for seed in range(12):
            targets = 0.1 + 0.6 * torch.rand(500, generator=seeded(seed), dtype=torch.float64)
            data = torch.ones(500, 1, dtype=torch.float64), targets
            estimate = solve(run,
                absolute_loss, data, constraint=Box(-1.0, 1.0, dimension=1), lipschitz=1.0, generator=seeded(seed), **BUDGET,
                **options
            )  # fmt: skip
            theta = float(estimate.theta)
            inside = (theta - 0.4) ** 2 / 0.6
            excesses.append(inside if 0.1 <= theta <= 0.7 else abs(theta - 0.4) - 0.15)
        deviation = np.std(excesses) / math.sqrt(12)
        assert np.mean(excesses) - ERRORS * deviation <= estimate.excess_loss_bound < 1.0


def test_acceleration_beats_plain_sgd_on_a_smooth_loss():
    plain, plain_bound = mean_excesses(shuffle_sgd, 40, users=300)
    fast, fast_bound = mean_excesses(shuffle_accelerated_sgd, 40, users=300, smoothness=1.0)
    assert fast_bound < plain_bound
    error = math.sqrt((plain.var() + fast.var()) / 40)
    assert plain.mean() - fast.mean() > ERRORS * error
