r"""Computes an ε of shuffled Gaussian reports that holds for **every** data set (the certificate).

The idea: with probability about α = e^{−(t/σ + 1/2σ²)} another user sends the same report as a user
at zero would, a *clone* of zero. Among k clones, user 1's report hides as in the papers' pair with
k + 1 users (:mod:`opacus_shuffle.analysis.mean_ratio`). There are two ways to make "about" exact,
both proved in docs/proofs/01_gaussian_clones.md: **mended** clones (Theorem 1.4) and **truncated**
ones (Theorem 1.6). The slack of the latter does not grow with n, so they usually give the smaller ε
at σ above about 1. Rounds, sampling and replacement are 1.5 and 1.8 to 1.15. If there are few
clones (σ below about 1 at n = 60000), there is no certified gain.

>>> rounds = [(ShuffledRound(noise_multiplier=9.48, num_users=60_000), 1)]
>>> for clones in CLONE_TYPES:
...     print(clones, round(compute_epsilon(rounds, delta=1 / 60_000, clones=clones), 5))
mended 0.00096
truncated 0.00086
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr, ndtr

from opacus_shuffle.analysis import binomial, gaussian, privacy_loss
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.analysis.merge import merge
from opacus_shuffle.analysis.opposite_reports import opposite_reports
from opacus_shuffle.analysis.privacy_loss import Mixture
from opacus_shuffle.analysis.ratio_distribution import mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import (
    Merged,
    Rounds,
    ShuffledRound,
    coarsen,
    tail_for,
    unshuffled_epsilon,
)
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import one_of, open_unit_interval

Counts = npt.NDArray[np.int64]
Clones = Literal["mended", "truncated"]
CLONE_TYPES: tuple[Clones, ...] = ("mended", "truncated")

_LARGEST_STRETCH = 30.0
"""The logarithm of the largest factor of truncated clones. Beyond it they count as lost."""
_SMALLEST_MARGIN, _FEWEST_CLONES = 0.5, 1e-3
"""The smallest t that is tried, and the mean number of clones below which there is no gain."""
_MOST_MARGINS, _SMALL_GAIN = 10, 3e-3
"""The most margins that are tried, and the relative decrease of ε below which the search ends."""
MOST_USERS = 10**9
"""A larger number of users is computed as this one, because more users hide better (1.17)."""
_FINE, _MANY_TYPES = (7, 0.04), (5, 0.06)
"""To how many significant bits pool sizes are rounded down, and the resolution of grids.

Seven bits are 0.6 % on average, 0.3 % in ε. The others, for histories of many types of rounds, are
rounded up by about 1 % of ε more.
"""
_FEW_TYPES = 4
"""Histories with more types of rounds than this are computed with ``_MANY_TYPES``."""


def compute_epsilon(
    rounds: Rounds,
    *,
    delta: float,
    adjacency: str = "zero_out",
    clones: Clones = "mended",
) -> float:
    """Returns ε of adaptive rounds at δ, for every data set, rounded up.

    Args:
        rounds: Rounds of any kinds, each with its number of repetitions, at least 1.
        delta: δ in (0, 1).
        adjacency: ``"zero_out"`` (a record becomes a zero report) or ``"replace"`` (it becomes any
            other).
        clones: Which proof: ``"mended"`` or ``"truncated"``.

    Returns:
        ε, never above that of the unshuffled reports. The two are equal at σ below 0.05, or with
        almost no clones.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        (ε, δ)-differential privacy of the shuffled reports of all rounds together, for every data
        set whose records are clipped to norm 1, adaptively chosen rounds included. Theorems 1.4,
        1.6, 9.1 and 9.2 of docs/proofs/.
    """
    delta = open_unit_interval("delta", delta)
    distance = Adjacency(adjacency).distance
    one_of("clones", clones, CLONE_TYPES)
    merged = merge(rounds)
    best = unshuffled_epsilon(merged, delta=delta, distance=distance)
    return min(best, _with_clones(merged, delta, clones, distance)) if best else 0.0


def smallest_epsilon(
    rounds: Rounds, *, delta: float, adjacency: str = "zero_out"
) -> tuple[float, Clones | None]:
    """Returns the smaller ε of both proofs, and the proof that gives it.

    The proof is None if neither gains anything from shuffling. The proof with the larger estimate
    is computed only if its estimate is below the ε of the other one, which saves half of the work.
    """
    unshuffled = unshuffled_epsilon(rounds, delta=delta, distance=Adjacency(adjacency).distance)
    if all(_clones(round_, _SMALLEST_MARGIN) < _FEWEST_CLONES for round_, _ in rounds):
        return unshuffled, None
    promised = {
        clones: estimate_epsilon(rounds, delta=delta, adjacency=adjacency, clones=clones)
        for clones in CLONE_TYPES
    }
    first, second = sorted(CLONE_TYPES, key=promised.__getitem__)
    compute = functools.partial(compute_epsilon, rounds, delta=delta, adjacency=adjacency)
    best, proof = compute(clones=first), first
    if promised[second] <= 1.05 * best or best >= unshuffled:
        other = compute(clones=second)
        if other < best:
            best, proof = other, second
    return best, proof if best < unshuffled else None


def estimate_epsilon(
    rounds: Rounds, *, delta: float, adjacency: str = "zero_out", clones: Clones = "mended"
) -> float:
    """Returns an estimate of :func:`compute_epsilon` in milliseconds, where searches begin.

    It is no bound.
    """
    merged, distance = coarsen(merge(rounds), "upper"), Adjacency(adjacency).distance
    return _gaussian_fixed_point(
        merged, delta, clones, distance, unshuffled_epsilon(merged, delta=delta, distance=distance)
    )


@functools.lru_cache(maxsize=512)
def _gaussian_fixed_point(
    rounds: Merged, delta: float, clones: Clones, distance: float, unshuffled: float
) -> float:
    """Returns a fixed point of guesses of ε, as if the mixtures were Gaussian."""
    guess = 0.0
    for _ in range(10):
        guess, last = (
            min(_best_margin(rounds, delta, clones, guess, distance)[1], unshuffled),
            guess,
        )
        if abs(guess - last) <= 1e-3:
            break
    return guess


def clone_probability(noise_multiplier: float, margin: float) -> float:
    """Returns α, the share of a user's distribution that is a clone, except for Φ(−``margin``)."""
    exponent = -margin / noise_multiplier - 0.5 / noise_multiplier**2
    return math.exp(min(exponent, 0.0))


def _clones(round_: ShuffledRound, margin: float) -> float:
    """Returns the mean number of clones among the other users of a round."""
    return round_.others * clone_probability(round_.noise_multiplier, margin)


@functools.lru_cache(maxsize=512)
def _with_clones(rounds: Merged, delta: float, clones: Clones, distance: float) -> float:
    """Returns ε by clones alone, at a margin t near the best one; ``inf`` if there is none.

    Of two records that are ``distance`` = 2 apart the worst are opposite (9.3); at 1, one of them
    is zero.
    """
    tail = tail_for(rounds, delta)
    if tail is None:
        return math.inf
    # Of a sample of fixed size, _pools takes no more users than these (1.17).
    rounds = tuple(
        (dataclasses.replace(round_, num_users=MOST_USERS), count)
        if round_.num_users > MOST_USERS and round_.sampling != "fixed_size"
        else (round_, count)
        for round_, count in coarsen(rounds, "upper")
    )
    unshuffled = unshuffled_epsilon(rounds, delta=delta, distance=distance)
    budget = 1e-4 * delta / sum(count for _, count in rounds)
    precision = _FINE if len(rounds) <= _FEW_TYPES else _MANY_TYPES

    # The slack is multiplied by e^ε, so the margin must be chosen for an ε that is at least the
    # result, but not far above it.
    guess = _gaussian_fixed_point(rounds, delta, clones, distance, unshuffled)
    best, good, too_low = math.inf, math.inf, 0.0
    for _ in range(_MOST_MARGINS):
        margin, _ = _best_margin(rounds, delta, clones, guess, distance)
        if all(_clones(round_, margin) < _FEWEST_CLONES for round_, _ in rounds):
            break
        mixtures = [
            (_mixture(round_, margin, clones, budget, tail, distance, precision), count)
            for round_, count in rounds
        ]
        lost = sum(count * mixture.lost for mixture, count in mixtures)
        mass = math.exp(min(2 * lost, 1.0))  # if half is lost, the result is infinite anyway
        epsilon = privacy_loss.compute_epsilon(
            mixtures, delta=delta, slack=clone_slack(rounds, margin, clones, delta, mass)
        )
        close = abs(epsilon - guess) <= 0.02 or (1 - _SMALL_GAIN) * best <= epsilon < math.inf
        if epsilon < best:
            best, good = epsilon, guess
        if close or guess >= unshuffled:
            break
        too_low = guess if epsilon == math.inf else too_low
        if too_low < epsilon < math.inf:
            guess = min(epsilon, unshuffled)
        else:
            guess = min(
                (too_low + good) / 2 if good < math.inf else max(2 * guess, 1.0), unshuffled
            )
    return best


def clone_slack(
    rounds: Merged, margin: float, clones: Clones, delta: float, mass: float = 1.0
) -> tuple[float, float]:
    """Returns what all rounds add to δ: a number, and another one that is multiplied by e^ε.

    ``mass`` is the most that the measures of the other rounds add up to, 1 but for what is lost.
    The first number is negative where a record is mostly absent: what its absence adds is
    e^ε − 1 + 2δ times the margin's probability. See 1.4, 1.6, 1.8, 1.12, 1.13 and 9.2 of the
    proofs.
    """
    missing = float(ndtr(-margin))
    if clones == "mended":
        sigmas = [(round_.noise_multiplier, count * round_.others) for round_, count in rounds]
        distance = sum(
            others * clone_probability(sigma, margin) * missing for sigma, others in sigmas
        )
        return distance, distance
    gained = lost = absent = 0.0
    for round_, count in rounds:
        shift, rate = 1 / round_.noise_multiplier, round_.sample_rate
        gained += count * rate * _mass(max(margin, shift / 2) - shift, shift)
        lost += count * rate * _mass(margin, shift)
        absent += count * (1 - rate) * missing
    # The subtrahend is reduced by more than rounding errors, because at a small ε it is almost as
    # large as the other term.
    return mass * gained - absent * (1 - 2 * delta - 1e-12), mass * (lost + absent)


def _mass(start: float, length: float) -> float:
    """Returns the standard normal probability of an interval, rounded up."""
    return float(ndtr(-start) - ndtr(-start - length)) + 1e-15 * float(ndtr(-start))


def _best_margin(
    rounds: Merged, delta: float, clones: Clones, guess: float, distance: float
) -> tuple[float, float]:
    """Returns a t near the best one at ε near ``guess``, as if the mixtures were Gaussian.

    The second number is an estimate of the ε that it gives.
    """

    def epsilon(margin: float) -> float:
        moved, unmoved = clone_slack(rounds, margin, clones, delta)
        remaining = delta - moved - math.exp(min(guess, 600.0)) * unmoved
        if not remaining > 0:
            return 1e9 - 1e7 * margin
        variance = 0.0
        for round_, count in rounds:
            size = 1 + _clones(round_, margin)
            stretch = (
                math.exp(min(-float(log_ndtr(margin)) * size, 10.0))
                if clones == "truncated"
                else 1.0
            )
            u = round_.noise_multiplier**-2
            spread = math.expm1(min(u, 600.0)) if distance == 1 else 4 * math.sinh(min(u, 600.0))
            variance += count * math.log1p(stretch**2 * round_.sample_rate**2 * spread / size)
        mu = math.sqrt(variance)
        spent = gaussian.compute_epsilon(mu=mu, delta=remaining)
        # Among the margins with ε = 0, prefer the one that leaves most of δ. At the edge rounding
        # would decide whether ε is 0 (10.4).
        return spent if spent > 0 else gaussian.log_delta(mu=mu, epsilon=0.0) - math.log(remaining)

    best = minimize_scalar(
        epsilon, bounds=(_SMALLEST_MARGIN, 38.0), method="bounded", options={"xatol": 1e-3}
    )
    return float(best.x), max(float(best.fun), 0.0)


def _mixture(
    round_: ShuffledRound,
    margin: float,
    clones: Clones,
    budget: float,
    tail: float,
    distance: float,
    precision: tuple[int, float],
) -> Mixture:
    """Returns the round's R as a mixture over pool sizes (1.7, 1.14).

    ``budget`` of probability may be lost to rare ones.
    """
    sigma, stretch = round_.noise_multiplier, 0.0
    probability = clone_probability(sigma, margin)
    if clones == "truncated":
        probability *= float(ndtr(margin))
        stretch = -float(log_ndtr(margin))
    bits, resolution = precision
    if distance == 2:  # each size takes longer, so use at most four per standard deviation
        bits = min(bits, math.ceil(math.log2(4 * math.sqrt(round_.others * probability) + 2)))
    components, lost = [], 0.0
    for weight, users, rates in _pools(round_, probability, budget, bits):
        if users == 0:
            lost += weight
            continue
        for share, (size, rate) in rates:
            if stretch * (size - 1) > _LARGEST_STRETCH:
                lost += weight * share
                continue
            factor = math.exp(stretch * (size - 1))
            if distance == 2:
                ratio = opposite_reports(
                    noise_multiplier=sigma,
                    num_users=users,
                    sample_rate=rate,
                    factor=factor,
                    tail=tail,
                    negligible=budget,
                )
            else:
                distribution = mean_distribution(
                    noise_multiplier=sigma, num_users=users, resolution=resolution, tail=tail
                )
                ratio = distribution.scaled(rate * factor)
                if factor > 1:  # atoms that are pushed below R = 0 count as lost, with the factor
                    lost += (
                        weight
                        * share
                        * factor
                        * float(distribution.masses[ratio.offsets <= -ratio.centre].sum())
                    )
            components.append((weight * share, ratio))
    return Mixture(tuple(components), lost)


def _pools(
    round_: ShuffledRound, probability: float, budget: float, bits: int
) -> Iterator[tuple[float, int, list[tuple[float, tuple[int, float]]]]]:
    """Yields groups of pool sizes (1.14): (probability, users, [(share, (largest size, π))]).

    The probability that is lost has 0 users.
    """
    n, gamma = round_.num_users, round_.sample_rate
    chance, trials = probability, n - 1
    if round_.sampling == "fixed_size":
        trials = min(round(n * gamma), MOST_USERS)
    elif round_.sampling == "poisson":
        chance = gamma * probability
    others = trials - 1 if round_.sampling == "fixed_size" else trials
    each_way = [binomial.likely_range(number, chance, budget / 8) for number in (others, trials)]
    low = int(min(fewest for fewest, _ in each_way))
    high = min(int(max(most for _, most in each_way)) + 1, trials)
    sizes = np.arange(low, high + 2)
    present = gamma * binomial.pmf(sizes - 1, others, chance)
    weights = present + (1 - gamma) * binomial.pmf(sizes, trials, chance)

    def outside(number: int, least: int, most: int) -> float:
        tails = binomial.cdf(least - 1, number, chance) + binomial.sf(most, number, chance)
        return float(tails)

    rare = gamma * outside(others, low - 1, high) + (1 - gamma) * outside(trials, low, high + 1)
    yield max(rare, 0.0), 0, []
    rates, lowest, highest = _membership(round_, probability, sizes, present, weights, budget)
    dropped = np.maximum(
        np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64) - (bits - 1), 0
    )  # bits of each size
    groups = np.maximum((sizes >> dropped) << dropped, 1)
    for group in np.unique(groups):
        chosen = (groups == group) & (weights > 0)
        total = float(weights[chosen].sum())
        if total == 0:
            continue
        floor, ceiling = float(lowest[chosen].min()), float(highest[chosen].max())
        mean = min(float(weights[chosen] @ rates[chosen]) / total * (1 + 1e-12), ceiling)
        share = min(max((mean - floor) / (ceiling - floor), 0.0), 1.0) if ceiling > floor else 1.0
        largest = int(sizes[chosen].max())
        yield (
            total,
            int(group),
            [
                (share_of_size, (largest, rate))
                for share_of_size, rate in ((1 - share, floor), (share, ceiling))
                if share_of_size > 0
            ],
        )
    if round_.sampling == "poisson":
        yield budget / 4, 0, []  # the absent users' number outside the range that _membership takes


def _membership(
    round_: ShuffledRound,
    clone: float,
    sizes: Counts,
    present: Vector,
    weights: Vector,
    budget: float,
) -> tuple[Vector, Vector, Vector]:
    """Returns π given the pool's size: its mean, and its range over what else is revealed.

    See 1.10 and 1.11 of the proofs.
    """

    def ratio(above: Vector | Counts, below: Vector) -> Vector:
        return np.divide(above, below, out=np.zeros(len(sizes)), where=below > 0)

    mean = ratio(present, weights)
    n, gamma = round_.num_users, round_.sample_rate
    if round_.sampling != "poisson" or gamma == 1:
        return mean, mean, mean
    absence = (1 - gamma) / (1 - gamma * clone)
    fewest, _ = binomial.likely_range(np.maximum(n - sizes - 1, 0), absence, budget / 16)
    _, most = binomial.likely_range(np.maximum(n - sizes, 0), absence, budget / 16)
    lowest, highest = ratio(sizes, sizes + clone * (most + 1)), ratio(sizes, sizes + clone * fewest)
    return mean, np.minimum(lowest, mean), np.maximum(highest, mean)
