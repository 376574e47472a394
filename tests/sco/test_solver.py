"""What all optimisers share: statements, randomness, blocks of users."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    half_square,
    seeded,
    solve,
)

from opacus_shuffle.core.guarantees import Guarantee
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco import (
    L2Ball,
    shuffle_accelerated_sgd,
    shuffle_gradient_descent,
    shuffle_sgd,
    shuffle_strongly_convex,
    solver,
)

OPTIMISERS = (shuffle_sgd, shuffle_accelerated_sgd, shuffle_gradient_descent)


def test_statements_say_what_the_protocols_do():
    data = torch.zeros(1000, 2, dtype=torch.float64)
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 1.0,
        "dimension": 2,
        "honest_fraction": 0.8,
        **BUDGET,
    }
    estimate = solve(shuffle_sgd, half_square, data, batch_size=300, **options)
    protocol = ShuffleVectorSum(300, 2, 1.0, 1.0, 1e-6, "tight", honest_fraction=0.8)
    three = {"rounds": 3, "num_users": 900, "interaction": "sequential"}
    assert estimate.privacy == dataclasses.replace(protocol.statement(), **three)
    assert estimate.privacy.guarantee is Guarantee.PROVED
    options["epsilon"] = 0.5
    full = solve(
        shuffle_gradient_descent,
        half_square,
        data,
        smoothness=1.0,
        rounds=5,
        calibration="published",
        **options,
    )
    protocol = ShuffleVectorSum(
        1000, 2, 1.0, 0.5, 1e-6, rounds=5, calibration="published", honest_fraction=0.8
    )
    assert full.privacy == protocol.statement()
    phases = solve(
        shuffle_strongly_convex,
        half_square,
        data,
        smoothness=1.0,
        strong_convexity=1.0,
        method="gradient_descent",
        phases=2,
        rounds=5,
        **options,
    )
    protocol = ShuffleVectorSum(
        500, 2, 1.0, 0.5, 1e-6, rounds=5, calibration="tight", honest_fraction=0.8
    )
    assert phases.privacy == dataclasses.replace(protocol.statement(), rounds=10, num_users=1000)


@pytest.mark.parametrize(
    ("run", "more"),
    [(shuffle_accelerated_sgd, {}), (shuffle_strongly_convex, {"strong_convexity": 1.0})],
)
def test_nothing_but_the_estimate_and_its_history_depends_on_the_data(run, more):
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 1.0,
        "clip": True,
        "smoothness": 1.0,
        "dimension": 2,
        **BUDGET,
        **more,
    }
    records = torch.ones(500, 2, dtype=torch.float64)
    first, second = (solve(run, half_square, x * records, **options) for x in (0.0, 50.0))
    assert first.choices == second.choices
    assert first.privacy == second.privacy
    assert first.excess_loss_bound == second.excess_loss_bound


@pytest.mark.parametrize("run", OPTIMISERS)
def test_runs_repeat_with_the_same_generator_and_ignore_the_global_one(run):
    data = torch.randn(400, 2, generator=seeded(0), dtype=torch.float64)
    extra = {"rounds": 3} if run is shuffle_gradient_descent else {"batch_size": 80}
    extra = extra if run is shuffle_sgd else {**extra, "smoothness": 1.0}
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 1.0,
        "dimension": 2,
        "clip": True,
        **extra,
        **BUDGET,
    }
    torch.manual_seed(0)
    first = solve(run, half_square, data, generator=seeded(5), **options)
    torch.manual_seed(1)
    second = solve(run, half_square, data, generator=seeded(5), **options)
    assert torch.equal(first.theta, second.theta)
    torch.manual_seed(0)
    secret = solve(run, half_square, data, **options)
    torch.manual_seed(0)
    assert not torch.equal(secret.theta, solve(run, half_square, data, **options).theta)


def test_gradients_come_in_blocks_where_they_are_many(silent, monkeypatch):
    data = torch.randn(100, 2, generator=seeded(0), dtype=torch.float64)
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 9.0,
        "smoothness": 1.0,
        "dimension": 2,
        "rounds": 4,
        **BUDGET,
    }
    whole = solve(shuffle_gradient_descent, half_square, data, **options)
    monkeypatch.setattr(solver, "_BLOCK", 14)
    assert torch.allclose(
        solve(shuffle_gradient_descent, half_square, data, **options).theta, whole.theta
    )
