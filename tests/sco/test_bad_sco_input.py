"""Problems, sets, objectives and optimisers answer whatever one of their arguments is, or name it."""

from __future__ import annotations

import pytest
import torch
from helpers.bad_calls import require_named_refusals
from torch import nn

from opacus_shuffle import sco

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
X = torch.nn.functional.normalize(
    torch.arange(60.0, dtype=torch.float64).reshape(30, 2).sin(), dim=1
)
DATA = (X, torch.where(X[:, 0] > 0, 1.0, -1.0).double())
THETA = torch.zeros(2, dtype=torch.float64)
BALL = sco.L2Ball(1.0)
LINK = sco.Link("square", lambda scores, targets: (scores - targets) ** 2)
CONSTRAINT = ("constraint",)
BATCH = ("data must",)


def problem():
    known = {"lipschitz": 1.0, "smoothness": 0.25, "dimension": 2, "clip": True}
    return sco.Problem(sco.logistic_loss, DATA, constraint=BALL, **known)


BUDGET = sco.PrivacyBudget(2.0, 1e-6)


def made(function):
    """A call that only makes something."""
    return lambda **given: function(**given) and None


def test_bad_arguments_of_problems_are_named():
    numbers = {"lipschitz": 1.0, "smoothness": 0.25, "dimension": 2, "diameter": 2.0, "clip": True}
    parts = {
        "loss": sco.logistic_loss,
        "data": DATA,
        "constraint": BALL,
        "envelope": None,
        "initial": THETA,
    }
    shape = ("initial must have shape",)
    require_named_refusals(
        made(sco.Problem), {**parts, **numbers, "generator": torch.Generator()}, dimension=shape
    )
    budget = {"epsilon": 1.0, "delta": 1e-5, "calibration": "tight", "honest_fraction": 0.9}
    require_named_refusals(sco.PrivacyBudget, budget)


def test_bad_arguments_of_sets_are_named():
    require_named_refusals(sco.L2Ball, {"radius": 1.0, "center": THETA})
    require_named_refusals(sco.Box, {"low": THETA - 1, "high": THETA + 1}, low=None, high=None)
    require_named_refusals(sco.Box, {"low": 0.0, "high": 1.0, "dimension": 2})
    require_named_refusals(sco.Projection, {"function": lambda theta: theta, "diameter": 1.0})
    require_named_refusals(sco.as_constraint, {"value": BALL}, value=CONSTRAINT)
    require_named_refusals(
        sco.as_constraint, {"value": lambda theta: theta, "diameter": 1.0}, value=CONSTRAINT
    )
    require_named_refusals(BALL.project, {"theta": THETA})


def test_bad_arguments_of_losses_are_named():
    known = {"lipschitz": 1.0, "signed": False, "elementwise": True}
    functions = {
        "value": lambda scores, targets: scores,
        "derivative": lambda scores, targets: scores * 0 + 1,
    }
    require_named_refusals(
        sco.Link, {"name": "linear", **functions, "coefficient": None, **known}, name=None
    )


def test_bad_arguments_of_objectives_are_named():
    require_named_refusals(made(sco.LinearObjective), {"link": LINK, "dimension": 2})
    require_named_refusals(
        made(sco.Objective.from_loss), {"loss": sco.logistic_loss, "dimension": 2}
    )
    network = {"module": nn.Linear(2, 1), "criterion": nn.MSELoss()}
    require_named_refusals(made(sco.ModuleObjective), network)
    module = sco.ModuleObjective(nn.Linear(2, 1), nn.MSELoss())
    require_named_refusals(made(module.load), {"theta": torch.zeros(3)})
    objective = sco.Objective.from_loss(sco.logistic_loss, dimension=2)
    for method in (objective.gradients, objective.losses):
        require_named_refusals(method, {"theta": THETA, "batch": DATA}, batch=BATCH)


def test_bad_arguments_of_envelopes_are_named():
    objective = sco.Objective.from_loss(sco.logistic_loss, dimension=2)
    known = {
        "objective": objective,
        "constraint": BALL,
        "smoothness": 4.0,
        "lipschitz": 1.0,
        "accuracy": 0.1,
    }
    require_named_refusals(made(sco.MoreauEnvelope), known)
    link = {"link": "hinge", "smoothness": 4.0, "dimension": 2, "lipschitz": 1.0}
    require_named_refusals(made(sco.MoreauEnvelope.generalized_linear), link)


@pytest.mark.parametrize(
    ("solver", "options"),
    [
        (sco.shuffle_sgd, {"batch_size": 10, "step_size": 0.1, "steps": "practical"}),
        (sco.shuffle_accelerated_sgd, {"batch_size": 10}),
        (sco.shuffle_gradient_descent, {"rounds": 2, "step_size": 0.1, "steps": "practical"}),
        (
            sco.shuffle_strongly_convex,
            {"strong_convexity": 0.1, "method": "accelerated", "phases": 2, "batch_size": 5},
        ),
        (
            sco.shuffle_strongly_convex,
            {"strong_convexity": 0.1, "method": "gradient_descent", "phases": 2, "rounds": 2},
        ),
        (sco.pan_private_accelerated_sgd, {"batch_size": 10}),
    ],
)
def test_bad_arguments_of_optimisers_are_named(solver, options):
    def solve(**given):
        solver(**{"problem": problem(), "budget": BUDGET, **given})

    valid = {"problem": problem(), "budget": BUDGET, **options}
    require_named_refusals(solve, valid)
