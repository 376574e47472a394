"""The two hockey sticks of a distribution of the likelihood ratio R."""

from __future__ import annotations

import math

import numpy as np


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
