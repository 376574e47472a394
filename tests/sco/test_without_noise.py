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

from opacus_shuffle.sco.accelerated_sgd import shuffle_accelerated_sgd
from opacus_shuffle.sco.constraints import L2Ball
from opacus_shuffle.sco.gradient_descent import shuffle_gradient_descent, shuffle_sgd
from opacus_shuffle.sco.losses import absolute_loss, logistic_loss

OPTIMISERS = (shuffle_sgd, shuffle_accelerated_sgd, shuffle_gradient_descent)


@pytest.mark.parametrize("radius", [0.5, 50.0])
def test_gradient_descent_finds_the_minimiser_without_noise(silent, radius):
    data = logistic_data(200)
    least, where = best_in_ball(logistic_loss, data, 3, radius)
    estimate = solve(shuffle_gradient_descent,
        logistic_loss, data, constraint=L2Ball(radius), lipschitz=1.0, smoothness=0.25, dimension=3, rounds=1000,
        step_size=4.0, average=False, **BUDGET
    )  # fmt: skip
    assert float(logistic_loss(estimate.theta, data).mean()) <= least + 1e-7
    assert torch.allclose(estimate.theta, where, atol=2e-3)


@pytest.mark.parametrize("radius", [0.5, 5.0])
def test_accelerated_sgd_finds_the_minimiser_without_noise(silent, radius):
    base = logistic_data(40)
    data = tuple(part.repeat(300, *[1] * (part.ndim - 1)) for part in base)
    batches = torch.arange(40 * 300).split(40)  # every batch is the whole of the base: no sampling error
    least, _ = best_in_ball(logistic_loss, base, 3, radius)
    options = {"constraint": L2Ball(radius), "lipschitz": 1.0, "smoothness": 0.25, "dimension": 3, "batches": batches}
    steps = [0.5 / (t + 1) for t in range(1, 301)]  # as for no sampling error: 2β/(t+1)
    estimate = solve(shuffle_accelerated_sgd, logistic_loss, data, inverse_step_sizes=steps, **options, **BUDGET)
    proved = 2 / (301 * 302) * (radius + 0.25 * radius**2)
    assert -1e-9 <= float(logistic_loss(estimate.theta, base).mean()) - least <= proved


def test_sgd_finds_the_minimiser_without_noise(silent):
    base = torch.randn(20, 2, generator=seeded(0), dtype=torch.float64)
    data = base.repeat(500, 1)
    least, _ = best_in_ball(norm_loss, base, 2, 1.0)
    estimate = solve(
        shuffle_sgd,
        norm_loss,
        data,
        constraint=L2Ball(1.0),
        lipschitz=1.0,
        dimension=2,
        batches=torch.arange(10_000).split(20),
        **BUDGET,
    )
    assert -1e-9 <= float(norm_loss(estimate.theta, base).mean()) - least <= estimate.excess_loss_bound
    assert estimate.excess_loss_bound == pytest.approx(1 / math.sqrt(500), rel=1e-6)


@pytest.mark.parametrize("run", OPTIMISERS)
def test_the_first_step_goes_downhill(silent, run):
    data = torch.full((10, 2), 0.5, dtype=torch.float64)
    options = {} if run is shuffle_sgd else {"smoothness": 1.0}
    size = {"rounds": 2, "step_size": 0.1, "average": False} if run is shuffle_gradient_descent else {"batch_size": 5}
    size = {**size, "step_size": 0.1, "average": False} if run is shuffle_sgd else size
    size = {**size, "inverse_step_sizes": [10.0, 10.0]} if run is shuffle_accelerated_sgd else size
    estimate = solve(run, half_square, data, constraint=L2Ball(5.0), lipschitz=10.0, dimension=2, **options, **size, **BUDGET)
    share = 2 / 3 if run is shuffle_accelerated_sgd else 1.0  # the aggregate: α_1 = 2/3 of the way from the start
    after_one = 0.05 * share  # 0 − 0.1·(0 − 0.5)
    assert torch.allclose(estimate.history[0].theta, torch.full((2,), after_one, dtype=torch.float64))


def test_smoothed_runs_find_the_kink_without_noise(silent):
    """The median by the absolute loss, with the exact envelope of a linear model and with the generic solver."""
    targets = torch.tensor([-0.9, 0.2, 0.3, 0.8, 0.25], dtype=torch.float64)
    features = torch.ones(5, 1, dtype=torch.float64)

    def rough(theta, batch):
        return (batch - theta).abs().sum(1)

    options = {"constraint": L2Ball(1.0), "lipschitz": 1.0, "dimension": 1, **BUDGET}
    exact = solve(shuffle_gradient_descent, absolute_loss, (features, targets), rounds=150, average=False, **options)
    assert float(exact.theta) == pytest.approx(0.25, abs=1 / exact.choices["smoothness"] + 0.01)
    generic = solve(shuffle_gradient_descent, rough, targets[:, None], rounds=150, average=False, **options)
    # gradients wrong by 2 %, of a loss whose one-sided slopes at the median are 1/5
    assert float(generic.theta) == pytest.approx(0.25, abs=1 / generic.choices["smoothness"] + 0.01)
