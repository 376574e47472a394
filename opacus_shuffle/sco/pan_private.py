"""Pan-private accelerated SGD: a stream of records, and an algorithm whose inner state may be seen once (SCO Appendix C).

The algorithm itself is in :mod:`opacus_shuffle.sco.pan_private_stream`; here its parameters are chosen and it is run on data.

>>> import torch
>>> from opacus_shuffle.sco.constraints import L2Ball
>>> records = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.5
>>> def half_square(theta, batch):
...     return (batch - theta).square().sum(dim=1) / 2
>>> estimate = pan_private_accelerated_sgd(half_square, records, constraint=L2Ball(1.0), lipschitz=2.5, smoothness=1.0,
...                                        clip=True, epsilon=1.0, delta=1e-6, dimension=3,
...                                        generator=torch.Generator().manual_seed(1))
>>> estimate.privacy.interaction, bool((estimate.theta - 0.5).norm() < 0.1), round(estimate.excess_loss_bound, 2)
('pan', True, 0.03)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import integer, one_of, positive
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.sco.accelerated import (
    Choices,
    Start,
    choose_steps,
    known_smoothness,
    phase_bound,
    plan_batch_size,
    probe_reports,
)
from opacus_shuffle.sco.objective import take
from opacus_shuffle.sco.pan_private_stream import PanPrivateAcceleratedSGD, pan_private_noise
from opacus_shuffle.sco.printed import Printed
from opacus_shuffle.sco.problem import Envelope, Problem, Reports, make_envelope, prepare
from opacus_shuffle.sco.result import Estimate, History
from opacus_shuffle.sco.schedules import PARAMETERS, Oracle, best_smoothing
from opacus_shuffle.sco.users import UserLedger, split


def pan_private_accelerated_sgd(
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
    inverse_step_sizes: Sequence[float] | None = None,
    parameters: str = "calibrated",
    calibration: str = "tight",
    clip: bool = False,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Minimises the mean loss of a stream of records by pan-private AC-SA, in one pass and in the order given.

    Args:
        loss: As for :func:`~opacus_shuffle.sco.accelerated.shuffle_accelerated_sgd`, like everything not named here.
        data: See there; the records in the order of the stream.
        constraint: See there.
        lipschitz: See there.
        epsilon: ε against an intruder who also sees the output; below 1 for ``calibration="published"``.
        delta: δ.
        smoothness: See there (Theorem C.3, 2), or None to smooth (Theorem C.3, 1).
        envelope: See there.
        initial: See there.
        dimension: See there.
        diameter: See there.
        batch_size: See there.
        inverse_step_sizes: See there.
        parameters: See there. ``"printed"`` takes Theorem 4.3's formulas; the paper gives none for the stream.
        calibration: ``"published"`` or ``"tight"``, see :func:`~opacus_shuffle.sco.pan_private_stream.pan_private_noise`.
        clip: See there.
        generator: Of the noise, on the CPU; by default secret.

    Returns:
        The estimate. Records beyond the last whole batch are not used.

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-pan-privacy (SCO Definition C.2) under replacement of one record, see
        :class:`~opacus_shuffle.sco.pan_private_stream.PanPrivateAcceleratedSGD`. The history may be published with the
        estimate: it is computed from the batches' gradients with both noises.
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
    choices = Choices(
        smoothness=None if smoothness is None else positive("smoothness", smoothness),
        envelope=envelope,
        batch_size=batch_size,
        inverse_step_sizes=inverse_step_sizes,
        printed=one_of("parameters", parameters, PARAMETERS) == "printed",
    )
    budget = PanBudget(epsilon, delta, calibration)
    ledger = UserLedger(problem.num_users)
    start = Start(problem.initial, problem.distance)
    phase = run_pan_private(problem, budget, ledger, torch.arange(problem.num_users), start, choices, generator)
    return Estimate(
        theta=phase.theta,
        privacy=budget.statement(rounds=len(phase.history.rounds), num_users=ledger.used),
        history=phase.history.rounds,
        parameters={"algorithm": "pan-private accelerated SGD", **phase.parameters, "parameters": parameters},
        excess_loss_bound=phase.bound,
    )


@dataclasses.dataclass(frozen=True)
class PanBudget:
    """ε and δ against one intrusion."""

    epsilon: float
    delta: float
    calibration: str

    def noise(self, lipschitz: float, batch_size: int) -> float:
        """ζ."""
        return pan_private_noise(
            lipschitz=lipschitz, batch_size=batch_size, epsilon=self.epsilon, delta=self.delta, calibration=self.calibration
        )

    def oracle(self, reports: Reports, dimension: int) -> Oracle:
        """What a batch tells: two noises, in units of the sum independent of the batch's size."""
        variance = 2 * self.noise(reports.limit, 1) ** 2
        return Oracle(lipschitz=reports.limit, dimension=dimension, variance=variance, bias=reports.bias)

    def statement(self, *, rounds: int, num_users: int) -> PrivacyStatement:
        """What the run has cost."""
        return PrivacyStatement(
            epsilon=float(self.epsilon),
            delta=float(self.delta),
            interaction="pan",
            rounds=rounds,
            rounds_per_user=1,
            num_users=num_users,
            bits_per_user=None,
            calibration=self.calibration,
        )


@dataclasses.dataclass(frozen=True)
class PanPhase:
    """The outcome of a phase."""

    theta: Tensor
    bound: float | None
    history: History
    parameters: dict[str, Any]


def run_pan_private(
    problem: Problem,
    budget: PanBudget,
    ledger: UserLedger,
    users: Tensor,
    start: Start,
    choices: Choices,
    generator: torch.Generator | None,
) -> PanPhase:
    """Pan-private AC-SA on a part of the stream."""
    known = known_smoothness(problem, choices.smoothness, choices.envelope)
    reports = probe_reports(problem, known, choices.envelope)
    oracle = budget.oracle(reports, problem.dimension)
    formulas = Printed(
        num_users=len(users),
        dimension=problem.dimension,
        lipschitz=problem.lipschitz,
        diameter=start.distance,
        epsilon=budget.epsilon,
        delta=budget.delta,
    )
    size = choices.batch_size
    if size is None and choices.printed:
        size = formulas.accelerated_batch_size(known or formulas.accelerated_smoothing())
    elif size is None:
        size = plan_batch_size(problem, oracle, len(users), start.distance, known)
    size = integer("batch_size", size)
    if size > len(users):
        raise ValueError(f"batch_size must not exceed the {len(users)} records there are, got {size!r}")
    groups = ledger.claim_all(split(users[: len(users) // size * size], size))
    smoothness = known
    if smoothness is None:
        best = best_smoothing(rounds=len(groups), lipschitz=problem.lipschitz, distance=start.distance)
        smoothness = formulas.accelerated_smoothing() if choices.printed else best
        reports = Reports.smoothed(problem, make_envelope(problem, choices.envelope, smoothness))
    deviation = oracle.deviation(size)
    steps = choose_steps(choices, len(groups), smoothness, deviation, start.distance)
    algorithm = PanPrivateAcceleratedSGD(
        reports.objective,
        constraint=problem.constraint,
        lipschitz=reports.limit,
        noise=budget.noise(reports.limit, size),
        batch_size=size,
        inverse_step_sizes=steps,
        initial=start.theta,
        clip=problem.clip,
        generator=generator,
    )
    history = History(len(groups))
    for group in groups:
        gradient = algorithm.consume(take(problem.data, group))
        if gradient is not None:
            history.add(users=algorithm.state().records, gradient=gradient, theta=algorithm.state().aggregate)
    return PanPhase(
        algorithm.output(),
        phase_bound(problem, reports, start, steps, smoothness, deviation),
        history,
        {
            "batch_size": size,
            "rounds": len(groups),
            "noise": budget.noise(reports.limit, size),
            "inverse_step_sizes": steps,
            "smoothness": smoothness,
            "lipschitz": problem.lipschitz,
            "distance": start.distance,
        },
    )
