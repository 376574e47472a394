r"""``ShuffleScalarSum``: sums users' numbers in [0, Δ] by shuffled messages.

This is Algorithm 1 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO).
"""

from __future__ import annotations

from typing import Any

import torch

from opacus_shuffle.core.validation import integer, moderate
from opacus_shuffle.protocols.calibration import SumBudget, tight_scalar_plan
from opacus_shuffle.protocols.grid_sum import TOLERANCE, GridSum, real_numbers


class ShuffleScalarSum(GridSum):
    """Sums numbers in [0, ``max_value``], one per user; the estimate is unbiased.

    Args:
        num_users: n, users in the round.
        max_value: Δ; numbers outside [0, Δ] are refused.
        epsilon: ε, up to 300.
        delta: δ in (0, ½).
        honest_fraction: γ in [1/3, 1], as for
            :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum` (SCO Claim A.8).

    Formal Guarantees:
        (ε, δ)-DP of all the shuffled bits, for every data set, replacement adjacency. It is exact:
        in the worst pair of data sets one value moves from end to end of the range, and δ(ε) of
        this pair is at most δ. With one more grid step it would exceed δ.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        num_users: int,
        max_value: float,
        epsilon: float,
        delta: float,
        *,
        honest_fraction: float = 1.0,
    ) -> None:
        users, top = integer("num_users", num_users), moderate("max_value", max_value)
        budget = SumBudget(epsilon, delta, honest_fraction)
        plan = tight_scalar_plan(
            num_users=users,
            epsilon=budget.epsilon,
            delta=budget.delta,
            honest_fraction=budget.honest_fraction,
        )
        super().__init__(users, 1, budget, plan, low=0.0, span=top)
        self.max_value = top

    def simulate(  # type: ignore[override]
        self, x: Any, generator: torch.Generator | None = None
    ) -> float:
        """Draws the estimate of the sum of all users' numbers, at once.

        Args:
            x: One number per user, shape (n,).
            generator: On the CPU; by default secret.

        Raises:
            ValueError: If ``x`` has another shape, a number lies outside of [0, ``max_value``], or
                the number of users is not covered.
        """
        numbers = real_numbers("x", x)
        if numbers.ndim != 1:
            raise ValueError(
                f"x must have shape (n,), one number per user, got {tuple(numbers.shape)}"
            )
        return float(super().simulate(numbers.unsqueeze(1), generator))

    def _within(self, values: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        slack = TOLERANCE * self.max_value
        if not bool(torch.all((values >= -slack) & (values <= self.max_value + slack))):
            worst = float(
                values.flatten()[(values - self.max_value / 2).abs().nan_to_num(torch.inf).argmax()]
            )
            raise ValueError(
                f"max_value is {self.max_value:g}, got the number {worst:.6g}: numbers must lie in "
                "[0, max_value]; shift and clip them first"
            )
        return values.clamp(0, self.max_value)
