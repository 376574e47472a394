r"""``ShuffleVectorSum``: the sum of users' vectors of bounded ℓ₂ norm, with multi-message shuffle privacy (SCO Algorithm 2).

Every coordinate of a user's vector, shifted by Δ₂ into [0, 2Δ₂], is rounded at random to a grid of g steps and sent as that
many ones among g bits, with b noise bits besides; all bits carry their coordinate's label. Shuffled, a coordinate's bits tell
their number of ones and nothing else: the sum of the rounded values plus Bin(b·n, p).

>>> import torch
>>> protocol = ShuffleVectorSum(1000, 20, 1.0, epsilon=1.0, delta=1e-6, calibration="tight")
>>> vectors = torch.nn.functional.normalize(torch.ones(1000, 20, dtype=torch.float64), dim=1)
>>> answer = protocol.simulate(vectors, torch.Generator().manual_seed(0))
>>> bool((answer - vectors.sum(0)).abs().max() < 5 * protocol.variance**0.5), round(protocol.variance**0.5, 1)
(True, 8.6)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from opacus_shuffle.analysis import binomial_sums
from opacus_shuffle.analysis.binomial_sums import LOST_SHARE
from opacus_shuffle.core.validation import integer, moderate, sampling_rate
from opacus_shuffle.protocols.calibration import (
    check_privacy,
    paper_round_budget,
    paper_vector_plan,
    round_mu,
    tight_vector_plan,
)
from opacus_shuffle.protocols.grid_sum import TOLERANCE, GridSum, real_numbers
from opacus_shuffle.protocols.messages import Messages


class ShuffleVectorSum(GridSum):
    """One round's sum of vectors with ‖x‖₂ ≤ ``max_norm``; unbiased.

    Args:
        num_users: n, users in the round.
        dimension: d.
        max_norm: Δ₂; a longer vector is refused.
        epsilon: ε in (0, 15].
        delta: δ in (0, ½).
        calibration: ``"published"``: the constants of SCO Theorem A.6. ``"tight"``: the least noise that the exact accounting
            allows, some 10⁵ times less variance at the same proved (ε, δ).
        honest_fraction: γ in [1/3, 1]: (ε, δ) holds for the honest users even if only a share γ of all follow the protocol, the
            rest sending nothing or anything. SCO Corollary A.9 says ε/γ for a protocol made for ε: here ε is what holds.

    Attributes:
        granularity: g. noise_bits: b. bit_probability: p.
        variance: Per coordinate of the answer, at most; unit of ``max_norm`` squared.
        bits_per_user: d·(g + b).
        mu: One round is a μ-Gaussian mechanism, but for a probability ``lost``.

    Formal Guarantees:
        (ε, δ)-DP of all the shuffled messages, for every data set, replacement adjacency, up to the floating-point arithmetic
        of the random numbers. ``"published"``: SCO Theorem A.6, Corollary A.9. ``"tight"``: the Gaussian bound of
        :mod:`opacus_shuffle.analysis.binomial_sums`, whose worst case is over the whole ball and both directions. Anyone may
        drop out, as long as the share of honest users holds; how many take part is not hidden.

    Edge cases:
        | input | answer |
        |---|---|
        | a norm above ``max_norm`` by less than 1e-5 of it | scaled back (rounding of single precision) |
        | a larger norm, NaN, infinity | ValueError |
        | fewer than γ·n users, or more than n | ValueError |

    Raises:
        ValueError: If an argument is out of range, or ``"published"`` has drop-outs and ε·γ > 1.
    """

    def __init__(
        self,
        num_users: int,
        dimension: int,
        max_norm: float,
        epsilon: float,
        delta: float,
        calibration: str = "published",
        honest_fraction: float = 1.0,
    ) -> None:
        self._set(num_users, dimension, max_norm, epsilon, delta, calibration, honest_fraction)
        self._calibrate(round_mu(epsilon=self.epsilon, delta=self.delta) if calibration == "tight" else None)

    @classmethod
    def for_rounds(
        cls,
        num_users: int,
        dimension: int,
        max_norm: float,
        epsilon: float,
        delta: float,
        *,
        rounds: int,
        calibration: str = "published",
        honest_fraction: float = 1.0,
        sample_rate: float = 1.0,
    ) -> ShuffleVectorSum:
        """The protocol of each of several rounds in which the same users take part, (ε, δ)-DP all together.

        Args:
            num_users: As the constructor's, like the rest.
            dimension: See there.
            max_norm: See there.
            epsilon: ε of all rounds together.
            delta: δ of all rounds together.
            rounds: T.
            calibration: ``"published"``: every round gets ε/(2√(2T·ln(1/δ))) and δ/(T+1) (SCO Algorithm 5). ``"tight"``: μ of a
                round is 1/√T of the total's.
            honest_fraction: See there.
            sample_rate: γ: every round's ``num_users`` users are a fresh, secret, uniform sample without replacement of
                ``num_users``/γ users in all; with ``"tight"`` and everyone honest only.

        Raises:
            ValueError: If an argument is out of range, or sampling is asked for where it is not covered.
        """
        protocol = cls.__new__(cls)
        protocol._set(num_users, dimension, max_norm, epsilon, delta, calibration, honest_fraction)
        protocol.rounds = integer("rounds", rounds)
        protocol.sample_rate = sampling_rate("sample_rate", sample_rate)
        if protocol.sample_rate < 1 and (calibration != "tight" or protocol.honest_fraction < 1):
            raise ValueError(
                f"sample_rate={sample_rate!r} takes calibration='tight' and honest_fraction=1, got {calibration!r} and "
                f"{honest_fraction!r}: what a secret sample gains is not proved for others"
            )
        protocol._calibrate(
            round_mu(epsilon=protocol.epsilon, delta=protocol.delta, rounds=protocol.rounds, sample_rate=protocol.sample_rate)
            if calibration == "tight"
            else None
        )
        return protocol

    def _set(
        self,
        num_users: int,
        dimension: int,
        max_norm: float,
        epsilon: float,
        delta: float,
        calibration: str,
        honest_fraction: float,
    ) -> None:
        self.num_users = integer("num_users", num_users)
        self.dimension = integer("dimension", dimension)
        self.max_norm = moderate("max_norm", max_norm)
        self.epsilon, self.delta, self.honest_fraction, self.calibration = check_privacy(
            epsilon, delta, honest_fraction, calibration
        )
        self._low, self._span = -self.max_norm, 2 * self.max_norm

    def _calibrate(self, mu: float | None) -> None:
        """Find the grid, and what one round is by itself."""
        if mu is None:
            self.round_epsilon, self.round_delta = paper_round_budget(
                epsilon=self.epsilon, delta=self.delta, rounds=self.rounds
            )
            self._plan = paper_vector_plan(
                num_users=self.num_users,
                dimension=self.dimension,
                max_norm=self.max_norm,
                epsilon=self.round_epsilon,
                delta=self.round_delta,
                honest_fraction=self.honest_fraction,
            )
            return
        self._plan = tight_vector_plan(
            num_users=self.num_users,
            dimension=self.dimension,
            mu=mu,
            lost=LOST_SHARE * self.delta / self.rounds,
            honest_fraction=self.honest_fraction,
        )
        self.round_epsilon, self.round_delta = self.epsilon, self.delta
        if self.rounds > 1 or self.sample_rate < 1:
            self.round_delta = self.delta / (self.rounds + 1)
            self.round_epsilon = binomial_sums.compute_epsilon([(self.sum_round, 1)], delta=self.round_delta)

    def randomize(self, x: Any, generator: torch.Generator | None = None) -> Messages:
        """One user's messages.

        Args:
            x: The user's vector, shape (d,), ‖x‖₂ ≤ ``max_norm``.
            generator: On the CPU; by default secret, from the operating system.

        Raises:
            ValueError: If ``x`` has another shape, or is longer than ``max_norm``.
        """
        point = real_numbers("x", x)
        if point.shape != (self.dimension,):
            raise ValueError(f"x must have shape ({self.dimension},), got {tuple(point.shape)}")
        return self._randomize(self._checked(point.unsqueeze(0))[0], generator)

    def analyze(self, messages: Messages) -> torch.Tensor:
        """The unbiased estimate of the sum from the shuffled messages: float64, shape (d,)."""
        return self._analyze(messages)

    def simulate(self, X: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        """A draw of ``analyze(shuffle([randomize(x) for x in X]))``, without the messages.

        Args:
            X: One row per user, shape (n, d): a tensor or array (dense, sparse, or expanded from one row), or an iterable of
                blocks of rows, for data that memory does not hold.
            generator: On the CPU; by default secret.

        Returns:
            float64, shape (d,).

        Raises:
            ValueError: If a row is longer than ``max_norm``, or the number of rows is not covered.
        """
        return self._simulate(X, generator)

    def _checked(self, points: torch.Tensor) -> torch.Tensor:
        points = points.to("cpu", torch.float64)
        norms = torch.linalg.vector_norm(points, dim=1)
        scale = self._scale(norms)
        return points if scale is None else points * scale.unsqueeze(1)

    def _checked_entries(self, row: torch.Tensor, values: torch.Tensor, rows: int) -> torch.Tensor:
        norms = torch.zeros(rows, dtype=torch.float64).index_add_(0, row, values**2).sqrt()
        scale = self._scale(norms)
        return values if scale is None else values * scale[row]

    def _scale(self, norms: torch.Tensor) -> torch.Tensor | None:
        """What brings norms that exceed the bound by rounding back to it; None if there are none."""
        largest = float(norms.max())
        if largest <= self.max_norm:
            return None
        if not largest <= self.max_norm * (1 + TOLERANCE):
            raise ValueError(
                f"max_norm is {self.max_norm:g}, got a vector of norm {largest:.6g}: clip vectors first, or raise max_norm "
                "(and with it the noise)"
                if np.isfinite(largest)
                else f"vectors must be finite, got one of norm {largest}"
            )
        return (self.max_norm / norms).clamp(max=1.0)

    def __repr__(self) -> str:
        return (
            f"ShuffleVectorSum(num_users={self.num_users}, dimension={self.dimension}, max_norm={self.max_norm:g}, "
            f"epsilon={self.epsilon:g}, delta={self.delta:g}, calibration={self.calibration!r}, "
            f"honest_fraction={self.honest_fraction:g}): rounds={self.rounds}, sample_rate={self.sample_rate:g}, "
            f"granularity={self.granularity}, "
            f"noise_bits={self.noise_bits}, bit_probability={self.bit_probability:.4g}, {self.bits_per_user} bits per user"
        )
