"""``shuffle_accelerated_sgd``: accelerated SGD, every user in one round.

Algorithm 4 and Theorems 4.3 and 4.7 of Cheu, Joseph, Mao and Peng's shuffle-private convex
optimisation (SCO): for a β-smooth loss directly; for one that is not smooth, on its Moreau
envelope, where every user smooths its own loss. The iteration is accelerated stochastic
approximation (AC-SA, Lan 2012). Its bound is a number that ``docs/proofs/20_accelerated_sgd.md``
proves, with the noise that the protocol really has. That page also says why L_t is not what the
paper prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.solver import Estimate, Oracle, Plan, Solver, Start

_CANDIDATES = 4000


def shuffle_accelerated_sgd(
    problem: Problem, budget: PrivacyBudget, *, batch_size: int | None = None
) -> Estimate:
    """Minimises users' mean loss by one pass of accelerated SGD over shuffled sums of gradients.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Theorem 4.3),
            else smoothed (Theorem 4.7).
        budget: What may be revealed.
        batch_size: b, users per round; by default the proved bound's best.

    Returns:
        The estimate; :func:`accelerated_bound` (plus L²/(2β) if smoothed) is its excess loss. Users
        beyond the last whole batch are not used; ``privacy.num_users`` says how many were.

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP as for :func:`~opacus_shuffle.sco.gradient_descent.shuffle_sgd`: each user is in
        one round.
    """
    return AcceleratedSGD(problem, budget, batch_size=batch_size).solve()


class AcceleratedSGD(Solver):
    """Accelerated SGD on one group of users after another (SCO Algorithm 4)."""

    algorithm = "accelerated SGD"

    def schedule(self, num_users: int, start: Start) -> tuple[int, int]:
        """Returns the caller's batch size, or the proved bound's best, and the whole batches."""
        best = accelerated_batch_size(
            self.oracle(self.planned_variance()),
            num_users=num_users,
            smoothness=self.problem.smoothness,
            distance=start.distance,
        )
        return self.batches(num_users, best)

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns smoothing, steps and bound for so many rounds of this size."""
        problem, distance = self.problem, start.distance
        smoothness = problem.smoothness or best_smoothing(
            rounds=rounds, lipschitz=problem.lipschitz, distance=distance
        )
        objective = problem.smoothed(smoothness)
        deviation = self.oracle(self.round_variance(batch_size, rounds)).deviation(batch_size)
        steps = accelerated_step_sizes(
            rounds=rounds, smoothness=smoothness, deviation=deviation, distance=distance
        )
        gap = problem.lipschitz * distance
        if start.gap is not None:  # the envelope lies below the loss, by no more than the cost
            gap = min(gap, start.gap + objective.smoothing_cost(problem.lipschitz))
        bound = accelerated_bound(
            steps,
            smoothness=smoothness,
            deviation=deviation,
            distance=distance,
            start_gap=gap,
            diameter=problem.constraint.diameter,
            bias=objective.gradient_error,
        )
        chosen = {
            "batch_size": batch_size,
            "rounds": rounds,
            "inverse_step_sizes": steps,
            "smoothness": smoothness,
        }
        return Plan(objective, steps, chosen, bound)

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a round of AC-SA with each group, and returns the aggregate.

        The sequences are as in SCO Algorithm 4. Algorithm 6 prints a middle, where gradients are
        taken, that is undefined at first, then the aggregate over again.
        """
        theta = aggregate = start.theta
        for step, (group, inverse_step) in enumerate(zip(groups, plan.steps, strict=True), 1):
            alpha = 2 / (step + 2)
            middle = alpha * theta + (1 - alpha) * aggregate
            gradient = self.mean_gradient(plan, middle, group, len(groups))
            theta = self.problem.constraint.project(theta - gradient / inverse_step)
            aggregate = alpha * theta + (1 - alpha) * aggregate
        return aggregate


def accelerated_step_sizes(
    *, rounds: int, smoothness: float, deviation: float, distance: float
) -> list[float]:
    """Returns L_1, …, L_T = (2β + s)/(t+1) with the s that minimises :func:`accelerated_bound`."""
    noise = deviation / distance * math.sqrt((rounds + 1) * (rounds + 2) * (2 * rounds + 3) / 6)
    return [(2 * smoothness + noise) / (step + 1) for step in range(1, rounds + 1)]


def accelerated_bound(
    inverse_step_sizes: Sequence[float],
    *,
    smoothness: float,
    deviation: float,
    distance: float,
    start_gap: float,
    diameter: float,
    bias: float = 0.0,
) -> float | None:
    """Returns an upper bound on the expected excess loss of AC-SA; None where nothing is proved.

    The claim of ``docs/proofs/20_accelerated_sgd.md``, whose names these are. It takes L_t > α_t·β
    for all t.

    Args:
        inverse_step_sizes: L_1, …, L_T; a step itself is 1/L_t.
        smoothness: β.
        deviation: σ.
        distance: D.
        start_gap: The excess loss at the start.
        diameter: Of the set; counts only if (t+1)L_t grows, or against the bias.
        bias: The gradients' errors have an expectation no longer than that.
    """
    steps = np.asarray(inverse_step_sizes, dtype=np.float64)
    times = np.arange(1, len(steps) + 1)
    spare = steps - 2 / (times + 2) * smoothness
    if np.any(spare < 0) or (deviation > 0 and np.any(spare == 0)):
        return None
    weights = (times + 1) * steps
    # Weights that are constant but for rounding count as constant.
    rising = np.maximum(np.diff(weights) - 1e-12 * weights[1:], 0).sum()
    moves = weights[0] * distance**2 / 2 + rising * diameter**2 / 2
    noise = float(((times + 1) / spare).sum()) * deviation**2 / 2 if deviation > 0 else 0.0
    gamma = 2 / ((len(steps) + 1) * (len(steps) + 2))
    return gamma * (start_gap + float(moves) + noise) + bias * diameter


def accelerated_batch_size(
    oracle: Oracle, *, num_users: int, smoothness: float | None, distance: float
) -> int:
    """Returns the batch size with the least bound at T = ⌊n/b⌋ rounds.

    With β None the smoothing is chosen with it.
    """
    # All batch sizes, or a geometric grid of them.
    candidates = np.geomspace(1, num_users, min(num_users, _CANDIDATES))
    candidates = np.unique(np.round(candidates).astype(np.int64))
    rounds = np.unique(np.maximum(num_users // candidates, 1)).astype(np.float64)
    sizes = num_users // rounds
    gamma = 2 / ((rounds + 1) * (rounds + 2))
    beta = np.full_like(rounds, smoothness or 0.0)
    if smoothness is None:
        beta = oracle.lipschitz / distance * np.sqrt(1 / (2 * gamma))
    deviation = oracle.lipschitz * np.sqrt(1 / sizes + (oracle.ratio / sizes) ** 2)
    bound = gamma * (oracle.lipschitz * distance + beta * distance**2)
    bound += 2 * distance * deviation * np.sqrt(gamma * (2 * rounds + 3) / 12)
    if smoothness is None:
        bound += oracle.lipschitz**2 / (2 * beta)
    return int(sizes[int(np.argmin(bound))])


def best_smoothing(*, rounds: int, lipschitz: float, distance: float) -> float:
    """Returns the β that balances 2βD²/((T+1)(T+2)) against what smoothing costs, L²/(2β)."""
    return lipschitz / (2 * distance) * math.sqrt((rounds + 1) * (rounds + 2))
