"""``shuffle_strongly_convex``: phases on disjoint groups of users, one after another.

Theorems 4.8 and 4.9 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO):
every phase starts where the previous one ended, nearer to the minimiser, and chooses its steps
accordingly (``docs/proofs/20_accelerated_sgd.md``, Phases).
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
    """Minimises users' mean loss, which is strongly convex, by phases of another method.

    Args:
        problem: The problem; without a known smoothness every phase smooths the loss again.
        budget: The privacy of the whole run.
        strong_convexity: λ: the mean loss less λ‖θ‖²/2 is convex on the set.
        method: ``"accelerated"`` (Theorem 4.8) or ``"gradient_descent"`` (Theorem 4.9; every user
            in every round of its phase).
        phases: k; by default the number with the smallest proved bound.
        rounds: T of each phase, for ``"gradient_descent"`` only.
        batch_size: b of each phase, for ``"accelerated"`` only.

    Returns:
        The estimate. ``choices["phases"]`` has the choices of each phase. The excess loss is the
        last phase's bound, with the distances D_1 = min(D, 2L/λ), D_{j+1} = min(diameter, 2L/λ,
        √(2·bound_j/λ)) (in mean square, which suffices for the bounds).

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
    largest = 2 * problem.lipschitz / problem.constraint.diameter
    if convexity > largest * (1 + 1e-9):
        raise ValueError(
            f"strong_convexity must not exceed 2 * lipschitz / diameter = {largest:g} of the "
            f"constraint set, got {convexity:g}: no loss with gradients that short is so curved on "
            "a set of that diameter; use a smaller one, a smaller set or a larger lipschitz"
        )
    objective = problem.objective
    if isinstance(objective, LinearObjective) and objective.link.lipschitz is not None:
        warnings.warn(
            f"strong_convexity={convexity:g} of the {objective.link.name} loss is assumed, and "
            "seldom true: this loss is flat where scores are large. Add "
            f"{convexity / 2:g} * theta.square().sum() to a loss function of your own; otherwise "
            "nothing is proved about the excess loss (privacy does not depend on it)",
            stacklevel=2,
        )
    if phases is None:
        phases = best_number_of_phases(solver, convexity)
    count = integer("phases", phases, maximum=problem.num_users)
    size = problem.num_users // count
    start, estimates = _start(problem, convexity), list[Estimate]()
    for group in torch.split(solver.order()[: size * count], size):
        estimates.append(solver.run(group, start))
        start = _start(problem, convexity, estimates[-1].theta, estimates[-1].excess_loss_bound)
    statements = [phase.privacy for phase in estimates]
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
        "phases": [dict(phase.choices) for phase in estimates],
    }
    history = [norm for phase in estimates for norm in phase.history]
    return dataclasses.replace(estimates[-1], privacy=privacy, history=history, choices=choices)


def best_number_of_phases(solver: Solver, strong_convexity: float) -> int:
    """Returns the number of phases with the smallest proved bound.

    The number may be chosen freely, because the bound does not depend on the data. The paper's
    number, ⌈log₂ log₂ n⌉, is among the candidates.
    """

    def bound(phases: int) -> float:
        try:
            return bound_of_phases(solver, strong_convexity, phases)
        except ValueError:  # too few users for a protocol, or for a batch of this size
            return math.inf

    users = solver.problem.num_users
    published = math.ceil(math.log2(math.log2(max(users, 4))))
    return min(range(1, min(users, published + 2) + 1), key=bound)


def bound_of_phases(solver: Solver, strong_convexity: float, phases: int) -> float:
    """Returns the proved excess loss of a run of so many phases."""
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
    """Returns the start of a phase.

    Args:
        problem: The problem.
        convexity: λ.
        theta: The end of the previous phase; None for the first phase. It may be farther from the
            minimiser than the first start.
        bound: The proved excess loss of ``theta``; None if none is proved.
    """
    farthest = 2 * problem.lipschitz / convexity
    if theta is None:
        return Start(problem.initial, min(problem.distance, farthest))
    farthest = min(problem.constraint.diameter, farthest)
    if bound is not None:
        farthest = min(farthest, math.sqrt(2 * bound / convexity))
    return Start(theta, farthest, bound)
