r"""Batch sizes, step sizes and smoothing, and the excess loss that is proved for them.

The paper's theorems hide constants in O(). Here the noise that the protocol really has takes the place of
√d·log(d/δ)/ε: with V the variance per coordinate of a *sum* of reports, s = √(dV)/L. Every bound below is a number that the
proof gives, for the step sizes it is asked about.

Errata of the paper, corrected in ``parameters="calibrated"`` (``"printed"`` keeps them, but for the direction of descent):
    * Theorem 4.1 has an L inside the bracket of η; it does not follow from L_G² = L² + O(dL²log²(d/δ)/(b²ε²)), on which the
      proof rests, and is right for L = 1 only.
    * Theorem 4.3 and Lemma 4.4 print L_t = ((T+2)^{3/2}σ/D + β)/(t+1). Where noise is small, α_t/L_t tends to 2/β and
      L_t > α_t β, which the proof needs, fails: on a quadratic without constraint the iterates diverge (a bounded set stops
      them, and may let the aggregate converge). :func:`accelerated_bound` proves L_t = (2β + s_T)/(t+1).

>>> oracle = Oracle(lipschitz=1.0, dimension=10, variance=4.0)
>>> round(oracle.ratio, 3), sgd_batch_size(oracle, num_users=10_000)
(6.325, 6)
>>> steps = accelerated_step_sizes(rounds=100, smoothness=1.0, deviation=0.1, distance=1.0)
>>> bound = accelerated_bound(steps, smoothness=1.0, deviation=0.1, distance=1.0, start_gap=1.0, diameter=1.0)
>>> round(bound, 5)
0.01185
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from opacus_shuffle.core.validation import integer, one_of, open_unit_interval, positive, sampling_rate
from opacus_shuffle.sco.printed import Printed, clamp

PARAMETERS = ("calibrated", "printed")
_CANDIDATES = 4000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle:
    """What a round tells about a gradient: the mean over a batch of b users, unbiased but for ``bias``.

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
        """The number of users whose gradients are as large as the noise, s = √(dV)/L: the paper's √d·log(d/δ)/ε."""
        return math.sqrt(self.dimension * self.variance) / self.lipschitz

    def deviation(self, batch_size: int) -> float:
        """Root of E‖estimate − mean gradient‖², at most: √(L²/b + dV/b²)."""
        return self.lipschitz * math.sqrt(1 / batch_size + (self.ratio / batch_size) ** 2)

    def second_moment(self, batch_size: int) -> float:
        """E‖estimate‖², at most: L_G² = L² + dV/b²."""
        return self.lipschitz**2 * (1 + (self.ratio / batch_size) ** 2)


# ---- stochastic gradient descent (Theorem 4.1) -------------------------------------------------------------------------------


def sgd_batch_size(oracle: Oracle, *, num_users: int) -> int:
    """The b that minimises D·L_G/√T at T = n/b: b = s, in [1, n]."""
    return clamp(oracle.ratio, num_users)


def sgd_bound(
    *, rounds: int, step_size: float, second_moment: float, distance: float, diameter: float = 0.0, bias: float = 0.0
) -> float:
    """Excess loss of the average of T projected subgradient steps, at most (Lemma 4.2).

    D²/(2ηT) + ηL_G²/2, and ‖bias‖·diameter for gradients that are not quite unbiased: ⟨bias, θ_t − θ*⟩ in every step.
    """
    return distance**2 / (2 * step_size * rounds) + step_size * second_moment / 2 + bias * diameter


# ---- accelerated stochastic approximation (Theorems 4.3 and 4.7) -------------------------------------------------------------


def accelerated_momentum(step: int) -> float:
    """α_t = 2/(t+2), t from 1."""
    return 2 / (step + 2)


def accelerated_step_sizes(*, rounds: int, smoothness: float, deviation: float, distance: float) -> list[float]:
    """L_1, …, L_T = (2β + s_T)/(t+1) with the s_T that minimises the bound (:func:`accelerated_bound`)."""
    noise = deviation / distance * math.sqrt((rounds + 1) * (rounds + 2) * (2 * rounds + 3) / 6)
    return [(2 * smoothness + noise) / (step + 1) for step in range(1, rounds + 1)]


def accelerated_bound(
    inverse_step_sizes: Sequence[float],
    *,
    smoothness: float,
    deviation: float,
    distance: float,
    start_gap: float,
    diameter: float,
    bias: float = 0.0,
) -> float | None:
    r"""Excess loss of AC-SA, at most; None if L_t > α_t β fails.

    Args:
        inverse_step_sizes: L_1, …, L_T; the step itself is 1/L_t.
        smoothness: β.
        deviation: σ with E‖ξ_t‖² ≤ σ², ξ_t the noise in round t's gradient: its error less the bias, centred given the past.
        distance: D with E‖θ_1 − θ*‖² ≤ D².
        start_gap: At least E f(θ_1) − f(θ*).
        diameter: Of the set; counts only if (t+1)L_t grows, or against the bias.
        bias: At most ‖b_t‖, b_t the expected error of round t's gradient given the past; no part of ξ_t.

    Returns:
        The bound, or None where the proof says nothing.

    Formal Guarantees:
        Proved. Write θ⁺, ag⁺ for round t's new points, α = α_t. As ag⁺ − md = α(θ⁺ − θ_t), smoothness at md, convexity at
        ag_t and at θ*, and the three-point inequality of the projection step give
        f(ag⁺) − f* ≤ (1−α)(f(ag_t) − f*) + (αL_t/2)(‖θ_t−θ*‖² − ‖θ⁺−θ*‖²) − α⟨ξ, θ_t−θ*⟩
        + α(‖ξ‖‖θ⁺−θ_t‖ − (L_t−αβ)‖θ⁺−θ_t‖²/2), whose last bracket is at most ‖ξ‖²/(2(L_t − αβ)). Divide by
        Γ_t = Π(1−α_i) = 2/((t+1)(t+2)), so that α_t/Γ_t = t+1, and sum:
        E f(ag_{T+1}) − f* ≤ Γ_T [start_gap + Σ_t w_t(r_t − r_{t+1})/2 + Σ_t (t+1)σ²/(2(L_t − α_tβ))] with w_t = (t+1)L_t
        and r_t = E‖θ_t−θ*‖²; the middle sum is at most w_1D²/2 + Σ max(0, w_t − w_{t−1})·diameter²/2. A bias b_t
        stays out of the last bracket: in the first lines it adds −α⟨b_t, θ⁺−θ*⟩ ≤ α·bias·diameter, hence
        Γ_T Σ(t+1)·bias·diameter ≤ bias·diameter in all. For L_t = (2β+s)/(t+1): L_t − α_tβ ≥ s/(t+1), hence at most
        2/((T+1)(T+2))·[start_gap + (2β+s)D²/2] + σ²(2T+3)/(6s), least at s = (σ/D)√((T+1)(T+2)(2T+3)/6).
    """
    steps = np.asarray(inverse_step_sizes, dtype=np.float64)
    times = np.arange(1, len(steps) + 1)
    spare = steps - 2 / (times + 2) * smoothness
    if np.any(spare < 0) or (deviation > 0 and np.any(spare == 0)):
        return None
    weights = (times + 1) * steps
    rising = np.maximum(np.diff(weights) - 1e-12 * weights[1:], 0).sum()  # constant but for rounding counts as constant
    moves = weights[0] * distance**2 / 2 + rising * diameter**2 / 2
    noise = float(((times + 1) / spare).sum()) * deviation**2 / 2 if deviation > 0 else 0.0
    return _gamma(len(steps)) * (start_gap + float(moves) + noise) + bias * diameter


def accelerated_batch_size(
    oracle: Oracle, *, num_users: int, smoothness: float | None, distance: float, lipschitz: float | None = None
) -> int:
    """The b that minimises the explicit bound at T = ⌊n/b⌋; of order n^{3/5}s^{2/5}(L/(βD))^{2/5}.

    Args:
        oracle: L and V, both of what is reported.
        num_users: n.
        smoothness: β; None to choose it with the batch size (:func:`best_smoothing`).
        distance: D.
        lipschitz: Of the loss that is smoothed, where ``smoothness`` is None; by default the oracle's.

    Returns:
        The largest b with the best T, in [1, n].
    """
    rounds = np.unique(np.maximum(num_users // _candidates(num_users), 1)).astype(np.float64)
    sizes = num_users // rounds
    gamma = 2 / ((rounds + 1) * (rounds + 2))
    rough = oracle.lipschitz if lipschitz is None else lipschitz
    beta = rough / distance * np.sqrt(1 / (2 * gamma)) if smoothness is None else np.full_like(rounds, smoothness)
    deviation = oracle.lipschitz * np.sqrt(1 / sizes + (oracle.ratio / sizes) ** 2)
    bound = gamma * (oracle.lipschitz * distance + beta * distance**2)
    bound += 2 * distance * deviation * np.sqrt(gamma * (2 * rounds + 3) / 12)
    if smoothness is None:
        bound += rough**2 / (2 * beta)
    return int(sizes[int(np.argmin(bound))])


def best_smoothing(*, rounds: int, lipschitz: float, distance: float) -> float:
    """The β that balances 2βD²/((T+1)(T+2)) against what smoothing costs, L²/(2β): (L/2D)·√((T+1)(T+2))."""
    return lipschitz / (2 * distance) * math.sqrt((rounds + 1) * (rounds + 2))


# ---- how far to smooth, for users who build the envelope themselves ----------------------------------------------------------


def smoothing_for_accelerated(
    *,
    num_users: int,
    dimension: int,
    lipschitz: float,
    diameter: float,
    epsilon: float,
    delta: float,
    parameters: str = "calibrated",
    calibration: str = "tight",
    honest_fraction: float = 1.0,
    gradient_factor: float = 1.0,
) -> float:
    """The β for a Moreau envelope that accelerated SGD is to minimise (Theorem 4.7).

    Args:
        num_users: n.
        dimension: d.
        lipschitz: Lipschitz constant L of every user's loss.
        diameter: D of the set, or a bound on the distance from the start to a minimiser.
        epsilon: ε of the run, under replacement of one user's value.
        delta: δ of the run.
        parameters: ``"calibrated"`` minimises the proved bound; ``"printed"`` takes the theorem's formula.
        calibration: The noise of the protocol, ``"tight"`` or ``"published"``.
        honest_fraction: Of the users, as the protocol's.
        gradient_factor: The envelope's gradients are at most this times L (2 in SCO Lemma 4.6).

    Returns:
        β > 0, in units of loss per squared parameter.

    Raises:
        ValueError: If an argument is out of range.
    """
    one_of("parameters", parameters, PARAMETERS)
    size = _Size.checked(num_users, dimension, lipschitz, diameter, epsilon, delta, honest_fraction, gradient_factor)
    if parameters == "printed":
        return size.printed().accelerated_smoothing()
    oracle = size.oracle(calibration)
    batch_size = accelerated_batch_size(
        oracle, num_users=size.num_users, smoothness=None, distance=size.diameter, lipschitz=size.lipschitz
    )
    return best_smoothing(rounds=size.num_users // batch_size, lipschitz=size.lipschitz, distance=size.diameter)


def smoothing_for_gradient_descent(
    *,
    num_users: int,
    dimension: int,
    lipschitz: float,
    diameter: float,
    epsilon: float,
    delta: float,
    parameters: str = "calibrated",
    calibration: str = "tight",
    honest_fraction: float = 1.0,
    gradient_factor: float = 1.0,
) -> float:
    """The β for a Moreau envelope that gradient descent on all users is to minimise (Theorem 4.9); arguments as above."""
    one_of("parameters", parameters, PARAMETERS)
    size = _Size.checked(num_users, dimension, lipschitz, diameter, epsilon, delta, honest_fraction, gradient_factor)
    if parameters == "printed":
        return size.printed().descent_smoothing()
    from opacus_shuffle.sco.descent_plan import Setting, plan_descent
    from opacus_shuffle.sco.rounds import Budget

    setting = Setting(
        dimension=size.dimension,
        num_users=size.num_users,
        reported=size.gradient_factor * size.lipschitz,
        lipschitz=size.lipschitz,
        distance=size.diameter,
        diameter=size.diameter,
        bias=0.0,
        budget=Budget(size.epsilon, size.delta, calibration, size.honest_fraction),
    )
    plan = plan_descent(setting, rounds=None, smoothness=None)
    return 2 / plan.step_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Size:
    """A planner's arguments, checked."""

    num_users: int
    dimension: int
    lipschitz: float
    diameter: float
    epsilon: float
    delta: float
    honest_fraction: float
    gradient_factor: float

    @classmethod
    def checked(
        cls, num_users: Any, dimension: Any, lipschitz: Any, diameter: Any, epsilon: Any, delta: Any,
        honest_fraction: Any, gradient_factor: Any,
    ) -> _Size:  # fmt: skip
        """Refuses what is out of range."""
        return cls(
            num_users=integer("num_users", num_users),
            dimension=integer("dimension", dimension),
            lipschitz=positive("lipschitz", lipschitz),
            diameter=positive("diameter", diameter),
            epsilon=positive("epsilon", epsilon),
            delta=open_unit_interval("delta", delta),
            honest_fraction=sampling_rate("honest_fraction", honest_fraction),
            gradient_factor=positive("gradient_factor", gradient_factor),
        )

    def printed(self) -> Printed:
        """The paper's formulas at this size."""
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(Printed)}
        return Printed(**kept)

    def oracle(self, calibration: str) -> Oracle:
        """What one round with the whole budget would tell."""
        reported = self.gradient_factor * self.lipschitz
        return Oracle(
            lipschitz=reported,
            dimension=self.dimension,
            variance=planned_variance(
                dimension=self.dimension,
                max_norm=reported,
                epsilon=self.epsilon,
                delta=self.delta,
                calibration=calibration,
                honest_fraction=self.honest_fraction,
            ),
        )


def planned_variance(
    *, dimension: int, max_norm: float, epsilon: float, delta: float, calibration: str, honest_fraction: float = 1.0
) -> float:
    """V of one round before its number of users is known; leaving the noise to honest users alone costs their share."""
    from opacus_shuffle.protocols.calibration import noise_variance

    variance = noise_variance(dimension=dimension, max_norm=max_norm, epsilon=epsilon, delta=delta, calibration=calibration)
    return variance / honest_fraction


def _gamma(rounds: int) -> float:
    """Γ_T = 2/((T+1)(T+2))."""
    return 2 / ((rounds + 1) * (rounds + 2))


def _candidates(num_users: int) -> np.ndarray:
    """Batch sizes to try: all, or a geometric grid."""
    return np.unique(np.round(np.geomspace(1, num_users, min(num_users, _CANDIDATES))).astype(np.int64))
