"""``shuffle_sgd``, in which every user takes part in one round, and ``shuffle_gradient_descent``, in which all do in all.

Algorithms 3 and 5, Theorems 4.1 and 4.9 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.sco.descent_bound import DescentBound, clamp, descent_candidates, sgd_bound
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.result import Estimate
from opacus_shuffle.sco.solver import Choices, Plan, Solver, Start


def shuffle_sgd(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    batch_size: int | None = None,
    batches: Iterable[Any] | None = None,
    step_size: float | None = None,
    steps: str = "proved",
    average: bool | None = None,
) -> Estimate:
    """Minimises users' mean loss by one pass of projected SGD, each batch's gradients summed by a shuffle protocol.

    Args:
        problem: What is to be minimised; it need not be smooth.
        budget: What may be revealed.
        batch_size: b, users per round; by default the proved bound's best.
        batches: Who takes part when, instead of ``batch_size``: vectors of user numbers, disjoint. They must not depend on the
            users' data.
        step_size: η; by default the proved bound's best. Practical steps begin with it, by default with D/max(L, √T·σ), σ² the
            noise's mean square on a mean gradient, and at most 1/β where ``problem.smoothness`` is β.
        steps: ``"proved"``, equal ones with a proved excess loss; or ``"practical"``, longer ones that fall to 0, which mostly
            find less loss by the same messages: privacy is the same, and nothing else is proved.
        average: Whether to answer the mean of the iterates, as the theorem does, or the last one (nothing is proved for it). By
            default the mean of proved steps, the last of practical ones.

    Returns:
        The estimate. Users beyond the last whole batch are not used; ``privacy.num_users`` says how many were.

    Raises:
        ValueError: If an argument is out of range, a user is in two batches, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against whoever sees all shuffled messages and the
        estimate: each user is in one round, which is (ε, δ)-DP whatever the rounds before it said. Excess loss: D²/(2ηT) +
        ηL_G²/2 (Lemma 4.2). SCO Algorithm 3 prints θ + ηg; descent is θ − ηg. Theorem 4.1 has an L too much in η.
    """
    choices = Choices(batch_size=batch_size, batches=batches, step_size=step_size, steps=steps, average=average)
    return SGD(problem, budget, choices).solve()


def shuffle_gradient_descent(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    rounds: int | None = None,
    step_size: float | None = None,
    steps: str = "proved",
    average: bool | None = None,
) -> Estimate:
    """Minimises users' mean loss by projected gradient descent on all of them, the sums by a shuffle protocol.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Lemma B.6), else smoothed (Theorem 4.9).
        budget: What may be revealed by all rounds together: with ``calibration="tight"`` they are composed exactly, with
            ``"published"`` by Algorithm 5's advanced composition.
        rounds: T; each costs a gradient of every user. By default the proved bound's best of at most 256; with many users more
            rounds would prove less excess loss (up to n of them), and seldom have less.
        step_size: η; by default the proved bound's best. Practical steps begin with it, by default with D/max(L, √T·σ), σ² the
            noise's mean square on a mean gradient, and at most 1/β where ``problem.smoothness`` is β.
        steps: ``"proved"``, equal ones with a proved excess loss; or ``"practical"``, longer ones that fall to 0, which mostly
            find less loss by the same messages: privacy is the same, and nothing else is proved.
        average: Whether to answer the mean of the iterates, as the theorem does, or the last one (nothing is proved for it). By
            default the mean of proved steps, the last of practical ones.

    Returns:
        The estimate; its excess loss is :class:`~opacus_shuffle.sco.descent_bound.DescentBound`'s (plus L²/(2β) if smoothed).

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against whoever sees all messages of all rounds.
        SCO Algorithm 5 prints θ + ηg; descent is θ − ηg.
    """
    choices = Choices(rounds=rounds, step_size=step_size, steps=steps, average=average)
    return GradientDescent(problem, budget, choices).solve()


class SGD(Solver):
    """Mini-batch SGD (SCO Algorithm 3)."""

    algorithm = "SGD"

    def sizes(self, num_users: int, start: Start) -> list[int]:
        """Returns the caller's batch size, or the one that minimises D·L_G/√T at T = n/b rounds, which is s."""
        return self.choices.sizes(num_users, lambda: clamp(self.oracle(self.planned_variance()).ratio, num_users))

    def plan(self, sizes: list[int], start: Start, *, exact: bool = True) -> Plan:
        """Returns step and bound for rounds of these sizes."""
        if self.choices.steps == "practical":
            return self._practical(sizes, start)
        gradients = self.problem.own_gradients()
        moment = max(self.oracle(self.protocol(size).variance).second_moment(size) for size in set(sizes))
        step = self.choices.step_size or start.distance / (moment * len(sizes)) ** 0.5
        bound = sgd_bound(
            rounds=len(sizes),
            step_size=step,
            second_moment=moment,
            distance=start.distance,
            diameter=self.problem.diameter,
            bias=gradients.bias,
        )
        chosen = {"batch_size": min(sizes), "rounds": len(sizes), "step_size": step}
        return Plan(gradients, [step] * len(sizes), chosen, bound if self.choices.average else None)

    def _practical(self, sizes: list[int], start: Start) -> Plan:
        """Returns steps that nothing is proved of: the longest that neither a gradient nor all the noise leads far astray.

        One gradient moves the iterate by no more than the distance to the minimiser, all rounds' noise together by about that,
        before it falls. The bound's steps are shorter, because its gradients may all be as long as the longest.
        """
        problem, often = self.problem, len(sizes) if self.interaction == "full" else 1
        variance = max(self.protocol(size, often).variance / size**2 for size in set(sizes))
        longest = start.distance / max(problem.lipschitz, math.sqrt(len(sizes) * problem.dimension * variance))
        if problem.smoothness is not None:
            longest = min(longest, 1 / problem.smoothness)
        first = self.choices.step_size or longest
        steps = [first * (1 - done / len(sizes)) for done in range(len(sizes))]
        chosen = {"batch_size": min(sizes), "rounds": len(sizes), "steps": "practical", "step_size": first}
        return Plan(problem.own_gradients(), steps, chosen, None)

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a projected step of SGD with each group; returns the mean of the iterates, or the last."""
        theta, total = start.theta, torch.zeros_like(start.theta)
        for group, step in zip(groups, plan.steps, strict=True):
            total += theta
            gradient = self.mean_gradient(plan.gradients, theta, group, len(groups) if self.interaction == "full" else 1)
            theta = self.problem.project(theta - step * gradient)
            self.history.add(users=len(group), gradient=gradient, theta=theta)
        return self.problem.project(total / len(groups)) if self.choices.average else theta


class GradientDescent(SGD):
    """Gradient descent on one group of users after another (SCO Algorithm 5)."""

    algorithm = "gradient descent"
    interaction = "full"

    def groups(self, users: Tensor, start: Start) -> list[Tensor]:
        """Returns all of these users, for every round."""
        self.ledger.claim(users)
        return [users] * len(self.sizes(len(users), start))

    def sizes(self, num_users: int, start: Start) -> list[int]:
        """Returns all users, for the caller's number of rounds, or the best as far as known without building protocols."""
        if self.choices.rounds is not None:
            return [num_users] * self.choices.rounds

        def value(rounds: int) -> float:
            try:
                bound = self._bound(num_users, rounds, start, exact=self.budget.calibration == "published")
            except ValueError:  # more noise bits than anyone would send
                return math.inf
            return bound.best_value(smoothness=self.problem.smoothness)

        candidates = descent_candidates(self.oracle(self.protocol(num_users).variance), num_users=num_users)
        return [num_users] * min(candidates, key=lambda rounds: (value(rounds), rounds))

    def plan(self, sizes: list[int], start: Start, *, exact: bool = True) -> Plan:
        """Returns step, smoothing and bound for so many rounds of all users."""
        if self.choices.steps == "practical":
            return self._practical(sizes, start)
        problem = self.problem
        proved = self._bound(sizes[0], len(sizes), start, exact=exact or self.budget.calibration == "published")
        step = self.choices.step_size or proved.best_step(smoothness=problem.smoothness)
        smoothness = problem.smoothness or 2 / step
        gradients = problem.smooth_gradients(smoothness)
        proved = dataclasses.replace(proved, oracle=dataclasses.replace(proved.oracle, bias=gradients.bias))
        bound = proved.value(step, smoothness=smoothness) if self.choices.average else None
        return Plan(gradients, [step] * len(sizes), {"rounds": len(sizes), "step_size": step, "smoothness": smoothness}, bound)

    def _bound(self, num_users: int, rounds: int, start: Start, *, exact: bool) -> DescentBound:
        """Returns the proved bound, before the smoothness is chosen, of so many rounds with their protocol, or nearly so."""
        protocol = self.protocol(num_users, rounds if exact else 1)
        variance, granularity = protocol.variance, protocol.granularity
        if not exact:  # as T grows the noise does in proportion, and the grid gets coarser
            variance, granularity = rounds * variance, max(1, math.floor(granularity / math.sqrt(rounds)))
        likely = self.problem.smooth_gradients(self.problem.lipschitz / start.distance)  # their error, if an envelope's
        return DescentBound(
            rounds=rounds,
            num_users=num_users,
            oracle=self.oracle(variance, likely.bias),
            granularity=granularity,
            distance=start.distance,
            diameter=self.problem.diameter,
        )
