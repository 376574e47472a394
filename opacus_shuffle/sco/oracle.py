"""``Oracle``: how far a round's estimate of a mean gradient may be off, and what plain SGD makes of it (SCO Lemma 4.2).

Where the paper (Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation, SCO) has √d·log(d/δ)/ε with a constant left
out, here stands the noise that the protocol really has: s = √(dV)/L, V the variance per coordinate of a *sum* of reports.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle:
    """How far a round's estimate of a mean gradient over b users is off; it is unbiased but for ``bias``.

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
        """The number of users whose gradients are as large as the noise, s = √(dV)/L."""
        return math.sqrt(self.dimension * self.variance) / self.lipschitz

    def deviation(self, batch_size: int) -> float:
        """Returns an upper bound on the root of E‖estimate − mean gradient‖²: √(L²/b + dV/b²)."""
        return self.lipschitz * math.sqrt(1 / batch_size + (self.ratio / batch_size) ** 2)

    def second_moment(self, batch_size: int) -> float:
        """Returns an upper bound on E‖estimate‖²: L_G² = L² + dV/b²."""
        return self.lipschitz**2 * (1 + (self.ratio / batch_size) ** 2)


def sgd_batch_size(oracle: Oracle, *, num_users: int) -> int:
    """Returns the batch size in [1, n] that minimises D·L_G/√T at T = n/b rounds, which is s."""
    return clamp(oracle.ratio, num_users)


def sgd_bound(
    *, rounds: int, step_size: float, second_moment: float, distance: float, diameter: float = 0.0, bias: float = 0.0
) -> float:
    """Returns an upper bound on the expected excess loss of the average of T projected subgradient steps (SCO Lemma 4.2).

    D²/(2ηT) + ηL_G²/2, and ‖bias‖·diameter for gradients that are not quite unbiased: ⟨bias, θ_t − θ*⟩ in every step.
    """
    return distance**2 / (2 * step_size * rounds) + step_size * second_moment / 2 + bias * diameter


def clamp(value: float, most: int) -> int:
    """Returns the nearest whole number in [1, most]."""
    return max(1, min(round(min(value, most)), most))
