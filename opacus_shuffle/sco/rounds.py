"""Rounds of disjoint users: who is in them, which protocol sums their gradients, and what all of them reveal.

>>> Budget(epsilon=1.0, delta=1e-6, calibration="tight", honest_fraction=1.0).protocol(100, 3, 1.0).num_users
100
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from opacus_shuffle.core.validation import integer
from opacus_shuffle.protocols.calibration import Promise
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
from opacus_shuffle.sco.printed import Printed
from opacus_shuffle.sco.problem import Problem, Reports
from opacus_shuffle.sco.schedules import Oracle, planned_variance
from opacus_shuffle.sco.users import UserLedger, random_batches


@dataclasses.dataclass(frozen=True)
class Budget:
    """The privacy of a run, and how its protocols are calibrated."""

    epsilon: float
    delta: float
    calibration: str
    honest_fraction: float

    def __post_init__(self) -> None:
        Promise(self.epsilon, self.delta, self.calibration, self.honest_fraction)

    def protocol(self, num_users: int, dimension: int, max_norm: float) -> ShuffleVectorSum:
        """A round for so many users."""
        return ShuffleVectorSum(
            num_users, dimension, max_norm, self.epsilon, self.delta, self.calibration, honest_fraction=self.honest_fraction
        )

    def planned(self, problem: Problem, reports: Reports) -> Oracle:
        """What a round will tell, before its size is known."""
        variance = planned_variance(
            dimension=problem.dimension,
            max_norm=reports.limit,
            epsilon=self.epsilon,
            delta=self.delta,
            calibration=self.calibration,
            honest_fraction=self.honest_fraction,
        )
        return Oracle(lipschitz=reports.limit, dimension=problem.dimension, variance=variance, bias=reports.bias)

    def printed(self, problem: Problem, *, num_users: int | None = None, distance: float | None = None) -> Printed:
        """The paper's formulas for this problem."""
        return Printed(
            num_users=problem.num_users if num_users is None else num_users,
            dimension=problem.dimension,
            lipschitz=problem.lipschitz,
            diameter=problem.distance if distance is None else distance,
            epsilon=self.epsilon,
            delta=self.delta,
        )


class SequentialRounds:
    """Runs rounds whose users are disjoint; each is (ε, δ)-DP, and so are all of them together.

    Args:
        problem: Data, set and randomness.
        reports: What users report.
        budget: ε and δ.
        groups: Each round's users, from a :class:`~opacus_shuffle.sco.users.UserLedger`.
    """

    def __init__(self, problem: Problem, reports: Reports, budget: Budget, groups: list[Tensor]) -> None:
        self._problem, self._reports, self._budget = problem, reports, budget
        self.sizes = sorted({len(group) for group in groups})
        self.protocols = {size: budget.protocol(size, problem.dimension, reports.limit) for size in self.sizes}

    def oracle(self, size: int) -> Oracle:
        """What a round of this size tells."""
        return Oracle(
            lipschitz=self._reports.limit,
            dimension=self._problem.dimension,
            variance=self.protocols[size].variance,
            bias=self._reports.bias,
        )

    @property
    def deviation(self) -> float:
        """Root mean squared error of a round's gradient, at most."""
        return max(self.oracle(size).deviation(size) for size in self.sizes)

    def gradient(self, theta: Tensor, users: Tensor) -> Tensor:
        """The round's estimate of the mean gradient, shape (d,)."""
        return self._problem.mean_gradient(self.protocols[len(users)], self._reports, theta, users)

    @property
    def bits_per_user(self) -> int:
        """What a user sends, at most."""
        return max(protocol.bits_per_user for protocol in self.protocols.values())

    def statement(self, *, rounds: int, num_users: int) -> PrivacyStatement:
        """What the run has cost."""
        budget = self._budget
        return PrivacyStatement(
            epsilon=float(budget.epsilon),
            delta=float(budget.delta),
            interaction="sequential",
            rounds=rounds,
            rounds_per_user=1,
            num_users=num_users,
            bits_per_user=self.bits_per_user,
            calibration=budget.calibration,
            honest_fraction=float(budget.honest_fraction),
        )


def make_batches(
    problem: Problem, ledger: UserLedger, users: Tensor, batch_size: int | None, batches: Iterable[Any] | None
) -> list[Tensor]:
    """The given batches, or these users at random in batches of one size; all claimed from the ledger."""
    if batches is not None:
        if batch_size is not None:
            raise ValueError(f"batch_size must be left out where batches are given, got batch_size={batch_size!r}")
        return ledger.claim_all(batches)
    size = integer("batch_size", batch_size)
    if size > len(users):
        raise ValueError(f"batch_size must not exceed the {len(users)} users there are, got {batch_size!r}")
    return ledger.claim_all(random_batches(users, size, problem.generator))
