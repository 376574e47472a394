r"""Computes ε of noised sums over secret samples: nobody learns whose records are in them.

Let the sum of a round be μ-Gaussian-private under replacement, but for a probability ``lost``, and
μ/2-Gaussian-private where a record becomes zero.

``"fixed_size"``
    Every round draws its B of n records anew, without replacement; γ = B/n. Proved in
    docs/proofs/03_secret_samples.md: one round's hockey sticks are at most h(α) + γ·``lost``,
    h(α) = γ·H_{1+(α−1)/γ} of the μ-Gaussian for α ≥ 1 (Theorem 3.1), which is the curve of one pair
    with a known likelihood ratio (3.2); rounds compose (3.3). A record that becomes zero is a
    replacement too.
``"poisson"``
    Every record is in the sum by its own secret coin of rate γ; the others count as zero.
    Proved in docs/proofs/08_secret_check_in.md: where a record becomes zero a round is
    Poisson-subsampled DP-SGD's, with the noise multiplier 2/μ (Theorem 8.1); where it is replaced
    it becomes the opposite at worst, at the same multiplier and rate, which never costs more than h
    (8.2).

>>> rounds = [(SampledSum(mu=0.5, sample_rate=0.01), 1000)]
>>> round(compute_epsilon(rounds, delta=1e-6), 3)
0.827
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from opacus_shuffle.analysis import gaussian, privacy_loss
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.analysis.merge import grouped, merge
from opacus_shuffle.analysis.opposite_reports import opposite_reports
from opacus_shuffle.analysis.privacy_loss import Mixture
from opacus_shuffle.analysis.ratio_distribution import TAILS, RatioDistribution, mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import MOST_TYPES, ShuffledRound, tail_for
from opacus_shuffle.core.solve import bracket, log_excess, safe_root
from opacus_shuffle.core.validation import (
    integer,
    number,
    one_of,
    open_unit_interval,
    positive,
    sampling_rate,
)

_NEGLIGIBLE = 1e-4
"""The share of δ below which probabilities need no accuracy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledSum:
    """One round on a fresh secret sample.

    Attributes:
        mu: μ of the sum under replacement, if it contained everyone.
        sample_rate: γ, the share of all records in the sample, or the probability of each to be in
            it.
        lost: The probability that μ does not cover.
        sampling: ``"fixed_size"``, or ``"poisson"``: each record by its own coin.
    """

    mu: float
    sample_rate: float = 1.0
    lost: float = 0.0
    sampling: str = "fixed_size"

    def __post_init__(self) -> None:
        number("mu", self.mu, "lie in [1e-9, 1e6]", lambda mu: 1e-9 <= mu <= 1e6)
        sampling_rate("sample_rate", self.sample_rate)
        number("lost", self.lost, "lie in [0, 1)", lambda lost: 0 <= lost < 1)
        one_of("sampling", self.sampling, ("fixed_size", "poisson"))


Rounds = Sequence[tuple[SampledSum, int]]


def sampled_distribution(
    *, mu: float, sample_rate: float, tail: float = TAILS[0]
) -> RatioDistribution:
    """Returns an upper distribution of one round's R.

    Its hockey sticks are the same in both directions.

    It lies above h at every α, for every data set (3.2, 3.4). μ, γ and ``tail`` have
    :func:`mean_distribution`'s limits.
    """
    gamma = sampling_rate("sample_rate", sample_rate)
    whole = mean_distribution(noise_multiplier=1 / mu, num_users=1, tail=tail)
    above = whole.offsets > 1 - whole.centre  # before scaling: 1 is a point of the grid, exactly
    sampled = whole.scaled(gamma)
    offsets, masses = sampled.offsets[above], sampled.masses[above]
    mirrored = (-offsets / (1 + offsets) if sampled.centre else 1 / offsets)[::-1]
    mirrored_masses = (masses * (offsets + sampled.centre))[::-1]
    rest = max(1.0 - float(masses.sum() + mirrored_masses.sum()) - sampled.infinite, 0.0)
    offsets = np.concatenate([mirrored, [1 - sampled.centre], offsets])
    masses = np.concatenate([mirrored_masses, [rest], masses])
    if sampled.infinite > 0:
        offsets, masses = np.append(-sampled.centre, offsets), np.append(sampled.infinite, masses)
    return dataclasses.replace(sampled, offsets=offsets, masses=masses)


def compute_epsilon(rounds: Rounds, *, delta: float, zeroed: bool = False) -> float:
    """Returns ε at δ after all rounds, rounded up.

    It is ``inf`` if ``lost`` uses up δ or μ is too large.

    Args:
        rounds: Rounds, each with its number of repetitions, at least 1; later ones may depend on
            earlier ones' sums.
        delta: δ in (0, 1).
        zeroed: Whether a record becomes zero; else it is replaced by any other, possibly zero.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        Proved for every data set and the adjacency asked for, as long as the samples stay secret.

    Source: this library's; one round is Balle, Barthe and Gaboardi 2018, Theorems 2 and 10.
    """
    return _compute_epsilon(merge(rounds), open_unit_interval("delta", delta), zeroed)


@functools.lru_cache(maxsize=256)
def _compute_epsilon(
    rounds: tuple[tuple[SampledSum, int], ...], delta: float, zeroed: bool
) -> float:
    """Returns ε of merged rounds."""
    if all(sampled_sum.sample_rate == 1.0 for sampled_sum, _ in rounds):
        lost = math.fsum(sampled_sum.lost * count for sampled_sum, count in rounds)
        total = math.sqrt(math.fsum(sampled_sum.mu**2 * count for sampled_sum, count in rounds)) * (
            0.5 if zeroed else 1.0
        )
        return gaussian.compute_epsilon(mu=total, delta=delta - lost) if lost < delta else math.inf
    gaussians = [
        (ShuffledRound(noise_multiplier=1 / sampled_sum.mu, num_users=1), count)
        for sampled_sum, count in rounds
    ]
    tail = tail_for(gaussians, delta)
    if tail is None:
        return math.inf
    negligible = _NEGLIGIBLE * delta / sum(count for _, count in rounds)
    mixtures = []
    for sampled_sum, count in _coarsen(rounds):
        mu, rate = sampled_sum.mu, sampled_sum.sample_rate
        if sampled_sum.sampling == "fixed_size":
            distribution = sampled_distribution(mu=mu, sample_rate=rate, tail=tail)
        elif zeroed:
            alone = mean_distribution(noise_multiplier=2 / mu, num_users=1, tail=tail)
            distribution = alone.scaled(rate)
        else:
            distribution = opposite_reports(
                noise_multiplier=2 / mu,
                num_users=1,
                sample_rate=rate,
                tail=tail,
                negligible=negligible,
            )
        # The loss occurs only if the record is in the sample.
        mixtures.append((Mixture(((1.0, distribution),), rate * sampled_sum.lost), count))
    return privacy_loss.compute_epsilon(mixtures, delta=delta)


def _coarsen(rounds: tuple[tuple[SampledSum, int], ...]) -> Rounds:
    """Returns few different rounds in place of many.

    Each has the largest μ, γ and loss of the rounds that it replaces (h grows with μ and γ).
    """
    if len(rounds) <= MOST_TYPES:
        return rounds
    rows = np.array(
        [(sampled_sum.mu, sampled_sum.sample_rate, sampled_sum.lost) for sampled_sum, _ in rounds]
    )

    def size(rows: Vector) -> Vector:
        return np.log1p(rows[:, 1] * np.expm1(np.minimum(rows[:, 0] ** 2, 600.0)))

    merged = []
    for worst, members, together in grouped(
        rows, [count for _, count in rounds], size, most=MOST_TYPES
    ):
        mu, rate, lost = (float(number) for number in worst)
        # A bound for samples of fixed size holds for coins as well.
        coins = all(rounds[index][0].sampling == "poisson" for index in members)
        sampling = "poisson" if coins else "fixed_size"
        sampled_sum = SampledSum(mu=mu, sample_rate=rate, lost=lost, sampling=sampling)
        merged.append((sampled_sum, together))
    return merge(merged)


def largest_mu(
    *, epsilon: float, delta: float, rounds: int, sample_rate: float, lost: float = 0.0
) -> float:
    """Returns the largest μ of each of ``rounds`` rounds that are (ε, δ)-DP together.

    It is rounded down, by at most a millionth.

    Args:
        epsilon: ε > 0 of all rounds.
        delta: δ in (0, 1) of all rounds.
        rounds: T.
        sample_rate: γ.
        lost: Of each round.

    Raises:
        ValueError: If an argument is out of range, or ``lost`` uses up δ.
    """
    target, delta = positive("epsilon", epsilon), open_unit_interval("delta", delta)
    count = integer("rounds", rounds)
    if count * lost >= delta:
        raise ValueError(
            f"lost={lost!r} in each of {count} rounds uses up delta={delta!r}: ask for a "
            "larger delta"
        )

    remaining = delta - count * lost

    def excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        spent = gaussian.compute_epsilon(mu=mu * math.sqrt(count), delta=remaining)
        if spent > target:  # a sample may cost less than everyone
            sampled_sum = SampledSum(mu=mu, sample_rate=sample_rate, lost=lost)
            spent = min(spent, compute_epsilon([(sampled_sum, count)], delta=delta))
        return log_excess(spent, target)

    # Samples cost no more than everyone, and everyone keeps the budget just below this μ.
    everyone = (
        math.log(gaussian.largest_mu(epsilon=target, delta=remaining) / math.sqrt(count)) - 1e-6
    )
    more = (min(everyone + 2.0 * step, math.log(1e6)) for step in range(1, 20))
    unsafe, safe = bracket(excess, everyone, towards_safe=(), towards_unsafe=more)
    if unsafe is None or safe is None:
        raise ValueError(
            f"epsilon={epsilon!r} at delta={delta!r} allows any mu up to 1e6: this needs no noise"
        )
    return math.exp(safe_root(excess, unsafe=unsafe, safe=safe, tolerance=2e-7, step=1e-7))
