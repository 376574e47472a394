"""``shuffle_strongly_convex``: phases on disjoint groups of users, each from the last one's end.

Theorems 4.8 and 4.9 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO):
every phase starts nearer to the minimiser (``docs/proofs/20_accelerated_sgd.md``, Phases), and
takes steps to suit.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import torch
from torch import Tensor

from opacus_shuffle.core.validation import integer, one_of, positive
from opacus_shuffle.sco.accelerated_sgd import AcceleratedSGD
from opacus_shuffle.sco.gradient_descent import GradientDescent
from opacus_shuffle.sco.objective import LinearObjective
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.solver import Estimate, Solver, Start

METHODS: dict[str, type[Solver]] = {
    "accelerated": AcceleratedSGD,
    "gradient_descent": GradientDescent,
}


def shuffle_strongly_convex(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    strong_convexity: float,
    method: str = "accelerated",
    phases: int | None = None,
    rounds: int | None = None,
    batch_size: int | None = None,
) -> Estimate:
    """Minimises users' mean loss, strongly convex, by phases of another method.

    Args:
        problem: What is to be minimised; without a known smoothness every phase smooths the loss
            anew.
        budget: What the whole run may reveal.
        strong_convexity: λ: the mean loss less λ‖θ‖²/2 is convex on the set.
        method: ``"accelerated"`` (Theorem 4.8) or ``"gradient_descent"`` (Theorem 4.9; every user
            in every round of its phase).
        phases: k; by default the one with the least proved bound (:func:`best_number_of_phases`).
        rounds: T of each phase, for ``"gradient_descent"`` only.
        batch_size: b of each phase, for ``"accelerated"`` only.

    Returns:
        The estimate. ``choices["phases"]`` holds each phase's own. Excess loss: the last phase's
        bound, whose distance is D_1 = min(D, 2L/λ), D_{j+1} = min(diameter, 2L/λ, √(2·bound_j/λ))
        (in mean square, which is all that the bounds need).

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP as for the method itself: the groups are disjoint.
    """
    one_of("method", method, METHODS)
    if rounds is not None and method != "gradient_descent":
        raise ValueError(
            f"rounds goes with method='gradient_descent', got rounds={rounds!r} for {method!r}: "
            "pass batch_size"
        )
    if batch_size is not None and method == "gradient_descent":
        raise ValueError(
            f"batch_size goes with method='accelerated', got {batch_size!r} for "
            "'gradient_descent': pass rounds"
        )
    solver = METHODS[method](problem, budget, rounds=rounds, batch_size=batch_size)
    convexity = positive("strong_convexity", strong_convexity)
    if problem.smoothness is not None and problem.smoothness < convexity:
        raise ValueError(
            f"smoothness must be at least strong_convexity={convexity:g}, got "
            f"{problem.smoothness!r}"
        )
    most = 2 * problem.lipschitz / problem.constraint.diameter
    if convexity > most * (1 + 1e-9):
        raise ValueError(
            f"strong_convexity must not exceed 2 * lipschitz / diameter = {most:g} of the "
            f"constraint set, got {convexity:g}: no loss with gradients that short curves so much "
            "across that diameter; take a smaller one, a smaller set or a larger lipschitz"
        )
    objective = problem.objective
    if isinstance(objective, LinearObjective) and objective.link.lipschitz is not None:
        warnings.warn(
            f"strong_convexity={convexity:g} of the {objective.link.name} loss is taken on trust, "
            "and seldom true: it is flat where scores are large. Add "
            f"{convexity / 2:g} * theta.square().sum() to a loss function of your own; else "
            "nothing is proved of the excess loss (privacy does not depend on it)",
            stacklevel=2,
        )
    if phases is None:
        phases = best_number_of_phases(solver, convexity)
    count = integer("phases", phases, maximum=problem.num_users)
    share = problem.num_users // count
    start, ran = _start(problem, convexity), list[Estimate]()
    for group in torch.split(solver.order()[: share * count], share):
        ran.append(solver.run(group, start))
        start = _start(problem, convexity, ran[-1].theta, ran[-1].excess_loss_bound)
    statements = [phase.privacy for phase in ran]
    privacy = dataclasses.replace(
        statements[-1],
        rounds=sum(statement.rounds for statement in statements),
        rounds_per_user=max(statement.rounds_per_user for statement in statements),
        num_users=sum(statement.num_users for statement in statements),
        bits_per_user=max(statement.bits_per_user for statement in statements),
    )
    choices = {
        "algorithm": f"phases of {method}",
        "strong_convexity": convexity,
        "phases": [dict(phase.choices) for phase in ran],
    }
    history = [norm for phase in ran for norm in phase.history]
    return dataclasses.replace(ran[-1], privacy=privacy, history=history, choices=choices)


def best_number_of_phases(solver: Solver, strong_convexity: float) -> int:
    """Returns the number of phases whose proved bound is the least.

    That is a free choice, since it does not depend on the data. The paper's number, ⌈log₂ log₂ n⌉,
    is among those tried.
    """

    def value(phases: int) -> float:
        try:
            return bound_of_phases(solver, strong_convexity, phases)
        except ValueError:  # so few users that no protocol, or no batch of this size, suits them
            return math.inf

    users = solver.problem.num_users
    papers = math.ceil(math.log2(math.log2(max(users, 4))))
    return min(range(1, min(users, papers + 2) + 1), key=value)


def bound_of_phases(solver: Solver, strong_convexity: float, phases: int) -> float:
    """Returns the excess loss to be proved for a run of so many phases."""
    problem = solver.problem
    start, bound = _start(problem, strong_convexity), math.inf
    for _ in range(phases):
        bound = solver.bound(problem.num_users // phases, start)
        start = _start(problem, strong_convexity, problem.initial, bound)
    return bound


def _start(
    problem: Problem,
    convexity: float,
    theta: Tensor | None = None,
    bound: float | None = None,
) -> Start:
    """Returns where a phase starts.

    Args:
        problem: What is minimised.
        convexity: λ.
        theta: Where the phase before ended; None for the first phase. That may be farther from the
            minimiser than the first start.
        bound: The excess loss proved there; None if none is.
    """
    farthest = 2 * problem.lipschitz / convexity
    if theta is None:
        return Start(problem.initial, min(problem.distance, farthest))
    farthest = min(problem.constraint.diameter, farthest)
    if bound is not None:
        farthest = min(farthest, math.sqrt(2 * bound / convexity))
    return Start(theta, farthest, bound)
