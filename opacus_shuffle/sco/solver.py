"""``Solver``: what the optimisers share: a problem, a budget, and phases that lead to an estimate."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opacus_shuffle.core.participation import permutation
from opacus_shuffle.core.validation import instance_of, integer, one_of, positive
from opacus_shuffle.protocols.calibration import noise_variance
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.descent_bound import Oracle
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.records import take
from opacus_shuffle.sco.result import Estimate

_BLOCK = 2**23  # entries of per-user gradients held at a time
_MOST_ROUNDS = 10**7


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a phase starts: E‖theta − θ*‖² ≤ distance², and an expected excess of at most ``gap`` (None: of L·distance)."""

    theta: Tensor
    distance: float
    gap: float | None = None


class Plan(NamedTuple):
    """All that a phase needs but the data; ``steps`` are η_1, …, or L_1, …, L_T; ``bound`` leaves out what smoothing costs."""

    gradients: BoundedGradients
    steps: list[float]
    choices: dict[str, Any]
    bound: float | None


class Solver(ABC):
    """One way to spend users on a problem, in one phase or several."""

    algorithm: ClassVar[str]
    interaction: ClassVar[str] = "sequential"

    def __init__(
        self,
        problem: Problem,
        budget: PrivacyBudget,
        *,
        batch_size: int | None = None,
        rounds: int | None = None,
        step_size: float | None = None,
        steps: str = "proved",
    ) -> None:
        self.problem: Problem = instance_of("problem", problem, (Problem,))
        self.budget: PrivacyBudget = instance_of("budget", budget, (PrivacyBudget,))
        # What the caller leaves out (None) is what the proved bound likes best.
        self.batch_size = None if batch_size is None else integer("batch_size", batch_size)
        self.rounds = None if rounds is None else integer("rounds", rounds, maximum=_MOST_ROUNDS)
        self.step_size = None if step_size is None else positive("step_size", step_size)
        self.steps: str = one_of("steps", steps, ("proved", "practical"))
        self.history: list[float] = []
        self._protocol = functools.cache(
            functools.partial(ShuffleVectorSum, **dataclasses.asdict(budget))
        )

    @abstractmethod
    def schedule(self, num_users: int, start: Start) -> tuple[int, int]:
        """Returns how many of so many users take part in each round of a phase, and the number of rounds."""

    @abstractmethod
    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns the plan for so many rounds of this size, by the protocol's own noise."""

    @abstractmethod
    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a round with each group, and returns the answer (d,)."""

    def bound(self, num_users: int, start: Start) -> float:
        """Returns the excess loss to be proved for a phase of so many users."""
        proved = self._proved(self.plan(*self.schedule(num_users, start), start))
        return self.problem.capped(math.inf) if proved is None else proved

    def run(self, users: Tensor, start: Start) -> Estimate:
        """Runs a phase on these users, who have not taken part before."""
        size, rounds = self.schedule(len(users), start)
        plan = self.plan(size, rounds, start)
        # Unless everyone is in every round no two rounds share a user: on that rests what a
        # sequential run promises.
        full = self.interaction == "full"
        groups = [users] * rounds if full else list(torch.split(users[: size * rounds], size))
        self.history, often = [], rounds if full else 1
        theta = self.iterate(plan, groups, start)
        privacy = PrivacyStatement(
            **dataclasses.asdict(self.budget),
            interaction=self.interaction,
            rounds=rounds,
            rounds_per_user=often,
            num_users=size if full else size * rounds,
            bits_per_user=None
            if self.interaction == "pan"
            else often * self.protocol(size, rounds).bits_per_user,
        )
        used = {"algorithm": self.algorithm, **plan.choices}
        return Estimate(
            theta=theta,
            privacy=privacy,
            history=self.history,
            choices={**used, "lipschitz": self.problem.lipschitz, "distance": start.distance},
            excess_loss_bound=self._proved(plan),
        )

    def _proved(self, plan: Plan) -> float | None:
        """Returns the excess loss that is proved, with what smoothing costs."""
        return (
            None
            if plan.bound is None
            else self.problem.capped(plan.bound + plan.gradients.smoothing_cost)
        )

    def batches(self, num_users: int, best: int) -> tuple[int, int]:
        """Returns the size of batches, as given or, if it is not, the best, and how many whole ones there are."""
        size = (
            best
            if self.batch_size is None
            else integer("batch_size", self.batch_size, maximum=num_users)
        )
        return size, num_users // size

    def order(self) -> Tensor:
        """Returns all users in the order in which they take part: at random."""
        return torch.from_numpy(permutation(self.problem.num_users, self.problem.generator))

    def solve(self) -> Estimate:
        """Runs one phase on everyone."""
        return self.run(self.order(), Start(self.problem.initial, self.problem.distance))

    def oracle(self, variance: float, bias: float = 0.0) -> Oracle:
        """Returns what a round with this variance of its sum tells about a gradient."""
        problem = self.problem
        return Oracle(
            lipschitz=problem.lipschitz, dimension=problem.dimension, variance=variance, bias=bias
        )

    def protocol(self, num_users: int, rounds: int) -> ShuffleVectorSum:
        """Returns the protocol of each of a phase's rounds, of so many users; together they spend the budget."""
        rounds_per_user = rounds if self.interaction == "full" else 1
        return self._protocol(
            num_users, self.problem.dimension, self.problem.lipschitz, rounds=rounds_per_user
        )

    def planned_variance(self) -> float:
        """Returns the variance per coordinate of a round's sum, before its number of users is known."""
        promised = dataclasses.asdict(self.budget)
        honest_fraction = promised.pop(
            "honest_fraction"
        )  # the others' noise comes on top, hence the division
        return (
            noise_variance(
                dimension=self.problem.dimension, max_norm=self.problem.lipschitz, **promised
            )
            / honest_fraction
        )

    def mean_gradient(
        self, gradients: BoundedGradients, theta: Tensor, users: Tensor, rounds: int
    ) -> Tensor:
        """Makes one of a phase's rounds: these users report their gradients, the protocol estimates the mean (d,)."""
        blocks = torch.split(users, max(1, _BLOCK // self.problem.dimension))
        rows = (gradients.rows(theta, take(self.problem.data, block)) for block in blocks)
        mean = self.protocol(len(users), rounds).simulate(rows, self.problem.generator) / len(users)
        self.history.append(float(mean.norm()))
        return mean
