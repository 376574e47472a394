"""``Solver``: what all optimisers share; it spends users on a problem in phases."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opacus_shuffle.core.participation import permutation
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.validation import instance_of, integer, one_of, positive
from opacus_shuffle.protocols.calibration import noise_variance
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.objective import Objective
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.records import take

_BLOCK = 2**23
"""Entries of per-user gradients that are held at a time."""
_CACHED = 2**17
"""So many that a processor's cache holds, and the protocol rounds at a time: more are slower."""
_MOST_ROUNDS = 10**7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The outcome of a shuffle-private optimiser.

    Attributes:
        theta: The estimate, float64, shape (d,).
        privacy: What the run reveals, to whom.
        history: Every round's norm of the noisy mean gradient; it is computed from shuffled
            messages alone, so that it may be published.
        choices: What was used: batch size, step size, smoothness, …
        excess_loss_bound: At least E[f(theta)] − min over the set of f, where f is the mean loss of
            a fresh user, the expectation is over users and randomness, and the minimum is over the
            constraint set. Proved if all users follow the protocol and are independent with one
            distribution, every user's loss is convex, and Lipschitz and smooth as stated, and
            ``diameter``, where given, is at least the distance from the start to a minimiser. It
            never depends on the data: it reveals nothing, nor notices when this fails (a
            ``clip=True`` that cuts, say). None where nothing is proved: steps that are too long, or
            practical.
    """

    theta: Tensor
    privacy: PrivacyStatement
    history: list[float]
    choices: Mapping[str, Any]
    excess_loss_bound: float | None = None

    def __str__(self) -> str:
        numbers = {name: f"{x:.4g}" for name, x in self.choices.items() if isinstance(x, float)}
        plain = {name: x for name, x in self.choices.items() if isinstance(x, int | str)}
        used = ", ".join(f"{name}={value}" for name, value in {**plain, **numbers}.items())
        quality = "excess loss: nothing is proved for these settings"
        if self.excess_loss_bound is not None:
            quality = (
                f"expected excess loss at most {round_up(self.excess_loss_bound)} (users "
                "independent with one distribution; loss convex and as Lipschitz and smooth as "
                "stated)"
            )
        counted = f"estimate of {self.theta.numel()} parameters after {len(self.history)} rounds"
        return f"{counted}\n{used}\n{quality}\n{self.privacy}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle:
    """How far a round's estimate of the mean gradient is off (SCO Definition B.1).

    The estimate is unbiased but for ``bias``.

    Attributes:
        lipschitz: No user's gradient is longer, L.
        dimension: d.
        variance: Per coordinate, of the sum of a batch's reports, V.
        bias: The users' gradients are wrong by at most this (inexact proximal steps).
    """

    lipschitz: float
    dimension: int
    variance: float
    bias: float = 0.0

    @property
    def ratio(self) -> float:
        """The number of users whose gradients together are as large as the noise, s = √(dV)/L."""
        return math.sqrt(self.dimension * self.variance) / self.lipschitz

    def deviation(self, batch_size: int) -> float:
        """Returns an upper bound on the root of E‖estimate − mean gradient‖²: √(L²/b + dV/b²)."""
        return self.lipschitz * math.sqrt(1 / batch_size + (self.ratio / batch_size) ** 2)

    def second_moment(self, batch_size: int) -> float:
        """Returns an upper bound on E‖estimate‖²: L_G² = L² + dV/b²."""
        return self.lipschitz**2 * (1 + (self.ratio / batch_size) ** 2)


class Start(NamedTuple):
    """The point and the distance that a phase starts from.

    Attributes:
        theta: The point.
        distance: E‖theta − θ*‖² ≤ distance².
        gap: At least its expected excess loss; None: L·distance.
    """

    theta: Tensor
    distance: float
    gap: float | None = None


class Plan(NamedTuple):
    """The settings of one phase, known before it sees data.

    Attributes:
        objective: What is minimised: the loss, or an envelope of it.
        steps: η_1, …, η_T, or the inverse steps L_1, …, L_T of accelerated SGD.
        choices: For the estimate.
        bound: The excess loss that is proved, without what smoothing costs; None if none is.
    """

    objective: Objective
    steps: list[float]
    choices: dict[str, Any]
    bound: float | None


class Solver(ABC):
    """One way to spend users on a problem, in one phase or several.

    Args:
        problem: What is to be minimised.
        budget: What may be revealed.
        batch_size: b; None takes what the proved bound likes best, as of the two that follow.
        rounds: T.
        step_size: η.
        steps: ``"proved"`` or ``"practical"``.

    Raises:
        ValueError: If an argument is out of range.
    """

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
        """Returns how many users take part in each round of a phase, and the number of rounds."""

    @abstractmethod
    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns the settings of a phase of so many rounds of this size."""

    @abstractmethod
    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes one round with each group of users, and returns the answer (d,)."""

    def solve(self) -> Estimate:
        """Runs one phase on all users."""
        return self.run(self.order(), Start(self.problem.initial, self.problem.distance))

    def order(self) -> Tensor:
        """Returns all users in the random order in which they take part."""
        return torch.from_numpy(permutation(self.problem.num_users, self.problem.generator))

    def run(self, users: Tensor, start: Start) -> Estimate:
        """Runs a phase on users who have not taken part before."""
        size, rounds = self.schedule(len(users), start)
        plan = self.plan(size, rounds, start)
        # Unless everyone is in every round no two rounds share a user: on that rests what a
        # sequential run promises.
        full = self.interaction == "full"
        groups = [users] * rounds if full else list(torch.split(users[: size * rounds], size))
        self.history = []
        return Estimate(
            theta=self.iterate(plan, groups, start),
            privacy=self.statement(size, rounds),
            history=self.history,
            choices={
                "algorithm": self.algorithm,
                **plan.choices,
                "lipschitz": self.problem.lipschitz,
                "distance": start.distance,
            },
            excess_loss_bound=self._proved(plan),
        )

    def statement(self, batch_size: int, rounds: int) -> Any:
        """Returns the guarantee of a phase of so many rounds of this size."""
        rounds_per_user = rounds if self.interaction == "full" else 1
        return PrivacyStatement(
            **dataclasses.asdict(self.budget),
            interaction=self.interaction,
            rounds=rounds,
            rounds_per_user=rounds_per_user,
            num_users=batch_size * rounds // rounds_per_user,
            bits_per_user=rounds_per_user * self.protocol(batch_size, rounds).bits_per_user,
        )

    def bound(self, num_users: int, start: Start) -> float:
        """Returns the proved excess loss of a phase of so many users."""
        proved = self._proved(self.plan(*self.schedule(num_users, start), start))
        return self.problem.capped(math.inf) if proved is None else proved

    def _proved(self, plan: Plan) -> float | None:
        """Returns the excess loss that is proved, with what smoothing costs."""
        if plan.bound is None:
            return None
        cost = plan.objective.smoothing_cost(self.problem.lipschitz)
        return self.problem.capped(plan.bound + cost)

    def batches(self, num_users: int, best: int) -> tuple[int, int]:
        """Returns the batch size and how many whole batches there are."""
        size = best
        if self.batch_size is not None:
            size = integer("batch_size", self.batch_size, maximum=num_users)
        return size, num_users // size

    def oracle(self, variance: float, bias: float = 0.0) -> Oracle:
        """Returns how far a round is off whose sum has this variance."""
        problem = self.problem
        return Oracle(
            lipschitz=problem.lipschitz, dimension=problem.dimension, variance=variance, bias=bias
        )

    def protocol(self, num_users: int, rounds: int) -> ShuffleVectorSum:
        """Returns the protocol of a round of so many users."""
        rounds_per_user = rounds if self.interaction == "full" else 1
        return self._protocol(
            num_users, self.problem.dimension, self.problem.lipschitz, rounds=rounds_per_user
        )

    def planned_variance(self) -> float:
        """Returns the variance per coordinate of a round's sum."""
        variance = noise_variance(
            max_norm=self.problem.lipschitz, epsilon=self.budget.epsilon, delta=self.budget.delta
        )
        # The noise of the other users comes on top, hence the division.
        return variance / self.budget.honest_fraction

    def round_variance(self, batch_size: int, rounds: int) -> float:
        """Returns the variance per coordinate of the sum of a round of this size."""
        return self.protocol(batch_size, rounds).variance

    def mean_gradient(self, plan: Plan, theta: Tensor, users: Tensor, rounds: int) -> Tensor:
        """Runs one round: these users report, and the protocol estimates their mean gradient (d,).

        Args:
            plan: The phase's.
            theta: Where the gradients are taken.
            users: Their numbers.
            rounds: Of the phase.
        """
        total = self.protocol(len(users), rounds).simulate(
            self.reports(plan, theta, users), self.problem.generator
        )
        mean = total / len(users)
        self.history.append(float(mean.norm()))
        return mean

    def reports(self, plan: Plan, theta: Tensor, users: Tensor) -> Iterator[Tensor]:
        """Yields these users' gradients, in blocks of rows that memory holds."""
        problem = self.problem
        most = max(1, _BLOCK // problem.dimension)
        rows = min(most, max(plan.objective.chunk_size, _CACHED // problem.dimension))
        for block in torch.split(users, rows):
            yield problem.bounded_gradients(plan.objective, theta, take(problem.data, block))
