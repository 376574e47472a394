"""The optimisers against scipy where the protocol adds no noise."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    best_in_ball,
    half_square,
    logistic_data,
    norm_loss,
    seeded,
    solve,
)

from opacus_shuffle.sco import (
    L2Ball,
    absolute_loss,
    logistic_loss,
    shuffle_accelerated_sgd,
    shuffle_gradient_descent,
    shuffle_sgd,
)

OPTIMISERS = (shuffle_sgd, shuffle_accelerated_sgd, shuffle_gradient_descent)


@pytest.mark.parametrize("radius", [0.5, 50.0])
def test_gradient_descent_finds_the_minimiser_without_noise(silent, radius):
    data = logistic_data(200)
    least, where = best_in_ball(logistic_loss, data, 3, radius)
    estimate = solve(shuffle_gradient_descent,
        logistic_loss, data, constraint=L2Ball(radius), lipschitz=1.0, smoothness=0.25, dimension=3, rounds=1000,
        step_size=4.0, steps="practical", **BUDGET
    )  # fmt: skip
    assert float(logistic_loss(estimate.theta, data).mean()) <= least + 1e-7
    assert torch.allclose(estimate.theta, where, atol=2e-3)


@pytest.mark.parametrize("radius", [0.5, 5.0])
def test_accelerated_sgd_finds_the_minimiser_without_noise(silent, radius):
    """One record for everyone, so that no batch has a sampling error; then the bound's steps are 2β/(t+1)."""
    data = tuple(part[:1].expand(12_000, *part.shape[1:]) for part in logistic_data(1))
    least, _ = best_in_ball(logistic_loss, tuple(part[:1] for part in data), 3, radius)
    options = {
        "constraint": L2Ball(radius),
        "lipschitz": 1.0,
        "smoothness": 0.25,
        "dimension": 3,
        "batch_size": 40,
    }
    estimate = solve(shuffle_accelerated_sgd, logistic_loss, data, **options, **BUDGET)
    excess = float(logistic_loss(estimate.theta, data).mean()) - least
    assert -1e-9 <= excess <= estimate.excess_loss_bound


def test_sgd_finds_the_minimiser_without_noise(silent):
    base = torch.randn(20, 2, generator=seeded(0), dtype=torch.float64)
    data = base.repeat(500, 1)
    least, _ = best_in_ball(norm_loss, base, 2, 1.0)
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 1.0,
        "dimension": 2,
        "batch_size": 20,
        **BUDGET,
    }
    estimate = solve(shuffle_sgd, norm_loss, data, **options)
    assert (
        -1e-9 <= float(norm_loss(estimate.theta, base).mean()) - least <= estimate.excess_loss_bound
    )
    assert estimate.excess_loss_bound == pytest.approx(1 / math.sqrt(500), rel=1e-6)


@pytest.mark.parametrize("run", OPTIMISERS)
def test_the_first_step_goes_downhill(silent, run):
    """One round, from 0, on users who all have 0.5."""
    data = torch.full((10, 2), 0.5, dtype=torch.float64)
    more = (
        {"smoothness": 1.0, "batch_size": 10}
        if run is shuffle_accelerated_sgd
        else {"step_size": 0.1, "steps": "practical"}
    )
    size = {"rounds": 1} if run is shuffle_gradient_descent else {"batch_size": 10}
    estimate = solve(
        run,
        half_square,
        data,
        constraint=L2Ball(5.0),
        lipschitz=10.0,
        dimension=2,
        **{**size, **more},
        **BUDGET,
    )
    # SGD's step is 0.1·0.5; the aggregate goes α_1 = 2/3 of a step of length 0.5/L_1.
    after = (
        0.05
        if run is not shuffle_accelerated_sgd
        else 2 / 3 * 0.5 / estimate.choices["inverse_step_sizes"][0]
    )
    assert torch.allclose(estimate.theta, torch.full((2,), after, dtype=torch.float64))


def test_smoothed_runs_find_the_kink_without_noise(silent):
    """The median by the absolute loss, with the exact envelope of a linear model and with the generic solver."""
    targets = torch.tensor([-0.9, 0.2, 0.3, 0.8, 0.25], dtype=torch.float64)
    features = torch.ones(5, 1, dtype=torch.float64)

    def rough(theta, batch):
        return (batch - theta).abs().sum(1)

    options = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "dimension": 1, "rounds": 150, **BUDGET}
    least = float((targets - 0.25).abs().mean())
    for loss, data in ((absolute_loss, (features, targets)), (rough, targets[:, None])):
        estimate = solve(shuffle_gradient_descent, loss, data, **options)
        step, beta = estimate.choices["step_size"], estimate.choices["smoothness"]
        # Lemma 4.2 with D = L = 1, what smoothing costs, and gradients wrong by 2 % across the
        # diameter.
        proved = 1 / (2 * step * 150) + step / 2 + 1 / (2 * beta) + 0.02 * 2
        assert float((targets - estimate.theta).abs().mean()) - least <= proved < 0.5
