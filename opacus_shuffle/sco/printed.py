"""The theorems' parameters as printed, with natural logarithms and every constant inside O() taken as 1: for comparison.

>>> printed = Printed(num_users=10_000, dimension=10, lipschitz=1.0, diameter=2.0, epsilon=1.0, delta=1e-6)
>>> printed.sgd_batch_size(), printed.accelerated_batch_size(1.0), round(printed.accelerated_smoothing(), 2)
(51, 917, 16.88)
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """The theorems' formulas, letter by letter, with natural logarithms and every constant inside O() taken as 1."""

    num_users: int
    dimension: int
    lipschitz: float
    diameter: float
    epsilon: float
    delta: float

    @property
    def _noise(self) -> float:
        """√d·log(d/δ)/ε."""
        return math.sqrt(self.dimension) * math.log(self.dimension / self.delta) / self.epsilon

    def sgd_batch_size(self) -> int:
        """Theorem 4.1: √d·log(d/δ)/ε."""
        return clamp(self._noise, self.num_users)

    def sgd_step_size(self, batch_size: int, rounds: int) -> float:
        """Theorem 4.1: εbD/(L√T(εb + √d·L·log(d/δ)))."""
        share = batch_size / (batch_size + self.lipschitz * self._noise)
        return self.diameter / (self.lipschitz * math.sqrt(rounds)) * share

    def accelerated_batch_size(self, smoothness: float) -> int:
        """Theorem 4.3: n^{3/5}·(√d·log(d/δ)/ε)^{2/5}·(L/(βD))^{2/5}."""
        ratio = self.lipschitz / (smoothness * self.diameter)
        return clamp(self.num_users**0.6 * (self._noise * ratio) ** 0.4, self.num_users)

    def accelerated_smoothing(self) -> float:
        """Theorem 4.7: (L/D)·(εn/(√d·log(d/δ)))^{2/3}."""
        return self.lipschitz / self.diameter * (self.num_users / self._noise) ** (2 / 3)

    @property
    def _full(self) -> float:
        """εn/√d."""
        return self.epsilon * self.num_users / math.sqrt(self.dimension)

    @property
    def _log(self) -> float:
        """log(nd/δ)."""
        return math.log(self.num_users * self.dimension / self.delta)

    def descent_rounds(self) -> int:
        """Lemma B.6: min(n, ε²n²/(d·log²(nd/δ)))."""
        return clamp(min(self.num_users, (self._full / self._log) ** 2), self.num_users)

    def descent_step_size(self, rounds: int) -> float:
        """Lemma B.6: D/(L√T)."""
        return self.diameter / (self.lipschitz * math.sqrt(rounds))

    def descent_smoothing(self) -> float:
        """Theorem 4.9: (L/D)·min(√n, εn/(√d·log^{3/2}(nd/δ)))."""
        return self.lipschitz / self.diameter * min(math.sqrt(self.num_users), self._full / self._log**1.5)


def printed_step_sizes(*, rounds: int, smoothness: float, deviation: float, distance: float) -> list[float]:
    """L_1, …, L_T as Theorem 4.3 prints them (errata: :mod:`opacus_shuffle.sco.schedules`): ((T+2)^{3/2}σ/D + β)/(t+1)."""
    top = (rounds + 2) ** 1.5 * deviation / distance + smoothness
    return [top / (step + 1) for step in range(1, rounds + 1)]


def clamp(value: float, most: int) -> int:
    """The nearest whole number in [1, most]."""
    return max(1, min(round(min(value, most)), most))
