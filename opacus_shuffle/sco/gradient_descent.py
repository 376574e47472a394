"""``shuffle_sgd``, with every user in one round, and ``shuffle_gradient_descent``, in all rounds.

Algorithms 3 and 5, Theorems 4.1 and 4.9 of Cheu, Joseph, Mao and Peng's shuffle-private convex
optimisation (SCO).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.solver import Estimate, Oracle, Plan, Solver, Start

MAX_ROUNDS = 256
"""The most rounds of gradient descent that an optimiser chooses by itself."""


def shuffle_sgd(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    batch_size: int | None = None,
    step_size: float | None = None,
    steps: str = "proved",
) -> Estimate:
    """Minimises users' mean loss by one pass of projected SGD over shuffled sums of gradients.

    Args:
        problem: The problem; its loss need not be smooth.
        budget: The privacy of the run.
        batch_size: b, users per round; by default the one with the smallest proved bound.
        step_size: η; by default the one with the smallest proved bound. With practical steps it is
            the first step, by default D/max(L, √T·σ), σ² the noise's mean square on a mean
            gradient, and at most 1/β if ``problem.smoothness`` is β.
        steps: ``"proved"``: equal steps with a proved excess loss. The result is the mean of the
            iterates. ``"practical"``: longer steps that decrease to 0. The result is the last
            iterate. Its loss is usually smaller, with the same messages and the same privacy, but
            no bound on it is proved.

    Returns:
        The estimate. Users beyond the last whole batch are not used; ``privacy.num_users`` is the
        number of users that were.

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against an adversary
        who sees all shuffled messages and the estimate: each user is in one round, which is (ε,
        δ)-DP for any output of the rounds before. Excess loss: D²/(2ηT) + ηL_G²/2 (Lemma 4.2). SCO
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
    """Minimises users' mean loss by projected gradient descent, with every user in every round.

    Args:
        problem: The problem, minimised directly if ``problem.smoothness`` is known (Lemma B.6),
            else smoothed (Theorem 4.9).
        budget: The privacy of all rounds together, which are composed exactly.
        rounds: T; each costs a gradient of every user. By default the number with the smallest
            proved bound, and at most 256. With many users more rounds (up to n) would have a
            smaller bound, but seldom a smaller loss.
        step_size: η; as for :func:`shuffle_sgd`.
        steps: ``"proved"`` or ``"practical"``; as for :func:`shuffle_sgd`.

    Returns:
        The estimate; its excess loss is :class:`DescentBound`'s (plus L²/(2β) if smoothed).

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against an adversary
        who sees all messages of all rounds. SCO Algorithm 5 prints θ + ηg; descent is θ − ηg.
    """
    return GradientDescent(problem, budget, rounds=rounds, step_size=step_size, steps=steps).solve()


class SGD(Solver):
    """Mini-batch SGD (SCO Algorithm 3)."""

    algorithm = "SGD"

    def schedule(self, num_users: int, start: Start) -> tuple[int, int]:
        """Returns the caller's batch size, or s, which minimises D·L_G/√T for T = n/b rounds."""
        return self.batches(num_users, clamp(self.oracle(self.planned_variance()).ratio, num_users))

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns steps and bound for so many rounds of this size."""
        if self.steps == "practical":
            return self._practical_plan(batch_size, rounds, start)
        return self._proved_plan(batch_size, rounds, start, self.step_size)

    def _proved_plan(
        self, batch_size: int, rounds: int, start: Start, step_size: float | None
    ) -> Plan:
        """Returns equal steps, of this size or the best, with their bound."""
        variance = self.round_variance(batch_size, rounds)
        moment = self.oracle(variance).second_moment(batch_size)
        step = step_size or start.distance / (moment * rounds) ** 0.5
        bound = sgd_bound(
            rounds=rounds, step_size=step, second_moment=moment, distance=start.distance
        )
        choices = {"batch_size": batch_size, "rounds": rounds, "step_size": step}
        return Plan(self.problem.objective, [step] * rounds, choices, bound)

    def _practical_plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns steps that decrease from the longest reasonable one; nothing is proved of them.

        With that step one gradient moves the iterate by at most the distance to the minimiser, and
        the noise of all rounds together by about that. The bound's steps are shorter, because it
        allows for gradients that all have the largest norm.
        """
        problem = self.problem
        variance = self.round_variance(batch_size, rounds) / batch_size**2
        longest = start.distance / max(
            problem.lipschitz, math.sqrt(rounds * problem.dimension * variance)
        )
        if problem.smoothness is not None:
            longest = min(longest, 1 / problem.smoothness)
        first = self.step_size or longest
        steps = [first * (1 - done / rounds) for done in range(rounds)]
        choices = {
            "batch_size": batch_size,
            "rounds": rounds,
            "steps": "practical",
            "step_size": first,
        }
        return Plan(problem.objective, steps, choices, None)

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Takes a projected step with each group; returns the iterates' mean.

        With practical steps it returns the last iterate.
        """
        project = self.problem.constraint.project
        theta, total = start.theta, torch.zeros_like(start.theta)
        for group, step in zip(groups, plan.steps, strict=True):
            total += theta
            theta = project(theta - step * self.mean_gradient(plan, theta, group, len(groups)))
        return theta if self.steps == "practical" else project(total / len(groups))


class GradientDescent(SGD):
    """Gradient descent with all users in every round (SCO Algorithm 5)."""

    algorithm = "gradient descent"
    interaction = "full"

    def schedule(self, num_users: int, start: Start) -> tuple[int, int]:
        """Returns all users, and the caller's rounds or the number with the smallest bound."""
        if self.rounds is not None:
            return num_users, self.rounds

        def bound(rounds: int) -> float:
            try:
                plan = self._proved_plan(num_users, rounds, start, None)
            except ValueError:  # so many rounds would need too many noise bits per user
                return math.inf
            cost = plan.objective.smoothing_cost(self.problem.lipschitz)
            return math.inf if plan.bound is None else plan.bound + cost

        oracle = self.oracle(self.round_variance(num_users, 1))
        return num_users, min(candidate_rounds(oracle, num_users=num_users), key=bound)

    def _proved_plan(
        self, batch_size: int, rounds: int, start: Start, step_size: float | None
    ) -> Plan:
        """Returns equal steps, of this size or the best, with the smoothing that fits them."""
        problem, protocol = self.problem, self.protocol(batch_size, rounds)
        bound = DescentBound(
            rounds=rounds,
            num_users=batch_size,
            oracle=self.oracle(protocol.variance),
            granularity=protocol.granularity,
            distance=start.distance,
        )
        step = step_size or bound.best_step(smoothness=problem.smoothness)
        smoothness = problem.smoothness or 2 / step
        choices = {"rounds": rounds, "step_size": step, "smoothness": smoothness}
        proved = bound.value(step, smoothness=smoothness)
        return Plan(problem.smoothed(smoothness), [step] * rounds, choices, proved)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescentBound:
    """The excess population loss of the average of T full-gradient steps.

    Attributes:
        rounds: T.
        num_users: n, all of them in every round.
        oracle: The error of one of the T rounds.
        granularity: Steps of the protocol's grid on [−L, L], g.
        distance: D with E‖θ_0 − θ*‖² ≤ D².

    Formal Guarantees:
        Proved for β-smooth losses and η ≤ 2/β (``docs/proofs/21_gradient_descent.md``).
    """

    rounds: int
    num_users: int
    oracle: Oracle
    granularity: int
    distance: float

    def drift(self, step_size: float, smoothness: float) -> float:
        """Returns an upper bound on the generalisation error.

        It is L times the mean distance of two runs whose data differ in one user.
        """
        oracle, users = self.oracle, self.num_users
        width = 2 * oracle.lipschitz / self.granularity
        root = width * math.sqrt(oracle.dimension)
        pace = 2 * step_size * (oracle.lipschitz / users)
        pace += step_size**2 * root * smoothness / (2 * users)
        spread = step_size**2 * (root**2 / (2 * users**2))
        return oracle.lipschitz * (pace * self.rounds / 2 + 2 / 3 * math.sqrt(spread * self.rounds))

    def value(self, step_size: float, *, smoothness: float) -> float | None:
        """Returns the bound at this step size; None if the step exceeds 2/β."""
        if step_size > 2 / smoothness * (1 + 1e-12):
            return None
        return self.drift(step_size, smoothness) + sgd_bound(
            rounds=self.rounds,
            step_size=step_size,
            second_moment=self.oracle.second_moment(self.num_users),
            distance=self.distance,
        )

    def best_step(self, *, smoothness: float | None) -> float:
        """Returns the η with the smallest bound.

        Without ``smoothness`` the loss is smoothed by β = 2/η, which adds ηL²/4.
        """
        start = self.distance**2 / (2 * self.rounds)
        moment = self.oracle.second_moment(self.num_users) / 2
        if smoothness is None:  # then the drift is proportional to η
            slope = moment + self.drift(1.0, 2.0) + self.oracle.lipschitz**2 / 4
            return math.sqrt(start / slope)

        def cost(log_step: float) -> float:
            step = math.exp(log_step)
            return start / step + step * (moment + self.drift(step, smoothness) / step)

        longest = 2 / smoothness
        # The slope of the cost grows with η, so the best step is at most ``first``.
        shortest = 1e-12 * longest
        first = math.sqrt(start / (moment + self.drift(shortest, smoothness) / shortest))
        end = math.log(min(first, longest))
        best = minimize_scalar(
            cost, bounds=(end - 12, end), method="bounded", options={"xatol": 1e-6}
        )
        return min(math.exp(best.x), longest)


def sgd_bound(*, rounds: int, step_size: float, second_moment: float, distance: float) -> float:
    """Returns an upper bound on the expected excess loss of the average of T SGD steps.

    SCO Lemma 4.2, for projected subgradient steps: D²/(2ηT) + ηL_G²/2.
    """
    return distance**2 / (2 * step_size * rounds) + step_size * second_moment / 2


def clamp(value: float, maximum: int) -> int:
    """Returns the nearest whole number in [1, maximum]."""
    return max(1, min(round(min(value, maximum)), maximum))


def candidate_rounds(oracle: Oracle, *, num_users: int) -> list[int]:
    """Returns numbers of rounds to try: powers of two up to T = min(n, (n/s)²), and T itself.

    That is Lemma B.6's number, with s of one round. None is above :data:`MAX_ROUNDS`: the theorem
    takes up to n rounds, each with a gradient of every user.
    """
    largest = clamp(
        min(num_users, (num_users / max(oracle.ratio, 1e-150)) ** 2), min(num_users, MAX_ROUNDS)
    )
    return [*(2**power for power in range(largest.bit_length()) if 2**power < largest), largest]
