"""Proximal points p = argmin_{y ∈ Θ} f(y) + (β/2)‖y − θ‖², of many losses f at once, each with a bound on its error.

The solvers, for f convex and with subgradients of norm at most L, are those of ``docs/proofs/22_proximal_points.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.sco.losses import Link
from opacus_shuffle.sco.objective import Objective

EPSILON = 2.0**-52
_HALVINGS = 64
SLACK = 1e-5  # a gradient may exceed the Lipschitz constant by this fraction: what rounding does in single precision


@dataclass(frozen=True)
class ProximalPoints:
    """Approximate proximal points, with bounds on their errors.

    Attributes:
        points: p̂, (B, d), each in Θ.
        errors: Bounds on ‖p̂ − p‖, (B,).
        steps: Evaluations of each record's subgradient, at most.
    """

    points: Tensor
    errors: Tensor
    steps: int


def steps_for(relative: float, *, smooth_ratio: float | None) -> int:
    """Returns the steps that prove β‖p̂ − p‖ ≤ ``relative``·L, by a contraction (H/β = ``smooth_ratio``) or cutting planes."""
    if smooth_ratio is None:
        return 1 if relative >= math.sqrt(0.5) else math.ceil((4 / relative) ** 2) - 15
    return max(1, math.ceil(math.log(relative) / (-math.log1p(1 / smooth_ratio))))


def relative_error(steps: int, *, smooth_ratio: float | None) -> float:
    """Returns the bound on β‖p̂ − p‖/L that is proved after so many steps."""
    if smooth_ratio is None:
        return min(math.sqrt(0.5), 4 / math.sqrt(steps + 15))
    return math.exp(-steps * math.log1p(1 / smooth_ratio))


def by_cutting_planes(
    objective: Objective,
    batch: Any,
    theta: Tensor,
    *,
    beta: float,
    lipschitz: float,
    steps: int,
    tolerance: float | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
) -> ProximalPoints:
    """Returns proximal points of convex losses that need not be smooth, by cutting planes, with certified errors.

    Each depends on its own record alone, to the last bit. The points ``theta`` (B, d) are in Θ, onto which ``project`` leads
    row by row (by default Θ is everything); ``steps`` counts cuts after the first; a point stays as it is when its error is
    certified to be at most ``tolerance``. A loss that is steeper than ``lipschitz``, or not convex, is refused.
    """
    inside = project or (lambda points: points)
    theta = theta.to(torch.float64)
    count = len(theta)
    best_points, best_errors = theta.clone(), torch.full((count,), math.inf, dtype=torch.float64)
    active = torch.ones(count, dtype=torch.bool)
    base, slope = objective.losses_and_gradients(theta, batch)
    _check_lipschitz(slope, lipschitz)
    center = theta
    # Values are relative to f(θ), offsets to θ: what is added up then stays of the size of L²/β.
    constant = torch.zeros_like(base)
    offset = inside(center - slope / beta) - center
    best, best_value = torch.zeros_like(center), torch.zeros_like(base)
    used = 0
    for step in range(1, steps + 1):
        if not bool(active.any()):
            break
        used = step
        value, gradient = objective.losses_and_gradients(center + offset, batch)
        _check_lipschitz(gradient, lipschitz)
        square = beta / 2 * offset.square().sum(1)
        primal = value - base + square
        better = active & (primal < best_value)
        best = torch.where(better[:, None], offset, best)
        best_value = torch.where(better, primal, best_value)
        linear = (slope * offset).sum(1)
        dual = constant + linear + square

        evaluated = base.abs() + value.abs() + lipschitz * (center.norm(dim=1) + offset.norm(dim=1))
        rounding = 16 * objective.rounding * evaluated
        rounding = rounding + EPSILON * 4 * (step + 4) * (constant.abs() + linear.abs() + square)
        gap = best_value - dual
        if bool((active & (gap < -2 * rounding)).any()):
            raise ValueError(
                "loss must be convex in theta, got one that falls below a tangent; the Moreau envelope needs convexity"
            )
        radius = ((gap + rounding).clamp_min(0) / beta - (best - offset).square().sum(1) / 4).clamp_min(0).sqrt()
        improved = active & (radius < best_errors)
        best_errors = torch.where(improved, radius, best_errors)
        best_points = torch.where(improved[:, None], center + (best + offset) / 2, best_points)
        if tolerance is not None:
            active = active & (best_errors > tolerance)

        difference = gradient - slope
        curvature = difference.square().sum(1)
        weight = torch.where(curvature > 0, beta * (primal - dual).clamp_min(0) / curvature, 0.0).clamp_max(1)
        cut = value - base - (gradient * offset).sum(1)
        constant = constant + weight * (cut - constant)
        slope = slope + weight[:, None] * difference
        # Who has left off stands still, so that it meets no error that it would not meet alone. It is still evaluated: the
        # shape of a batch may change the rounding of its other records.
        offset = torch.where(active[:, None], inside(center - slope / beta) - center, offset)
    return ProximalPoints(best_points, best_errors, used + 1)


def by_contraction(
    objective: Objective,
    batch: Any,
    theta: Tensor,
    *,
    beta: float,
    smoothness: float,
    lipschitz: float,
    steps: int,
    tolerance: float | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
) -> ProximalPoints:
    """Returns what :func:`by_cutting_planes` does, by a contraction, for losses that are H-smooth (``smoothness``, trusted)."""
    inside = project or (lambda points: points)
    theta = theta.to(torch.float64)
    points, errors, step = theta, torch.full((len(theta),), math.inf, dtype=torch.float64), 0
    scale = theta.norm(dim=1) + lipschitz / beta
    active = torch.ones(len(theta), dtype=torch.bool)
    for step in range(1, steps + 1):
        gradient = objective.gradients(points, batch)
        _check_lipschitz(gradient, lipschitz)
        moved = inside((smoothness * points + beta * theta - gradient) / (smoothness + beta))
        # A step's rounding, 8 units, is amplified by 1/(1 − q) at most.
        rounding = 8 * objective.rounding * scale * (smoothness + beta) / beta
        proved = lipschitz / beta * relative_error(step, smooth_ratio=smoothness / beta)
        reached = (smoothness / beta * (moved - points).norm(dim=1)).clamp_max(proved) + rounding
        # Each record stops by itself: when it does must not tell about the others, nor the others about it.
        errors = torch.where(active, reached, errors)
        points = torch.where(active[:, None], moved, points)
        if tolerance is not None:
            active = active & (errors > tolerance)
            if not bool(active.any()):
                break
    return ProximalPoints(points, errors, step)


def linear_coefficients(link: Link, scores: Tensor, targets: Any, squared_norms: Tensor, beta: float) -> Tensor:
    """Returns the gradients of the envelopes of h(⟨θ, x⟩, y), as multiples of x, shape (B,).

    They are a ∈ ∂h(⟨θ, x⟩ − κa), κ = ‖x‖²/β; right to 2⁻⁵² of h′(⟨θ, x⟩), given h′ at the points asked for.
    """
    kappa = squared_norms / beta
    # A record without features has no gradient, whatever its coefficient.
    safe = torch.where(kappa > 0, kappa, 1.0)
    if link.coefficient is not None:
        return link.coefficient(scores, targets, safe)
    far = link.derivative(scores, targets)
    near = torch.zeros_like(far)
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        # Beyond the root, as seen from 0.
        beyond = (middle - link.derivative(scores - safe * middle, targets)) * torch.sign(far) > 0
        near, far = torch.where(beyond, near, middle), torch.where(beyond, middle, far)
    return (near + far) / 2


def _check_lipschitz(gradients: Tensor, lipschitz: float) -> None:
    """Refuses subgradients that are longer than ``lipschitz``, for which nothing is proved."""
    largest = float(gradients.norm(dim=1).max()) if len(gradients) else 0.0
    if largest > lipschitz * (1 + SLACK):
        raise ValueError(
            f"lipschitz must bound every subgradient of the loss, got {lipschitz!r} and a longer one: "
            "pass a larger one, or a constraint on which the loss has this one"
        )
