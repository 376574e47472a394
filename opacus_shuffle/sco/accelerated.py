"""``shuffle_accelerated_sgd``: accelerated SGD (AC-SA), every user in one round (SCO Algorithm 4, Theorems 4.3 and 4.7).

For a β-smooth loss directly; for one that is not smooth, on its Moreau envelope: every user smooths its own loss.

>>> import torch
>>> from opacus_shuffle.sco.constraints import L2Ball
>>> records = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.5
>>> def half_square(theta, batch):
...     return (batch - theta).square().sum(dim=1) / 2
>>> estimate = shuffle_accelerated_sgd(half_square, records, constraint=L2Ball(1.0), lipschitz=2.5, smoothness=1.0, clip=True,
...                                    epsilon=1.0, delta=1e-6, dimension=3, generator=torch.Generator().manual_seed(1))
>>> estimate.privacy.rounds_per_user, bool((estimate.theta - 0.5).norm() < 0.1), round(estimate.excess_loss_bound, 2)
(1, True, 0.03)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import one_of, positive
from opacus_shuffle.sco.moreau import MoreauEnvelope
from opacus_shuffle.sco.printed import printed_step_sizes
from opacus_shuffle.sco.problem import Envelope, Problem, Reports, make_envelope, prepare
from opacus_shuffle.sco.result import Estimate, History
from opacus_shuffle.sco.rounds import Budget, SequentialRounds, make_batches
from opacus_shuffle.sco.schedules import (
    PARAMETERS,
    Oracle,
    accelerated_batch_size,
    accelerated_bound,
    accelerated_momentum,
    accelerated_step_sizes,
    best_smoothing,
)
from opacus_shuffle.sco.users import UserLedger


def shuffle_accelerated_sgd(
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
    batch_size: int | None = None,
    batches: Iterable[Any] | None = None,
    inverse_step_sizes: Sequence[float] | None = None,
    parameters: str = "calibrated",
    calibration: str = "tight",
    honest_fraction: float = 1.0,
    clip: bool = False,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Minimises users' mean loss by one pass of AC-SA, each batch's gradients summed by a shuffle protocol.

    Args:
        loss: As for :func:`~opacus_shuffle.sco.sgd.shuffle_sgd`.
        data: See there.
        constraint: See there.
        lipschitz: L of the loss (before any smoothing).
        epsilon: See there.
        delta: See there.
        smoothness: β: every user's loss has a β-Lipschitz gradient on the set (Theorem 4.3). None (Theorem 4.7): the loss is
            smoothed, by the β that the proved bound likes best; an ``Objective`` that is a Moreau envelope brings its own.
        envelope: With ``smoothness`` None: the Moreau envelope at a given β, where there is a better one than the generic
            solver's, as for linear models:
            ``lambda beta: MoreauEnvelope.generalized_linear("absolute", beta, dimension=d)``.
        initial: See there.
        dimension: See there.
        diameter: See there.
        batch_size: See there.
        batches: See there.
        inverse_step_sizes: L_1, …, L_T, one per round; the step itself is 1/L_t. By default the proved bound's best.
        parameters: ``"calibrated"``; ``"printed"``: Theorem 4.3's formulas as they stand, which need not converge
            (:mod:`opacus_shuffle.sco.schedules`); no excess loss is proved where they need not.
        calibration: See there.
        honest_fraction: See there.
        clip: See there.
        generator: See there.

    Returns:
        The estimate; :func:`~opacus_shuffle.sco.schedules.accelerated_bound` (plus L²/(2β) if smoothed) is its excess loss.

    Raises:
        ValueError: If an argument is out of range, a user is in two batches, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP as for :func:`~opacus_shuffle.sco.sgd.shuffle_sgd`: each user is in one round.
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
    budget = Budget(epsilon, delta, calibration, honest_fraction)
    ledger = UserLedger(problem.num_users)
    choices = Choices(
        smoothness=None if smoothness is None else positive("smoothness", smoothness),
        envelope=envelope,
        batch_size=batch_size,
        batches=batches,
        inverse_step_sizes=inverse_step_sizes,
        printed=one_of("parameters", parameters, PARAMETERS) == "printed",
    )
    start = Start(problem.initial, problem.distance)
    phase = run_accelerated(problem, budget, ledger, torch.arange(problem.num_users), start, choices)
    return Estimate(
        theta=phase.theta,
        privacy=phase.rounds.statement(rounds=len(phase.history.rounds), num_users=ledger.used),
        history=phase.history.rounds,
        parameters={"algorithm": "accelerated SGD", **phase.parameters, "parameters": parameters},
        excess_loss_bound=phase.bound,
    )


class AcceleratedIterates:
    """The three sequences of AC-SA: θ, the aggregate (the answer) and the middle (where gradients are taken).

    SCO Algorithm 6 has the middle point of its first round undefined, and takes later ones with α_t and the old aggregate: that
    is the new aggregate over again. Here they are AC-SA's, as in Algorithm 4: θ_1, then with α_{t+1} and the new aggregate.
    """

    def __init__(self, project: Callable[[Tensor], Tensor], start: Tensor, inverse_step_sizes: Sequence[float]) -> None:
        self._project, self._step_sizes = project, inverse_step_sizes
        self.step = 1
        self.theta = self.aggregate = self.middle = start

    def advance(self, gradient: Tensor) -> None:
        """One step; ``gradient`` is an estimate at :attr:`middle`."""
        alpha = accelerated_momentum(self.step)
        self.theta = self._project(self.theta - gradient / self._step_sizes[self.step - 1])
        self.aggregate = alpha * self.theta + (1 - alpha) * self.aggregate
        self.step += 1
        alpha = accelerated_momentum(self.step)
        self.middle = alpha * self.theta + (1 - alpha) * self.aggregate


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a phase starts.

    Attributes:
        theta: In the set.
        distance: D with E‖theta − θ*‖² ≤ D².
        gap: At least the expected excess loss there, if that is known better than L·D.
    """

    theta: Tensor
    distance: float
    gap: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user has fixed; see :func:`shuffle_accelerated_sgd`."""

    smoothness: float | None
    envelope: Envelope | None = None
    batch_size: int | None = None
    batches: Iterable[Any] | None = None
    inverse_step_sizes: Sequence[float] | None = None
    printed: bool = False


@dataclasses.dataclass(frozen=True)
class Phase:
    """The outcome of a phase."""

    theta: Tensor
    bound: float | None
    rounds: SequentialRounds
    history: History
    parameters: dict[str, Any]


def run_accelerated(
    problem: Problem, budget: Budget, ledger: UserLedger, users: Tensor, start: Start, choices: Choices
) -> Phase:
    """AC-SA on some of the users."""
    known = known_smoothness(problem, choices.smoothness, choices.envelope)
    reports = probe_reports(problem, known, choices.envelope)
    batch_size = choices.batch_size
    formulas = budget.printed(problem, num_users=len(users), distance=start.distance)
    if choices.batches is None and batch_size is None:
        if choices.printed:
            batch_size = formulas.accelerated_batch_size(known or formulas.accelerated_smoothing())
        else:
            batch_size = plan_batch_size(problem, budget.planned(problem, reports), len(users), start.distance, known)
    groups = make_batches(problem, ledger, users, batch_size, choices.batches)
    smoothness = known
    if smoothness is None:
        best = best_smoothing(rounds=len(groups), lipschitz=problem.lipschitz, distance=start.distance)
        smoothness = formulas.accelerated_smoothing() if choices.printed else best
        reports = Reports.smoothed(problem, make_envelope(problem, choices.envelope, smoothness))
    rounds = SequentialRounds(problem, reports, budget, groups)
    deviation = rounds.deviation
    steps = choose_steps(choices, len(groups), smoothness, deviation, start.distance)
    iterates, history, reached = AcceleratedIterates(problem.project, start.theta, steps), History(len(groups)), 0
    for group in groups:
        gradient = rounds.gradient(iterates.middle, group)
        iterates.advance(gradient)
        reached += len(group)
        history.add(users=reached, gradient=gradient, theta=iterates.aggregate)
    return Phase(
        iterates.aggregate,
        phase_bound(problem, reports, start, steps, smoothness, deviation),
        rounds,
        history,
        {
            "batch_size": min(rounds.sizes),
            "rounds": len(groups),
            "inverse_step_sizes": steps,
            "smoothness": smoothness,
            "lipschitz": problem.lipschitz,
            "distance": start.distance,
        },
    )


def known_smoothness(problem: Problem, smoothness: float | None, envelope: Envelope | None) -> float | None:
    """β, unless the loss is to be smoothed."""
    if smoothness is not None and envelope is not None:
        raise ValueError("envelope must be left out where smoothness is given: it is for losses that are not smooth")
    if smoothness is None and envelope is None and isinstance(problem.objective, MoreauEnvelope):
        return float(problem.objective.smoothness)
    return smoothness


def probe_reports(problem: Problem, smoothness: float | None, envelope: Envelope | None) -> Reports:
    """What users will report, as far as their norm goes (an envelope's does not depend on β)."""
    if smoothness is not None:
        return Reports.of(problem)
    return Reports.smoothed(problem, make_envelope(problem, envelope, problem.lipschitz / problem.distance))


def plan_batch_size(problem: Problem, oracle: Oracle, num_users: int, distance: float, smoothness: float | None) -> int:
    """The proved bound's best."""
    return accelerated_batch_size(
        oracle, num_users=num_users, smoothness=smoothness, distance=distance, lipschitz=problem.lipschitz
    )


def choose_steps(choices: Choices, rounds: int, smoothness: float, deviation: float, distance: float) -> list[float]:
    """The user's L_t, or the defaults."""
    if choices.inverse_step_sizes is None:
        make = printed_step_sizes if choices.printed else accelerated_step_sizes
        return make(rounds=rounds, smoothness=smoothness, deviation=deviation, distance=distance)
    steps = positive_numbers("inverse_step_sizes", choices.inverse_step_sizes)
    if len(steps) != rounds:
        raise ValueError(f"inverse_step_sizes must hold one L_t for each of the {rounds} rounds, got {len(steps)}")
    return steps


def positive_numbers(name: str, values: Any) -> list[float]:
    """A list of positive numbers."""
    if isinstance(values, str) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a sequence of positive numbers, got {values!r}")
    return [positive(name, step) for step in (values.tolist() if isinstance(values, Tensor) else values)]


def phase_bound(
    problem: Problem, reports: Reports, start: Start, steps: list[float], smoothness: float, deviation: float
) -> float | None:
    """Excess of the loss itself after the phase; None where nothing is proved."""
    gap = reports.limit * start.distance
    if start.gap is not None:  # the envelope lies below the loss, by no more than the cost
        gap = min(gap, start.gap + reports.smoothing_cost)
    bound = accelerated_bound(
        steps,
        smoothness=smoothness,
        deviation=deviation,
        distance=start.distance,
        start_gap=gap,
        diameter=problem.diameter,
        bias=reports.bias,
    )
    return problem.capped(bound + reports.smoothing_cost) if bound is not None else None
