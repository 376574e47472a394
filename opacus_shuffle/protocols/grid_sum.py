"""``GridSum``: the base of the sum protocols: rounding to a grid, noise bits, and the estimate.

``simulate`` draws the estimate for all users at once. The sum of the rounded values plus one
binomial number per coordinate has the same distribution as the sum of all users' bits.

A process that has all vectors in the clear need not round each of them. ``release_sum`` rounds
their sum, once per coordinate, with the same guarantee (docs/proofs, page 2, Corollary 2.9).
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from opacus_shuffle.analysis import binomial_sums, sampled_sums
from opacus_shuffle.analysis.binomial_sums import BinomialSum, gaussian_equivalent
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.core.exact_binomials import draw_binomials
from opacus_shuffle.core.guarantees import InconsistentBound
from opacus_shuffle.core.randomness import SecretGenerator, for_pytorch, room_for, stream_of
from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.protocols.calibration import GridPlan, SumBudget
from opacus_shuffle.protocols.statement import PrivacyStatement

_CHUNK = 2**16
"""The number of values that are rounded at a time, so that they fit into the processor's cache."""
TOLERANCE = 1e-5
"""The fraction by which a value may exceed its bound, because of single precision."""


class GridSum(ABC):
    """Sums points in ``[low, low + span]^dimension``, one per user.

    Subclasses define which of these points are allowed.

    Attributes:
        granularity: g, the number of grid steps across a coordinate's range.
        noise_bits: b, noise bits per user and coordinate.
        bit_probability: p, the probability that a noise bit is 1.
    """

    def __init__(
        self,
        num_users: int,
        dimension: int,
        budget: SumBudget,
        plan: GridPlan,
        *,
        low: float,
        span: float,
    ) -> None:
        self.num_users, self.dimension = num_users, dimension
        self.epsilon, self.delta = budget.epsilon, budget.delta
        self.honest_fraction, self.rounds = budget.honest_fraction, budget.rounds
        self.sample_rate, self.granularity = budget.sample_rate, plan.granularity
        self.noise_bits, self.bit_probability = plan.noise_bits, plan.bit_probability
        self._budget, self._plan, self._low, self._span = budget, plan, low, span

    @property
    def bits_per_user(self) -> int:
        """The number of bits that a user sends in a round: d·(g + b)."""
        return self.dimension * (self.granularity + self.noise_bits)

    @property
    def fewest_reports(self) -> int:
        """The smallest number of reports for which the guarantee holds."""
        return self._plan.honest_users

    @property
    def grid_step(self) -> float:
        """The length of a grid step, in the unit of the points."""
        return self._span / self.granularity

    @property
    def variance(self) -> float:
        """The variance of each coordinate of the estimate if all users report.

        It is the variance of the noise plus the largest possible variance of the rounding, ¼ grid
        step² per user.
        """
        return self.grid_step**2 * self._plan.variance(self.num_users)

    @property
    def mean_squared_error(self) -> float:
        """An upper bound on E‖estimate − sum‖₂²: d times :attr:`variance` (SCO Theorem 3.2)."""
        return self.dimension * self.variance

    @property
    def sum_round(self) -> BinomialSum:
        """One round for the accountant, with the noise of the honest users alone."""
        return BinomialSum(noise=self._plan.noise, shift=self.granularity, dimension=self.dimension)

    @property
    def mu(self) -> float:
        """μ of a round's Gaussian privacy under replacement, except for :attr:`lost`."""
        return gaussian_equivalent(self.sum_round, lost=self.tail)[0]

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier 2/μ, the noise of the sum over the clipping norm; rounded down."""
        return math.nextafter(2 / self.mu, 0.0)

    @property
    def lost(self) -> float:
        """The probability of the outcomes of a round that :attr:`mu` does not cover."""
        return gaussian_equivalent(self.sum_round, lost=self.tail)[1]

    @property
    def tail(self) -> float:
        """The share of δ that the binomial tails of one round may use."""
        return self._budget.lost

    def exact_epsilon(self, delta: float | None = None) -> tuple[float, float]:
        """Computes a lower and an upper bound on ε from the noise itself.

        The lower bound is ε of one pair of data sets; the upper bound is proved for all of them.

        Args:
            delta: δ of all rounds together; by default the protocol's.

        Returns:
            ``(lower, upper)``. At the protocol's δ, ``upper`` does not exceed its ε.

        Raises:
            ValueError: If ``delta`` is smaller than the binomial tails of the rounds.
        """
        delta = self.delta if delta is None else delta
        repeated = [(self.sum_round, self.rounds)]
        upper = binomial_sums.compute_epsilon(repeated, delta=delta)
        if self.sample_rate < 1:
            sampled = SampledSum(mu=self.mu, sample_rate=self.sample_rate, lost=self.lost)
            upper = min(upper, sampled_sums.compute_epsilon([(sampled, self.rounds)], delta=delta))
        if delta == self.delta:
            upper = min(upper, self.epsilon)
        if not math.isfinite(upper):
            raise ValueError(
                f"delta={delta!r} is smaller than the bound on the binomial tails of "
                f"{self.rounds} rounds: choose a larger delta"
            )
        lower = binomial_sums.lower_epsilon(repeated, delta=delta, sample_rate=self.sample_rate)
        if lower > upper:
            raise InconsistentBound(
                f"{self!r} has lower = {lower!r} above upper = {upper!r}: use neither, and report "
                "this error"
            )
        return lower, upper

    def statement(self) -> PrivacyStatement:
        """Returns the (ε, δ) of all rounds together, with its meaning."""
        return PrivacyStatement(
            epsilon=self.epsilon,
            delta=self.delta,
            interaction="one round" if self.rounds == 1 else "full",
            rounds=self.rounds,
            rounds_per_user=self.rounds,
            num_users=round(self.num_users / self.sample_rate),
            bits_per_user=self.rounds * self.bits_per_user,
            honest_fraction=self.honest_fraction,
            sample_rate=self.sample_rate,
        )

    # One user

    def randomize(self, x: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        """Returns one user's report: the number of ones that it sends in each coordinate.

        A user of the paper sends that many ones among g + b bits, for the shuffler to mix. Shuffled
        bits reveal their number of ones alone, so the shuffler may add up these counts instead.

        Args:
            x: The user's vector, shape (d,), or its number.
            generator: On the CPU; by default secret, from the operating system.

        Returns:
            int64, shape (d,).

        Raises:
            ValueError: If ``x`` has another shape or is out of bounds.
        """
        point = real_numbers("x", x)
        if point.numel() != self.dimension or point.ndim > 1:
            raise ValueError(f"x must have shape ({self.dimension},), got {tuple(point.shape)}")
        stream = stream_of(generator)
        position = self._grid_position(self._checked(point.reshape(1, -1)))[0]
        return round_at_random(position, stream).long() + self.draw_noise(1, stream)

    def check_reports(self, num_reports: Any) -> int:
        """Refuses a number of reports that the guarantee does not cover."""
        reports = integer("num_reports", num_reports)
        fewest = self.fewest_reports
        if not fewest <= reports <= self.num_users:
            between = f"{fewest} to {self.num_users}" if fewest < self.num_users else str(fewest)
            raise ValueError(
                f"this protocol is for {between} users (num_users={self.num_users}, "
                f"honest_fraction={self.honest_fraction:.3g}), got {reports}: build a protocol for "
                "this number of users"
            )
        return reports

    # All users at once

    def encode(self, points: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        """Returns the sum of the users' randomly rounded points, in grid steps: int64, shape (d,).

        Args:
            points: X of shape (n, d), or an iterable of blocks of rows if X does not fit into
                memory.
            generator: On the CPU; by default secret.
        """
        return self._encode(points, stream_of(generator))[0]

    def _encode(self, points: Any, draws: SecretGenerator) -> tuple[torch.Tensor, int]:
        """Returns the sum of the rounded points, and their number."""
        blocks = [points] if isinstance(points, torch.Tensor | np.ndarray) else points
        if isinstance(blocks, str | bytes) or not isinstance(blocks, Iterable):
            raise ValueError(
                f"X must be a tensor of shape (n, {self.dimension}) or blocks of such rows, got "
                f"{points!r}"
            )
        total, rows = torch.zeros(self.dimension, dtype=torch.int64), 0
        for block in blocks:
            if not isinstance(block, torch.Tensor | np.ndarray):
                raise ValueError(
                    f"X must be a tensor or contain tensors of shape (rows, {self.dimension}), got "
                    f"a {type(block).__name__} in it"
                )
            numbers = real_numbers("X", block)
            if numbers.ndim != 2 or numbers.shape[1] != self.dimension:
                raise ValueError(
                    f"X must have shape (n, {self.dimension}), got {tuple(numbers.shape)}"
                )
            rows += len(numbers)
            for chunk in torch.split(numbers, max(1, _CHUNK // self.dimension)):
                rounded = round_at_random(self._grid_position(self._checked(chunk)), draws)
                total += rounded.sum(0).long()
        return total, rows

    def draw_noise(
        self, num_reports: int, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Draws the sum of the noise bits of some users: int64, shape (d,).

        Args:
            num_reports: The number of users, at least 0.
            generator: By default secret. The noise is drawn on its device, the CPU or a GPU.
        """
        reports = integer("num_reports", num_reports, minimum=0)
        return draw_binomials(
            reports * self.noise_bits, self.bit_probability, self.dimension, generator
        )

    def decode(self, counts: torch.Tensor, num_reports: int) -> torch.Tensor:
        """Returns the unbiased estimate of the sum from the number of ones: float64, shape (d,).

        Raises:
            ValueError: If the number of reports is not covered.
        """
        reports = self.check_reports(num_reports)
        instance_of("counts", counts, (torch.Tensor,))
        if counts.shape != (self.dimension,):
            raise ValueError(
                f"counts must have shape ({self.dimension},), got {tuple(counts.shape)}"
            )
        return self._estimate(counts.to(torch.float64, copy=True), reports)

    def simulate(self, X: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draws the estimate of the sum of all users' points, at once.

        Its distribution is that of ``decode`` of the sum of all users' ``randomize``.

        Args:
            X: One row per user, shape (n, d): a tensor or array, or an iterable of blocks of rows
                for data that does not fit into memory.
            generator: On the CPU; by default secret.

        Returns:
            float64, shape (d,).

        Raises:
            ValueError: If a row is out of bounds, or the number of rows is not covered.
        """
        draws = stream_of(generator)
        counts, reports = self._encode(X, draws)
        if not reports:
            raise ValueError("X must hold one row per user, got none")
        return self.decode(counts + self.draw_noise(reports, draws), reports)

    def release_sum(
        self, total: torch.Tensor, num_reports: int, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Releases a sum of users' points, rounded once per coordinate, with the users' noise bits.

        This is for a process that adds up the points in the clear. The guarantee is that of the
        protocol: the same μ and the same δ. The distribution differs: rounding adds at most ¼ grid
        step² to the variance of a coordinate here, and at most ¼ grid step² per user in the
        protocol.

        Args:
            total: The sum of the points of the users who report, shape (d,). Each point must be
                within bounds, which is not checked. A user who reports zero adds nothing. The
                guarantee does not cover rounding errors of the sum.
            num_reports: The number of users who report.
            generator: By default secret. Everything is drawn on its device, the CPU or a GPU.

        Returns:
            float64, shape (d,), on the generator's device.

        Raises:
            ValueError: If the number of reports is not covered, or ``total`` has another shape or
                is not finite.
        """
        reports = self.check_reports(num_reports)
        if total.shape != (self.dimension,) or not bool(total.isfinite().all()):
            raise ValueError(
                f"total must hold {self.dimension} finite numbers, in shape ({self.dimension},), "
                f"got NaN or infinity, or shape {tuple(total.shape)}: add up clipped vectors"
            )
        generator = SecretGenerator() if generator is None else generator
        noise = self.draw_noise(reports, generator)
        released = total.to(noise.device, torch.float64, copy=True)
        together = _CHUNK if noise.device.type == "cpu" else max(len(noise), 1)
        for some, bits in zip(
            torch.split(released, together), torch.split(noise, together), strict=True
        ):
            round_at_random(some.sub_(reports * self._low).div_(self.grid_step), generator)
            self._estimate(some.add_(bits), reports)
        return released

    def _estimate(self, counts: torch.Tensor, reports: int) -> torch.Tensor:
        """Turns numbers of ones into the unbiased estimate of a sum, in place."""
        expected = reports * self.noise_bits * self.bit_probability
        return counts.sub_(expected).mul_(self.grid_step).add_(reports * self._low)

    def _grid_position(self, points: torch.Tensor) -> torch.Tensor:
        """Returns the positions of points on the grid, in grid steps."""
        return ((points - self._low) * (self.granularity / self._span)).clamp_(0, self.granularity)

    def _checked(self, points: torch.Tensor) -> torch.Tensor:
        """Converts points to float64 on the CPU, and refuses points out of bounds."""
        points = points.to("cpu", torch.float64)
        return self._within(points, torch.linalg.vector_norm(points, dim=1, keepdim=True))

    @abstractmethod
    def _within(self, values: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """Returns values with the given norms, moved back into bounds where rounding exceeded them.

        Raises:
            ValueError: If a value is farther out of bounds than rounding can explain.
        """


def round_at_random(position: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Replaces each entry by ⌊entry + U⌋, with its own U uniform in [0, 1).

    U has 32 bits on a CPU, so an entry is rounded like one that differs from it by less than 2⁻³².
    Whole numbers are not changed.

    Args:
        position: float64. It is overwritten if it is contiguous.
        generator: On the device of ``position``; by default secret.

    Returns:
        float64, in the shape of ``position``.
    """
    entries, room = position.reshape(-1), room_for(_CHUNK // 2)
    draws = stream_of(generator) if position.device.type == "cpu" else None
    for some in torch.split(entries, _CHUNK if draws else max(len(entries), 1)):
        if draws:
            bits = draws.words(-(-len(some) // 2), room).view(np.int32)[: len(some)]
            uniforms = torch.from_numpy(bits).double().mul_(2.0**-32).add_(0.5)
        else:
            uniforms = torch.empty_like(some).uniform_(generator=for_pytorch(generator))
        whole = some.floor()
        some.sub_(whole).add_(uniforms).floor_().add_(whole)
    return entries.view(position.shape)


def real_numbers(name: str, value: Any) -> torch.Tensor:
    """Converts a value to a dense, detached tensor of real numbers.

    Raises:
        ValueError: If this is not possible.
    """
    try:
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            value = value.copy()
        numbers = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be a tensor of real numbers, got {reprlib.repr(value)}"
        ) from None
    if numbers.is_complex() or numbers.dtype == torch.bool:
        raise ValueError(f"{name} must hold real numbers, got {numbers.dtype}")
    if numbers.layout != torch.strided:
        raise ValueError(f"{name} must be dense, got {numbers.layout}: pass its to_dense()")
    return numbers
