"""``Solver``: what the optimisers share: a problem, a budget, a ledger of users, and phases that lead to an estimate."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from opacus_shuffle.core.participation import permutation
from opacus_shuffle.core.progress import enter_phase, progress
from opacus_shuffle.core.validation import boolean, instance_of, integer, one_of, positive
from opacus_shuffle.protocols.calibration import noise_variance
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.descent_bound import Oracle
from opacus_shuffle.sco.problem import PrivacyBudget, Problem
from opacus_shuffle.sco.records import UserLedger, take
from opacus_shuffle.sco.result import Estimate, History

_BLOCK = 2**23  # entries of per-user gradients held at a time
_MOST_ROUNDS = 10**7


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a phase starts: E‖theta − θ*‖² ≤ distance², and an expected excess of at most ``gap`` (None: of L·distance)."""

    theta: Tensor
    distance: float
    gap: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """Arguments of the optimisers that their caller may fix; None: the optimiser takes what its proved bound likes best."""

    batch_size: int | None = None
    batches: Iterable[Any] | None = None
    inverse_step_sizes: Sequence[float] | None = None
    rounds: int | None = None
    step_size: float | None = None
    steps: str = "proved"
    average: bool | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "rounds"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integer(name, getattr(self, name)))
        if self.rounds is not None and self.rounds > _MOST_ROUNDS:
            raise ValueError(f"rounds must not exceed {_MOST_ROUNDS:,}, got {self.rounds!r}: take fewer")
        if self.step_size is not None:
            object.__setattr__(self, "step_size", positive("step_size", self.step_size))
        one_of("steps", self.steps, ("proved", "practical"))
        average = self.steps == "proved" if self.average is None else boolean("average", self.average)
        object.__setattr__(self, "average", average)
        if self.batches is not None and self.batch_size is not None:
            raise ValueError(f"batch_size must be left out where batches are given, got batch_size={self.batch_size!r}")
        if self.inverse_step_sizes is not None:
            object.__setattr__(self, "inverse_step_sizes", positive_numbers("inverse_step_sizes", self.inverse_step_sizes))

    def sizes(self, num_users: int, best: Callable[[], int]) -> list[int]:
        """Returns the sizes of the whole batches of so many users, of the size given or, if none is, of the best."""
        size = best() if self.batch_size is None else fitting("batch_size", self.batch_size, num_users)
        return [size] * (num_users // size)


@dataclasses.dataclass(frozen=True)
class Phase:
    """The outcome of a phase: where it has ended, the excess loss proved there (None: nothing is), and what users have sent."""

    theta: Tensor
    bound: float | None
    choices: dict[str, Any]
    bits_per_user: int | None
    rounds_per_user: int = 1


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

    def __init__(self, problem: Problem, budget: PrivacyBudget, choices: Choices) -> None:
        self.problem: Problem = instance_of("problem", problem, (Problem,))
        self.budget: PrivacyBudget = instance_of("budget", budget, (PrivacyBudget,))
        self.choices = choices
        self.ledger, self.history = UserLedger(problem.num_users), History()
        self.protocol = functools.cache(self._protocol)

    @abstractmethod
    def sizes(self, num_users: int, start: Start) -> list[int]:
        """Returns how many users take part in each round of a phase of so many."""

    @abstractmethod
    def plan(self, sizes: list[int], start: Start, *, exact: bool = True) -> Plan:
        """Returns the plan for rounds of these sizes, by the protocols' own noise; nearly so, but faster, if not ``exact``."""

    @abstractmethod
    def iterate(self, plan: Plan, groups: list[Tensor], start: Start) -> Tensor:
        """Makes a round with each group, adds it to the history, and returns the answer (d,)."""

    def bound(self, num_users: int, start: Start, *, exact: bool) -> float:
        """Returns the excess loss to be proved for a phase of so many users."""
        proved = self._proved(self.plan(self.sizes(num_users, start), start, exact=exact))
        return self.problem.capped(math.inf) if proved is None else proved

    def run(self, users: Tensor, start: Start) -> Phase:
        """Runs a phase on these users, who have not taken part before."""
        groups = self.groups(users, start)
        sizes = [len(group) for group in groups]
        plan = self.plan(sizes, start)
        self.history.begin(rounds=len(groups), users=len(users))
        with progress(self.algorithm):
            theta = self.iterate(plan, groups, start)
        choices = {**plan.choices, "lipschitz": self.problem.lipschitz, "distance": start.distance}
        often = len(groups) if self.interaction == "full" else 1
        return Phase(theta, self._proved(plan), choices, self.bits(sizes, often), often)

    def _proved(self, plan: Plan) -> float | None:
        """Returns the excess loss that is proved, with what smoothing costs."""
        return None if plan.bound is None else self.problem.capped(plan.bound + plan.gradients.smoothing_cost)

    def bits(self, sizes: list[int], often: int) -> int | None:
        """Returns what a user who takes part so often sends at most; None if nothing is sent."""
        return often * max(self.protocol(size, often).bits_per_user for size in sizes)

    def groups(self, users: Tensor, start: Start) -> list[Tensor]:
        """Returns who takes part in each round: the given batches, or these users, all claimed from the ledger."""
        if self.choices.batches is not None:
            return self.ledger.claim_all(self.choices.batches)
        sizes = self.sizes(len(users), start)
        return self.ledger.claim_all(torch.split(self.order(users)[: sum(sizes)], sizes))

    def order(self, users: Tensor) -> Tensor:
        """Returns these users in the order in which they take part: at random."""
        return users[torch.from_numpy(permutation(len(users), self.problem.generator))]

    def solve(self) -> Estimate:
        """Runs one phase on everyone."""
        everyone = torch.arange(self.problem.num_users)
        phase = self.run(everyone, Start(self.problem.initial, self.problem.distance))
        return self.estimate([phase], {"algorithm": self.algorithm, **phase.choices})

    def estimate(self, phases: list[Phase], choices: dict[str, Any]) -> Estimate:
        """Returns what the last phase has found, and what all of them have revealed."""
        privacy = PrivacyStatement(
            **dataclasses.asdict(self.budget),
            interaction=self.interaction,
            rounds=len(self.history.rounds),
            rounds_per_user=max(phase.rounds_per_user for phase in phases),
            num_users=self.ledger.used,
            bits_per_user=max((phase.bits_per_user for phase in phases if phase.bits_per_user is not None), default=None),
        )
        last, history = phases[-1], self.history.rounds
        return Estimate(theta=last.theta, privacy=privacy, history=history, choices=choices, excess_loss_bound=last.bound)

    def oracle(self, variance: float, bias: float = 0.0) -> Oracle:
        """Returns what a round with this variance of its sum tells about a gradient."""
        problem = self.problem
        return Oracle(lipschitz=problem.lipschitz, dimension=problem.dimension, variance=variance, bias=bias)

    def _protocol(self, num_users: int, rounds: int = 1) -> ShuffleVectorSum:
        """Returns the protocol of each of so many rounds with the same users; all of them together spend the budget."""
        problem, budget = self.problem, dataclasses.asdict(self.budget)
        return ShuffleVectorSum(num_users, problem.dimension, problem.lipschitz, **budget, rounds=rounds)

    def planned_variance(self) -> float:
        """Returns the variance per coordinate of a round's sum, before its number of users is known."""
        promised = dataclasses.asdict(self.budget)
        honest_fraction = promised.pop("honest_fraction")  # the others' noise comes on top, hence the division
        return noise_variance(dimension=self.problem.dimension, max_norm=self.problem.lipschitz, **promised) / honest_fraction

    def mean_gradient(self, gradients: BoundedGradients, theta: Tensor, users: Tensor, rounds: int = 1) -> Tensor:
        """Makes one of so many rounds of these users: each reports its gradient, the protocol estimates the mean (d,)."""
        enter_phase(f"round {len(self.history.rounds) + 1:,} of {self.history.planned:,}", share=self.history.share)
        blocks = torch.split(users, max(1, _BLOCK // self.problem.dimension))
        rows: Iterator[Tensor] | Tensor = (gradients.rows(theta, take(self.problem.data, block)) for block in blocks)
        if len(blocks) == 1:
            rows = next(iter(rows))
        return self.protocol(len(users), rounds).simulate(rows, self.problem.generator) / len(users)


def fitting(name: str, size: int, num_users: int) -> int:
    """Returns a number of users that is at most as large as there are."""
    if size > num_users:
        raise ValueError(f"{name} must not exceed the {num_users} users there are, got {size!r}")
    return size


def positive_numbers(name: str, values: Any) -> list[float]:
    """Returns a sequence of positive numbers as a list, and refuses anything else."""
    if isinstance(values, str) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a sequence of positive numbers, got {values!r}")
    return [positive(name, step) for step in (values.tolist() if isinstance(values, Tensor) else values)]
