"""``shuffle_accelerated_sgd``: accelerated SGD, every user in one round.

Algorithm 4 and Theorems 4.3 and 4.7 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO): for a β-smooth
loss directly; for one that is not smooth, on its Moreau envelope, where every user smooths its own loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from opacus_shuffle.sco.acceleration import (
    AcceleratedIterates,
    accelerated_batch_size,
    accelerated_bound,
    accelerated_step_sizes,
    best_smoothing,
)
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.result import Estimate
from opacus_shuffle.sco.solver import Choices, Plan, Solver, Start


def shuffle_accelerated_sgd(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    batch_size: int | None = None,
    batches: Iterable[Any] | None = None,
    inverse_step_sizes: Sequence[float] | None = None,
) -> Estimate:
    """Minimises users' mean loss by one pass of accelerated SGD, each batch's gradients summed by a shuffle protocol.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Theorem 4.3), else smoothed
            (Theorem 4.7).
        budget: What may be revealed.
        batch_size: b, users per round; by default the proved bound's best.
        batches: Who takes part when, instead of ``batch_size``: vectors of user numbers, disjoint. They must not depend on the
            users' data.
        inverse_step_sizes: L_1, …, L_T, one per round; the step itself is 1/L_t. By default the proved bound's best.

    Returns:
        The estimate; :func:`~opacus_shuffle.sco.acceleration.accelerated_bound` (plus L²/(2β) if smoothed) is its excess loss.
        Users beyond the last whole batch are not used; ``privacy.num_users`` says how many were.

    Raises:
        ValueError: If an argument is out of range, a user is in two batches, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP as for :func:`~opacus_shuffle.sco.gradient_descent.shuffle_sgd`: each user is in one round.
    """
    choices = Choices(batch_size=batch_size, batches=batches, inverse_step_sizes=inverse_step_sizes)
    return AcceleratedSGD(problem, budget, choices).solve()


class AcceleratedSGD(Solver):
    """Accelerated SGD on one group of users after another (SCO Algorithm 4)."""

    algorithm = "accelerated SGD"

    def sizes(self, num_users: int, start: Start) -> list[int]:
        """Returns the caller's batch size, or the proved bound's best, for every round."""

        def best() -> int:
            oracle, smoothness = self.oracle(self.variance(None)), self.problem.smoothness
            return accelerated_batch_size(oracle, num_users=num_users, smoothness=smoothness, distance=start.distance)

        return self.choices.sizes(num_users, best)

    def plan(self, sizes: list[int], start: Start, *, exact: bool = True) -> Plan:
        """Returns smoothing, steps and bound for rounds of these sizes."""
        problem, count = self.problem, len(sizes)
        smoothness = problem.smoothness or best_smoothing(rounds=count, lipschitz=problem.lipschitz, distance=start.distance)
        gradients = problem.smooth_gradients(smoothness)
        deviation = max(self.oracle(self.variance(size if exact else None)).deviation(size) for size in set(sizes))
        steps = self.choices.inverse_step_sizes
        if steps is None:
            steps = accelerated_step_sizes(rounds=count, smoothness=smoothness, deviation=deviation, distance=start.distance)
        elif len(steps) != count:
            raise ValueError(f"inverse_step_sizes must hold one L_t for each of the {count} rounds, got {len(steps)}")
        gap = problem.lipschitz * start.distance
        if start.gap is not None:  # the envelope lies below the loss, by no more than the cost
            gap = min(gap, start.gap + gradients.smoothing_cost)
        bound = accelerated_bound(
            steps,
            smoothness=smoothness,
            deviation=deviation,
            distance=start.distance,
            start_gap=gap,
            diameter=problem.diameter,
            bias=gradients.bias,
        )
        chosen = {"batch_size": min(sizes), "rounds": count, "inverse_step_sizes": list(steps), "smoothness": smoothness}
        return Plan(gradients, list(steps), chosen, bound)

    def variance(self, size: int | None) -> float:
        """Returns the variance per coordinate of the sum of a batch of this size; None: of one of a size not yet known."""
        return self.planned_variance() if size is None else self.protocol(size).variance

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a round of AC-SA with each group, and returns the aggregate."""
        iterates = AcceleratedIterates(self.problem.project, start.theta, plan.steps)
        for group in groups:
            gradient = self.mean_gradient(plan.gradients, iterates.middle, group)
            iterates.advance(gradient)
            self.history.add(users=len(group), gradient=gradient, theta=iterates.aggregate)
        return iterates.aggregate
