"""What a problem may be made of, and what is refused by name."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.convex_problems import (
    BUDGET,
    half_square,
    logistic_data,
    seeded,
    solve,
)

from opacus_shuffle.sco import (
    Box,
    L2Ball,
    MoreauEnvelope,
    PrivacyBudget,
    Problem,
    absolute_loss,
    logistic_loss,
    shuffle_accelerated_sgd,
    shuffle_gradient_descent,
    shuffle_sgd,
)


def test_modules_and_envelopes_are_losses_too():
    features, labels = logistic_data(300)
    module = torch.nn.Linear(3, 1, bias=False).double()

    def criterion(outputs, targets):
        return torch.nn.functional.softplus(-targets * outputs.squeeze(-1)).mean()

    options = {"constraint": L2Ball(5.0), "lipschitz": 1.0, "generator": seeded(0), **BUDGET}
    from_module = solve(
        shuffle_sgd,
        (module, criterion),
        (features, labels),
        initial=torch.zeros(3),
        batch_size=100,
        **options,
    )
    options["generator"] = seeded(0)
    from_loss = solve(
        shuffle_sgd,
        logistic_loss,
        (features, labels),
        initial=torch.zeros(3),
        batch_size=100,
        **options,
    )
    assert torch.allclose(from_module.theta, from_loss.theta)
    start = solve(shuffle_sgd, (module, criterion), (features, labels), batch_size=300, **options)
    assert torch.allclose(
        start.theta, module.weight.detach().flatten()
    )  # one round: θ_0 is the mean
    envelope = MoreauEnvelope.generalized_linear("absolute", 3.0, dimension=3, lipschitz=1.0)
    own = solve(shuffle_accelerated_sgd, envelope, (features, labels), batch_size=100, **options)
    assert own.choices["smoothness"] == 3.0
    made = solve(shuffle_accelerated_sgd,
        absolute_loss, (features, labels), initial=torch.zeros(3), batch_size=100,
        envelope=lambda beta: MoreauEnvelope.generalized_linear("absolute", beta, dimension=3), **options
    )  # fmt: skip
    assert made.excess_loss_bound > 1 / (
        2 * made.choices["smoothness"]
    )  # the price of smoothing is in it


def test_a_known_distance_improves_the_bound_and_a_callable_needs_one():
    data, project = torch.zeros(300, 2, dtype=torch.float64), L2Ball(4.0).project
    options = {"lipschitz": 5.0, "dimension": 2, "batch_size": 50, **BUDGET}
    bounds = [
        solve(
            shuffle_sgd, half_square, data, constraint=constraint, **more, **options
        ).excess_loss_bound
        for constraint, more in [
            (L2Ball(4.0), {"diameter": 0.5}),
            (L2Ball(4.0), {}),
            (project, {"diameter": 8.0}),
            (L2Ball(4.0), {"initial": torch.tensor([2.0, 0.0])}),
        ]
    ]
    assert [bound / bounds[0] for bound in bounds] == pytest.approx([1, 8, 16, 12])
    with pytest.raises(ValueError, match="diameter must be given"):
        solve(shuffle_sgd, half_square, data, constraint=project, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 16.0}, "epsilon must not exceed 15"),
        ({"delta": 0.5}, "delta must be at least 1e-200 and below 1/2"),
        ({"honest_fraction": 0.2}, r"honest_fraction must lie in \[1/3, 1\]"),
        ({"calibration": "loose"}, "calibration must be one of"),
        ({"lipschitz": 0.0}, "lipschitz must be positive"),
        ({"smoothness": -1.0}, "smoothness must be positive"),
        ({"constraint": None}, "constraint"),
        ({"dimension": None}, "dimension must be given"),
        ({"initial": torch.zeros(3)}, r"initial must have shape \(2,\), got \(3,\)"),
        (
            {"initial": torch.tensor([0.0, math.nan])},
            "initial must hold 2 finite numbers, got NaN or infinity in it",
        ),
        ({"initial": "here"}, "initial must be a tensor of real numbers, got 'here'"),
        (
            {"initial": torch.zeros(2, dtype=torch.complex64)},
            "initial must hold real numbers, got torch.complex64",
        ),
        (
            {"envelope": 3, "smoothness": None},
            "envelope must be a function from a smoothness to a MoreauEnvelope, got 3",
        ),
        (
            {"envelope": lambda beta: None, "smoothness": None},
            "what envelope returns must be a MoreauEnvelope, got NoneT",
        ),
        (
            {
                "envelope": lambda b: MoreauEnvelope.generalized_linear("hinge", b, dimension=3),
                "smoothness": None,
            },
            "envelope must return one of dimension 2, got 3",
        ),
        ({"clip": 1}, "clip must be True or False"),
        ({"generator": 0}, "generator must be a Generator"),
        ({"envelope": lambda beta: None}, "envelope must be left out"),
    ],
)
def test_nonsense_is_refused(change, message):
    options = {
        "constraint": L2Ball(1.0),
        "lipschitz": 2.0,
        "smoothness": 1.0,
        "dimension": 2,
        "batch_size": 10,
        **BUDGET,
    }
    with pytest.raises(ValueError, match=message):
        solve(shuffle_accelerated_sgd, half_square, torch.zeros(20, 2), **{**options, **change})


@pytest.mark.parametrize("known", [{"dimension": 2}, {"initial": torch.zeros(2)}])
def test_a_box_between_two_numbers_takes_the_dimension_that_the_optimiser_knows(silent, known):
    data = torch.full((20, 2), 3.0, dtype=torch.float64)
    options = {
        "lipschitz": 9.0,
        "smoothness": 1.0,
        "rounds": 40,
        "step_size": 0.5,
        "steps": "practical",
        **BUDGET,
    }
    found = solve(
        shuffle_gradient_descent, half_square, data, constraint=Box(0.0, 1.0), **known, **options
    )
    assert torch.allclose(found.theta, torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="dimension must be given"):
        solve(shuffle_gradient_descent, half_square, data, constraint=Box(0.0, 1.0), **options)


def test_losses_and_data_that_are_none_are_refused():
    options = {"constraint": L2Ball(1.0), "lipschitz": 2.0, "dimension": 2, **BUDGET}
    with pytest.raises(ValueError, match="loss must be a function"):
        solve(shuffle_sgd, torch.nn.Linear(2, 1), torch.zeros(20, 2), **options)
    with pytest.raises(ValueError, match="at least one user"):
        solve(shuffle_sgd, half_square, torch.zeros(0, 2), **options)


def test_optimisers_want_a_problem_and_a_budget():
    problem = Problem(
        half_square, torch.zeros(9, 2), constraint=L2Ball(1.0), lipschitz=1.0, dimension=2
    )
    with pytest.raises(ValueError, match="problem must be a Problem, got function"):
        shuffle_sgd(half_square, torch.zeros(9, 2))
    with pytest.raises(ValueError, match="budget must be a PrivacyBudget, got float"):
        shuffle_sgd(problem, 1.0)
    with pytest.raises(TypeError, match="parameters"):
        shuffle_sgd(problem, PrivacyBudget(1.0, 1e-6), parameters="printed")


def test_one_problem_serves_many_runs():
    data = torch.randn(300, 2, generator=seeded(0), dtype=torch.float64)
    problem = Problem(
        half_square,
        data,
        constraint=L2Ball(1.0),
        lipschitz=1.0,
        smoothness=1.0,
        dimension=2,
        clip=True,
    )
    budget = PrivacyBudget(1.0, 1e-6)
    first, second = (shuffle_accelerated_sgd(problem, budget, batch_size=50) for _ in range(2))
    assert first.privacy == second.privacy
    assert first.privacy.num_users == 300
    assert not torch.equal(first.theta, second.theta)
    assert shuffle_sgd(problem, budget, batch_size=50).choices["rounds"] == 6
