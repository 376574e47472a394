r"""Computes Feldman, McMillan and Talwar's amplification by shuffling ("hiding among the clones").

The bounds are a baseline for those of this library.

They only use that a report is (ε0, δ0)-LDP and are valid for every data set. They are usually far
above the bounds that use the Gaussian distribution itself
(:mod:`opacus_shuffle.analysis.gaussian_clones`). ``gaussian_epsilon`` is the best of them for
Gaussian reports.

>>> round(compute_epsilon(local_epsilon=4.0, num_users=100_000, delta=1e-6), 4)
0.1182

A Gaussian report is (ε0, δ0)-LDP for *any* two records, which are 2C apart, so Theorem 3.8 with
sensitivity 1 proves nothing, not even for zero-out adjacency
(docs/proofs/07_clones_of_any_report.md). At small σ only the unshuffled bound remains.

>>> round(gaussian_epsilon(noise_multiplier=9.48, num_users=60_000, delta=1 / 60_000), 3)
0.022
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy
from scipy.optimize import brentq, minimize_scalar
from scipy.special import expit

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.core.validation import (
    finite_number,
    integer,
    noise_level,
    one_of,
    open_unit_interval,
    positive,
)

MAX_USERS = 10**10
"""A larger number of users is computed as this one, because more users give more privacy.

The binomial tails were checked up to this number.
"""
LARGEST_LOCAL_EPSILON = 500.0
SMALLEST_DELTA = 1e-300
"""Double precision is insufficient beyond these two limits; the local bound is returned."""
BINS, COARSE_BINS = 4096, 192
MARGIN = 1e-9
"""Relative error allowed to every binomial probability.

Measured: below 2e-10 for up to ``MAX_USERS`` trials.
"""


def _lost(*, local_epsilon: float, local_delta: float, num_users: int, conversion: str) -> float:
    """Returns the factor of (1 + e^ε) in the final δ."""
    if conversion == "theorem_3_8":
        return (1 + math.exp(-local_epsilon) / 2) * num_users * local_delta
    own = local_delta * float(expit(-local_epsilon))
    return own + (num_users - 1) * math.exp(-local_epsilon) * (local_delta + own)


def _falls_to_zero(function: Callable[[float], float], end: float) -> float:
    """Returns the zero of a decreasing function on [0, ``end``], or the nearest endpoint.

    Any ε0 is sound, so nothing is rounded.
    """
    if function(0.0) <= 0:
        return 0.0
    return end if function(end) >= 0 else float(brentq(function, 0.0, end, xtol=1e-12 * end))


def compute_epsilon(
    *,
    local_epsilon: float,
    num_users: int,
    delta: float,
    local_delta: float = 0.0,
    conversion: str = "proved",
) -> float:
    """Returns ε after shuffling n reports of (ε0, δ0)-LDP.

    Args:
        local_epsilon: ε0 > 0 of one report.
        num_users: n ≥ 1, the reports shuffled together.
        delta: The whole δ in (0, 1).
        local_delta: δ0 in [0, 1) of one report; it enters δ about n·e^(−ε0) or n times, so it must
            be far below δ/n. With δ0 = 0 clones are more likely: 2/(e^ε0 + 1) instead of e^(−ε0).
        conversion: ``"proved"``: δ = δ_clones + (1 + e^ε)·(t + (n − 1)·e^(−ε0)·(δ0 + t)) with t =
            δ0/(1 + e^ε0); ``"theorem_3_8"``: δ = δ_clones + (1 + e^ε)·(1 + e^(−ε0)/2)·n·δ0, never
            less.

    Returns:
        ε ≥ 0, rounded up; never above ``local_epsilon`` if ``local_delta`` ≤ ``delta``. The tails
        of the clone count are added to δ, and each bin of counts is replaced by its smallest count,
        which increases ε by a few 1e-4 at most.

    Raises:
        ValueError: If an argument is out of range, or δ0 too large for any ε.

    Formal Guarantees:
        Proved for every data set, replacement adjacency: Theorem 7.3 of
        docs/proofs/07_clones_of_any_report.md if ``local_delta`` is 0, otherwise Theorem 7.1
        (``"proved"``). All users draw independently from the same randomiser.

    Source:
        Feldman, McMillan, Talwar, "Hiding among the clones" (FOCS 2021), Theorems 3.2 and 3.8,
        arXiv 2012.12803; ``"proved"`` is ours.
    """
    local_epsilon = positive("local_epsilon", local_epsilon)
    if not 0 <= finite_number("local_delta", local_delta) < 1:
        raise ValueError(f"local_delta must lie in [0, 1), got {local_delta!r}; pass 0 for none")
    num_users = integer("num_users", num_users)
    delta = open_unit_interval("delta", delta)
    one_of("conversion", conversion, ("proved", "theorem_3_8"))
    if num_users == 1 and local_delta <= delta:
        return local_epsilon  # no other users
    lost = _lost(
        local_epsilon=local_epsilon,
        local_delta=local_delta,
        num_users=num_users,
        conversion=conversion,
    )
    chance = math.exp(-local_epsilon) if local_delta else 2 * float(expit(-local_epsilon))
    epsilon = pair_epsilon(
        local_epsilon=local_epsilon, probability=chance, num_users=num_users, delta=delta, lost=lost
    )
    if epsilon is not None:
        return epsilon
    if local_delta <= delta:
        return local_epsilon  # shuffling is post-processing
    raise ValueError(
        f"local_delta={local_delta!r} leaves nothing of delta={delta!r} after {num_users} reports; "
        "pass a far smaller local_delta (for a Gaussian: with a larger local_epsilon, or call "
        "gaussian_epsilon, which looks for the best)"
    )


def gaussian_epsilon(
    *,
    noise_multiplier: float,
    num_users: int,
    delta: float,
    adjacency: str = "replace",
    conversion: str = "proved",
) -> float:
    """Returns the best ε that clones give for one round of shuffled Gaussian reports.

    The minimum is over all (ε0, δ0) on the exact curve of a report.

    Args:
        noise_multiplier: σ of one report over the clipping norm.
        num_users: n ≥ 1, the reports shuffled together.
        delta: δ in (0, 1).
        adjacency: ``"replace"`` (user 1's two reports are up to 2C apart) or ``"zero_out"`` (up to
            C).
        conversion: As in ``compute_epsilon``. For zero-out adjacency, Theorem 3.8 returns its value
        for replacement, which covers zero-out.

    Returns:
        ε ≥ 0, rounded up; never above the unshuffled ``gaussian.compute_epsilon``, and equal to it
        if n is too small for σ.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        Proved for every data set; zero-out is Theorem 7.2 of
        docs/proofs/07_clones_of_any_report.md.

    Source:
        Feldman, McMillan, Talwar, "Hiding among the clones", Theorems 3.2 and 3.8, arXiv
        2012.12803; Balle and Wang 2018, arXiv 1805.06530, Theorem 8, for the curve; the zero-out
        bound is ours.
    """
    sigma = noise_level("noise_multiplier", noise_multiplier)
    num_users = integer("num_users", num_users)
    delta = open_unit_interval("delta", delta)
    one_of("adjacency", adjacency, ("replace", "zero_out"))
    one_of("conversion", conversion, ("proved", "theorem_3_8"))
    zero_out = adjacency == "zero_out"
    unshuffled = gaussian.compute_epsilon(mu=(1 if zero_out else 2) / sigma, delta=delta)
    if unshuffled == 0 or num_users == 1 or delta < SMALLEST_DELTA:
        return unshuffled

    def curve(local_epsilon: float, distance: float) -> float:
        return math.exp(gaussian.log_delta(mu=distance / sigma, epsilon=local_epsilon))

    def view(clone_epsilon: float) -> tuple[float, float]:
        """Returns the factor of (1 + e^ε) in δ with clones of probability e^(−``clone_epsilon``).

        The second value is the mass that is corrected in user 1's reports.
        """
        local_delta = curve(clone_epsilon, 2.0)
        if zero_out and conversion == "proved":
            mended = (curve(clone_epsilon, 1.0) + local_delta) / 2
            return mended + (num_users - 1) * math.exp(-clone_epsilon) * 2 * mended, mended
        return _lost(
            local_epsilon=clone_epsilon,
            local_delta=local_delta,
            num_users=num_users,
            conversion=conversion,
        ), 0.0

    # The factor is at most half of δ and at least 1e-8 of it: no better ε0 lies outside.
    most = gaussian.compute_epsilon(
        mu=2 / sigma, delta=max(1e-8 * delta / (3 * num_users), SMALLEST_DELTA)
    )
    start = _falls_to_zero(lambda e: math.log(max(view(e)[0], 1e-320) * 2 / delta), most)
    if start > min(math.log(num_users) + 5, LARGEST_LOCAL_EPSILON):
        return unshuffled  # hardly any clones among so few users

    def best(clone_epsilon: float, bins: int) -> float:
        lost, mended = view(clone_epsilon)
        own = clone_epsilon
        if mended > 0:  # ε_a where t = δ_b
            own = _falls_to_zero(
                lambda e: (
                    gaussian.log_delta(mu=1 / sigma, epsilon=e)
                    - math.log(mended * (1 + math.exp(e)))
                ),
                own,
            )
        chance = math.exp(-clone_epsilon)
        epsilon = pair_epsilon(
            local_epsilon=own,
            probability=chance,
            num_users=num_users,
            delta=delta,
            lost=lost,
            bins=bins,
        )
        return unshuffled if epsilon is None else min(epsilon, unshuffled)

    grid = np.linspace(start, most, 26)
    middle = 1 + int(np.argmin([best(float(point), COARSE_BINS) for point in grid[1:]]))
    bounds = (grid[middle - 1], grid[min(middle + 1, 25)])
    refined = minimize_scalar(
        lambda e: best(float(e), COARSE_BINS),
        bounds=bounds,
        method="bounded",
        options={"maxiter": 20},
    )
    return min(best(float(refined.x), BINS), best(float(grid[middle]), BINS))


def _clone_counts(
    probability: float, num_users: int, tail: float, bins: int
) -> tuple[Vector, Vector]:
    """Returns clone counts and upper bounds on their probabilities.

    All other counts have a probability of at most 2·``tail`` (Chernoff, Bernstein).
    """
    others = min(num_users, MAX_USERS) - 1
    mean, log_tail = others * probability, -math.log(tail)
    low = max(math.floor(mean - math.sqrt(2 * mean * log_tail)), 0)
    high = min(
        math.ceil(mean + log_tail / 3 + math.sqrt(log_tail**2 / 9 + 2 * mean * log_tail)), others
    )
    width = -(-(high - low + 1) // bins)
    first = np.arange(
        low, high + 1, width, dtype=np.float64
    )  # fewer clones give less privacy: each bin is replaced by its lower end
    last = np.minimum(first + (width - 1), high)
    most_likely = np.clip(
        math.floor((others + 1) * probability), first, last
    )  # of the bin: binomials are unimodal
    return first, (last - first + 1) * scipy.stats.binom.pmf(most_likely, others, probability)


def _hockey_stick(
    epsilon: float, local_epsilon: float, counts: Vector, masses: Vector
) -> tuple[float, float]:
    """Returns an upper bound on δ(ε) of the pair of Theorem 3.2, and minus its slope in e^ε.

    Given C, both views are determined by their first number a, and the ratio P/Q increases with a.
    The best test is therefore "a ≥ k", and with S(k) = Pr[Bin(C, ½) ≥ k] and b = S(k − 1) − S(k),
    q = e^ε0/(1 + e^ε0): P(a ≥ k) − e^ε·Q(a ≥ k) = q·(1 − e^(ε−ε0))·b − (e^ε − 1)·S(k). The
    reflection a → C + 1 − a gives Q against P.
    """
    q = float(expit(local_epsilon))
    slope = (
        math.tanh(epsilon / 2) / math.tanh(local_epsilon / 2) if epsilon > 0 else 0.0
    )  # half of 5e-324 is 0
    threshold = min((1 + slope) / 2, 1.0)
    k = np.ceil(
        (counts + 1) * threshold
    )  # rounding a tie in the wrong direction has no effect: there P = e^ε·Q
    beyond, at_edge = (
        scipy.stats.binom.sf(k - 1, counts, 0.5),
        scipy.stats.binom.pmf(k - 1, counts, 0.5),
    )
    gain, loss = -math.expm1(epsilon - local_epsilon) * q * at_edge, math.expm1(epsilon) * beyond
    each = np.maximum(gain * (1 + MARGIN) - loss * (1 - MARGIN), 0.0)
    return float(masses @ each) * (1 + MARGIN), float(masses @ (beyond + (1 - q) * at_edge))


def pair_epsilon(
    *,
    local_epsilon: float,
    probability: float,
    num_users: int,
    delta: float,
    lost: float = 0.0,
    bins: int = BINS,
) -> float | None:
    """Returns the least ε with δ_pair(ε) + (1 + e^ε)·``lost`` ≤ δ, rounded up.

    Args:
        local_epsilon: ε0 of user 1's coin.
        probability: Probability that another user is a clone.
        num_users: n.
        delta: δ in (0, 1).
        lost: The factor of e^ε + 1 in δ.
        bins: The number of bins of clone counts.

    Returns:
        ε ≥ 0, or None if there is none up to ``local_epsilon``.
    """
    if local_epsilon > LARGEST_LOCAL_EPSILON or delta < SMALLEST_DELTA:
        return None
    tail = 1e-8 * delta
    counts, masses = _clone_counts(probability, num_users, tail, bins)
    budget = delta - 2 * tail - 2 * lost
    if budget <= 0:
        return None

    def excess(epsilon: float) -> float:
        return math.log(
            max(_hockey_stick(epsilon, local_epsilon, counts, masses)[0], 1e-320)
        ) - math.log(budget)

    if excess(0.0) <= 0:
        return 0.0
    # Start on the left, at the root for a constant loss of 2·lost. Newton's method on a convex
    # function of e^ε then takes steps that are slightly too long. It ends on the safe side, where
    # the bound was evaluated and is small enough.
    epsilon = float(brentq(excess, 0.0, local_epsilon, xtol=1e-13 * local_epsilon, rtol=1e-12))
    for _ in range(200):
        value, mass = _hockey_stick(epsilon, local_epsilon, counts, masses)
        total, slope = value + 2 * tail + (1 + math.exp(epsilon)) * lost, lost - mass
        if total <= delta:
            return min(epsilon, local_epsilon)
        if slope >= 0:
            return None
        step = (total - delta) / -slope * (1 + 1e-6)
        epsilon = max(math.log1p(math.expm1(epsilon) + step), epsilon * (1 + 1e-12))
        if epsilon > local_epsilon:
            return None
    return None
