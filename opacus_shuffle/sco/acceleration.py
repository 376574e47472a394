"""Accelerated stochastic approximation (AC-SA, Lan 2012): its iteration, its step sizes and its proved excess loss.

Every bound is a number that ``docs/proofs/20_accelerated_sgd.md`` proves, with the noise that the
protocol really has. That page also says why L_t is not what the paper (Cheu, Joseph, Mao and Peng's
convex optimisation, SCO) prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from opacus_shuffle.sco.descent_bound import Oracle

_CANDIDATES = 4000


def accelerated_momentum(step: int) -> float:
    """Returns α_t = 2/(t+2), t from 1."""
    return 2 / (step + 2)


class AcceleratedIterates:
    """The three sequences of AC-SA: θ, the aggregate (the answer) and the middle (where gradients are taken).

    They are as in SCO Algorithm 4. Algorithm 6 prints a middle that is undefined at first, then the
    aggregate over again.
    """

    def __init__(
        self,
        project: Callable[[Tensor], Tensor],
        start: Tensor,
        inverse_step_sizes: Sequence[float],
    ) -> None:
        self._project, self._step_sizes = project, inverse_step_sizes
        self.step = 1
        self.theta = self.aggregate = self.middle = start

    @property
    def finished(self) -> bool:
        """Whether all T steps were made."""
        return self.step > len(self._step_sizes)

    def advance(self, gradient: Tensor) -> None:
        """Makes one step by an estimate of the gradient at :attr:`middle`."""
        alpha = accelerated_momentum(self.step)
        self.theta = self._project(self.theta - gradient / self._step_sizes[self.step - 1])
        self.aggregate = alpha * self.theta + (1 - alpha) * self.aggregate
        self.step += 1
        alpha = accelerated_momentum(self.step)
        self.middle = alpha * self.theta + (1 - alpha) * self.aggregate


def accelerated_step_sizes(
    *, rounds: int, smoothness: float, deviation: float, distance: float
) -> list[float]:
    """Returns L_1, …, L_T = (2β + s)/(t+1) with the s that minimises the bound (:func:`accelerated_bound`)."""
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
    """Returns an upper bound on the expected excess loss of AC-SA; None where nothing is proved: if L_t > α_t·β fails.

    The claim of ``docs/proofs/20_accelerated_sgd.md``, whose names these are: L_1, …, L_T (the step
    itself is 1/L_t), β, σ and D; the diameter counts only if (t+1)L_t grows, or against the bias.
    """
    steps = np.asarray(inverse_step_sizes, dtype=np.float64)
    times = np.arange(1, len(steps) + 1)
    spare = steps - 2 / (times + 2) * smoothness
    if np.any(spare < 0) or (deviation > 0 and np.any(spare == 0)):
        return None
    weights = (times + 1) * steps
    rising = np.maximum(
        np.diff(weights) - 1e-12 * weights[1:], 0
    ).sum()  # constant but for rounding counts as constant
    moves = weights[0] * distance**2 / 2 + rising * diameter**2 / 2
    noise = float(((times + 1) / spare).sum()) * deviation**2 / 2 if deviation > 0 else 0.0
    gamma = 2 / ((len(steps) + 1) * (len(steps) + 2))
    return gamma * (start_gap + float(moves) + noise) + bias * diameter


def accelerated_batch_size(
    oracle: Oracle, *, num_users: int, smoothness: float | None, distance: float
) -> int:
    """Returns the batch size with the least bound at T = ⌊n/b⌋ rounds; with β None the smoothing is chosen with it."""
    candidates = np.geomspace(1, num_users, min(num_users, _CANDIDATES))
    candidates = np.unique(
        np.round(candidates).astype(np.int64)
    )  # all batch sizes, or a geometric grid
    rounds = np.unique(np.maximum(num_users // candidates, 1)).astype(np.float64)
    sizes = num_users // rounds
    gamma = 2 / ((rounds + 1) * (rounds + 2))
    beta = (
        oracle.lipschitz / distance * np.sqrt(1 / (2 * gamma))
        if smoothness is None
        else np.full_like(rounds, smoothness)
    )
    deviation = oracle.lipschitz * np.sqrt(1 / sizes + (oracle.ratio / sizes) ** 2)
    bound = gamma * (oracle.lipschitz * distance + beta * distance**2)
    bound += 2 * distance * deviation * np.sqrt(gamma * (2 * rounds + 3) / 12)
    if smoothness is None:
        bound += oracle.lipschitz**2 / (2 * beta)
    return int(sizes[int(np.argmin(bound))])


def best_smoothing(*, rounds: int, lipschitz: float, distance: float) -> float:
    """Returns the β that balances 2βD²/((T+1)(T+2)) against what smoothing costs, L²/(2β): (L/2D)·√((T+1)(T+2))."""
    return lipschitz / (2 * distance) * math.sqrt((rounds + 1) * (rounds + 2))
