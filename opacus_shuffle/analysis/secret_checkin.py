r"""Computes ε of rounds in which all users report, and users who do not participate send noise.

By a coin of rate q a user sends its vector with noise, else noise alone, and reports are shuffled.
Users who send noise alone are *clones* of a user whose record is zero, for all records and in any
dimension, without a slack. Let B of the other h − 1 honest users send noise alone, B ~
Bin(h − 1, 1 − q), and let B be revealed. Then the
round's likelihood ratio is 1 − q + q·(mean of B + 1 copies of X), X that of one report
(:mod:`opacus_shuffle.analysis.report_shapes`). Proofs: docs/proofs/12_secret_checkin.md.

>>> rounds = [(SecretRound(noise_multiplier=0.75, num_users=4000, sample_rate=0.8), 10)]
>>> lower, upper = zero_out_epsilon(rounds, delta=1e-5)
>>> round(lower, 3), round(upper, 3)
(0.316, 0.852)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from opacus_shuffle.analysis import binomial, gaussian, privacy_loss
from opacus_shuffle.analysis.gaussian_clones import MOST_USERS
from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.analysis.merge import merge
from opacus_shuffle.analysis.opposite_reports import opposite_reports
from opacus_shuffle.analysis.privacy_loss import Mixture
from opacus_shuffle.analysis.ratio_distribution import Side, mean_distribution
from opacus_shuffle.analysis.report_shapes import pure_epsilon, shape_of
from opacus_shuffle.analysis.shuffled_rounds import (
    ShuffledRound,
    coarsen,
    tail_for,
    unshuffled_epsilon,
)
from opacus_shuffle.core.validation import open_unit_interval

_EDGES = (-math.inf, -5.0, *np.arange(-3.5, 3.5, 0.5), math.inf)
"""Edges of the groups of numbers of clones, in standard deviations from their mean."""
_RESOLUTION = 0.04
_NEGLIGIBLE = 1e-4
"""The share of δ that may be spent on rare small numbers of clones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecretRound(ShuffledRound):
    """One round in which all users report.

    Attributes:
        noise_multiplier: σ of one report over the clipping norm.
        num_users: h, the honest users, whose noise and coins are secret.
        sample_rate: q, the probability that a user participates.
        sampling: Always by coins.
        report: The shape of the participants' reports.
    """

    sampling: Sampling = "poisson"
    report: str = "gaussian"


Rounds = Sequence[tuple[SecretRound, int]]
Merged = tuple[tuple[SecretRound, int], ...]


def zero_out_epsilon(rounds: Rounds, *, delta: float) -> tuple[float, float]:
    """Returns a lower and an upper value of ε ≥ 0 at δ if one record becomes zero.

    Args:
        rounds: :class:`SecretRound`, each with its number of repetitions, at least 1.
        delta: δ in (0, 1).

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        The upper value covers every data set and every adaptive choice of vectors of norm C at most
        (Theorem 12.1). The lower one is of one pair of data sets: all other records are zero.
    """
    merged, delta = merge(rounds), open_unit_interval("delta", delta)
    upper = _epsilon(merged, delta, 1.0, alone=False)
    return min(_lower_epsilon(merged, delta), upper), upper


def replacement_epsilon(rounds: Rounds, *, delta: float) -> float:
    """Returns ε ≥ 0 at δ, rounded up, if one record becomes any other one (Theorem 12.3).

    The arguments are those of :func:`zero_out_epsilon`.
    """
    return _epsilon(merge(rounds), open_unit_interval("delta", delta), 2.0, alone=False)


def unshuffled(rounds: Rounds, *, delta: float, distance: float = 1.0) -> float:
    """Returns ε ≥ 0 at δ for an adversary who sees the sender of every report, rounded up.

    Only the coin hides whether a record is in its report then.

    Args:
        rounds: As of :func:`zero_out_epsilon`.
        delta: δ in (0, 1).
        distance: 1 for zero-out, 2 for replacement adjacency.
    """
    return _epsilon(merge(rounds), open_unit_interval("delta", delta), distance, alone=True)


def estimate_epsilon(rounds: Rounds, *, delta: float, distance: float = 1.0) -> float:
    """Returns an estimate of ε, as if log R were Gaussian, where searches begin. It is no bound."""
    variance = 0.0
    for round_, count in rounds:
        pool = 1 + (round_.num_users - 1) * (1 - round_.sample_rate)
        shape = shape_of(round_.report, round_.noise_multiplier)
        log_square = shape.log_variance
        if distance == 2:
            log_square = math.log(4 * shape.opposed_variance(0.0))
        variance += count * math.log1p(
            math.exp(min(2 * math.log(round_.sample_rate) + log_square - math.log(pool), 600.0))
        )
    return gaussian.compute_epsilon(mu=math.sqrt(variance), delta=delta)


@functools.lru_cache(maxsize=512)
def _epsilon(rounds: Merged, delta: float, distance: float, *, alone: bool) -> float:
    """Returns ε with the clones, or without any if ``alone``.

    The value without clones is always valid, also if all other users are dishonest.
    """
    never = sum(count * math.log1p(-min(round_.sample_rate, 1 - 1e-16)) for round_, count in rounds)
    if delta >= -math.expm1(never):
        return 0.0  # user 1 participates in some round with a probability of at most δ
    most = min(
        _moment_epsilon(rounds, delta),
        sum(
            count
            * pure_epsilon(
                shape_of(round_.report, round_.noise_multiplier), round_.sample_rate, distance
            )
            for round_, count in rounds
        ),
    )
    if not alone:
        most = _epsilon(rounds, delta, distance, alone=True)
    if all(round_.report == "gaussian" for round_, _ in rounds):
        everyone = [
            (dataclasses.replace(round_, sample_rate=1.0), count) for round_, count in rounds
        ]
        most = min(most, unshuffled_epsilon(everyone, delta=delta, distance=distance))
    tail = tail_for(rounds, delta)
    if most == 0 or tail is None:
        return most
    budget = _NEGLIGIBLE * delta / sum(count for _, count in rounds)
    mixtures = [
        (_mixture(round_, budget, tail, distance, alone=alone), count)
        for round_, count in _coarsen(rounds, "upper")
    ]
    return min(most, privacy_loss.compute_epsilon(mixtures, delta=delta))


def _moment_epsilon(rounds: Merged, delta: float) -> float:
    """Returns ε by second moments, for losses that exceed every grid (12.7)."""
    if any(round_.sample_rate == 1 for round_, _ in rounds):
        return math.inf
    log_moment = 0.0
    for round_, count in rounds:
        shape = shape_of(round_.report, round_.noise_multiplier)
        square = np.logaddexp(0.0, 2 * math.log(round_.sample_rate) + shape.log_variance)
        log_moment += count * (float(square) - math.log1p(-round_.sample_rate))
    return (log_moment - math.log(delta)) * (1 + 1e-9)


def _coarsen(rounds: Merged, side: Side) -> Merged:
    """Returns few different rounds for each shape of report (12.4)."""
    shapes = dict.fromkeys(round_.report for round_, _ in rounds)
    alike = (tuple(entry for entry in rounds if entry[0].report == shape) for shape in shapes)
    return tuple(entry for some in alike for entry in coarsen(some, side))


def _mixture(
    round_: SecretRound, budget: float, tail: float, distance: float, *, alone: bool
) -> Mixture:
    """Returns the round's R as a mixture over the number of clones (12.1)."""
    components, lost = [], 0.0
    for weight, pool in [(1.0, 1)] if alone else _pools(round_, budget):
        if pool == 0:
            lost += weight
        elif distance == 2:
            ratio = opposite_reports(
                noise_multiplier=round_.noise_multiplier,
                num_users=pool,
                sample_rate=round_.sample_rate,
                report=round_.report,
                tail=tail,
                negligible=budget,
            )
            components.append((weight, ratio))
        else:
            mean = mean_distribution(
                noise_multiplier=round_.noise_multiplier,
                num_users=pool,
                report=round_.report,
                resolution=_RESOLUTION,
                tail=tail,
            )
            components.append((weight, mean.scaled(round_.sample_rate)))
    return Mixture(tuple(components), lost)


def _pools(round_: SecretRound, budget: float) -> Iterator[tuple[float, int]]:
    """Yields (probability, the least number of reports among which user 1's hides, with itself).

    The number is 0 for the probability that is lost.
    """
    others, chance = min(round_.num_users, MOST_USERS) - 1, 1 - round_.sample_rate
    low, _ = binomial.likely_range(others, chance, budget)
    mean, variance = others * chance, others * chance * round_.sample_rate
    deviation = math.sqrt(max(variance, 1e-12))
    edges = np.unique(np.clip(np.ceil(mean + deviation * np.array(_EDGES)), low, others + 1))
    yield float(binomial.cdf(low - 1, others, chance)), 0
    below, above = (tail(edges - 1, others, chance) for tail in (binomial.cdf, binomial.sf))
    # The differences of one tail cancel where it is close to 1.
    weights = np.where(edges[:-1] > mean, -np.diff(above), np.diff(below))
    # Numbers of reports with many trailing zero bits share the halves of their means.
    step = 2 ** max(0, math.floor(math.log2(max(deviation, 1.0))) - 3)
    for weight, fewest in zip(weights.tolist(), edges.tolist(), strict=False):
        yield weight, max(1, int((fewest + 1) // step * step))


@functools.lru_cache(maxsize=512)
def _lower_epsilon(rounds: Merged, delta: float) -> float:
    """Returns ε of one pair, rounded down: all other records are zero, so all users are clones."""
    if (tail := tail_for(rounds, delta)) is None:
        return 0.0
    side: Side = "lower"
    composition = []
    for round_, count in _coarsen(rounds, side):
        mean = mean_distribution(
            noise_multiplier=round_.noise_multiplier,
            num_users=round_.num_users,
            report=round_.report,
            side=side,
            tail=tail,
        )
        composition.append((Mixture.of(mean.scaled(round_.sample_rate)), count))
    return privacy_loss.lower_epsilon(composition, delta=delta)
