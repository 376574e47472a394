"""``shuffle_sgd``, in which every user takes part in one round, and ``shuffle_gradient_descent``, in which all do in all.

Algorithms 3 and 5, Theorems 4.1 and 4.9 of Cheu, Joseph, Mao and Peng's shuffle-private convex
optimisation (SCO).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from opacus_shuffle.sco.descent_bound import DescentBound, clamp, descent_candidates, sgd_bound
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.result import Estimate
from opacus_shuffle.sco.solver import Plan, Solver, Start


def shuffle_sgd(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    batch_size: int | None = None,
    step_size: float | None = None,
    steps: str = "proved",
) -> Estimate:
    """Minimises users' mean loss by one pass of projected SGD, each batch's gradients summed by a shuffle protocol.

    Args:
        problem: What is to be minimised; it need not be smooth.
        budget: What may be revealed.
        batch_size: b, users per round; by default the proved bound's best.
        step_size: η; by default the proved bound's best. Practical steps begin with it, by default
            with D/max(L, √T·σ), σ² the noise's mean square on a mean gradient, and at most 1/β
            where ``problem.smoothness`` is β.
        steps: ``"proved"``, equal ones with a proved excess loss, whose answer is the mean of the
            iterates; or ``"practical"``, longer ones that fall to 0, whose answer is the last
            iterate and mostly has less loss by the same messages: privacy is the same, and nothing
            else is proved.

    Returns:
        The estimate. Users beyond the last whole batch are not used; ``privacy.num_users`` says how
        many were.

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against whoever sees
        all shuffled messages and the estimate: each user is in one round, which is (ε, δ)-DP
        whatever the rounds before it said. Excess loss: D²/(2ηT) + ηL_G²/2 (Lemma 4.2). SCO
        Algorithm 3 prints θ + ηg; descent is θ − ηg. Theorem 4.1 has an L too much in η.
    """
    return SGD(problem, budget, batch_size=batch_size, step_size=step_size, steps=steps).solve()


def shuffle_gradient_descent(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    rounds: int | None = None,
    step_size: float | None = None,
    steps: str = "proved",
) -> Estimate:
    """Minimises users' mean loss by projected gradient descent on all of them, the sums by a shuffle protocol.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Lemma B.6),
            else smoothed (Theorem 4.9).
        budget: What may be revealed by all rounds together: with ``calibration="tight"`` they are
            composed exactly, with ``"published"`` by Algorithm 5's advanced composition.
        rounds: T; each costs a gradient of every user. By default the proved bound's best of at
            most 256; with many users more rounds would prove less excess loss (up to n of them),
            and seldom have less.
        step_size: η; by default the proved bound's best. Practical steps begin with it, by default
            with D/max(L, √T·σ), σ² the noise's mean square on a mean gradient, and at most 1/β
            where ``problem.smoothness`` is β.
        steps: ``"proved"``, equal ones with a proved excess loss, whose answer is the mean of the
            iterates; or ``"practical"``, longer ones that fall to 0, whose answer is the last
            iterate and mostly has less loss by the same messages: privacy is the same, and nothing
            else is proved.

    Returns:
        The estimate; its excess loss is :class:`~opacus_shuffle.sco.descent_bound.DescentBound`'s
        (plus L²/(2β) if smoothed).

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against whoever sees
        all messages of all rounds. SCO Algorithm 5 prints θ + ηg; descent is θ − ηg.
    """
    return GradientDescent(problem, budget, rounds=rounds, step_size=step_size, steps=steps).solve()


class SGD(Solver):
    """Mini-batch SGD (SCO Algorithm 3)."""

    algorithm = "SGD"

    def schedule(self, num_users: int, start: Start) -> tuple[int, int]:
        """Returns the caller's batch size, or the one that minimises D·L_G/√T at T = n/b rounds, which is s."""
        return self.batches(num_users, clamp(self.oracle(self.planned_variance()).ratio, num_users))

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns steps and bound for so many rounds of this size."""
        if self.steps == "practical":
            return self._practical(batch_size, rounds, start)
        gradients = self.problem.own_gradients()
        moment = self.oracle(self.protocol(batch_size, rounds).variance).second_moment(batch_size)
        step = self.step_size or start.distance / (moment * rounds) ** 0.5
        bound = sgd_bound(
            rounds=rounds,
            step_size=step,
            second_moment=moment,
            distance=start.distance,
            diameter=self.problem.diameter,
            bias=gradients.bias,
        )
        chosen = {"batch_size": batch_size, "rounds": rounds, "step_size": step}
        return Plan(gradients, [step] * rounds, chosen, bound)

    def _practical(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns steps that nothing is proved of: the longest that neither a gradient nor all the noise leads far astray.

        One gradient moves the iterate by no more than the distance to the minimiser, all rounds'
        noise together by about that, before it falls. The bound's steps are shorter, because its
        gradients may all be as long as the longest.
        """
        problem = self.problem
        variance = self.protocol(batch_size, rounds).variance / batch_size**2
        longest = start.distance / max(
            problem.lipschitz, math.sqrt(rounds * problem.dimension * variance)
        )
        if problem.smoothness is not None:
            longest = min(longest, 1 / problem.smoothness)
        first = self.step_size or longest
        steps = [first * (1 - done / rounds) for done in range(rounds)]
        chosen = {
            "batch_size": batch_size,
            "rounds": rounds,
            "steps": "practical",
            "step_size": first,
        }
        return Plan(problem.own_gradients(), steps, chosen, None)

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a projected step with each group; returns the iterates' mean, or of practical steps the last."""
        theta, total = start.theta, torch.zeros_like(start.theta)
        for group, step in zip(groups, plan.steps, strict=True):
            total += theta
            gradient = self.mean_gradient(plan.gradients, theta, group, len(groups))
            theta = self.problem.project(theta - step * gradient)
        return theta if self.steps == "practical" else self.problem.project(total / len(groups))


class GradientDescent(SGD):
    """Gradient descent on one group of users after another (SCO Algorithm 5)."""

    algorithm = "gradient descent"
    interaction = "full"

    def schedule(self, num_users: int, start: Start) -> tuple[int, int]:
        """Returns all users, and the caller's number of rounds, or the one with the least bound."""
        if self.rounds is not None:
            return num_users, self.rounds

        def value(rounds: int) -> float:
            try:
                plan = self._descent(num_users, rounds, start)
            except ValueError:  # more noise bits than anyone would send
                return math.inf
            return math.inf if plan.bound is None else plan.bound + plan.gradients.smoothing_cost

        candidates = descent_candidates(
            self.oracle(self.protocol(num_users, 1).variance), num_users=num_users
        )
        return num_users, min(candidates, key=value)

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns steps, smoothing and bound for so many rounds of all users."""
        if self.steps == "practical":
            return self._practical(batch_size, rounds, start)
        return self._descent(batch_size, rounds, start, self.step_size)

    def _descent(
        self, num_users: int, rounds: int, start: Start, step_size: float | None = None
    ) -> Plan:
        """Returns the plan of equal steps, of this size or the best, with the smoothing that suits them."""
        problem, protocol = self.problem, self.protocol(num_users, rounds)
        likely = problem.smooth_gradients(
            problem.lipschitz / start.distance
        )  # their error, if an envelope's
        proved = DescentBound(
            rounds=rounds,
            num_users=num_users,
            oracle=self.oracle(protocol.variance, likely.bias),
            granularity=protocol.granularity,
            distance=start.distance,
            diameter=problem.diameter,
        )
        step = step_size or proved.best_step(smoothness=problem.smoothness)
        smoothness = problem.smoothness or 2 / step
        gradients = problem.smooth_gradients(smoothness)
        proved = dataclasses.replace(proved, oracle=self.oracle(protocol.variance, gradients.bias))
        chosen = {"rounds": rounds, "step_size": step, "smoothness": smoothness}
        return Plan(gradients, [step] * rounds, chosen, proved.value(step, smoothness=smoothness))
