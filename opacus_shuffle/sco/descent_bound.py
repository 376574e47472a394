"""``Oracle``: how far a round's estimate of a mean gradient may be off; what SGD and gradient descent make of it."""

from __future__ import annotations

import dataclasses
import math

from scipy.optimize import minimize_scalar

MOST_ROUNDS = 256
"""Rounds of gradient descent that an optimiser chooses by itself."""


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


def sgd_bound(
    *,
    rounds: int,
    step_size: float,
    second_moment: float,
    distance: float,
    diameter: float = 0.0,
    bias: float = 0.0,
) -> float:
    """Returns an upper bound on the expected excess loss of the average of T projected subgradient steps (SCO Lemma 4.2).

    D²/(2ηT) + ηL_G²/2, and ‖bias‖·diameter for gradients that are not quite unbiased: ⟨bias, θ_t −
    θ*⟩ in every step.
    """
    return distance**2 / (2 * step_size * rounds) + step_size * second_moment / 2 + bias * diameter


def clamp(value: float, most: int) -> int:
    """Returns the nearest whole number in [1, most]."""
    return max(1, min(round(min(value, most)), most))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescentBound:
    """The excess population loss of the average of T full-gradient steps.

    Attributes:
        rounds: T.
        num_users: n, all of them in every round.
        oracle: What one of the T rounds tells.
        granularity: Steps of the protocol's grid on [−L, L], g.
        distance: D with E‖θ_0 − θ*‖² ≤ D².
        diameter: Of the set, for the bias.

    Formal Guarantees:
        Proved for β-smooth losses and η ≤ 2/β (``docs/proofs/21_gradient_descent.md``).
    """

    rounds: int
    num_users: int
    oracle: Oracle
    granularity: int
    distance: float
    diameter: float

    def drift(self, step_size: float, smoothness: float) -> float:
        """Returns an upper bound on the generalisation error: L times the mean distance of two runs that differ in one user."""
        oracle, users = self.oracle, self.num_users
        width = 2 * oracle.lipschitz / self.granularity
        root = width * math.sqrt(oracle.dimension)
        pace = 2 * step_size * (
            oracle.lipschitz / users + oracle.bias
        ) + step_size**2 * root * smoothness / (2 * users)
        spread = step_size**2 * (root**2 / (2 * users**2) + 2 * root * oracle.bias / users)
        return oracle.lipschitz * (pace * self.rounds / 2 + 2 / 3 * math.sqrt(spread * self.rounds))

    def value(self, step_size: float, *, smoothness: float) -> float | None:
        """Returns the bound at this step size; None if it exceeds 2/β."""
        if step_size > 2 / smoothness * (1 + 1e-12):
            return None
        fit = sgd_bound(
            rounds=self.rounds,
            step_size=step_size,
            second_moment=self.oracle.second_moment(self.num_users),
            distance=self.distance,
            diameter=self.diameter,
            bias=self.oracle.bias,
        )
        return fit + self.drift(step_size, smoothness)

    def best_step(self, *, smoothness: float | None) -> float:
        """Returns the η with the least bound; without ``smoothness`` the loss is smoothed by β = 2/η, at a cost of ηL²/4."""
        start = self.distance**2 / (2 * self.rounds)

        def slope(step: float) -> float:
            beta = 2 / step if smoothness is None else smoothness
            rough = self.oracle.lipschitz**2 / 4 if smoothness is None else 0.0
            return (
                self.oracle.second_moment(self.num_users) / 2
                + self.drift(step, beta) / step
                + rough
            )

        if smoothness is None:  # the drift is then proportional to η
            return math.sqrt(start / slope(1.0))
        step = 2 / smoothness
        first = math.sqrt(
            start / slope(1e-12 * step)
        )  # the slope grows with η: the best step is no longer than this
        best = minimize_scalar(
            lambda log_step: (
                start / math.exp(log_step) + math.exp(log_step) * slope(math.exp(log_step))
            ),
            bounds=(math.log(min(first, step)) - 12, math.log(min(first, step))),
            method="bounded",
            options={"xatol": 1e-6},
        )
        return min(math.exp(best.x), step)


def descent_candidates(oracle: Oracle, *, num_users: int) -> list[int]:
    """Returns numbers of rounds to try: powers of two up to T = min(n, (n/s)²) of Lemma B.6, s of one round, and T itself.

    None is above :data:`MOST_ROUNDS`: the theorem takes up to n rounds, each a gradient of every
    user.
    """
    most = clamp(
        min(num_users, (num_users / max(oracle.ratio, 1e-150)) ** 2), min(num_users, MOST_ROUNDS)
    )
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
