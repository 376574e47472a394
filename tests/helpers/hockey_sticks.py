"""Hockey sticks of the Gaussian mechanism, and of a distribution of the likelihood ratio R."""

import math

import numpy as np
from scipy.special import ndtr


def gaussian_delta(mu, epsilon):
    """Returns δ(ε) of the Gaussian mechanism."""
    return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


def hockey_stick(distribution, epsilon):
    """Returns E(R − e^ε)₊."""
    threshold = math.expm1(epsilon) if distribution.centre else math.exp(epsilon)
    inside = distribution.masses @ np.maximum(distribution.offsets - threshold, 0.0)
    return float(inside) + distribution.infinite


def reverse_hockey_stick(distribution, epsilon):
    """Returns E(1 − e^ε·R)₊."""
    threshold = math.expm1(-epsilon) if distribution.centre else math.exp(-epsilon)
    below = distribution.masses @ np.maximum(threshold - distribution.offsets, 0.0)
    return math.exp(epsilon) * float(below)
