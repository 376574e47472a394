"""``Solver``: what the optimisers share: a problem, a budget, a ledger of users, and phases that lead to an estimate."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from opacus_shuffle.core.validation import boolean, instance_of, integer, positive
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.bounded_gradients import BoundedGradients
from opacus_shuffle.sco.budget import PrivacyBudget
from opacus_shuffle.sco.oracle import Oracle
from opacus_shuffle.sco.problem import Problem
from opacus_shuffle.sco.records import take
from opacus_shuffle.sco.result import Estimate, Round
from opacus_shuffle.sco.users import UserLedger, split

_BLOCK = 2**23
"""Entries of per-user gradients held at a time."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a phase starts.

    Attributes:
        theta: In the set.
        distance: D with E‖theta − θ*‖² ≤ D².
        gap: At least the expected excess loss there, if that is known better than L·D.
    """

    theta: Tensor
    distance: float
    gap: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What the caller of an optimiser has fixed; None: the optimiser takes what its proved bound likes best.

    Attributes:
        batch_size: b, users per round.
        batches: Every round's users, in place of ``batch_size``.
        inverse_step_sizes: L_1, …, L_T of the accelerated method.
        rounds: T of gradient descent.
        step_size: η.
        average: Whether the answer is the mean of the iterates or the last one.
    """

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
    """The outcome of a phase.

    Attributes:
        theta: Where it has ended.
        bound: At least the expected excess loss there; None where nothing is proved.
        history: One entry per round.
        choices: What was used.
        bits_per_user: What one of the phase's users has sent; None where nothing is sent.
        rounds_per_user: In how many rounds each of them took part.
    """

    theta: Tensor
    bound: float | None
    history: list[Round]
    choices: dict[str, Any]
    bits_per_user: int | None
    rounds_per_user: int = 1


class Solver(ABC):
    """One way to spend users on a problem, in one phase or several.

    Args:
        problem: What is to be minimised.
        budget: What may be revealed.
        choices: What the caller has fixed.
    """

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
        history = join(phases)
        bits = [phase.bits_per_user for phase in phases if phase.bits_per_user is not None]
        return Estimate(
            theta=phases[-1].theta,
            privacy=self.budget.statement(
                self.interaction,
                rounds=len(history),
                rounds_per_user=max(phase.rounds_per_user for phase in phases),
                num_users=self.ledger.used,
                bits_per_user=max(bits, default=None),
            ),
            history=history,
            choices=choices,
            excess_loss_bound=phases[-1].bound,
        )

    def oracle(self, variance: float, bias: float = 0.0) -> Oracle:
        """Returns what a round with this variance of its sum tells about a gradient."""
        problem = self.problem
        return Oracle(lipschitz=problem.lipschitz, dimension=problem.dimension, variance=variance, bias=bias)

    def protocol(self, num_users: int, rounds: int = 1) -> ShuffleVectorSum:
        """Returns the protocol of each of so many rounds with the same users."""
        return self.budget.protocol(num_users, self.problem.dimension, self.problem.lipschitz, rounds=rounds)

    def protocols(self, groups: Iterable[Tensor]) -> dict[int, ShuffleVectorSum]:
        """Returns the protocols of groups of each size, for users who take part in one round."""
        return {size: self.protocol(size) for size in sorted({len(group) for group in groups})}

    def planned_variance(self) -> float:
        """Returns the variance per coordinate of a round's sum, before its number of users is known."""
        return self.budget.planned_variance(self.problem.dimension, self.problem.lipschitz)

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


def join(phases: list[Phase]) -> list[Round]:
    """Returns the rounds of all phases, numbered and with their users counted through."""
    joined: list[Round] = []
    for phase in phases:
        first, before = len(joined), joined[-1].users if joined else 0
        joined += [dataclasses.replace(each, number=first + each.number, users=before + each.users) for each in phase.history]
    return joined


def whole_batches(users: Tensor, size: int) -> list[Tensor]:
    """Splits users in their order into ⌊n / size⌋ batches; who is left over is in none of them."""
    return split(users[: len(users) // size * size], size)


def fitting(name: str, size: int, num_users: int) -> int:
    """Returns a number of users that is at most as large as there are."""
    if size > num_users:
        raise ValueError(f"{name} must not exceed the {num_users} users there are, got {size!r}")
    return size


def positive_numbers(name: str, values: Any) -> list[float]:
    """Returns a sequence of positive numbers as a list.

    Raises:
        ValueError: It is none.
    """
    if isinstance(values, str) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise ValueError(f"{name} must be a sequence of positive numbers, got {values!r}")
    return [positive(name, step) for step in (values.tolist() if isinstance(values, Tensor) else values)]
