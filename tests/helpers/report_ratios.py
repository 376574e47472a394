"""Likelihood ratios of one report, and integrals over normal numbers: no part of the library."""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

NODES, WEIGHTS = np.polynomial.legendre.leggauss(12)
FAR = 13.0
"""Normal numbers beyond have probabilities of 1e-38."""


def integral(function, low=-FAR, high=FAR, kinks=()):
    """E[f(z); low < z < high] of a standard normal z: pieces of half a unit, cut at kinks."""
    ends = np.unique(np.clip([*np.arange(low, high, 0.5), high, *kinks], low, high))
    half = np.diff(ends) / 2
    z = ends[:-1] + half * (1 + NODES[:, None])
    return float((half * WEIGHTS[:, None] * function(z) * norm.pdf(z)).sum())


class GaussianRatio:
    """X = exp(kz − k²/2), k = 1/σ."""

    def __init__(self, sigma):
        self.shift = 1 / sigma

    def __call__(self, z, x=1.0):
        """X of a report of x in [−1, 1], on a line."""
        return np.exp(self.shift * x * z - (self.shift * x) ** 2 / 2)

    def place(self, ratio):
        """Where X is that."""
        return np.log(ratio) / self.shift + self.shift / 2

    def above(self, z):
        """E[X; beyond z]."""
        return norm.cdf(self.shift - z)

    def masses(self, ends, x):
        """Probabilities of cells between ends that a report of x has."""
        return np.diff(norm.cdf(ends - x * self.shift))


class LinearRatio:
    """X = a·(z − t)₊ with a mean of z of 1/σ."""

    def __init__(self, sigma):
        self.threshold = brentq(lambda t: norm.sf(t) * sigma - self.beyond(t), -2 - sigma, 8)
        self.slope = 1 / self.beyond(self.threshold)

    @staticmethod
    def beyond(t):
        """E(z − t)₊."""
        return norm.pdf(t) - t * norm.sf(t)

    def __call__(self, z, x=1.0):
        tilted = self.slope * np.maximum(np.sign(x) * z - self.threshold, 0)
        return 1 - abs(x) + abs(x) * tilted

    def place(self, ratio):
        return self.threshold + ratio / self.slope

    def above(self, z):
        kept = np.maximum(z, self.threshold)
        return self.slope * (norm.pdf(kept) - self.threshold * norm.sf(kept))

    def masses(self, ends, x):
        tilted = -np.diff(self.above(ends if x > 0 else -ends))
        return (1 - abs(x)) * np.diff(norm.cdf(ends)) + abs(x) * tilted * (1 if x > 0 else -1)


RATIOS = {"gaussian": GaussianRatio, "linear": LinearRatio}


def call(ratio, strike):
    """E(X − strike)₊, of an array of strikes."""
    edge = ratio.place(np.maximum(strike, 1e-300))
    return np.where(strike > 0, ratio.above(edge) - strike * norm.sf(edge), 1 - strike)
