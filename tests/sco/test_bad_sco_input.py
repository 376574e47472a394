"""Problems, sets, objectives and optimisers answer whatever an argument is, or name it."""

import functools
import math

import pytest
import torch
from helpers.bad_calls import require_named_refusals
from helpers.convex_problems import BUDGET, half_square, solve
from torch import nn

from opacus_shuffle import sco
from opacus_shuffle.sco.constraints import check_constraint
from opacus_shuffle.sco.records import number_of_users

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.nn.functional.normalize(
    torch.arange(60.0, dtype=torch.float64).reshape(30, 2).sin(), dim=1
)
DATA = (X, torch.where(X[:, 0] > 0, 1.0, -1.0).double())
THETA, BALL = torch.zeros(2, dtype=torch.float64), sco.L2Ball(1.0)
KNOWN = {"lipschitz": 1.0, "smoothness": 0.25, "dimension": 2, "clip": True}
PARTS = {"loss": sco.logistic_loss, "data": DATA, "constraint": BALL, **KNOWN}
RUN = {"problem": sco.Problem(**PARTS), "budget": sco.PrivacyBudget(2.0, 1e-6)}
OBJECTIVE = sco.Objective.from_loss(sco.logistic_loss, dimension=2)
PRACTICAL = {"step_size": 0.1, "steps": "practical"}
PHASES = {"strong_convexity": 0.1, "phases": 2}
CALLS = {
    "Problem": (
        sco.Problem,
        {**PARTS, "envelope": None, "initial": THETA, "diameter": 2.0, "generator": None},
        {"dimension": ("initial must have shape",)},
    ),
    "PrivacyBudget": (
        sco.PrivacyBudget,
        {"epsilon": 1.0, "delta": 1e-5, "honest_fraction": 0.9},
        {},
    ),
    "L2Ball": (sco.L2Ball, {"radius": 1.0, "center": THETA}, {}),
    "Box": (sco.Box, {"low": THETA - 1, "high": THETA + 1}, {"low": None, "high": None}),
    "Box of numbers": (sco.Box, {"low": 0.0, "high": 1.0, "dimension": 2}, {}),
    "project": (BALL.project, {"theta": THETA}, {}),
    "from_loss": (sco.Objective.from_loss, {"loss": sco.logistic_loss, "dimension": 2}, {}),
    "gradients": (OBJECTIVE.gradients, {"theta": THETA, "batch": DATA}, {"batch": ("data must",)}),
    "MoreauEnvelope": (sco.MoreauEnvelope, {"objective": OBJECTIVE, "smoothness": 4.0}, {}),
    "sgd": (sco.shuffle_sgd, {**RUN, "batch_size": 10, **PRACTICAL}, {}),
    "accelerated": (sco.shuffle_accelerated_sgd, {**RUN, "batch_size": 10}, {}),
    "descent": (sco.shuffle_gradient_descent, {**RUN, "rounds": 2, **PRACTICAL}, {}),
    "phases": (
        sco.shuffle_strongly_convex,
        {**RUN, **PHASES, "method": "accelerated", "batch_size": 5},
        {},
    ),
    "phases of descent": (
        sco.shuffle_strongly_convex,
        {**RUN, **PHASES, "method": "gradient_descent", "rounds": 2},
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_are_named(name):
    function, valid, said = CALLS[name]
    # What comes out is not looked at: it may hold the given tensors.
    require_named_refusals(lambda **given: (function(**given), None)[1], valid, **said)


def loss_of(loss, dimension=1):
    return sco.Objective.from_loss(loss, dimension=dimension)


def square(theta, x):
    return (x @ theta) ** 2


def envelope(beta, loss=sco.hinge_loss, dimension=1):
    return sco.MoreauEnvelope(loss_of(loss, dimension), beta)


def run_with(run, **change):
    known = {"constraint": BALL, "lipschitz": 2.0, "smoothness": 1.0, "dimension": 2, **BUDGET}
    call = {"loss": half_square, "data": torch.zeros(100, 2), **known, **change}
    return solve(run, **call)


def accelerated(**change):
    return run_with(sco.shuffle_accelerated_sgd, **{"batch_size": 10, **change})


descent = functools.partial(run_with, sco.shuffle_gradient_descent, rounds=2)
phases = functools.partial(run_with, sco.shuffle_strongly_convex, strong_convexity=1.0)
ONE, RECORDS = torch.ones(1), torch.ones(3, 1)
UNBOUNDED = type("Unbounded", (), {"project": lambda self, theta: theta})()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: sco.L2Ball(0.0), "radius must be positive"),
        (lambda: sco.L2Ball(1.0, torch.tensor([math.nan])), "center must hold 1 finite numbers"),
        (
            lambda: sco.L2Ball(1.0, torch.zeros(2, 2)),
            r"center must have shape \(d,\), got \(2, 2\)",
        ),
        (lambda: sco.L2Ball(1.0, torch.zeros(2)).project(torch.zeros(3)), r"shape \(2,\)"),
        (
            lambda: sco.L2Ball(1.0).project(torch.tensor([math.nan])),
            "must be finite.*smaller steps",
        ),
        (lambda: sco.L2Ball(1.0).project(torch.tensor([1])), "floating-point"),
        (lambda: sco.Box(1.0, 0.0), "low must not exceed high"),
        (lambda: sco.Box(1.0, 1.0), "below it somewhere"),
        (lambda: sco.Box(0.0, math.inf), "high must be a finite number"),
        (lambda: sco.Box(torch.zeros(2), torch.ones(3)), "must agree"),
        (lambda: sco.Box(torch.zeros(2), 1.0, dimension=3), "must agree"),
        (lambda: sco.Box(0.0, 1.0).diameter, "dimension must be given"),
        (lambda: sco.Box(0.0, 1.0, dimension=2).project(torch.zeros(3)), r"shape \(2,\)"),
        (lambda: check_constraint(lambda theta: theta), "constraint must be"),
        (lambda: check_constraint(sco.L2Ball), "constraint must be"),
        (lambda: check_constraint(UNBOUNDED), "with project.* and diameter"),
        (lambda: check_constraint(sco.Box(0.0, 1.0)), "dimension must be given"),
        (lambda: sco.MoreauEnvelope(sco.absolute_loss, 1.0), "objective must be"),
        (lambda: envelope(0.0), "smoothness must be positive"),
        (
            lambda: envelope(1.0, square),
            "loss must be one of .*, got RecordObjective: pass smoothn",
        ),
        (lambda: envelope(1.0).losses(torch.zeros(1), torch.zeros(3, 1)), "pair"),
        (lambda: loss_of(3), "loss must be a function"),
        (lambda: loss_of(sco.L2Ball), "loss must be a function"),
        (
            lambda: loss_of(nn.Linear(1, 1)),
            "got the module Linear: write its loss .*functional_call",
        ),
        (lambda: loss_of((nn.Linear(1, 1), nn.MSELoss())), "the module Linear.*'shuffled_sums'"),
        (lambda: loss_of(square, 0), "dimension"),
        (lambda: loss_of(square, None), "dimension must be given"),
        (
            lambda: loss_of(square, 2).gradients(torch.zeros(3), torch.zeros(4, 2)),
            r"theta must be .*\(2,\)",
        ),
        (
            lambda: loss_of(square, 2).gradients(torch.zeros(3, 2), torch.zeros(4, 2)),
            "a row for each record, got torch.float32 of shape",
        ),
        (lambda: loss_of(square).losses(torch.tensor([1]), RECORDS), "int64"),
        (lambda: loss_of(square).gradients([0.0], RECORDS), "theta must be"),
        (lambda: loss_of(square).losses(torch.tensor([math.nan]), RECORDS), "theta must be fin"),
        (lambda: loss_of(lambda t, x: x @ t.repeat(2, 1).T).losses(ONE, RECORDS), "one loss"),
        (lambda: loss_of(lambda t, x: 1.0).gradients(ONE, RECORDS), "got float"),
        (
            lambda: loss_of(lambda t, x: (x @ t).log()).gradients(ONE, torch.eye(2)[:, :1]),
            "NaN or infinity among them.*clip=True",
        ),
        (lambda: loss_of(lambda t, x: (x + torch.rand(1)) @ t).losses(ONE, RECORDS), "random"),
        (
            lambda: loss_of(lambda t, x: x @ t if x.sum().item() else x).losses(ONE, RECORDS),
            "must run under torch.func.vmap .*without branches on values",
        ),
        (
            lambda: loss_of(square, 3).gradients(torch.zeros(3), torch.zeros(4, 2)),
            r"theta has shape \(3,\): is the dimension right",
        ),
        (lambda: loss_of(sco.hinge_loss).losses(ONE, RECORDS), "pair"),
        (
            lambda: loss_of(sco.squared_loss).losses(ONE, (torch.zeros(3, 3), torch.zeros(3))),
            r"x must be .*shape \(B, 1\)",
        ),
        (
            lambda: loss_of(sco.squared_loss).losses(ONE, (RECORDS, RECORDS)),
            r"y must be a tensor of shape \(B,\)",
        ),
        (
            lambda: loss_of(sco.logistic_loss).losses(ONE, (RECORDS, torch.zeros(3))),
            r"2 \* y - 1",
        ),
        (
            lambda: loss_of(sco.hinge_loss).losses(ONE, (RECORDS, torch.zeros(3))),
            r"2 \* y - 1",
        ),
        (lambda: number_of_users(torch.tensor(1.0)), r"shape \(\)"),
        (lambda: number_of_users((torch.zeros(2), torch.zeros(3))), r"\[2, 3\]"),
        (lambda: number_of_users(()), "no tensor"),
        (lambda: number_of_users([1, 2]), "got int"),
        (lambda: accelerated(epsilon=16.0), "epsilon must not exceed 15"),
        (lambda: accelerated(delta=0.5), "delta must be at least 1e-200 and below 1/2"),
        (lambda: accelerated(honest_fraction=0.2), "honest_fraction must lie in \\[1/3, 1\\]"),
        (lambda: accelerated(lipschitz=0.0), "lipschitz must be positive"),
        (lambda: accelerated(smoothness=-1.0), "smoothness must be positive"),
        (lambda: accelerated(diameter=0.0), "diameter must be positive"),
        (lambda: accelerated(constraint=None), "constraint must be"),
        (lambda: accelerated(dimension=None), "dimension must be given"),
        (
            lambda: accelerated(dimension=None, constraint=sco.Box(0.0, 1.0)),
            "dimension must be given",
        ),
        (
            lambda: accelerated(initial=torch.zeros(3)),
            "initial must have shape \\(2,\\), got \\(3,\\)",
        ),
        (
            lambda: accelerated(initial=torch.tensor([0.0, math.nan])),
            "initial must hold 2 finite numbers",
        ),
        (
            lambda: accelerated(initial="here"),
            "initial must be a tensor of real numbers, got 'here'",
        ),
        (
            lambda: accelerated(initial=torch.zeros(2) * 1j),
            "initial must hold real numbers, got torch.complex64",
        ),
        (lambda: accelerated(envelope=3, smoothness=None), "envelope must be a function .*, got 3"),
        (
            lambda: accelerated(envelope=lambda beta: None, smoothness=None),
            "what envelope returns must be a MoreauEnvelope, got NoneT",
        ),
        (
            lambda: accelerated(envelope=lambda beta: envelope(beta, dimension=3), smoothness=None),
            "envelope must return one of dimension 2, got 3",
        ),
        (lambda: accelerated(envelope=lambda beta: None), "envelope must be left out"),
        (lambda: accelerated(clip=1), "clip must be True or False"),
        (lambda: accelerated(generator=0), "generator must be a Generator"),
        (lambda: accelerated(loss=nn.Linear(2, 1)), "loss must be a function"),
        *(
            (
                lambda run=run: run(smoothness=None),
                "loss must be one of .*shuffle_sgd, which needs no",
            )
            for run in (accelerated, descent, phases)
        ),
        (lambda: accelerated(data=torch.zeros(0, 2)), "at least one user"),
        (lambda: phases(rounds=3), "rounds goes with method='gradient_descent'"),
        (
            lambda: phases(method="gradient_descent", batch_size=3),
            "batch_size goes with method='accelerated'",
        ),
        (lambda: phases(method="newton"), "method must be one of"),
        (lambda: phases(strong_convexity=2.0), "smoothness must be at least strong_convexity"),
        (lambda: phases(strong_convexity=0.0), "strong_convexity must be positive"),
        (
            lambda: phases(lipschitz=0.4),
            "strong_convexity must not exceed 2 \\* lipschitz / diameter = 0.4",
        ),
        (lambda: phases(phases=101), "phases must be .* \\(and at most 100\\)"),
        (lambda: phases(phases=0), "phases must be a whole number"),
        (lambda: accelerated(batch_size=101), "batch_size must be .* \\(and at most 100\\)"),
        (lambda: accelerated(batch_size=0), "batch_size must be a whole number"),
        (lambda: sco.shuffle_sgd(half_square, RECORDS), "problem must be a Problem, got function"),
        (lambda: sco.shuffle_sgd(RUN["problem"], 1.0), "budget must be a PrivacyBudget, got float"),
        (
            lambda: sco.shuffle_sgd(**RUN, steps="tuned"),
            "steps must be one of 'proved', 'practical'",
        ),
        (
            lambda: sco.shuffle_gradient_descent(**RUN, steps="tuned"),
            "steps must be one of 'proved', 'practical', got 'tuned'",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(act, message):
    with pytest.raises(ValueError, match=message):
        act()
