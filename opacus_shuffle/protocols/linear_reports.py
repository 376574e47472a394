r"""Draws linear reports and step reports: one user's own, or the sum of many at once.

Such a report of a vector along u is normal across u, and along it is drawn with the density
X(z)φ(z). X(z) = a·(z − t)₊ in a linear report, and has two values in a step report
(:mod:`opacus_shuffle.analysis.report_shapes`). All here is in units of a report's noise. Proofs:
docs/proofs/13_linear_reports.md.

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
"""No normal number of 107 random bits is farther out, and no noise in secure mode."""
_STEPS = 24
"""Steps of a search, always as many: the time they take must not tell what is drawn."""
Vector = npt.NDArray[np.float64]


def tilted(
    signed_uniforms: torch.Tensor, noise_multiplier: float, report: str = "linear"
) -> torch.Tensor:
    """Returns the parts of reports along their vectors, of uniform numbers in [−1, 1].

    Args:
        signed_uniforms: On the CPU, float64, shape (count,). Half of a positive number is
            the chance that a part is larger, half of a negative one less its sign the chance that a
            part is smaller: either tail is told by a small number, which has all of its digits.
        noise_multiplier: σ of the reports.
        report: Their shape, ``"linear"`` or ``"step"``.

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
    """Returns the parts of linear reports, from the chances of a larger and of a smaller one.

    Newton's method on the logarithm of the smaller of both chances, in a bracket that is halved
    where it would leave it. Tails keep twelve digits, and where they end at t, chances are met to
    1e-12.
    """
    threshold, slope = shape.threshold, shape.slope
    # From t ≥ 0 on there is no lower tail, but an end, near which the upper chance says all.
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
            # Nor is NaN inside, which rounding errors near t, and chances of 0, give.
            outside = ~((low <= parts) & (parts <= high))
            np.copyto(parts, (low + high) / 2, where=outside)
    return parts


def _stepped(larger: Vector, smaller: Vector, shape: StepTilt) -> Vector:
    """Returns the parts of step reports, from the chances of a larger and of a smaller one.

    By what of a normal number lies beyond them (13.8). Both of its tails are computed as small
    numbers, so neither loses a digit.
    """
    threshold, below, above = shape.levels
    high = -ndtri(larger / (1 + above))
    if below == -1:  # no part is below t
        return np.clip(high, threshold, threshold + _FARTHEST)
    low = ndtri(smaller / (1 + below))
    # Here t = 0: a chance that no part above 0 has says how far below it the part is.
    return np.clip(np.where(high >= 0, high, low), -_FARTHEST, _FARTHEST)


def report_along(unit: torch.Tensor, part: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    """Returns one report, of shape (d,).

    Args:
        unit: u, of norm 1.
        part: Along u, of :func:`tilted`.
        normals: d standard normal numbers.
    """
    return normals + (part - unit @ normals) * unit


def summed_reports(
    units: Sequence[torch.Tensor], parts: torch.Tensor, normals: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Returns how often the sum of k reports holds each user's u, besides √k times the normals.

    That is as if each had its own d normal numbers (13.5).

    Args:
        units: The users' u in pieces, each of shape (k, entries).
        parts: Along them, of shape (k,), of :func:`tilted`.
        normals: Standard normal numbers, in the same pieces, each of shape (entries,).

    Returns:
        Coefficients of shape (k,), in double precision.
    """
    count = len(parts)
    gram = torch.zeros(count, count, dtype=torch.float64, device=parts.device)
    along = torch.zeros(count, dtype=torch.float64, device=parts.device)
    for piece, normal in zip(units, normals, strict=True):
        gram += (piece @ piece.T).to(gram)
        along += (piece @ normal).to(along)
    values, vectors = torch.linalg.eigh(gram)
    shrink = 1 / ((count - values).clamp_min(0.0).sqrt() + math.sqrt(count))
    return parts - vectors @ (shrink * (vectors.T @ along))
