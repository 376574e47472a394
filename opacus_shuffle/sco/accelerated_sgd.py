"""``shuffle_accelerated_sgd``: accelerated SGD, with every user in one round.

Algorithm 4 and Theorems 4.3 and 4.7 of Cheu, Joseph, Mao and Peng's shuffle-private convex
optimisation (SCO). A β-smooth loss is minimised directly. A loss that is not smooth is replaced by
its Moreau envelope, and every user smooths its own loss. The iteration is accelerated stochastic
approximation (AC-SA, Lan 2012). Its bound is proved in ``docs/proofs/20_accelerated_sgd.md``, with
the noise that the protocol really has. That page also explains why L_t is not what the paper
prints.
"""

from __future__ import annotations

import math

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
        problem: The problem, minimised directly if ``problem.smoothness`` is known (Theorem 4.3),
            else smoothed (Theorem 4.7).
        budget: The privacy of the run.
        batch_size: b, users per round; by default the one with the smallest proved bound.

    Returns:
        The estimate; :func:`accelerated_bound` (plus L²/(2β) if smoothed) is its excess loss. Users
        beyond the last whole batch are not used; ``privacy.num_users`` is the number of users that
        were.

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
        """Returns the batch size (the caller's, or the best) and the number of whole batches."""
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
        if start.gap is not None:  # the envelope is below the loss, by at most the smoothing cost
            gap = min(gap, start.gap + objective.smoothing_cost(problem.lipschitz))
        bound = accelerated_bound(
            rounds=rounds,
            smoothness=smoothness,
            deviation=deviation,
            distance=distance,
            start_gap=gap,
        )
        choices = {
            "batch_size": batch_size,
            "rounds": rounds,
            "inverse_step_sizes": steps,
            "smoothness": smoothness,
        }
        return Plan(objective, steps, choices, bound)

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a round of AC-SA with each group, and returns the aggregate.

        The sequences are those of SCO Algorithm 4.
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
    """Returns the inverse steps L_1, …, L_T = (2β + s)/(t+1), with the s of the smallest bound."""
    noise = deviation / distance * math.sqrt((rounds + 1) * (rounds + 2) * (2 * rounds + 3) / 6)
    return [(2 * smoothness + noise) / (step + 1) for step in range(1, rounds + 1)]


def accelerated_bound(
    *, rounds: int, smoothness: float, deviation: float, distance: float, start_gap: float
) -> float:
    """Returns an upper bound on the expected excess loss of AC-SA with those step sizes.

    The claim of ``docs/proofs/20_accelerated_sgd.md``, for weights (t+1)·L_t that are constant, and
    estimates of the gradient without bias.

    Args:
        rounds: T.
        smoothness: β.
        deviation: σ.
        distance: D.
        start_gap: The excess loss at the start.
    """
    steps = np.array(
        accelerated_step_sizes(
            rounds=rounds, smoothness=smoothness, deviation=deviation, distance=distance
        )
    )
    times = np.arange(1, rounds + 1)
    moves = 2 * steps[0] * distance**2 / 2
    noise = 0.0
    if deviation > 0:
        margins = steps - 2 / (times + 2) * smoothness
        noise = float(((times + 1) / margins).sum()) * deviation**2 / 2
    return 2 / ((rounds + 1) * (rounds + 2)) * (start_gap + float(moves) + noise)


def accelerated_batch_size(
    oracle: Oracle, *, num_users: int, smoothness: float | None, distance: float
) -> int:
    """Returns the batch size with the smallest bound at T = ⌊n/b⌋ rounds.

    If β is None, the smoothing is chosen with it.
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
    """Returns the β that balances 2βD²/((T+1)(T+2)) against the cost of smoothing, L²/(2β)."""
    return lipschitz / (2 * distance) * math.sqrt((rounds + 1) * (rounds + 2))
