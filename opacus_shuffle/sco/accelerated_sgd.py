"""``shuffle_accelerated_sgd``: accelerated SGD, every user in one round.

Algorithm 4 and Theorems 4.3 and 4.7 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO): for a β-smooth
loss directly; for one that is not smooth, on its Moreau envelope, where every user smooths its own loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from opacus_shuffle.sco.acceleration import (
    AcceleratedIterates,
    accelerated_batch_size,
    accelerated_bound,
    accelerated_step_sizes,
    best_smoothing,
)
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.budget import PrivacyBudget
from opacus_shuffle.sco.problem import Problem
from opacus_shuffle.sco.result import Estimate, History, Round
from opacus_shuffle.sco.solver import Choices, Phase, Solver, Start, fitting


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
        (ε, δ)-DP as for :func:`~opacus_shuffle.sco.sgd.shuffle_sgd`: each user is in one round.
    """
    choices = Choices(batch_size=batch_size, batches=batches, inverse_step_sizes=inverse_step_sizes)
    return AcceleratedSGD(problem, budget, choices).solve()


class AcceleratedPlan(NamedTuple):
    """All that a phase needs but the data (``steps``: L_1, …, L_T), and the excess loss that is then proved (None: nothing)."""

    gradients: BoundedGradients
    smoothness: float
    steps: list[float]
    bound: float | None


class AcceleratedSGD(Solver):
    """Accelerated SGD on one group of users after another (SCO Algorithm 4)."""

    algorithm = "accelerated SGD"

    def bound(self, num_users: int, start: Start, *, exact: bool) -> float:
        """Returns the excess loss to be proved for a phase of so many users; nearly so, but at once, if not ``exact``."""
        size = self.batch_size(num_users, start)
        bound = self.plan([size] * (num_users // size), start, exact=exact).bound
        return self.problem.capped(float("inf")) if bound is None else bound

    def run(self, users: Tensor, start: Start) -> Phase:
        """Runs a phase on these users."""
        groups = self.batches(users, None if self.choices.batches is not None else self.batch_size(len(users), start))
        sizes = [len(group) for group in groups]
        plan = self.plan(sizes, start, exact=True)
        theta, history, more, bits = self.iterate(plan, groups, start)
        chosen = {"batch_size": min(sizes), "rounds": len(groups), **more, "inverse_step_sizes": plan.steps}
        given = {"lipschitz": self.problem.lipschitz, "distance": start.distance}
        return Phase(theta, plan.bound, history, {**chosen, "smoothness": plan.smoothness, **given}, bits)

    def batch_size(self, num_users: int, start: Start) -> int:
        """Returns the caller's batch size, or the proved bound's best."""
        if self.choices.batch_size is not None:
            return fitting("batch_size", self.choices.batch_size, num_users)
        oracle, smoothness = self.oracle(self.variance(None)), self.problem.smoothness
        return accelerated_batch_size(oracle, num_users=num_users, smoothness=smoothness, distance=start.distance)

    def plan(self, sizes: list[int], start: Start, *, exact: bool) -> AcceleratedPlan:
        """Returns smoothing, steps and bound for rounds of these sizes, with the protocols' own variance if ``exact``."""
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
        whole = None if bound is None else problem.capped(bound + gradients.smoothing_cost)
        return AcceleratedPlan(gradients, smoothness, list(steps), whole)

    def variance(self, size: int | None) -> float:
        """Returns the variance per coordinate of the sum of a batch of this size; None: of one of a size not yet known."""
        return self.planned_variance() if size is None else self.protocol(size).variance

    def iterate(
        self, plan: AcceleratedPlan, groups: list[Tensor], start: Start
    ) -> tuple[Tensor, list[Round], dict[str, Any], int | None]:
        """Makes the rounds; returns the answer, the history, further choices to report, and the bits that a user sends."""
        protocols = self.protocols(groups)
        iterates, history, reached = AcceleratedIterates(self.problem.project, start.theta, plan.steps), History(len(groups)), 0
        for group in groups:
            gradient = self.mean_gradient(protocols[len(group)], plan.gradients, iterates.middle, group)
            iterates.advance(gradient)
            reached += len(group)
            history.add(users=reached, gradient=gradient, theta=iterates.aggregate)
        return iterates.aggregate, history.rounds, {}, max(each.bits_per_user for each in protocols.values())
