"""``shuffle_sgd``, in which users take part once, and ``shuffle_gradient_descent``, in every round.

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

MOST_ROUNDS = 256
"""Rounds of gradient descent that an optimiser chooses by itself."""


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
    """Minimises users' mean loss by projected gradient descent, with everybody in all rounds.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Lemma B.6),
            else smoothed (Theorem 4.9).
        budget: The budget of all rounds together, which are composed exactly.
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
        The estimate; its excess loss is :class:`DescentBound`'s (plus L²/(2β) if smoothed).

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
        """Returns the caller's batch size, or s, at which D·L_G/√T is least for T = n/b rounds."""
        return self.batches(num_users, clamp(self.oracle(self.planned_variance()).ratio, num_users))

    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns steps and bound for so many rounds of this size."""
        if self.steps == "practical":
            return self._practical(batch_size, rounds, start)
        return self._proved_steps(batch_size, rounds, start, self.step_size)

    def _proved_steps(
        self, batch_size: int, rounds: int, start: Start, step_size: float | None
    ) -> Plan:
        """Returns equal steps, of this size or the best, with their bound."""
        objective = self.problem.objective
        moment = self.oracle(self.protocol(batch_size, rounds).variance).second_moment(batch_size)
        step = step_size or start.distance / (moment * rounds) ** 0.5
        bound = sgd_bound(
            rounds=rounds,
            step_size=step,
            second_moment=moment,
            distance=start.distance,
            diameter=self.problem.constraint.diameter,
            bias=objective.gradient_error,
        )
        chosen = {"batch_size": batch_size, "rounds": rounds, "step_size": step}
        return Plan(objective, [step] * rounds, chosen, bound)

    def _practical(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns the longest steps that neither a gradient nor all the noise leads far astray.

        One gradient moves the iterate by no more than the distance to the minimiser, all rounds'
        noise together by about that, before it falls. The bound's steps are shorter, because its
        gradients may all be as long as the longest. Nothing is proved of these.
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
        return Plan(problem.objective, steps, chosen, None)

    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a projected step with each group; returns the iterates' mean, or the last one.

        The last one is the answer of practical steps.
        """
        project = self.problem.constraint.project
        theta, total = start.theta, torch.zeros_like(start.theta)
        for group, step in zip(groups, plan.steps, strict=True):
            total += theta
            theta = project(theta - step * self.mean_gradient(plan, theta, group, len(groups)))
        return theta if self.steps == "practical" else project(total / len(groups))


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
                plan = self._proved_steps(num_users, rounds, start, None)
            except ValueError:  # more noise bits than anyone would send
                return math.inf
            cost = plan.objective.smoothing_cost(self.problem.lipschitz)
            return math.inf if plan.bound is None else plan.bound + cost

        oracle = self.oracle(self.protocol(num_users, 1).variance)
        return num_users, min(descent_candidates(oracle, num_users=num_users), key=value)

    def _proved_steps(
        self, batch_size: int, rounds: int, start: Start, step_size: float | None
    ) -> Plan:
        """Returns equal steps, of this size or the best, with the smoothing that suits them."""
        problem, protocol = self.problem, self.protocol(batch_size, rounds)
        # An envelope's error does not depend on how smooth it is.
        likely = problem.smoothed(problem.lipschitz / start.distance)
        proved = DescentBound(
            rounds=rounds,
            num_users=batch_size,
            oracle=self.oracle(protocol.variance, likely.gradient_error),
            granularity=protocol.granularity,
            distance=start.distance,
            diameter=problem.constraint.diameter,
        )
        step = step_size or proved.best_step(smoothness=problem.smoothness)
        smoothness = problem.smoothness or 2 / step
        objective = problem.smoothed(smoothness)
        exact = self.oracle(protocol.variance, objective.gradient_error)
        bound = dataclasses.replace(proved, oracle=exact).value(step, smoothness=smoothness)
        chosen = {"rounds": rounds, "step_size": step, "smoothness": smoothness}
        return Plan(objective, [step] * rounds, chosen, bound)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescentBound:
    """The excess population loss of the average of T full-gradient steps.

    Attributes:
        rounds: T.
        num_users: n, all of them in every round.
        oracle: What one of the T rounds tells.
        granularity: Steps of the protocol's grid on [−L, L], g.
        distance: D with E‖θ_0 − θ*‖² ≤ D².
        diameter: Of the set, for the bias.

    Formal Guarantees:
        Proved for β-smooth losses and η ≤ 2/β (``docs/proofs/21_gradient_descent.md``).
    """

    rounds: int
    num_users: int
    oracle: Oracle
    granularity: int
    distance: float
    diameter: float

    def drift(self, step_size: float, smoothness: float) -> float:
        """Returns an upper bound on the generalisation error.

        It is L times the mean distance of two runs whose data differ in one user.
        """
        oracle, users = self.oracle, self.num_users
        width = 2 * oracle.lipschitz / self.granularity
        root = width * math.sqrt(oracle.dimension)
        pace = 2 * step_size * (
            oracle.lipschitz / users + oracle.bias
        ) + step_size**2 * root * smoothness / (2 * users)
        spread = step_size**2 * (root**2 / (2 * users**2) + 2 * root * oracle.bias / users)
        return oracle.lipschitz * (pace * self.rounds / 2 + 2 / 3 * math.sqrt(spread * self.rounds))

    def value(self, step_size: float, *, smoothness: float) -> float | None:
        """Returns the bound at this step size; None if it exceeds 2/β."""
        if step_size > 2 / smoothness * (1 + 1e-12):
            return None
        fit = sgd_bound(
            rounds=self.rounds,
            step_size=step_size,
            second_moment=self.oracle.second_moment(self.num_users),
            distance=self.distance,
            diameter=self.diameter,
            bias=self.oracle.bias,
        )
        return fit + self.drift(step_size, smoothness)

    def best_step(self, *, smoothness: float | None) -> float:
        """Returns the η with the least bound.

        Without ``smoothness`` the loss is smoothed by β = 2/η, at a cost of ηL²/4.
        """
        start = self.distance**2 / (2 * self.rounds)
        moment = self.oracle.second_moment(self.num_users) / 2
        if smoothness is None:  # the drift is then proportional to η
            slope = moment + self.drift(1.0, 2.0) + self.oracle.lipschitz**2 / 4
            return math.sqrt(start / slope)

        def cost(log_step: float) -> float:
            step = math.exp(log_step)
            return start / step + step * (moment + self.drift(step, smoothness) / step)

        longest = 2 / smoothness
        # The cost's slope grows with η: the best step is no longer than this.
        shortest = 1e-12 * longest
        first = math.sqrt(start / (moment + self.drift(shortest, smoothness) / shortest))
        end = math.log(min(first, longest))
        best = minimize_scalar(
            cost, bounds=(end - 12, end), method="bounded", options={"xatol": 1e-6}
        )
        return min(math.exp(best.x), longest)


def sgd_bound(
    *,
    rounds: int,
    step_size: float,
    second_moment: float,
    distance: float,
    diameter: float = 0.0,
    bias: float = 0.0,
) -> float:
    """Returns an upper bound on the expected excess loss of the average of T SGD steps.

    SCO Lemma 4.2, for projected subgradient steps: D²/(2ηT) + ηL_G²/2, and ‖bias‖·diameter for
    gradients that are not quite unbiased: ⟨bias, θ_t − θ*⟩ in every step.
    """
    return distance**2 / (2 * step_size * rounds) + step_size * second_moment / 2 + bias * diameter


def clamp(value: float, most: int) -> int:
    """Returns the nearest whole number in [1, most]."""
    return max(1, min(round(min(value, most)), most))


def descent_candidates(oracle: Oracle, *, num_users: int) -> list[int]:
    """Returns numbers of rounds to try: powers of two up to T = min(n, (n/s)²), and T itself.

    That is Lemma B.6's number, with s of one round. None is above :data:`MOST_ROUNDS`: the theorem
    takes up to n rounds, each a gradient of every user.
    """
    most = clamp(
        min(num_users, (num_users / max(oracle.ratio, 1e-150)) ** 2), min(num_users, MOST_ROUNDS)
    )
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
