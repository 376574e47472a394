"""``shuffle_gradient_descent``: full gradients, every user in every round (SCO Algorithm 5, Theorem 4.9).

>>> import torch
>>> from opacus_shuffle.sco.constraints import L2Ball
>>> records = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.5
>>> def half_square(theta, batch):
...     return (batch - theta).square().sum(dim=1) / 2
>>> estimate = shuffle_gradient_descent(half_square, records, constraint=L2Ball(1.0), lipschitz=2.5, smoothness=1.0, clip=True,
...                                     epsilon=1.0, delta=1e-6, rounds=64, dimension=3,
...                                     generator=torch.Generator().manual_seed(1))
>>> estimate.privacy.rounds_per_user, bool((estimate.theta - 0.5).norm() < 0.5), round(estimate.excess_loss_bound, 2)
(64, True, 0.32)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import boolean, integer, one_of, positive
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.accelerated import Start, known_smoothness, probe_reports
from opacus_shuffle.sco.descent_plan import Setting, plan_descent
from opacus_shuffle.sco.problem import Envelope, Problem, Reports, make_envelope, prepare
from opacus_shuffle.sco.result import Estimate, History
from opacus_shuffle.sco.rounds import Budget
from opacus_shuffle.sco.schedules import PARAMETERS


def shuffle_gradient_descent(
    loss: Any,
    data: Any,
    *,
    constraint: Any,
    lipschitz: float,
    epsilon: float,
    delta: float,
    smoothness: float | None = None,
    envelope: Envelope | None = None,
    initial: Tensor | None = None,
    dimension: int | None = None,
    diameter: float | None = None,
    rounds: int | None = None,
    step_size: float | None = None,
    average: bool = True,
    parameters: str = "calibrated",
    calibration: str = "tight",
    honest_fraction: float = 1.0,
    clip: bool = False,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Minimises users' mean loss by projected gradient descent on all of them, the sums by a shuffle protocol.

    Args:
        loss: As for :func:`~opacus_shuffle.sco.accelerated.shuffle_accelerated_sgd`, like everything not named here.
        data: See there.
        constraint: See there.
        lipschitz: See there.
        epsilon: See there; for all rounds together.
        delta: See there; for all rounds together.
        smoothness: See there (Lemma B.6); None: the loss is smoothed (Theorem 4.9).
        envelope: See there.
        initial: See there.
        dimension: See there.
        diameter: See there.
        rounds: T; each costs a gradient of every user. By default the proved bound's best.
        step_size: η; by default the proved bound's best.
        average: Whether to answer the mean of the iterates, as the theorem does, or the last one (nothing is proved for it).
        parameters: ``"calibrated"`` or ``"printed"`` (the proof's formulas; the bound still holds for them).
        calibration: ``"published"``: Algorithm 5's advanced composition; ``"tight"``: the rounds composed exactly.
        honest_fraction: See there.
        clip: See there.
        generator: See there.

    Returns:
        The estimate; its excess loss is :class:`~opacus_shuffle.sco.schedules.DescentBound`'s (plus L²/(2β) if smoothed).

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against whoever sees all messages of all rounds.
        SCO Algorithm 5 prints θ + ηg; descent is θ − ηg.
    """
    problem = prepare(
        loss,
        data,
        constraint=constraint,
        lipschitz=lipschitz,
        initial=initial,
        dimension=dimension,
        diameter=diameter,
        clip=clip,
        generator=generator,
    )
    choices = DescentChoices(
        smoothness=None if smoothness is None else positive("smoothness", smoothness),
        envelope=envelope,
        rounds=None if rounds is None else integer("rounds", rounds),
        step_size=None if step_size is None else positive("step_size", step_size),
        average=boolean("average", average),
        printed=one_of("parameters", parameters, PARAMETERS) == "printed",
    )
    budget = Budget(epsilon, delta, calibration, honest_fraction)
    start = Start(problem.initial, problem.distance)
    phase = run_descent(problem, budget, torch.arange(problem.num_users), start, choices)
    return Estimate(
        theta=phase.theta,
        privacy=phase.protocol.statement(interaction="full"),
        history=phase.history.rounds,
        parameters={"algorithm": "gradient descent", **phase.parameters, "parameters": parameters},
        excess_loss_bound=phase.bound,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescentChoices:
    """What the user has fixed; see :func:`shuffle_gradient_descent`."""

    smoothness: float | None
    envelope: Envelope | None = None
    rounds: int | None = None
    step_size: float | None = None
    average: bool = True
    printed: bool = False


@dataclasses.dataclass(frozen=True)
class DescentPhase:
    """The outcome of a phase."""

    theta: Tensor
    bound: float | None
    protocol: ShuffleVectorSum
    history: History
    parameters: dict[str, Any]


def run_descent(problem: Problem, budget: Budget, users: Tensor, start: Start, choices: DescentChoices) -> DescentPhase:
    """Gradient descent on some of the users, all of them in every round."""
    known = known_smoothness(problem, choices.smoothness, choices.envelope)
    reports = probe_reports(problem, known, choices.envelope)
    formulas = budget.printed(problem, num_users=len(users), distance=start.distance)
    smoothness = known or (formulas.descent_smoothing() if choices.printed else None)
    plan = plan_descent(
        Setting(
            dimension=problem.dimension,
            num_users=len(users),
            reported=reports.limit,
            lipschitz=problem.lipschitz,
            distance=start.distance,
            diameter=problem.diameter,
            bias=reports.bias,
            budget=budget,
        ),
        rounds=choices.rounds or (formulas.descent_rounds() if choices.printed else None),
        smoothness=smoothness,
    )
    count = plan.bound.rounds
    step = choices.step_size or (formulas.descent_step_size(count) if choices.printed else plan.step_size)
    if known is None:
        smoothness = smoothness or 2 / step
        reports = Reports.smoothed(problem, make_envelope(problem, choices.envelope, smoothness))
    theta, total, history = start.theta, torch.zeros_like(start.theta), History(count)
    for _ in range(count):
        total += theta
        gradient = problem.mean_gradient(plan.protocol, reports, theta, users)
        theta = problem.project(theta - step * gradient)
        history.add(users=len(users), gradient=gradient, theta=theta)
    proved = dataclasses.replace(plan.bound, oracle=dataclasses.replace(plan.bound.oracle, bias=reports.bias))
    value = proved.value(step, smoothness=smoothness) if choices.average and smoothness is not None else None
    return DescentPhase(
        problem.project(total / count) if choices.average else theta,
        None if value is None else problem.capped(value + reports.smoothing_cost),
        plan.protocol,
        history,
        {
            "rounds": count,
            "step_size": step,
            "smoothness": smoothness,
            "lipschitz": problem.lipschitz,
            "distance": start.distance,
        },
    )
