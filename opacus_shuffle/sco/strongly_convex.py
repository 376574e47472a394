"""``shuffle_strongly_convex``: phases on disjoint groups of users, each from where the last one ended (SCO Theorem 4.8, 4.9).

Where a λ-strongly convex loss is within Δ of its minimum, θ is within √(2Δ/λ) of the minimiser: every phase starts nearer, and
takes steps to suit.

>>> import torch
>>> from opacus_shuffle.sco.constraints import L2Ball
>>> records = torch.randn(40_000, 3, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.5
>>> def half_square(theta, batch):
...     return (batch - theta).square().sum(dim=1) / 2
>>> estimate = shuffle_strongly_convex(half_square, records, constraint=L2Ball(1.0), lipschitz=2.5, smoothness=1.0, clip=True,
...                                    strong_convexity=1.0, epsilon=1.0, delta=1e-6, dimension=3,
...                                    generator=torch.Generator().manual_seed(1))
>>> len(estimate.parameters["phases"]), bool((estimate.theta - 0.5).norm() < 0.05), round(estimate.excess_loss_bound, 4)
(4, True, 0.004)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import integer, one_of, positive
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.sco.accelerated import Choices, Start, run_accelerated
from opacus_shuffle.sco.gradient_descent import DescentChoices, run_descent
from opacus_shuffle.sco.pan_private import PanBudget, run_pan_private
from opacus_shuffle.sco.problem import Envelope, prepare
from opacus_shuffle.sco.result import Estimate, Round
from opacus_shuffle.sco.rounds import Budget
from opacus_shuffle.sco.schedules import PARAMETERS
from opacus_shuffle.sco.users import UserLedger, split

METHODS = ("accelerated", "gradient_descent", "pan_private")


def shuffle_strongly_convex(
    loss: Any,
    data: Any,
    *,
    constraint: Any,
    lipschitz: float,
    strong_convexity: float,
    epsilon: float,
    delta: float,
    smoothness: float | None = None,
    envelope: Envelope | None = None,
    method: str = "accelerated",
    phases: int | None = None,
    initial: Tensor | None = None,
    dimension: int | None = None,
    diameter: float | None = None,
    rounds: int | None = None,
    batch_size: int | None = None,
    parameters: str = "calibrated",
    calibration: str = "tight",
    honest_fraction: float = 1.0,
    clip: bool = False,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Minimises users' mean loss, strongly convex, by phases of another method.

    Args:
        loss: As for :func:`~opacus_shuffle.sco.accelerated.shuffle_accelerated_sgd`, like everything not named here.
        data: See there.
        constraint: See there.
        lipschitz: See there.
        strong_convexity: λ: the mean loss less λ‖θ‖²/2 is convex on the set.
        epsilon: See there; of the whole run.
        delta: See there.
        smoothness: See there; None: every phase smooths the loss anew.
        envelope: See there.
        method: ``"accelerated"`` (Theorem 4.8), ``"gradient_descent"`` (Theorem 4.9; every user in every round of its phase) or
            ``"pan_private"`` (Theorem C.3, 3 and 4; no shuffler, records in the order given).
        phases: k, by default ⌈log₂ log₂ n⌉.
        initial: See there.
        dimension: See there.
        diameter: See there.
        rounds: T of each phase, for ``"gradient_descent"`` only.
        batch_size: b of each phase, for the other methods only.
        parameters: See there; a phase for which nothing is proved leaves the next one with its own distance.
        calibration: See there.
        honest_fraction: See there; 1 for ``"pan_private"``.
        clip: See there.
        generator: See there.

    Returns:
        The estimate. ``parameters["phases"]`` holds each phase's own. Excess loss: the last phase's bound, whose distance is
        D_1 = min(diameter, 2L/λ), D_{j+1} = min(D_j, √(2·bound_j/λ)) (in mean square, which is all that the bounds need).

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP as for the method itself: the groups are disjoint.
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
    convexity = positive("strong_convexity", strong_convexity)
    smooth = None if smoothness is None else positive("smoothness", smoothness)
    if smooth is not None and smooth < convexity:
        raise ValueError(f"smoothness must be at least strong_convexity={convexity:g}, got {smoothness!r}")
    one_of("method", method, METHODS)
    _check_combination(method, rounds, batch_size, honest_fraction)
    printed = one_of("parameters", parameters, PARAMETERS) == "printed"
    count = number_of_phases(problem.num_users) if phases is None else integer("phases", phases)
    share = problem.num_users // count
    if not share:
        raise ValueError(f"phases must not exceed the {problem.num_users} users there are, got {phases!r}")
    budget: Budget | PanBudget = Budget(epsilon, delta, calibration, honest_fraction)
    if method == "pan_private":
        budget = PanBudget(epsilon, delta, calibration)
    order = torch.arange(problem.num_users)
    if method != "pan_private":
        order = order[torch.randperm(problem.num_users, generator=problem.generator)]

    ledger, used = UserLedger(problem.num_users), []
    history: list[Round] = []
    start = Start(problem.initial, min(problem.distance, 2 * problem.lipschitz / convexity))
    bits, most_rounds, bound = 0, 1, None
    choices = Choices(smoothness=smooth, envelope=envelope, batch_size=batch_size, printed=printed)
    for users in split(order[: share * count], share):
        before = ledger.used
        if isinstance(budget, PanBudget):
            pan = run_pan_private(problem, budget, ledger, users, start, choices, generator)
            theta, bound, new, settings = pan.theta, pan.bound, pan.history.rounds, pan.parameters
        elif method == "accelerated":
            phase = run_accelerated(problem, budget, ledger, users, start, choices)
            theta, bound, new, settings = phase.theta, phase.bound, phase.history.rounds, phase.parameters
            bits = max(bits, phase.rounds.bits_per_user)
        else:
            ledger.claim(users)
            descent_choices = DescentChoices(smoothness=smooth, envelope=envelope, rounds=rounds, printed=printed)
            descent = run_descent(problem, budget, users, start, descent_choices)
            theta, bound, new, settings = descent.theta, descent.bound, descent.history.rounds, descent.parameters
            most_rounds = max(most_rounds, len(new))
            bits = max(bits, len(new) * descent.protocol.bits_per_user)
        history += [Round(len(history) + each.number, before + each.users, each.gradient_norm, each.theta) for each in new]
        used.append(settings)
        distance = start.distance if bound is None else min(start.distance, math.sqrt(2 * bound / convexity))
        start = Start(theta, distance, bound)
    return Estimate(
        theta=start.theta,
        privacy=PrivacyStatement(
            epsilon=float(epsilon),
            delta=float(delta),
            interaction={"accelerated": "sequential", "gradient_descent": "full", "pan_private": "pan"}[method],
            rounds=len(history),
            rounds_per_user=most_rounds,
            num_users=ledger.used,
            bits_per_user=None if method == "pan_private" else bits,
            calibration=calibration,
            honest_fraction=float(honest_fraction),
        ),
        history=history,
        parameters={
            "algorithm": f"phases of {method}",
            "strong_convexity": convexity,
            "phases": used,
            "parameters": parameters,
        },
        excess_loss_bound=bound,
    )


def number_of_phases(num_users: int) -> int:
    """K = ⌈log₂ log₂ n⌉, at least 1."""
    return max(1, math.ceil(math.log2(max(math.log2(max(num_users, 2)), 1))))


def _check_combination(method: str, rounds: int | None, batch_size: int | None, honest_fraction: float) -> None:
    """Refuses what the method would not read."""
    if rounds is not None and method != "gradient_descent":
        raise ValueError(f"rounds goes with method='gradient_descent', got rounds={rounds!r} for {method!r}: pass batch_size")
    if batch_size is not None and method == "gradient_descent":
        raise ValueError(f"batch_size goes with the other methods, got {batch_size!r} for 'gradient_descent': pass rounds")
    if honest_fraction != 1 and method == "pan_private":
        raise ValueError(f"honest_fraction must be 1 for method='pan_private', which has no reports, got {honest_fraction!r}")
