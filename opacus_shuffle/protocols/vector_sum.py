r"""``ShuffleVectorSum``: sums users' vectors of bounded ℓ₂ norm by shuffled messages.

This is Algorithm 2 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO). Each
coordinate of a user's vector, shifted by Δ₂ into [0, 2Δ₂], is rounded at random to a grid of g
steps. The user sends the result as the number of ones among g bits, together with b noise bits, all
labelled with the coordinate. After shuffling, the bits of a coordinate reveal only their number of
ones: the sum of the rounded values plus Bin(b·n, p). So a user may send its number of ones.
"""

from __future__ import annotations

import math

import torch

from opacus_shuffle.analysis import binomial_sums
from opacus_shuffle.core.validation import integer, moderate
from opacus_shuffle.protocols.calibration import (
    ROUNDING_SHARE,
    SumBudget,
    plan_with_noise_multiplier,
    tight_vector_plan,
)
from opacus_shuffle.protocols.grid_sum import TOLERANCE, GridSum


class ShuffleVectorSum(GridSum):
    """Sums vectors with ‖x‖₂ ≤ ``max_norm``, one per user; the estimate is unbiased.

    Args:
        num_users: n, users in a round.
        dimension: d.
        max_norm: Δ₂. Longer vectors are refused. A vector that is longer by less than 1e-5 of it
            (rounding in single precision) is scaled back.
        epsilon: ε, up to 300.
        delta: δ in (0, ½).
        honest_fraction: γ in [1/3, 1]. (ε, δ) holds for the honest users even if only a share γ of
            all users follow the protocol and the others send nothing or anything. SCO Corollary A.9
            says ε/γ for a protocol made for ε; here ε is the value that holds.
        rounds: T, rounds with the same users, which together are (ε, δ)-DP.
        sample_rate: If below 1, the ``num_users`` users of every round are a fresh, secret, uniform
            sample of fixed size out of ``num_users / sample_rate`` users in all. It requires
            ``honest_fraction=1``.

    The noise is the least that the exact accounting allows; over T rounds, μ of each round is 1/√T
    of the total's.

    Formal Guarantees:
        (ε, δ)-DP of all the shuffled bits, for every data set, replacement adjacency, up to the
        floating-point arithmetic of the random numbers, by the Gaussian bound of
        :mod:`opacus_shuffle.analysis.binomial_sums`, whose worst case is over the whole ball and
        both directions. Users may drop out as long as the share of honest users holds. The number
        of users who report is not hidden.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        num_users: int,
        dimension: int,
        max_norm: float,
        epsilon: float,
        delta: float,
        *,
        honest_fraction: float = 1.0,
        rounds: int = 1,
        sample_rate: float = 1.0,
    ) -> None:
        users, entries, norm = (
            integer("num_users", num_users),
            integer("dimension", dimension),
            moderate("max_norm", max_norm),
        )
        budget = SumBudget(epsilon, delta, honest_fraction, rounds, sample_rate)
        plan = tight_vector_plan(
            num_users=users,
            dimension=entries,
            mu=budget.round_mu,
            lost=budget.lost,
            honest_fraction=budget.honest_fraction,
        )
        super().__init__(users, entries, budget, plan, low=-norm, span=2 * norm)
        self.max_norm = norm

    @classmethod
    def with_noise_multiplier(
        cls,
        num_users: int,
        dimension: int,
        max_norm: float,
        noise_multiplier: float,
        *,
        delta: float,
        honest_fraction: float = 1.0,
        rounds: int = 1,
        zero_on_grid: bool = False,
        rate: float = 1.0,
        rounding_share: float = ROUNDING_SHARE,
    ) -> ShuffleVectorSum:
        """Makes the protocol with the fewest bits for a noise multiplier, or slightly more noise.

        As in DP-SGD, the multiplier is the noise of the **sum** over ``max_norm``. If one user's
        vector becomes zero, the sum is a Gaussian mechanism with μ = 1/``noise_multiplier``; if a
        vector is replaced by another one, μ = 2/``noise_multiplier``.

        Args:
            num_users: n, as in the constructor (like ``dimension``, ``max_norm`` and
                ``honest_fraction``).
            dimension: d.
            max_norm: Δ₂.
            noise_multiplier: At least 0.1. The protocol has this much noise, or slightly more: see
                ``rounding_share``.
            delta: δ in (0, ½). The tails that no Gaussian covers use a millionth of it over all
                ``rounds``.
            honest_fraction: γ.
            rounds: T. The protocol's ``epsilon`` is the cost of T rounds with the same users at
                ``delta``, without sampling.
            zero_on_grid: Zero is a point of the grid. Users who send zero then add only their noise
                bits, and no error of rounding.
            rate: The expected share of users who send a vector other than zero; below 1 only with
                ``zero_on_grid``.
            rounding_share: By which share each coordinate's variance may exceed that of the
                covering Gaussian, because of rounding to the grid and of the binomial noise. A
                smaller share takes more bits: 0.3 takes about 65 per coordinate, 0.1 about 170,
                0.04 about 440 (n = 4000, rate 0.1, multiplier 1.55).

        Raises:
            ValueError: If an argument is out of range, or no grid is fine enough.
        """
        users, entries, norm = (
            integer("num_users", num_users),
            integer("dimension", dimension),
            moderate("max_norm", max_norm),
        )
        budget = SumBudget(1.0, delta, honest_fraction, rounds)
        plan = plan_with_noise_multiplier(
            users,
            entries,
            noise_multiplier,
            budget,
            zero_on_grid=zero_on_grid,
            rate=rate,
            rounding_share=rounding_share,
        )
        protocol = cls.__new__(cls)
        GridSum.__init__(protocol, users, entries, budget, plan, low=-norm, span=2 * norm)
        protocol.max_norm = norm
        protocol.epsilon = binomial_sums.compute_epsilon(
            [(protocol.sum_round, budget.rounds)], delta=budget.delta
        )
        return protocol

    def _within(self, values: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        largest = float(norms.max()) if len(norms) else 0.0
        if not math.isfinite(largest):
            raise ValueError(f"vectors must be finite, got one of norm {largest}")
        if largest > self.max_norm * (1 + TOLERANCE):
            raise ValueError(
                f"max_norm is {self.max_norm:g}, got a vector of norm {largest:.6g}: clip vectors "
                "first, or raise max_norm (and with it the noise)"
            )
        return values * (self.max_norm / norms).clamp(max=1.0)

    def __repr__(self) -> str:
        return (
            f"ShuffleVectorSum(num_users={self.num_users}, dimension={self.dimension}, "
            f"max_norm={self.max_norm:g}, epsilon={self.epsilon:g}, delta={self.delta:g}, "
            f"honest_fraction={self.honest_fraction:g}): rounds={self.rounds}, "
            f"sample_rate={self.sample_rate:g}, "
            f"granularity={self.granularity}, noise_bits={self.noise_bits}, "
            f"bit_probability={self.bit_probability:.4g}, "
            f"{self.bits_per_user} bits per user"
        )
