"""``shuffle_accelerated_sgd``: accelerated SGD, every user in one round.

Algorithm 4 and Theorems 4.3 and 4.7 of Cheu, Joseph, Mao and Peng's shuffle-private convex
optimisation (SCO): for a β-smooth loss directly; for one that is not smooth, on its Moreau
envelope, where every user smooths its own loss.
"""

from __future__ import annotations

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
from opacus_shuffle.sco.solver import Plan, Solver, Start


def shuffle_accelerated_sgd(
    problem: Problem, budget: PrivacyBudget, *, batch_size: int | None = None
) -> Estimate:
    """Minimises users' mean loss by one pass of accelerated SGD, each batch's gradients summed by a shuffle protocol.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Theorem 4.3),
            else smoothed (Theorem 4.7).
        budget: What may be revealed.
        batch_size: b, users per round; by default the proved bound's best.

    Returns:
        The estimate; :func:`~opacus_shuffle.sco.acceleration.accelerated_bound` (plus L²/(2β) if
        smoothed) is its excess loss. Users beyond the last whole batch are not used;
        ``privacy.num_users`` says how many were.

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
        """Returns the caller's batch size, or the proved bound's best, and the number of whole batches."""
        oracle = self.oracle(self.variance(None))
        smoothness, distance = self.problem.smoothness, start.distance
        best = accelerated_batch_size(
            oracle, num_users=num_users, smoothness=smoothness, distance=distance
        )
        return self.batches(num_users, best)

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns smoothing, steps and bound for so many rounds of this size."""
        problem, distance = self.problem, start.distance
        smoothness = problem.smoothness or best_smoothing(
            rounds=rounds, lipschitz=problem.lipschitz, distance=distance
        )
        gradients = problem.smooth_gradients(smoothness)
        deviation = self.oracle(self.variance(batch_size)).deviation(batch_size)
        steps = accelerated_step_sizes(
            rounds=rounds, smoothness=smoothness, deviation=deviation, distance=distance
        )
        gap = problem.lipschitz * distance
        if start.gap is not None:  # the envelope lies below the loss, by no more than the cost
            gap = min(gap, start.gap + gradients.smoothing_cost)
        bound = accelerated_bound(
            steps,
            smoothness=smoothness,
            deviation=deviation,
            distance=distance,
            start_gap=gap,
            diameter=problem.diameter,
            bias=gradients.bias,
        )
        chosen = {
            "batch_size": batch_size,
            "rounds": rounds,
            "inverse_step_sizes": steps,
            "smoothness": smoothness,
        }
        return Plan(gradients, steps, chosen, bound)

    def variance(self, batch_size: int | None) -> float:
        """Returns the variance per coordinate of the sum of a batch of this size; None: of one not yet known."""
        return (
            self.planned_variance() if batch_size is None else self.protocol(batch_size, 1).variance
        )

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a round of AC-SA with each group, and returns the aggregate."""
        iterates = AcceleratedIterates(self.problem.project, start.theta, plan.steps)
        for group in groups:
            iterates.advance(
                self.mean_gradient(plan.gradients, iterates.middle, group, len(groups))
            )
        return iterates.aggregate
