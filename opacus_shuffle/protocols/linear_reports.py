r"""Draws linear reports and step reports: of one user, or the sum of many users' at once.

A report of a vector with direction u is normal noise, except for its component along u, which has
the density X(z)φ(z). X(z) = a·(z − t)₊ in a linear report; in a step report X has two values
(:mod:`opacus_shuffle.analysis.report_shapes`). The unit is the standard deviation of a report's
noise. Proofs: docs/proofs/13_linear_reports.md.

>>> along = tilted(torch.linspace(-1.0, 1.0, 10_001, dtype=torch.float64), 0.5)
>>> round(float(along.mean()), 2)  # 1 / 0.5
2.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtr, ndtri

from opacus_shuffle.analysis.report_shapes import LinearTilt, StepTilt

_FARTHEST = 13.0
"""A bound on normal numbers made of 107 random bits, and on noise in secure mode."""
_STEPS = 24
"""The number of steps of a search. It is fixed, so that the time does not reveal the result."""
Vector = npt.NDArray[np.float64]


def tilted(
    signed_uniforms: torch.Tensor, noise_multiplier: float, report: str = "linear"
) -> torch.Tensor:
    """Returns the components of reports along their vectors, from uniform numbers in [−1, 1].

    Args:
        signed_uniforms: On the CPU, float64, shape (count,). For a number x > 0, x/2 is the
            probability of a larger component; for x < 0, −x/2 is the probability of a smaller one.
            So small numbers, which have all their digits, determine both tails.
        noise_multiplier: σ of the reports.
        report: The shape of the reports, ``"linear"`` or ``"step"``.

    Returns:
        float64, shape (count,).
    """
    signed = signed_uniforms.numpy()
    nearer = np.abs(signed) / 2
    larger, smaller = np.where(signed > 0, (nearer, 1 - nearer), (1 - nearer, nearer))
    if report == "step":
        parts = _stepped(larger, smaller, StepTilt(noise_multiplier))
    else:
        parts = _tilted_linearly(larger, smaller, LinearTilt(noise_multiplier))
    return torch.from_numpy(parts)


def _tilted_linearly(larger: Vector, smaller: Vector, shape: LinearTilt) -> Vector:
    """Inverts the distribution of linear reports at the probabilities of both tails.

    Newton's method runs on the logarithm of the smaller tail, within a bracket that is halved where
    a step would leave it. Tails are accurate to twelve digits; if the distribution ends at t,
    probabilities are accurate to 1e-12.
    """
    threshold, slope = shape.threshold, shape.slope
    # If t ≥ 0 there is no lower tail: the upper probability determines the component.
    upper = (larger < smaller) | (threshold >= 0)
    sign, chance = np.where(upper, 1.0, -1.0), np.where(upper, larger, smaller)
    whole = np.where(upper, 0.0, shape.unit_point)
    low = np.full_like(chance, max(threshold, -_FARTHEST))
    high = np.full_like(chance, max(threshold, 0.0) + _FARTHEST)
    parts = (low + high) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(_STEPS):
            density = np.exp(parts * parts * -0.5) / math.sqrt(2 * math.pi)
            beyond = whole + sign * density - threshold * ndtr(-sign * parts)
            ratio = beyond * (slope / chance)
            to_the_right = (ratio > 1) == upper
            np.copyto(low, parts, where=to_the_right)
            np.copyto(high, parts, where=~to_the_right)
            parts = parts + sign * np.log(ratio) * beyond / ((parts - threshold) * density)
            # Negated, so that NaN (by rounding near t, or a probability of 0) counts as outside.
            outside = ~((low <= parts) & (parts <= high))
            np.copyto(parts, (low + high) / 2, where=outside)
    return parts


def _stepped(larger: Vector, smaller: Vector, shape: StepTilt) -> Vector:
    """Inverts the distribution of step reports at the probabilities of both tails (13.8).

    Both tails are computed as small numbers, so neither loses digits.
    """
    threshold, below, above = shape.levels
    high = -ndtri(larger / (1 + above))
    if below == -1:  # The distribution begins at t.
        return np.clip(high, threshold, threshold + _FARTHEST)
    low = ndtri(smaller / (1 + below))
    # Here t = 0, and the lower tail determines components below 0.
    return np.clip(np.where(high >= 0, high, low), -_FARTHEST, _FARTHEST)


def report_along(unit: torch.Tensor, part: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    """Returns one report, shape (d,).

    Args:
        unit: u, a vector of norm 1.
        part: The component along u, from :func:`tilted`.
        normals: d standard normal numbers.
    """
    return normals + (part - unit @ normals) * unit


def summed_reports(
    rows: Sequence[torch.Tensor],
    lengths: torch.Tensor,
    parts: torch.Tensor,
    normals: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Returns the coefficients of the users' vectors in the sum of k reports.

    The sum is √k times the normals plus these multiples of the vectors. It has the distribution of
    k reports with d normal numbers each (13.5).

    Args:
        rows: The users' vectors in pieces, each of shape (k, entries).
        lengths: The norms of the vectors, above 0, shape (k,).
        parts: The components along the vectors, from :func:`tilted`, shape (k,).
        normals: Standard normal numbers in the same pieces, each of shape (entries,).

    Returns:
        float64, shape (k,).
    """
    count, lengths = len(parts), lengths.to(parts)
    gram = sum((piece @ piece.T).to(parts) for piece in rows) / torch.outer(lengths, lengths)
    along = sum((row @ z).to(parts) for row, z in zip(rows, normals, strict=True)) / lengths
    values, vectors = torch.linalg.eigh(gram)
    shrink = 1 / ((count - values).clamp_min(0.0).sqrt() + math.sqrt(count))
    return (parts - vectors @ (shrink * (vectors.T @ along))) / lengths
