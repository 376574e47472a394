"""``shuffle_gradient_descent``: full gradients, every user in every round.

Algorithm 5 and Theorem 4.9 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from torch import Tensor

from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.budget import PrivacyBudget
from opacus_shuffle.sco.descent_bound import DescentBound, descent_candidates
from opacus_shuffle.sco.problem import Problem
from opacus_shuffle.sco.result import Estimate
from opacus_shuffle.sco.solver import Choices, Phase, Solver, Start


def shuffle_gradient_descent(
    problem: Problem,
    budget: PrivacyBudget,
    *,
    rounds: int | None = None,
    step_size: float | None = None,
    average: bool = True,
) -> Estimate:
    """Minimises users' mean loss by projected gradient descent on all of them, the sums by a shuffle protocol.

    Args:
        problem: What is to be minimised: directly if ``problem.smoothness`` is known (Lemma B.6), else smoothed (Theorem 4.9).
        budget: What may be revealed by all rounds together: with ``calibration="tight"`` they are composed exactly, with
            ``"published"`` by Algorithm 5's advanced composition.
        rounds: T; each costs a gradient of every user. By default the proved bound's best.
        step_size: η; by default the proved bound's best.
        average: Whether to answer the mean of the iterates, as the theorem does, or the last one (nothing is proved for it).

    Returns:
        The estimate; its excess loss is :class:`~opacus_shuffle.sco.descent_bound.DescentBound`'s (plus L²/(2β) if smoothed).

    Raises:
        ValueError: If an argument is out of range, or a gradient is too long (without ``clip``).

    Formal Guarantees:
        (ε, δ)-DP under replacement of one user's value, for every data set, against whoever sees all messages of all rounds.
        SCO Algorithm 5 prints θ + ηg; descent is θ − ηg.
    """
    choices = Choices(rounds=rounds, step_size=step_size, average=average)
    return GradientDescent(problem, budget, choices).solve()


class DescentPlan(NamedTuple):
    """All that a phase needs but the data, and the excess loss that is then proved (None: nothing is)."""

    protocol: ShuffleVectorSum
    rounds: int
    step_size: float
    smoothness: float
    gradients: BoundedGradients
    bound: float | None


class GradientDescent(Solver):
    """Gradient descent on one group of users after another (SCO Algorithm 5)."""

    algorithm = "gradient descent"
    interaction = "full"

    def bound(self, num_users: int, start: Start, *, exact: bool) -> float:
        """Returns the excess loss to be proved for a phase of so many users; nearly so, but faster, if not ``exact``."""
        proved = self.plan(num_users, start).bound if exact else self._best_rounds(num_users, start)[0]
        return self.problem.capped(math.inf if proved is None else proved)

    def run(self, users: Tensor, start: Start) -> Phase:
        """Runs a phase on these users, all of them in every round."""
        self.ledger.claim(users)
        plan = self.plan(len(users), start)
        protocols = {len(users): plan.protocol}
        theta, history = self.descend([users] * plan.rounds, protocols, plan.gradients, start.theta, plan.step_size)
        chosen = {"rounds": plan.rounds, "step_size": plan.step_size, "smoothness": plan.smoothness}
        return Phase(
            theta,
            plan.bound if self.choices.average else None,
            history,
            {**chosen, "lipschitz": self.problem.lipschitz, "distance": start.distance},
            plan.rounds * plan.protocol.bits_per_user,
            plan.rounds,
        )

    def plan(self, num_users: int, start: Start) -> DescentPlan:
        """Returns rounds, step, smoothing and bound for a phase of so many users."""
        problem, choices = self.problem, self.choices
        rounds = choices.rounds or self._best_rounds(num_users, start)[1]
        protocol = self.protocol(num_users, rounds)
        proved = self._bound(num_users, rounds, start, protocol.variance, protocol.granularity)
        step = choices.step_size or proved.best_step(smoothness=problem.smoothness, lipschitz=problem.lipschitz)
        smoothness = problem.smoothness or 2 / step
        gradients = problem.smooth_gradients(smoothness)
        proved = dataclasses.replace(proved, oracle=dataclasses.replace(proved.oracle, bias=gradients.bias))
        value = proved.value(step, smoothness=smoothness)
        bound = None if value is None else problem.capped(value + gradients.smoothing_cost)
        return DescentPlan(protocol, rounds, step, smoothness, gradients, bound)

    def _bound(self, num_users: int, rounds: int, start: Start, variance: float, granularity: int) -> DescentBound:
        """Returns the proved bound of so many rounds with this noise, before the smoothness is chosen."""
        likely = self.problem.smooth_gradients(self.problem.lipschitz / start.distance)  # their error, if an envelope's
        return DescentBound(
            rounds=rounds,
            num_users=num_users,
            oracle=self.oracle(variance, likely.bias),
            granularity=granularity,
            distance=start.distance,
            diameter=self.problem.diameter,
        )

    def _best_rounds(self, num_users: int, start: Start) -> tuple[float, int]:
        """Returns the least bound and its number of rounds, as far as known without building every number's protocol."""
        problem, single = self.problem, self.protocol(num_users)

        def value(rounds: int) -> float:
            if self.budget.calibration == "tight":  # as T grows the noise does in proportion, and the grid gets coarser
                variance, granularity = rounds * single.variance, max(1, math.floor(single.granularity / math.sqrt(rounds)))
            else:
                try:
                    protocol = self.protocol(num_users, rounds)
                except ValueError:  # more noise bits than anyone would send
                    return math.inf
                variance, granularity = protocol.variance, protocol.granularity
            bound = self._bound(num_users, rounds, start, variance, granularity)
            return bound.best_value(smoothness=problem.smoothness, lipschitz=problem.lipschitz)

        given = self.choices.rounds
        candidates = [given] if given else descent_candidates(self.oracle(single.variance), num_users=num_users)
        return min((value(rounds), rounds) for rounds in candidates)
