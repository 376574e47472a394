r"""Composes the privacy losses of many rounds by FFT, and returns ε at δ.

The loss of a round is L = log R. Losses of rounds add up, so all distributions are put on one grid
and convolved, in both directions (loss log R under the moved data set, −log R under the
other); ε is the larger. Opacus's own grid has an *absolute* error in ε (0.01 by default), while ε
here may be 6e-4. This grid bounds the truth from one side. Losses are tilted, which gives the FFT
its accuracy near the answer, even at δ = 1e-200 (docs/proofs/06_distributions_on_grids.md, 6.6 to
6.8).

>>> from opacus_shuffle.analysis.ratio_distribution import mean_distribution
>>> def week(side):
...     ratio = mean_distribution(noise_multiplier=9.48, num_users=60_000, side=side)
...     return [(Mixture.of(ratio), 7)]
>>> upper = compute_epsilon(week("upper"), delta=1 / 60_000)
>>> lower = lower_epsilon(week("lower"), delta=1 / 60_000)
>>> round(upper, 5), round(lower, 5)
(0.00205, 0.00204)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq, minimize_scalar

from opacus_shuffle.analysis.mean_ratio import Vector, logsumexp
from opacus_shuffle.analysis.ratio_distribution import RatioDistribution, Side
from opacus_shuffle.core.solve import bracket, safe_root

RELATIVE_ERROR = 1e-9
"""Every upper ε is enlarged by this fraction, for the rounding of sums of positive terms."""

_STEP = 0.05
"""Grid step in standard deviations of one round's loss, averaged over the rounds."""

_LARGEST_GRID = 2**20
_LARGEST_WINDOW = 2**21
_WINDOW = 30.0
"""Standard deviations of the composed loss that a grid has room for."""
_WIDEST = 700.0
"""The widest step, beyond which its exponential would overflow.

A run with wider steps loses so much that shuffling has no effect.
"""
_COARSER = (1.0, 4.0)
"""Factors of the grid's steps. The second one is used if the first needs too long a window."""

_CLIPPED = 1e-4
"""Share of δ that may be spent on tails clipped off single rounds."""
_OUTSIDE = 1e-16
"""Tilted probability that may lie outside the FFT's window."""


@dataclasses.dataclass(frozen=True)
class Mixture:
    """One round whose adversary learns which of several distributions of R applies.

    It is the same one for both data sets.

    Attributes:
        components: (probability, distribution) pairs.
        lost: The probability that the adversary learns everything. All probabilities add up to 1,
            or to at most 1 + ``lost`` where an upper bound counts an event in both.
    """

    components: tuple[tuple[float, RatioDistribution], ...]
    lost: float = 0.0

    @classmethod
    def of(cls, distribution: RatioDistribution) -> Mixture:
        """Makes a mixture of one distribution."""
        return cls(((1.0, distribution),))

    def clipped(self, budget: float, side: Side) -> Mixture:
        """The mixture with the tails of every part clipped."""
        return dataclasses.replace(
            self,
            components=tuple(
                (weight, component.clipped(budget, side)) for weight, component in self.components
            ),
        )

    @property
    def span(self) -> float:
        """The range of finite losses; infinite if there is none."""
        logs = np.concatenate([distribution.log_ratios for _, distribution in self.components])
        finite = logs[np.isfinite(logs)]
        return float(np.ptp(finite)) if finite.size else math.inf


@dataclasses.dataclass(frozen=True)
class GridDistribution:
    """Probabilities of log R, or of a loss, at the points of an even grid around 0.

    Attributes:
        first: The first point as a multiple of the grid's step.
        masses: Probabilities of this point and of those that follow it, shape (k,).
        zero: The probability of R = 0, or of a loss of −∞.
        infinite: The probability of infinity (of log R: under the moved data set).
    """

    first: int
    masses: Vector
    zero: float
    infinite: float


Rounds = Sequence[tuple[Mixture, int]]


def compute_epsilon(
    rounds: Rounds, *, delta: float, slack: tuple[float, float] = (0.0, 0.0)
) -> float:
    """Returns the smallest ε with δ(ε) + slack₀ + e^ε·slack₁ ≤ δ in both directions, rounded up.

    Args:
        rounds: Mixtures of **upper** distributions, each with its number of rounds.
        delta: δ in (0, 1).
        slack: What all rounds add to δ besides ``rounds``. For a distance in total variation both
            numbers are that distance. The first may be negative if their sum is not.

    Returns:
        ε ≥ 0, or ``inf`` if ``lost``, infinite losses or ``slack`` use up δ.
    """
    return _epsilon(rounds, delta, slack, "upper")


def losses_above(
    mixture: Mixture, *, step: float, clipped: float
) -> tuple[GridDistribution, GridDistribution]:
    """Returns a round above a mixture of upper distributions, by its losses on a grid.

    Args:
        mixture: The round.
        step: Of the grid, h: losses are its multiples.
        clipped: Probability that may be moved to the ends, 0 or more, at either tail.

    Returns:
        The loss log R under the moved data set, and −log R under the other.

    Raises:
        ValueError: If so fine a grid has too many points.

    Formal Guarantees:
        Both are losses of one pair of distributions whose ratio is above R in convex order (6.9).
    """
    mixture = mixture.clipped(clipped, "upper")
    if not mixture.span < step * _LARGEST_WINDOW:
        raise ValueError(
            f"losses between {-mixture.span:.3g} and {mixture.span:.3g} have more than "
            f"{_LARGEST_WINDOW:,} multiples of {step!r}: use a larger interval"
        )
    return _loss(mixture, step, "upper", reverse=False), _loss(mixture, step, "upper", reverse=True)


def lower_epsilon(rounds: Rounds, *, delta: float) -> float:
    """Returns a value, rounded down, that the smallest valid ε is not below.

    ``rounds`` holds **lower** distributions only.
    """
    return _epsilon(rounds, delta, (0.0, 0.0), "lower")


def _epsilon(rounds: Rounds, delta: float, slack: tuple[float, float], side: Side) -> float:
    """Returns ε in the larger direction."""
    total = sum(count for _, count in rounds)
    if not all(mixture.components for mixture, _ in rounds):
        return math.inf
    rounds = [(mixture.clipped(_CLIPPED * delta / total, side), count) for mixture, count in rounds]
    deviation = math.sqrt(
        sum(
            count * sum(weight * component.scale**2 for weight, component in mixture.components)
            for mixture, count in rounds
        )
    )
    widest = max(mixture.span for mixture, _ in rounds)
    if widest == math.inf:
        return math.inf if side == "upper" else 0.0
    width = max(
        _STEP * deviation / math.sqrt(total),
        _WINDOW * deviation / _LARGEST_GRID,
        widest / _LARGEST_GRID,
    )
    if width == 0:
        return 0.0
    return max(
        _direction_epsilon(rounds, delta, slack, width, side, reverse) for reverse in (False, True)
    )


def _direction_epsilon(
    rounds: Rounds,
    delta: float,
    slack: tuple[float, float],
    width: float,
    side: Side,
    reverse: bool,
) -> float:
    """Returns ε in one direction."""
    counts = [count for _, count in rounds]
    # A rare large loss may need a longer window than allowed. Then the steps are wider.
    for coarser in _COARSER:
        if width * coarser > _WIDEST:
            break
        losses = [_loss(mixture, width * coarser, side, reverse) for mixture, _ in rounds]
        remaining = sum(count * loss.infinite for loss, count in zip(losses, counts, strict=True))
        # An upper bound may count the infinite part twice, so a round's masses add up to at most
        # 1 + 2·infinite, and those of all rounds to e^(2·remaining).
        if side == "upper":
            remaining *= math.exp(min(2 * remaining, 1.0))
        if remaining + sum(slack) >= delta:
            return math.inf
        if not any(
            np.any(loss.first + np.flatnonzero(loss.masses)) for loss in losses
        ):  # every loss is 0
            return 0.0
        composed = _compose(losses, counts, width * coarser, math.log(delta))
        if composed is not None:
            return _smallest_epsilon(composed, delta, remaining, slack, side)
    return math.inf if side == "upper" else 0.0


def _smallest_epsilon(
    composed: _Composed, delta: float, remaining: float, slack: tuple[float, float], side: Side
) -> float:
    """Returns where log δ(ε) meets log δ.

    An upper value is on the safe side and enlarged, a lower one is reduced.
    """
    sign = 1.0 if side == "upper" else -1.0

    def excess(epsilon: float) -> float:
        return composed.log_delta(epsilon, sign, remaining, slack) - math.log(delta)

    ups = (composed.chernoff * 1.05**step for step in range(1, 62))
    downs = (composed.chernoff * 0.95 ** (2**step - 1) for step in range(1, 8))
    unsafe, safe = bracket(
        excess, composed.chernoff, towards_safe=ups, towards_unsafe=itertools.chain(downs, [0.0])
    )
    if safe is None:
        return math.inf
    if unsafe is None:
        return 0.0
    if side == "lower":
        root = brentq(excess, unsafe, safe, xtol=1e-12 * safe, rtol=1e-12)
        return float(root) * (1 - RELATIVE_ERROR)
    root = safe_root(
        excess, unsafe=unsafe, safe=safe, tolerance=1e-12 * safe, relative_tolerance=1e-12
    )
    return math.nextafter(root * (1 + RELATIVE_ERROR), math.inf)


def _loss(mixture: Mixture, width: float, side: Side, reverse: bool) -> GridDistribution:
    """Returns the mixture's loss on the grid.

    It is log R under the moved data set, or −log R under the other.
    """
    discretize = _round_up if side == "upper" else _round_down
    discretized = [
        (weight, discretize(distribution, width)) for weight, distribution in mixture.components
    ]
    first = min(component.first for _, component in discretized)
    end = max(component.first + len(component.masses) for _, component in discretized)
    masses = np.zeros(end - first)
    for weight, component in discretized:
        masses[component.first - first : component.first - first + len(component.masses)] += (
            weight * component.masses
        )
    zero = mixture.lost + sum(weight * component.zero for weight, component in discretized)
    infinite = mixture.lost + sum(weight * component.infinite for weight, component in discretized)
    if reverse:
        return GridDistribution(1 - end, masses[::-1], infinite, zero)
    return GridDistribution(first, masses * np.exp(np.arange(first, end) * width), zero, infinite)


def _round_up(distribution: RatioDistribution, width: float) -> GridDistribution:
    """Splits every atom between its neighbours on the grid, with the mean preserved.

    The result is above the distribution in convex order (6.6).
    """
    logs = distribution.log_ratios
    finite = np.isfinite(logs)
    if not finite.any():  # an infinite loss alone, possibly as one component of several
        return GridDistribution(
            0, np.zeros(1), float(distribution.masses.sum()), distribution.infinite
        )
    position = logs[finite] / width
    below = np.floor(position).astype(np.int64)
    upward = distribution.masses[finite] * np.clip(
        np.expm1((position - below) * width) / math.expm1(width), 0.0, 1.0
    )
    first = int(below.min())
    size = int(below.max()) - first + 2
    masses: Vector = np.bincount(below - first, distribution.masses[finite] - upward, size).astype(
        np.float64
    )
    masses += np.bincount(below - first + 1, upward, size)
    return GridDistribution(
        first, masses, float(distribution.masses[~finite].sum()), distribution.infinite
    )


def _round_down(distribution: RatioDistribution, width: float) -> GridDistribution:
    """Merges and splits neighbouring atoms until the mean of every group is a grid point.

    The result is below the distribution in convex order (6.6). From left to right a group collects
    mass until its mean has risen to its grid point. The last group does not reach its point. Its
    mass, which is of the size of the tails, is dropped, which only lowers δ.
    """
    mass_at: dict[int, float] = {}
    logs = distribution.log_ratios.tolist()
    point, target, mass, deficit = 0, 0.0, 0.0, 0.0
    for log_ratio, remaining in zip(logs, distribution.masses.tolist(), strict=True):
        ratio = math.exp(log_ratio)
        if mass:
            gain = (
                (ratio - target)
                if abs(log_ratio - point * width) > 0.1
                else target * math.expm1(log_ratio - point * width)
            )
            if gain * remaining < deficit:
                mass, deficit = mass + remaining, deficit - gain * remaining
                continue
            used = deficit / gain
            mass_at[point] = mass_at.get(point, 0.0) + mass + used
            remaining, mass = remaining - used, 0.0
        point = math.ceil(log_ratio / width)
        target = math.exp(point * width)
        mass, deficit = remaining, target * -math.expm1(log_ratio - point * width) * remaining
    if not mass_at:  # the distribution is narrower than one step, so it is put at its mean
        return GridDistribution(0, np.ones(1), 0.0, 0.0)
    first = min(mass_at)
    masses = np.zeros(max(mass_at) - first + 1)
    masses[np.array(list(mass_at)) - first] = list(mass_at.values())
    return GridDistribution(first, masses, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class _Composed:
    """The composed loss, tilted.

    Its value is (first + i)·width, its true probability masses·e^{log_norm − θ·value}.
    """

    losses: Vector
    masses: Vector
    theta: float
    log_norm: float
    error: float
    chernoff: float

    @functools.cached_property
    def weights(self) -> tuple[Vector, Vector]:
        """Returns e^{−(1+θ)·beyond} and (1 − e^{−beyond})·e^{−θ·beyond} at the grid's multiples."""
        beyond = self.losses - self.losses[0]
        tilt = np.exp(-self.theta * beyond)
        return np.exp(-beyond) * tilt, -np.expm1(-beyond) * tilt

    def log_delta(
        self, epsilon: float, sign: float, remaining: float, slack: tuple[float, float]
    ) -> float:
        """Returns log of δ(ε), with the errors added (sign 1) or taken off (sign −1)."""
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        masses = self.masses[start:]
        # The loss of the k-th mass is ε + first + k·width, and 1 − e^{−first − k·width} is the sum
        # of e^{−k·width}·(1 − e^{−first}) and 1 − e^{−k·width}, none of them negative.
        first = float(self.losses[start] - epsilon) if len(masses) else 0.0
        # Not ``@``: BLAS starts threads for such a product, which takes longer than the product.
        near, far = (float(np.sum(weights[: len(masses)] * masses)) for weights in self.weights)
        beyond = math.exp(-self.theta * first) * (far - math.expm1(-first) * near)
        largest = (self.theta / (1 + self.theta)) ** self.theta / (
            1 + self.theta
        )  # of the weights, at any loss
        inside = beyond + sign * self.error * largest
        if inside <= 0:
            return -1e6
        log_inside = math.log(inside) + self.log_norm - self.theta * epsilon
        rest = (
            sign * remaining
            + slack[0]
            + (math.exp(min(epsilon, 700.0)) * slack[1] if slack[1] else 0.0)
        )
        return float(np.logaddexp(log_inside, math.log(rest))) if rest > 0 else log_inside


def _compose(
    losses: Sequence[GridDistribution], counts: Sequence[int], width: float, log_delta: float
) -> _Composed | None:
    """Tilts and convolves losses, and bounds the errors of window and rounding (6.7).

    Returns ``None`` if the window would be too large.
    """
    filled = [np.flatnonzero(loss.masses) for loss in losses]
    values = [(loss.first + at) * width for loss, at in zip(losses, filled, strict=True)]
    masses = [loss.masses[at] for loss, at in zip(losses, filled, strict=True)]
    logs = [np.log(probabilities) for probabilities in masses]

    def log_moment(index: int, theta: float) -> float:
        return logsumexp(logs[index] + theta * values[index])

    def total_log_moment(theta: float) -> float:
        return sum(count * log_moment(index, theta) for index, count in enumerate(counts))

    deviation = math.sqrt(
        sum(
            count * float(np.sum(v**2 * p))
            for v, p, count in zip(values, masses, counts, strict=True)
        )
    )
    if not 0 < deviation < math.inf:  # distributions whose masses underflow, at δ below about 1e-30
        return None

    def chernoff(theta: float) -> float:
        # E(1 − e^{ε−L})₊ ≤ E e^{θ(L−ε)} · θ^θ/(1+θ)^{1+θ}
        return (
            total_log_moment(theta) - log_delta - math.log1p(theta) - theta * math.log1p(1 / theta)
        ) / theta

    theta = math.exp(
        _minimum(lambda log_theta: chernoff(math.exp(log_theta)), -math.log(deviation))
    )
    norms = [log_moment(index, theta) for index in range(len(losses))]
    tilted = [
        np.exp(log + theta * v - norm) for log, v, norm in zip(logs, values, norms, strict=True)
    ]
    centres = [round(float(np.sum(v * p)) / width) for v, p in zip(values, tilted, strict=True)]
    ends = [
        (loss.first - c, loss.first + len(loss.masses) - 1 - c)
        for loss, c in zip(losses, centres, strict=True)
    ]
    reach = int(np.abs(ends).max())

    def escape(indices: Sequence[int], sign: float) -> float:
        """Bounds how far the composed tilted losses stray from their centre but for ``_OUTSIDE``.

        This is Chernoff's bound.
        """

        def bound(log_slope: float) -> float:
            slope = sign * math.exp(log_slope)
            growth = sum(
                counts[i] * (log_moment(i, theta + slope) - norms[i] - slope * centres[i] * width)
                for i in indices
            )
            return (growth - math.log(_OUTSIDE)) / abs(slope)

        return bound(_minimum(bound, -math.log(deviation)))

    groups = [[index] for index in range(len(losses))] + (
        [list(range(len(losses)))] if len(losses) > 1 else []
    )
    window = max(escape(group, sign) for group in groups for sign in (1.0, -1.0))
    if max(reach, window / width) > _LARGEST_WINDOW:
        return None
    size = 2 * next_fast_len(max(reach, math.ceil(window / width)) + 2, real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    for loss, count, at, probabilities, centre in zip(
        losses, counts, filled, tilted, centres, strict=True
    ):
        around = np.zeros(size)  # loss 0 comes first, those below it last
        around[loss.first - centre + at] = probabilities
        transform = rfft(around)
        # The other powers underflow. Of many rounds these are almost all.
        matters = np.abs(transform) > math.exp(-745 / count)
        spectrum *= np.power(
            transform, count, out=np.zeros_like(transform), where=matters, dtype=np.complex128
        )
    shift = sum(count * centre for count, centre in zip(counts, centres, strict=True))
    # Rounding: a power multiplies the relative error of the spectrum, of which some tens of entries
    # matter.
    rounding = 1e-14 * (100.0 + sum(counts))
    return _Composed(
        losses=(np.arange(size) - size // 2 + shift) * width,
        masses=np.maximum(np.fft.fftshift(irfft(spectrum, size)), 0.0),
        theta=theta,
        log_norm=total_log_moment(theta),
        error=2 * len(groups) * _OUTSIDE + rounding,
        chernoff=max(chernoff(theta), width),
    )


def _minimum(function: Callable[[float], float], guess: float) -> float:
    """Returns an approximate minimizer of a function of a logarithm that falls and then rises."""
    return float(
        minimize_scalar(
            function, bounds=(guess - 12.0, guess + 9.0), method="bounded", options={"xatol": 1e-2}
        ).x
    )
