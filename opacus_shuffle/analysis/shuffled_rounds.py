r"""Computes ε of shuffled Gaussian reports for a pair of data sets, and ε under other trust models.

``pair_epsilon`` brackets the exact value for one pair of data sets (all others at zero, one record
at norm C becomes zero) in both directions. ``unshuffled_epsilon`` is that without a trusted
shuffler, and ``sampled_gaussian_epsilon`` that of DP-SGD, where a trusted server adds the reports.
The latter two cover every data set.

>>> kind = ShuffledRound(
...     noise_multiplier=5.0, num_users=60_000, sample_rate=0.1, sampling="poisson"
... )
>>> rounds = [(kind, 5540)]
>>> lower, upper = pair_epsilon(rounds, delta=1 / 60_000)
>>> round(lower, 4), round(upper, 4), round(unshuffled_epsilon(rounds, delta=1 / 60_000), 1)
(0.0538, 0.0539, 30.2)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from scipy.special import ndtr

from opacus_shuffle.analysis import gaussian, privacy_loss
from opacus_shuffle.analysis.mean_ratio import Sampling, Vector, check_round
from opacus_shuffle.analysis.merge import grouped, merge
from opacus_shuffle.analysis.privacy_loss import Mixture
from opacus_shuffle.analysis.ratio_distribution import (
    TAILS,
    RatioDistribution,
    Side,
    has_distribution,
    mean_distribution,
)
from opacus_shuffle.core.validation import open_unit_interval

MOST_TYPES, MOST_SHUFFLED_TYPES = 40, 10
"""Histories with more different rounds are replaced by this many, which cost no less.

The second number is for bounds that take long for each of them.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledRound:
    """One round of n Gaussian reports that are shuffled together.

    For n = 1 it is a Gaussian mechanism.

    Attributes:
        noise_multiplier: σ of one report over the clipping norm.
        num_users: n, the whole population.
        sample_rate: γ. Without replacement, m = round(γ·n) users take part and γ becomes m/n.
        sampling: How the users are drawn: ``None`` (all of them), ``"fixed_size"`` or
            ``"poisson"``.
    """

    noise_multiplier: float
    num_users: int
    sample_rate: float = 1.0
    sampling: Sampling = None

    def __post_init__(self) -> None:
        _, _, rate = check_round(
            self.noise_multiplier, self.num_users, self.sample_rate, self.sampling
        )
        object.__setattr__(self, "sample_rate", rate)

    @property
    def others(self) -> float:
        """Expected participants other than user 1."""
        return (self.num_users - 1) * self.sample_rate

    def with_noise(self, noise_multiplier: float) -> ShuffledRound:
        """Returns the same round at another σ."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)


Rounds = Sequence[tuple[ShuffledRound, int]]
Merged = tuple[tuple[ShuffledRound, int], ...]
_Round = TypeVar("_Round", bound=ShuffledRound)


def pair_epsilon(rounds: Rounds, *, delta: float) -> tuple[float, float]:
    """Returns a lower and an upper value of the pair's ε at δ after all rounds.

    The larger of both directions counts.

    Args:
        rounds: Rounds of any kinds, each with its number of repetitions, at least 1.
        delta: δ in (0, 1).

    Returns:
        ``(lower, upper)``, some tenths of a percent apart for σ ≥ 0.5 (several percent for more
        than 10 different rounds, whose numbers are rounded). Below σ = 0.05 the upper one is the
        unshuffled Gaussian's and the lower one 0.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        For one pair of data sets, both directions (SG ICLR Theorems 1–3 without slack). No
        guarantee for every data set.
    """
    return epsilon_bracket(
        merge(rounds), open_unit_interval("delta", delta), _distribution, unshuffled_epsilon
    )


def estimate_pair_epsilon(rounds: Rounds, *, delta: float) -> float:
    """Returns an estimate of :func:`pair_epsilon`, as if log R were Gaussian, where searches begin.

    It is no bound.
    """
    variance = sum(
        count
        * math.log1p(
            round_.sample_rate**2
            * math.expm1(min(round_.noise_multiplier**-2, 600.0))
            / max(round_.others, 1.0)
        )
        for round_, count in rounds
    )
    return gaussian.compute_epsilon(mu=math.sqrt(variance), delta=delta)


@functools.lru_cache(maxsize=512)
def epsilon_bracket(
    rounds: Merged,
    delta: float,
    distribution: Callable[[ShuffledRound, Side, float], RatioDistribution],
    largest: Callable[..., float],
) -> tuple[float, float]:
    """Returns a lower and an upper value of ε for rounds with these distributions of R.

    ``distribution`` maps a round, a side and a tail to a distribution on that side of the round's
    R. ``largest`` maps rounds and δ to an ε that always holds and caps the upper value.
    """
    most = largest(rounds, delta=delta)
    if most == 0 or (tail := tail_for(rounds, delta)) is None:
        return 0.0, most

    def composition(side: Side) -> list[tuple[Mixture, int]]:
        return [
            (Mixture.of(distribution(round_, side, tail)), count)
            for round_, count in coarsen(rounds, side)
        ]

    upper = min(privacy_loss.compute_epsilon(composition("upper"), delta=delta), most)
    return privacy_loss.lower_epsilon(composition("lower"), delta=delta), upper


def unshuffled_epsilon(rounds: Rounds, *, delta: float, distance: float = 1.0) -> float:
    """Returns ε ≥ 0 at δ for an adversary who sees the sender of every report, rounded up.

    Args:
        rounds: As :func:`pair_epsilon`.
        delta: δ in (0, 1).
        distance: How far a record may move, in clipping norms: 1 for zero-out, 2 for replacement
            adjacency.

    Formal Guarantees:
        Proved for every data set, because shuffling is post-processing. Exact
        for the worst one (up to 0.1 % where γ < 1, where T rounds count as little more than γT).
    """
    delta = open_unit_interval("delta", delta)
    rounds = merge(rounds)
    mu = distance * math.sqrt(sum(count / round_.noise_multiplier**2 for round_, count in rounds))
    everyone = gaussian.compute_epsilon(mu=mu, delta=delta)
    if all(round_.sample_rate == 1.0 for round_, _ in rounds) or any(
        round_.noise_multiplier / distance < 1e-6 for round_, _ in rounds
    ):
        return everyone
    if delta >= -math.expm1(
        sum(count * math.log1p(-min(round_.sample_rate, 1 - 1e-16)) for round_, count in rounds)
    ):
        return 0.0  # the user participates in some round with a probability of at most δ
    scaled = [
        (round_.with_noise(round_.noise_multiplier / distance), count) for round_, count in rounds
    ]
    return min(everyone, _one_user_epsilon(merge(scaled), delta, sample_seen=True))


@functools.lru_cache(maxsize=256)
def _one_user_epsilon(rounds: Merged, delta: float, *, sample_seen: bool) -> float:
    """Returns ε of one user's reports, each sent with probability γ; the sample is seen or secret.

    It is infinite if σ is too small to compute with. The number of other users has no effect, so
    rounds that differ in it alone are merged.
    """
    if (tail := tail_for(rounds, delta)) is None:
        return math.inf
    alone = merge(
        (dataclasses.replace(round_, num_users=1, sampling="poisson"), count)
        for round_, count in rounds
    )
    mixtures = []
    for round_, count in coarsen(alone, "upper", most=MOST_TYPES):
        report = mean_distribution(noise_multiplier=round_.noise_multiplier, num_users=1, tail=tail)
        mixture = Mixture.of(report.scaled(round_.sample_rate))
        if sample_seen:
            nothing = RatioDistribution(
                np.array([1 - report.centre]), np.ones(1), report.centre, 0.0, 0.0
            )
            mixture = Mixture(((round_.sample_rate, report), (1 - round_.sample_rate, nothing)))
        mixtures.append((mixture, count))
    return privacy_loss.compute_epsilon(mixtures, delta=delta)


def sampled_gaussian_epsilon(rounds: Rounds, *, delta: float) -> float:
    """Returns ε ≥ 0 at δ of DP-SGD, rounded up.

    User 1's record enters each round's noised sum with probability γ, in secret. The value agrees
    with Opacus's PRV accountant, but has a relative error (0.1 %) instead of an absolute one
    (0.01).

    Args:
        rounds: As :func:`pair_epsilon`; ``noise_multiplier`` is that of the **sum**, ``num_users``
            is not used.
        delta: δ in (0, 1).

    Formal Guarantees:
        Proved for every data set under Poisson sampling, add/remove (here: zero-out) adjacency.
    """
    delta = open_unit_interval("delta", delta)
    merged = merge(rounds)
    everyone = unshuffled_epsilon(merged, delta=delta)
    if all(round_.sample_rate == 1.0 for round_, _ in merged):
        return everyone
    return min(everyone, _one_user_epsilon(merged, delta, sample_seen=False))


def coarsen(
    rounds: tuple[tuple[_Round, int], ...], side: Side, *, most: int = MOST_SHUFFLED_TYPES
) -> tuple[tuple[_Round, int], ...]:
    """Returns few different rounds in place of many, which reveal more, or less (1.18).

    For an upper ε the round of a group has the smallest σ, the fewest users and the largest γ (or
    sample of fixed size) of its members; for a lower one the other extremes. A thousand rounds that
    differ by a factor of 10 in one of the three add 5 to 10 % to ε. If all three differ at random,
    ε may double.

    Args:
        rounds: Merged rounds.
        side: The side of ε.
        most: The largest number of rounds for each of the three that differs.
    """
    if len(rounds) <= most:
        return rounds
    few: list[tuple[_Round, int]] = []
    for sampling in dict.fromkeys(round_.sampling for round_, _ in rounds):
        few += _grouped(
            [(round_, count) for round_, count in rounds if round_.sampling == sampling], side, most
        )
    return merge(few)


def _grouped(
    rounds: Sequence[tuple[_Round, int]], side: Side, most: int
) -> Iterable[tuple[_Round, int]]:
    """Yields a few rounds in place of many whose users are drawn in the same way."""
    like = rounds[0][0]
    fixed, sign = like.sampling == "fixed_size", 1.0 if side == "upper" else -1.0

    def size(rows: Vector) -> Vector:
        """Returns the approximate variance of log R, negated for a lower ε."""
        noise, users, drawn = np.abs(rows).T
        return sign * np.log1p(
            drawn * np.expm1(np.minimum(noise**-2, 600.0)) / users ** (2 if fixed else 1)
        )

    def numbers(round_: ShuffledRound) -> tuple[float, int, float]:
        drawn = round(round_.sample_rate * round_.num_users) if fixed else round_.sample_rate
        return -round_.noise_multiplier, -round_.num_users, drawn

    rows = sign * np.array([numbers(round_) for round_, _ in rounds])  # the larger, the safer
    most *= max(int(np.count_nonzero(np.ptp(rows, axis=0))), 1)
    for worst, _, together in grouped(rows, [count for _, count in rounds], size, most=most):
        noise, users, drawn = (float(number) for number in np.abs(worst))
        round_ = dataclasses.replace(
            like,
            noise_multiplier=noise,
            num_users=int(users),
            sample_rate=min(drawn / users, 1.0) if fixed else drawn,
        )
        yield round_, together


def tail_for(rounds: Rounds, delta: float) -> float | None:
    """Returns the number of standard deviations beyond which a report's tails are negligible.

    It is ``None`` if σ is too small to compute with such tails.
    """
    smallest = 1e-6 * delta / sum(count for _, count in rounds)
    tail = next((tail for tail in TAILS if ndtr(-tail) <= smallest), None)
    # A tenth of σ leaves room for coarsening.
    fits = tail is not None and all(
        has_distribution(0.9 * round_.noise_multiplier, tail) for round_, _ in rounds
    )
    return tail if fits else None


def _distribution(round_: ShuffledRound, side: Side, tail: float) -> RatioDistribution:
    """Returns the distribution of R of one round."""
    return mean_distribution(**dataclasses.asdict(round_), side=side, tail=tail)
