"""Likelihood ratios of one report, and integrals over normal numbers: no part of the library."""

import functools

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


class TiltedRatio:
    """A report of x in [−1, 1], on a line, has X(±z) with probability |x|."""

    def __call__(self, z, x=1.0):
        return 1 - abs(x) + abs(x) * self.tilt(np.sign(x) * z)

    def masses(self, ends, x):
        """Probabilities of cells between ends that a report of x has."""
        tilted = -np.diff(self.above(ends if x > 0 else -ends))
        return (1 - abs(x)) * np.diff(norm.cdf(ends)) + abs(x) * tilted * (1 if x > 0 else -1)


class LinearRatio(TiltedRatio):
    """X = a·(z − t)₊ with a mean of z of 1/σ."""

    def __init__(self, sigma):
        self.threshold = brentq(lambda t: norm.sf(t) * sigma - self.beyond(t), -2 - sigma, 8)
        self.slope = 1 / self.beyond(self.threshold)

    @staticmethod
    def beyond(t):
        """E(z − t)₊."""
        return norm.pdf(t) - t * norm.sf(t)

    def tilt(self, z):
        return self.slope * np.maximum(z - self.threshold, 0)

    def place(self, ratio):
        return self.threshold + ratio / self.slope

    def above(self, z):
        kept = np.maximum(z, self.threshold)
        return self.slope * (norm.pdf(kept) - self.threshold * norm.sf(kept))


class StepRatio(TiltedRatio):
    """X = p/Φ(−t) from t on and (1 − p)/Φ(t) below: with t = 0 if p can be what σ asks for."""

    def __init__(self, sigma):
        self.threshold, share = 0.0, 0.5 + np.sqrt(np.pi / 8) / sigma  # E zX = (2p − 1)·√(2/π)
        if share > 1:
            share = 1.0
            self.threshold = brentq(lambda t: norm.pdf(t) * sigma - norm.sf(t), 0, 8)
        self.low = (1 - share) / norm.cdf(self.threshold)
        self.high = share / norm.sf(self.threshold)

    def tilt(self, z):
        return np.where(z >= self.threshold, self.high, self.low)

    def place(self, ratio):
        """From where on X is that."""
        return np.select([ratio <= self.low, ratio <= self.high], [-np.inf, self.threshold], np.inf)

    def above(self, z):
        below = norm.cdf(self.threshold) - norm.cdf(np.minimum(z, self.threshold))
        return self.low * below + self.high * norm.sf(np.maximum(z, self.threshold))


RATIOS = {"gaussian": GaussianRatio, "linear": LinearRatio, "step": StepRatio}


def call(ratio, strike):
    """E(X − strike)₊, of an array of strikes."""
    edge = ratio.place(np.maximum(strike, 1e-300))
    return np.where(strike > 0, ratio.above(edge) - strike * norm.sf(edge), 1 - strike)


class Exact:
    """Hockey sticks of R = 1 − q + q·(mean of one or two copies of X), exactly.

    ``weights`` are the probabilities of one copy and of two, which the adversary sees.
    """

    def __init__(self, report, sigma, rate, weights):
        self.ratio, self.rate, self.weights = RATIOS[report](sigma), rate, weights
        self.kinks = [getattr(self.ratio, "threshold", 0.0), -getattr(self.ratio, "threshold", 0.0)]
        # A step is between two neighbours among all floating-point numbers.
        edges = np.array(self.kinks)
        self.z = np.union1d(np.linspace(-FAR, FAR, 20_001), [*edges, *np.nextafter(edges, -FAR)])

    def mixed(self, stick):
        """The mean of hockey sticks given the number of copies."""
        return sum(weight * stick(n) for n, weight in enumerate(self.weights, 1) if weight)

    def moved(self, tau, reports):
        """E(R − τ)₊, R = 1 − q + q·(mean of copies of X)."""
        strike = reports * (1 + (tau - 1) / self.rate)
        if reports == 1:
            return self.rate * float(call(self.ratio, strike))
        return self.rate / 2 * self.mean(lambda z: call(self.ratio, strike - self.ratio(z)))

    def mean(self, function):
        return integral(function, high=20.0, kinks=self.kinks)

    def zeroed(self, tau):
        """The larger of both directions; E(1 − τR)₊ = τE(R − 1/τ)₊ + 1 − τ, as E R = 1."""
        forward = self.mixed(functools.partial(self.moved, tau))
        return max(forward, tau * self.mixed(functools.partial(self.moved, 1 / tau)) + 1 - tau)

    def replaced(self, tau):
        """E((1 − q)(1 − τ) + q·(mean of copies of X(z) − τX(−z)))₊."""
        change = self.ratio(self.z) - tau * self.ratio(-self.z)  # which grows with z

        def beyond(known):
            """E(known + X(z) − τX(−z))₊; being off at its root costs a square of that."""
            root = np.interp(-np.asarray(known), change, self.z)
            gained = self.ratio.above(root) - tau * (1 - self.ratio.above(-root))
            return known * norm.sf(root) + gained

        def stick(reports):
            constant = reports * (1 - self.rate) / self.rate * (1 - tau)
            if reports == 1:
                return self.rate * float(beyond(constant))
            return self.rate / 2 * self.mean(lambda z: beyond(constant + self.change(z, tau)))

        return self.mixed(stick)

    def change(self, z, tau):
        return self.ratio(z) - tau * self.ratio(-z)
