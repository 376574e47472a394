r"""Draws linear reports and step reports: one user's own, or the sum of many at once.

Such a report of a vector along u is normal across u, and along it is drawn with the density
X(z)φ(z). X(z) = a·(z − t)₊ in a linear report, and has two values in a step report
(:mod:`opacus_shuffle.analysis.report_shapes`). All here is in units of a report's noise. Proofs:
docs/proofs/13_linear_reports.md.

>>> along = tilted(torch.linspace(0.0, 1.0, 10_001, dtype=torch.float64), 0.5)
>>> round(float(along.mean()), 2)  # 1 / 0.5
2.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from opacus_shuffle.analysis.report_shapes import LinearTilt, StepTilt

_FARTHEST = 12.0
"""No normal number of 53 random bits is farther out."""
_HALVINGS = 60


def tilted(uniforms: torch.Tensor, noise_multiplier: float, report: str = "linear") -> torch.Tensor:
    """Returns the parts of reports along their vectors, of uniform numbers in [0, 1].

    Args:
        uniforms: In double precision, of any shape: the chance that a part is larger.
        noise_multiplier: σ of the reports.
        report: Their shape, ``"linear"`` or ``"step"``.
    """
    if report == "step":
        return _stepped(uniforms, StepTilt(noise_multiplier))
    shape = LinearTilt(noise_multiplier)
    threshold, slope = shape.threshold, shape.slope
    low = torch.full_like(uniforms, max(threshold, -_FARTHEST))
    high = torch.full_like(uniforms, max(threshold, 0.0) + _FARTHEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        density = torch.exp(-middle.square() / 2) / math.sqrt(2 * math.pi)
        larger = slope * (density - threshold * torch.special.ndtr(-middle))
        low, high = (
            torch.where(larger > uniforms, middle, low),
            torch.where(larger > uniforms, high, middle),
        )
    return (low + high) / 2


def _stepped(uniforms: torch.Tensor, shape: StepTilt) -> torch.Tensor:
    """Returns the parts of step reports, by what of a normal number lies beyond them (13.8).

    Both of its tails are computed as small numbers, so neither loses a digit.
    """
    threshold, below, above = shape.levels
    high = -torch.special.ndtri(uniforms / (1 + above))
    if below == -1:  # no part is below t
        return high.clamp(threshold, threshold + _FARTHEST)
    low = torch.special.ndtri((1 - uniforms) / (1 + below))
    # Here t = 0: a chance that no part above 0 has says how far below it the part is.
    return torch.where(high >= 0, high, low).clamp(-_FARTHEST, _FARTHEST)


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
