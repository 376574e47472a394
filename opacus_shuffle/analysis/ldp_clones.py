r"""Computes the ε of shuffled reports of which no more is known than that each is ε0-LDP.

An other user's report is with probability 2/(e^ε0 + 1) a *clone* of what user 1 may send: with
those clones user 1 hides in the pair of Feldman, McMillan and Talwar, whose hockey stick is a sum
over their number (docs/proofs/07_clones_of_any_report.md, 7.3). Reports whose distribution is known
hide better (:mod:`opacus_shuffle.analysis.gaussian_clones`).

>>> round(compute_epsilon(local_epsilon=4.0, num_users=100_000, delta=1e-6), 4)
0.1182
"""

from __future__ import annotations

import math

import numpy as np
import scipy  # whose statistics, half of the time of all imports, are loaded when first used
from scipy.optimize import brentq
from scipy.special import expit

from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.core.validation import integer, open_unit_interval, positive

MAX_USERS = 10**10
"""More users hide better, so a larger count is taken as this one.

Up to which the binomial tails were checked.
"""
LARGEST_LOCAL_EPSILON = 500.0
SMALLEST_DELTA = 1e-300
"""Outside these two nobody hides anybody and double precision ends.

The local bound is the answer.
"""
BINS = 4096
MARGIN = 1e-9
"""Relative error allowed to every binomial probability.

Measured: below 2e-10 for up to ``MAX_USERS`` trials.
"""


def compute_epsilon(*, local_epsilon: float, num_users: int, delta: float) -> float:
    """Returns ε after shuffling n reports of one ε0-LDP randomiser.

    Args:
        local_epsilon: ε0 > 0 of one report.
        num_users: n ≥ 1, the reports shuffled together.
        delta: δ in (0, 1).

    Returns:
        ε ≥ 0, rounded up, never above ``local_epsilon``. The tails of the number of clones go into
        δ, and of a bin of numbers the smallest is taken, which costs a few 1e-4 of ε at most.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        Proved for every data set, replacement adjacency (so zero-out too), one round: Theorem 7.3
        of docs/proofs/07_clones_of_any_report.md. All users draw from the same randomiser, each on
        its own; not for randomisers that differ, or that are chosen by what others sent.

    Source:
        Feldman, McMillan, Talwar, arXiv 2208.04591, whose erratum keeps it for some randomisers
        only; the proof for all of them is this library's.
    """
    local_epsilon = positive("local_epsilon", local_epsilon)
    num_users = integer("num_users", num_users)
    delta = open_unit_interval("delta", delta)
    if num_users == 1:
        return local_epsilon  # nobody to hide among
    epsilon = pair_epsilon(
        local_epsilon=local_epsilon,
        probability=2 * float(expit(-local_epsilon)),
        num_users=num_users,
        delta=delta,
    )
    return local_epsilon if epsilon is None else epsilon


def _clone_counts(
    probability: float, num_users: int, tail: float, bins: int
) -> tuple[Vector, Vector]:
    """Returns clone counts and bounds on their masses.

    Outside lies 2·``tail`` at most (Chernoff, Bernstein).
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
    )  # fewer clones hide worse: a bin counts as its low end
    last = np.minimum(first + (width - 1), high)
    most_likely = np.clip(
        math.floor((others + 1) * probability), first, last
    )  # of the bin: binomials are unimodal
    return first, (last - first + 1) * scipy.stats.binom.pmf(most_likely, others, probability)


def _hockey_stick(
    epsilon: float, local_epsilon: float, counts: Vector, masses: Vector
) -> tuple[float, float]:
    """Returns an upper bound on δ(ε) of the pair of Theorem 3.2, and minus its slope in e^ε.

    Given C, both views are told by their first number a, whose ratio P/Q grows with a. So the best
    test is "a ≥ k", and with S(k) = Pr[Bin(C, ½) ≥ k] and b = S(k − 1) − S(k), q = e^ε0/(1 + e^ε0):
    P(a ≥ k) − e^ε·Q(a ≥ k) = q·(1 − e^(ε−ε0))·b − (e^ε − 1)·S(k). Mirrored (a → C + 1 − a) it is Q
    against P.
    """
    q = float(expit(local_epsilon))
    slope = (
        math.tanh(epsilon / 2) / math.tanh(local_epsilon / 2) if epsilon > 0 else 0.0
    )  # half of 5e-324 is 0
    threshold = min((1 + slope) / 2, 1.0)
    k = np.ceil(
        (counts + 1) * threshold
    )  # rounded the wrong way at a tie it costs nothing: there P = e^ε·Q
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
        probability: Of every other user to be a clone.
        num_users: n.
        delta: δ in (0, 1).
        lost: What e^ε + 1 multiplies in δ.
        bins: How many numbers of clones are told apart.

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
    # A start on the left: the root if the loss stayed at 2·lost. From there Newton's method on a
    # convex function of e^ε, each step a little too long, so that it ends on the safe side, where
    # the bound was evaluated and found small enough.
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
