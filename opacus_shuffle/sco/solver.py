"""``Solver``: the base class of all optimisers; it spends users on a problem in phases."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
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
from opacus_shuffle.sco.records import map_data, take

_BLOCK = 2**23
"""The most entries of per-user gradients in memory at a time."""
_CACHED = 2**19
"""The usual number: it fits into a processor's cache."""
_MAX_ROUNDS = 10**7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of a shuffle-private optimiser.

    Attributes:
        theta: The estimate, float64, shape (d,).
        privacy: The guarantee of the run.
        history: The norm of each round's noisy mean gradient. It is computed from shuffled
            messages only, so it may be published.
        choices: The settings: batch size, step size, smoothness, …
        excess_loss_bound: At least E[f(theta)] − min over the set of f, where f is the mean loss of
            a fresh user, the expectation is over users and randomness, and the minimum is over the
            constraint set. Proved if all users follow the protocol and are independent with one
            distribution, every user's loss is convex, and Lipschitz and smooth as stated, and
            ``diameter``, if given, is at least the distance from the start to a minimiser. It never
            depends on the data: it reveals nothing, and it does not notice if an assumption fails
            (for example if ``clip=True`` cuts gradients). None if nothing is proved, because steps
            are too long or practical.
    """

    theta: Tensor
    privacy: PrivacyStatement
    history: list[float]
    choices: Mapping[str, Any]
    excess_loss_bound: float | None = None

    def __str__(self) -> str:
        numbers = {name: f"{x:.4g}" for name, x in self.choices.items() if isinstance(x, float)}
        plain = {name: x for name, x in self.choices.items() if isinstance(x, int | str)}
        settings = ", ".join(f"{name}={value}" for name, value in {**plain, **numbers}.items())
        quality = "excess loss: nothing is proved for these settings"
        if self.excess_loss_bound is not None:
            quality = (
                f"expected excess loss at most {round_up(self.excess_loss_bound)} (users "
                "independent with one distribution; loss convex and as Lipschitz and smooth as "
                "stated)"
            )
        summary = f"estimate of {self.theta.numel()} parameters after {len(self.history)} rounds"
        return f"{summary}\n{settings}\n{quality}\n{self.privacy}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle:
    """The error of a round's unbiased estimate of the mean gradient (SCO Definition B.1).

    Attributes:
        lipschitz: No user's gradient is longer, L.
        dimension: d.
        variance: Per coordinate, of the sum of a batch's reports, V.
    """

    lipschitz: float
    dimension: int
    variance: float

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
    """The start of a phase.

    Attributes:
        theta: The point.
        distance: E‖theta − θ*‖² ≤ distance².
        gap: At least its expected excess loss; None: L·distance.
    """

    theta: Tensor
    distance: float
    gap: float | None = None


class Plan(NamedTuple):
    """The settings of one phase, chosen before it sees data.

    Attributes:
        objective: The function to minimise: the loss, or an envelope of it.
        steps: η_1, …, η_T, or the inverse steps L_1, …, L_T of accelerated SGD.
        choices: The settings for ``Estimate.choices``.
        bound: The proved excess loss, without the cost of smoothing; None if none is proved.
    """

    objective: Objective
    steps: list[float]
    choices: dict[str, Any]
    bound: float | None


class Solver(ABC):
    """A method that spends users on a problem, in one phase or several.

    Args:
        problem: The problem.
        budget: The privacy of the run.
        batch_size: b; None takes the one with the smallest proved bound, as for the next two.
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
        self.rounds = None if rounds is None else integer("rounds", rounds, maximum=_MAX_ROUNDS)
        self.step_size = None if step_size is None else positive("step_size", step_size)
        self.steps: str = one_of("steps", steps, ("proved", "practical"))
        self.history: list[float] = []
        self._protocol = functools.cache(
            functools.partial(ShuffleVectorSum, **dataclasses.asdict(budget))
        )

    @abstractmethod
    def schedule(self, num_users: int, start: Start) -> tuple[int, int]:
        """Returns the number of users per round of a phase, and the number of rounds."""

    @abstractmethod
    def plan(self, batch_size: int, rounds: int, start: Start) -> Plan:
        """Returns the settings of a phase of so many rounds of this size."""

    @abstractmethod
    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes one round with each group of users, and returns the result (d,)."""

    def solve(self) -> Estimate:
        """Runs one phase on all users."""
        return self.run(self.order(), Start(self.problem.initial, self.problem.distance))

    def order(self) -> Tensor:
        """Returns the numbers of all users, in random order."""
        return torch.from_numpy(permutation(self.problem.num_users, self.problem.generator))

    def run(self, users: Tensor, start: Start) -> Estimate:
        """Runs a phase on users who were in no phase before."""
        size, rounds = self.schedule(len(users), start)
        plan = self.plan(size, rounds, start)
        if self.interaction == "full":
            groups = [users] * rounds
        else:  # The guarantee of a sequential run requires that no two rounds share a user.
            groups = list(torch.split(users[: size * rounds], size))
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
            excess_loss_bound=self._proved_loss(plan),
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
        proved = self._proved_loss(self.plan(*self.schedule(num_users, start), start))
        return self.problem.cap(math.inf) if proved is None else proved

    def _proved_loss(self, plan: Plan) -> float | None:
        """Returns the proved excess loss, including the cost of smoothing."""
        if plan.bound is None:
            return None
        return self.problem.cap(plan.bound + plan.objective.smoothing_cost(self.problem.lipschitz))

    def batches(self, num_users: int, best: int) -> tuple[int, int]:
        """Returns the batch size and the number of whole batches."""
        size = best
        if self.batch_size is not None:
            size = integer("batch_size", self.batch_size, maximum=num_users)
        return size, num_users // size

    def oracle(self, variance: float) -> Oracle:
        """Returns the error of a round whose sum has this variance."""
        problem = self.problem
        return Oracle(lipschitz=problem.lipschitz, dimension=problem.dimension, variance=variance)

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
        # The honest users' noise must suffice; that of the others is added to it.
        return variance / self.budget.honest_fraction

    def round_variance(self, batch_size: int, rounds: int) -> float:
        """Returns the variance per coordinate of the sum of a round of this size."""
        return self.protocol(batch_size, rounds).variance

    def mean_gradient(self, plan: Plan, theta: Tensor, users: Tensor, rounds: int) -> Tensor:
        """Runs one round: these users report, and the protocol estimates their mean gradient (d,).

        Args:
            plan: The plan of the phase.
            theta: The point of the gradients.
            users: The users' numbers.
            rounds: The number of rounds of the phase.
        """
        problem, total = self.problem, torch.zeros(self.problem.dimension, dtype=torch.float64)
        for batch in self.batches_of(plan, users):
            total += problem.sum_of_gradients(plan.objective, theta, batch)
        protocol = self.protocol(len(users), rounds)
        mean = protocol.release_sum(total, len(users), problem.generator) / len(users)
        self.history.append(float(mean.norm()))
        return mean

    def batches_of(self, plan: Plan, users: Tensor) -> Iterator[Any]:
        """Yields these users' records, in blocks whose gradients fit into memory."""
        problem = self.problem
        limit = max(1, _BLOCK // problem.dimension)
        rows = min(limit, max(plan.objective.chunk_size, _CACHED // problem.dimension))
        if len(users) == problem.num_users:  # in any order; slices need no copies
            for start in range(0, len(users), rows):
                yield map_data(operator.itemgetter(slice(start, start + rows)), problem.data)
        else:
            for block in torch.split(users, rows):
                yield take(problem.data, block)
