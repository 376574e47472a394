"""``GridSum``: what both protocols share: numbers on a grid, noise bits, and the analyzer.

``simulate`` draws the analyzer's answer at once, without any messages: the sum of the rounded
values plus one binomial per coordinate has the same distribution as what the bits add up to.
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
from opacus_shuffle.core.compiled import worth_compiling
from opacus_shuffle.core.exact_binomials import draw_binomials
from opacus_shuffle.core.guarantees import InconsistentBound
from opacus_shuffle.core.randomness import SecretGenerator, stream_of
from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.protocols.calibration import GridPlan, SumBudget
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.protocols.sums_of_roundings import FINEST, round_at_random, sum_of_roundings

_CHUNK = 2**17
"""Numbers that are rounded at a time: what a processor's cache holds."""
TOLERANCE = 1e-5
"""How far beyond its bound a value may lie, relatively, by the rounding of single precision."""


class GridSum(ABC):
    """Sums over ``num_users`` users of points in ``[low, low + span]^dimension``.

    Subclasses say which of these points are allowed.

    Attributes:
        granularity: g, grid steps from end to end of a coordinate's range.
        noise_bits: b, noise bits per user and coordinate.
        bit_probability: p, that a noise bit is 1.
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
        """How many bits one user sends in one round: d·(g + b)."""
        return self.dimension * (self.granularity + self.noise_bits)

    @property
    def fewest_reports(self) -> int:
        """How many users must report at least for the guarantee to hold."""
        return self._plan.honest_users

    @property
    def grid_step(self) -> float:
        """The length of one grid step, in the points' own unit."""
        return self._span / self.granularity

    @property
    def variance(self) -> float:
        """The variance of each coordinate of the answer when all users take part.

        It is that of the noise, and of rounding at its worst (¼ grid step² a user).
        """
        return self.grid_step**2 * self._plan.variance(self.num_users)

    @property
    def mean_squared_error(self) -> float:
        """An upper bound on E‖answer − sum‖₂²: d times :attr:`variance` (SCO Theorem 3.2)."""
        return self.dimension * self.variance

    @property
    def sum_round(self) -> BinomialSum:
        """One round as it is accounted for, with the noise of honest users alone."""
        return BinomialSum(noise=self._plan.noise, shift=self.granularity, dimension=self.dimension)

    @property
    def mu(self) -> float:
        """The μ of a round's Gaussian privacy under replacement, but for a chance :attr:`lost`."""
        return gaussian_equivalent(self.sum_round, lost=self.tail)[0]

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier 2/μ, the noise of the sum over the clipping norm.

        It is rounded down, so that 2 over it is no less than μ.
        """
        return math.nextafter(2 / self.mu, 0.0)

    @property
    def lost(self) -> float:
        """The probability that :attr:`mu` does not cover, one round."""
        return gaussian_equivalent(self.sum_round, lost=self.tail)[1]

    @property
    def tail(self) -> float:
        """The share of δ that one round's binomial tails may take."""
        return self._budget.lost

    def exact_epsilon(self, delta: float | None = None) -> tuple[float, float]:
        """Computes a lower value of ε, and a proved upper one, from the noise itself.

        The lower one is that of one pair of data sets, the upper one holds for all of them.

        Args:
            delta: δ of all the rounds that the protocol is made for; by default the protocol's.

        Returns:
            ``(lower, upper)``, rounded apart; ``upper`` never exceeds ε where ``delta`` is the
            protocol's.
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
                f"delta={delta!r} is less than the binomial's tails can be held to over "
                f"{self.rounds} rounds: ask for a larger delta"
            )
        lower = binomial_sums.lower_epsilon(repeated, delta=delta, sample_rate=self.sample_rate)
        if lower > upper:
            raise InconsistentBound(
                f"{self!r} has lower = {lower!r} above upper = {upper!r}: report this error, use "
                "neither"
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
        return round_at_random(position, stream) + self.draw_noise(1, stream, part=True)

    def check_reports(self, num_reports: Any) -> int:
        """Refuses more or fewer reports than the guarantee covers."""
        reports = integer("num_reports", num_reports)
        fewest = self.fewest_reports
        if not fewest <= reports <= self.num_users:
            between = f"{fewest} to {self.num_users}" if fewest < self.num_users else str(fewest)
            raise ValueError(
                f"this protocol is for {between} users (num_users={self.num_users}, "
                f"honest_fraction={self.honest_fraction:.3g}), got {reports}: fewer have too "
                "little noise, more were not planned for"
            )
        return reports

    # All users at once

    def encode(self, points: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        """Returns the sum of the users' randomly rounded points, in grid steps: int64, shape (d,).

        Args:
            points: X of shape (n, d), or an iterable of such blocks of rows, where memory does not
                hold it.
            generator: On the CPU; by default secret.
        """
        return self._encode(points, stream_of(generator))[0]

    def _encode(
        self, points: Any, draws: SecretGenerator, width: int | None = None
    ) -> tuple[torch.Tensor, int]:
        """Returns the sum of the rounded points, and how many there are.

        Args:
            points: As :meth:`encode`.
            draws: Of the random rounding.
            width: How many columns the points have, if they are only some of the coordinates.
        """
        width = self.dimension if width is None else width
        blocks = [points] if isinstance(points, torch.Tensor | np.ndarray) else points
        if isinstance(blocks, str | bytes) or not isinstance(blocks, Iterable):
            raise ValueError(
                f"X must be a tensor of shape (n, {self.dimension}) or blocks of such rows, got "
                f"{points!r}"
            )
        total, rows = torch.zeros(width, dtype=torch.int64), 0
        for block in blocks:
            if not isinstance(block, torch.Tensor | np.ndarray):
                raise ValueError(
                    f"X must be a tensor or hold tensors of shape (rows, {self.dimension}), got a "
                    f"{type(block).__name__} in it"
                )
            numbers = real_numbers("X", block)
            if numbers.ndim != 2 or numbers.shape[1] != width:
                raise ValueError(f"X must have shape (n, {width}), got {tuple(numbers.shape)}")
            rows += len(numbers)
            for part in torch.split(numbers, max(1, _CHUNK // max(1, width))):
                total += self._sum_rounded(self._checked(part), draws)
        return total, rows

    def _sum_rounded(self, points: torch.Tensor, draws: SecretGenerator) -> torch.Tensor:
        """Returns the sum of points rounded to the grid, in steps."""
        if self.granularity > FINEST:
            return round_at_random(self._grid_position(points), draws).sum(0)
        middle = self._low + self._span / 2
        centred = points - middle if middle else points
        steps = torch.full((len(points),), self.granularity / self._span, dtype=torch.float64)
        return sum_of_roundings(
            centred,
            steps,
            granularity=self.granularity,
            source=draws,
            compiled=worth_compiling(self.num_users * self.dimension),
        )

    def draw_noise(
        self, num_reports: int, generator: torch.Generator | None = None, *, part: bool = False
    ) -> torch.Tensor:
        """Draws the noise bits of so many users, added up: int64, shape (d,).

        Args:
            num_reports: How many users.
            generator: By default secret. The noise is drawn where it lives, on the CPU or on a GPU.
            part: They are some of a round's, whose number is looked at when all are added up.

        Raises:
            ValueError: If so many reports are not covered, unless they are a part.
        """
        reports = (
            integer("num_reports", num_reports, minimum=0)
            if part
            else self.check_reports(num_reports)
        )
        trials = reports * self.noise_bits
        return draw_binomials(trials, self.bit_probability, self.dimension, generator)

    def decode(self, counts: torch.Tensor, num_reports: int) -> torch.Tensor:
        """Returns the analyzer's estimate of the sum from the numbers of ones: float64, shape (d,).

        Raises:
            ValueError: If so many reports are not covered.
        """
        reports = self.check_reports(num_reports)
        instance_of("counts", counts, (torch.Tensor,))
        if counts.shape != (self.dimension,):
            raise ValueError(
                f"counts must have shape ({self.dimension},), got {tuple(counts.shape)}"
            )
        expected = reports * self.noise_bits * self.bit_probability
        estimate = counts.to(torch.float64, copy=True).sub_(expected)
        return estimate.mul_(self.grid_step).add_(reports * self._low)

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

    def _grid_position(self, points: torch.Tensor) -> torch.Tensor:
        """Returns where points lie on the grid, in steps."""
        return ((points - self._low) * (self.granularity / self._span)).clamp_(0, self.granularity)

    def _checked(self, points: torch.Tensor) -> torch.Tensor:
        """Returns points as float64 on the CPU, or refuses points out of bounds."""
        points = points.to("cpu", torch.float64)
        return self._within(points, torch.linalg.vector_norm(points, dim=1, keepdim=True))

    @abstractmethod
    def _within(self, values: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """Returns values with their norms, moved back where rounding took them out of bounds.

        Raises:
            ValueError: If they are farther off than rounding explains.
        """


def real_numbers(name: str, value: Any) -> torch.Tensor:
    """Returns a dense tensor of real numbers, detached.

    Raises:
        ValueError: If it is none.
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
