"""Exact distributions of integers plus binomial noise, by enumeration.

No part of SciPy's binomial or of the library. A δ from losses on a grid is computed twice, losses
rounded up and rounded down, so the truth lies between.
"""

import math

import numpy as np
from scipy.signal import fftconvolve

from opacus_shuffle.analysis import gaussian

# Sums of at most 2^24 products of probabilities, whose own error is below 2^-36 (up to 2^16
# factors): relative.
ROUNDING = 2.0**-34


def binomial_distribution(trials, probability, reach=math.inf):
    """The first outcome within ``reach`` standard deviations, and probabilities from it on."""
    mean, deviation = trials * probability, math.sqrt(trials * probability * (1 - probability))
    first = max(0, math.floor(mean - reach * deviation)) if math.isfinite(reach) else 0
    last = min(trials, math.ceil(mean + reach * deviation)) if math.isfinite(reach) else trials
    y = np.arange(first, last)
    logs = np.concatenate(
        [
            [0.0],
            np.cumsum(np.log((trials - y) / (y + 1)) + math.log(probability / (1 - probability))),
        ]
    )
    masses = np.exp(logs - logs.max())
    return first, masses / masses.sum()


def rounded(value, size):
    """Probabilities of 0, 1, ... for a value that is rounded at random to a neighbour."""
    return np.maximum(1 - np.abs(np.arange(size) - value), 0)


def moved_pair(distribution, one, other):
    """Distributions of the sums under two values of one user, each rounded at random."""
    first, masses = distribution
    low = min(math.floor(one), math.floor(other))
    width = max(math.floor(one), math.floor(other)) - low + 2
    p, q = (np.convolve(masses, rounded(value - low, width)) for value in (one, other))
    return first + low, p, q


def exact_delta(pairs, epsilon):
    """δ(ε) of up to three independent coordinates (P_j, Q_j), summed over all outcomes."""
    left, right = np.ones(()), np.ones(())
    for p, q in pairs:
        left, right = np.multiply.outer(left, p), np.multiply.outer(right, q)
    return float(np.maximum(left - math.exp(epsilon) * right, 0).sum())


def both_ways(pairs, epsilon):
    """The larger of the two directions."""
    return max(exact_delta(pairs, epsilon), exact_delta([(q, p) for p, q in pairs], epsilon))


def delta_of_losses(pairs, epsilons, step, repeats=1):
    """Bounds on δ(ε) of independent coordinates, by losses rounded down and up to multiples."""
    answers = []
    for upward in (False, True):
        infinite, total = 0.0, None
        for p, q in pairs:
            seen = (p > 0) & (q > 0)
            infinite += repeats * float(p[(p > 0) & (q == 0)].sum())
            losses = np.log(p[seen] / q[seen]) / step
            cells = (np.ceil(losses) if upward else np.floor(losses)).astype(np.int64)
            distribution = (int(cells.min()), np.bincount(cells - cells.min(), p[seen]))
            for _ in range(repeats):
                total, more = (
                    (distribution, 0.0) if total is None else convolved(total, distribution, upward)
                )
                infinite += more
        at = (total[0] + np.arange(len(total[1]))) * step
        gains = [
            float(total[1] @ np.maximum(-np.expm1(np.minimum(e - at, 0.0)), 0.0)) for e in epsilons
        ]
        answers.append(np.array(gains) + (infinite if upward else 0.0))
    return answers[0] - 1e-12 * repeats * len(pairs), answers[1]


def convolved(one, other, upward, negligible=1e-13):
    """The sum's distribution with tails cut so that δ only grows (``upward``) or shrinks."""
    masses = np.maximum(fftconvolve(one[1], other[1]), 0)
    below, above = np.cumsum(masses), np.cumsum(masses[::-1])[::-1]
    start = int(np.searchsorted(below, negligible))
    end = len(masses) - int(np.searchsorted(above[::-1], negligible))
    left, right = below[start - 1] if start else 0.0, above[end] if end < len(masses) else 0.0
    masses = masses[start:end]
    if upward:
        masses[0] += left
    else:
        masses[-1] += right
    # The FFT's own error in total: 2^16 entries, 2e-15 in the Euclidean norm.
    return (one[0] + other[0] + start, masses), right + 1e-12


def gaussian_delta(mu, epsilon):
    return math.exp(gaussian.log_delta(mu=mu, epsilon=epsilon)) if mu > 0 else 0.0


def direction(kind, dimension, rng):
    """A unit vector."""
    move = {
        "axis": np.eye(dimension)[0],
        "diagonal": np.ones(dimension),
        "signs": rng.choice([-1.0, 1.0], dimension),
        "random": rng.standard_normal(dimension),
        "one large": np.concatenate([[3.0], rng.standard_normal(dimension - 1) * 0.3]),
    }[kind]
    return move / np.linalg.norm(move)
