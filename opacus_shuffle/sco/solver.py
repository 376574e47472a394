"""``Solver``: what the optimisers share: a problem, a budget, a ledger of users, and phases that lead to an estimate."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from opacus_shuffle.core.validation import boolean, instance_of, integer, positive
from opacus_shuffle.protocols.calibration import noise_variance
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.budget import PrivacyBudget
from opacus_shuffle.sco.oracle import Oracle
from opacus_shuffle.sco.problem import Problem
from opacus_shuffle.sco.records import take
from opacus_shuffle.sco.result import Estimate, History, Round
from opacus_shuffle.sco.users import UserLedger, split

_BLOCK = 2**23  # entries of per-user gradients held at a time


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a phase starts: a point of the set with E‖theta − θ*‖² ≤ distance².

    Its expected excess loss is at most ``gap``; None where nothing better than L·distance is known.
    """

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
    average: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "rounds"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name))
        if self.step_size is not None:
            positive("step_size", self.step_size)
        boolean("average", self.average)
        if self.batches is not None and self.batch_size is not None:
            raise ValueError(f"batch_size must be left out where batches are given, got batch_size={self.batch_size!r}")
        if self.inverse_step_sizes is not None:
            object.__setattr__(self, "inverse_step_sizes", positive_numbers("inverse_step_sizes", self.inverse_step_sizes))


@dataclasses.dataclass(frozen=True)
class Phase:
    """The outcome of a phase: where it has ended, the excess loss proved there (None: nothing is), and how it came about.

    ``bits_per_user`` is what one of its users has sent in ``rounds_per_user`` rounds; None where nothing is sent.
    """

    theta: Tensor
    bound: float | None
    history: list[Round]
    choices: dict[str, Any]
    bits_per_user: int | None
    rounds_per_user: int = 1


class Solver(ABC):
    """One way to spend users on a problem, in one phase or several."""

    algorithm: ClassVar[str]
    interaction: ClassVar[str] = "sequential"

    def __init__(self, problem: Problem, budget: PrivacyBudget, choices: Choices) -> None:
        self.problem: Problem = instance_of("problem", problem, (Problem,))
        self.budget: PrivacyBudget = instance_of("budget", budget, (PrivacyBudget,))
        self.choices = choices
        self.ledger = UserLedger(problem.num_users)

    @abstractmethod
    def run(self, users: Tensor, start: Start) -> Phase:
        """Runs a phase on these users, who have not taken part before."""

    def solve(self) -> Estimate:
        """Runs one phase on everyone."""
        everyone = torch.arange(self.problem.num_users)
        phase = self.run(everyone, Start(self.problem.initial, self.problem.distance))
        return self.estimate([phase], {"algorithm": self.algorithm, **phase.choices})

    def estimate(self, phases: list[Phase], choices: dict[str, Any]) -> Estimate:
        """Returns what the last phase has found, and what all of them have revealed."""
        history: list[Round] = []
        for phase in phases:  # rounds and users are counted through
            first, before = len(history), history[-1].users if history else 0
            history += [
                dataclasses.replace(each, number=first + each.number, users=before + each.users) for each in phase.history
            ]
        privacy = PrivacyStatement(
            **dataclasses.asdict(self.budget),
            interaction=self.interaction,
            rounds=len(history),
            rounds_per_user=max(phase.rounds_per_user for phase in phases),
            num_users=self.ledger.used,
            bits_per_user=max((phase.bits_per_user for phase in phases if phase.bits_per_user is not None), default=None),
        )
        return Estimate(
            theta=phases[-1].theta, privacy=privacy, history=history, choices=choices, excess_loss_bound=phases[-1].bound
        )

    def oracle(self, variance: float, bias: float = 0.0) -> Oracle:
        """Returns what a round with this variance of its sum tells about a gradient."""
        problem = self.problem
        return Oracle(lipschitz=problem.lipschitz, dimension=problem.dimension, variance=variance, bias=bias)

    def protocol(self, num_users: int, rounds: int = 1) -> ShuffleVectorSum:
        """Returns the protocol of each of so many rounds with the same users; all of them together spend the budget."""
        problem, budget = self.problem, dataclasses.asdict(self.budget)
        return ShuffleVectorSum(num_users, problem.dimension, problem.lipschitz, **budget, rounds=rounds)

    def protocols(self, groups: Iterable[Tensor]) -> dict[int, ShuffleVectorSum]:
        """Returns the protocols of groups of each size, for users who take part in one round."""
        return {size: self.protocol(size) for size in sorted({len(group) for group in groups})}

    def planned_variance(self) -> float:
        """Returns the variance per coordinate of a round's sum, before its number of users is known.

        Where only the honest users' noise counts, the others' comes on top, hence the division.
        """
        promised = dataclasses.asdict(self.budget)
        honest_fraction = promised.pop("honest_fraction")
        return noise_variance(dimension=self.problem.dimension, max_norm=self.problem.lipschitz, **promised) / honest_fraction

    def batches(self, users: Tensor, batch_size: int | None) -> list[Tensor]:
        """Returns the given batches, or these users at random in batches of one size; all claimed from the ledger."""
        if self.choices.batches is not None:
            return self.ledger.claim_all(self.choices.batches)
        size = fitting("batch_size", integer("batch_size", batch_size), len(users))
        return self.ledger.claim_all(whole_batches(self.problem.shuffled(users), size))

    def mean_gradient(self, protocol: ShuffleVectorSum, gradients: BoundedGradients, theta: Tensor, users: Tensor) -> Tensor:
        """Makes a round: every user of the batch reports its gradient, the protocol estimates the mean; shape (d,)."""
        blocks = split(users, max(1, _BLOCK // self.problem.dimension))
        rows: Iterator[Tensor] | Tensor = (gradients.rows(theta, take(self.problem.data, block)) for block in blocks)
        if len(blocks) == 1:
            rows = next(iter(rows))
        return protocol.simulate(rows, self.problem.generator) / len(users)

    def descend(
        self,
        groups: list[Tensor],
        protocols: dict[int, ShuffleVectorSum],
        gradients: BoundedGradients,
        theta: Tensor,
        step: float,
    ) -> tuple[Tensor, list[Round]]:
        """Makes a projected step of SGD with each group; returns the mean of the iterates, or the last, and the history."""
        total, history, reached = torch.zeros_like(theta), History(len(groups)), 0
        for group in groups:
            total += theta
            gradient = self.mean_gradient(protocols[len(group)], gradients, theta, group)
            theta = self.problem.project(theta - step * gradient)
            reached = len(group) if self.interaction == "full" else reached + len(group)
            history.add(users=reached, gradient=gradient, theta=theta)
        return self.problem.project(total / len(groups)) if self.choices.average else theta, history.rounds


def whole_batches(users: Tensor, size: int) -> list[Tensor]:
    """Splits users in their order into ⌊n / size⌋ batches; who is left over is in none of them."""
    return split(users[: len(users) // size * size], size)


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
