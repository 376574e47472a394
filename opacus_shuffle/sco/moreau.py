"""Moreau envelopes: smooth stand-ins for losses with kinks, one record at a time.

Definition 4.5 and Lemma 4.6 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation
(SCO). The β-envelope of a convex f is f_β(θ) = min_{p ∈ Θ} f(p) + (β/2)‖θ − p‖², its minimiser the
*proximal point* p(θ). It is convex and β-smooth, its gradients β(θ − p(θ)) are no longer than f's
(``docs/proofs/22_proximal_points.md``), and f_β ≤ f ≤ f_β + L²/(2β). Every user smooths its own
loss, on its own device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import boolean, instance_of, moderate, not_negative, positive
from opacus_shuffle.sco.constraints import as_constraint, project_rows
from opacus_shuffle.sco.losses import Function, Link, as_link
from opacus_shuffle.sco.objective import LinearObjective, Objective, elementwise
from opacus_shuffle.sco.records import as_double, each_record, number_of_users, refuse_unless_finite

_MOST_STEPS = 1_000_000
_ROUGH = 0.02  # by default gradients are wrong by this fraction of L at most
_TOLERANCE = 1e-9
EPSILON = 2.0**-52
_HALVINGS = 64
# a gradient may exceed the Lipschitz constant by this fraction: what rounding does in single
# precision
SLACK = 1e-5


class MoreauEnvelope(Objective):
    """The Moreau envelopes of an objective's losses, which are smooth; an objective again.

    Proximal points are found as ``prox`` says; else, of a generalised linear loss
    (:class:`~opacus_shuffle.sco.objective.LinearObjective`) without constraint, by closed form or
    bisection, exact up to rounding; else by cutting planes, which stop each record as soon as its
    error is certified to be within ``accuracy``: what is promised holds for every convex
    L-Lipschitz loss, before any data are seen. Gradients are moved into the ball of radius L, where
    the true ones are, so that the optimisers' protocol need never cut them.

    Args:
        objective: The losses f, convex in θ.
        smoothness: β > 0.
        lipschitz: L, a bound on the subgradients of f (on the constraint set, if there is one).
            Needed unless the proximal points are exact.
        constraint: The set Θ that proximal points are to stay in, as
            :func:`~opacus_shuffle.sco.constraints.as_constraint` takes it; θ must lie in it. By
            default everything, as if f were defined everywhere (then its L must be, too).
        accuracy: The largest ‖p̂ − p‖ to be accepted; by default 0.02·L/β. With ``prox``, what that
            promises (by default 0).
        prox: From points (B, d) and a batch to proximal points (B, d). It is called on batches of
            one record, all at once by ``torch.func.vmap``.
        prox_elementwise: Your promise that ``prox`` computes each record's point from that record
            alone. It is then called on whole batches. The privacy guarantee rests on it, and
            nothing checks it.

    Attributes:
        smoothness: β.
        lipschitz: A bound on the norm of the gradients: L; None if none was given.
        accuracy: A bound on ‖p̂ − p‖, up to rounding if it is 0.
        gradient_error: A bound on the error of the gradients: β times the accuracy.

    Raises:
        ValueError: An argument is out of range, or would need more than a million steps. Later: the
            loss turns out not to be convex or L-Lipschitz, or θ to be outside Θ.
    """

    def __init__(
        self,
        objective: Objective,
        smoothness: float,
        *,
        lipschitz: float | None = None,
        constraint: Any = None,
        accuracy: float | None = None,
        prox: Callable[[Tensor, Any], Tensor] | None = None,
        prox_elementwise: bool = False,
    ) -> None:
        self.objective: Objective = instance_of("objective", objective, (Objective,))
        self.dimension, self.chunk_size = objective.dimension, objective.chunk_size
        self.smoothness = moderate("smoothness", smoothness)
        self.lipschitz = None if lipschitz is None else moderate("lipschitz", lipschitz)
        self.constraint = None if constraint is None else as_constraint(constraint)
        self._prox = prox
        if not boolean("prox_elementwise", prox_elementwise) and prox is not None:
            remedy = "; if it treats records one by one as it is, say so by prox_elementwise=True"
            self._prox = each_record(prox, "prox", remedy)
        self._exact = (
            prox is None and self.constraint is None and isinstance(objective, LinearObjective)
        )
        if prox is None:
            self.accuracy = 0.0 if self._exact else self._planned(accuracy)
        elif not callable(prox):
            raise ValueError(f"prox must be a callable prox(theta, batch), got {prox!r}")
        else:
            self.accuracy = 0.0 if accuracy is None else not_negative("accuracy", accuracy)

    @classmethod
    def generalized_linear(
        cls,
        link: str | Link | Function,
        smoothness: float,
        *,
        dimension: int,
        lipschitz: float | None = None,
    ) -> MoreauEnvelope:
        """Returns the exact envelope of h(⟨θ, x⟩, y), for batches ``(x, y)``.

        Args:
            link: "absolute", "hinge", "logistic" or "squared"; or a convex function h(scores,
                targets), elementwise, which is called on one record at a time; or a
                :class:`~opacus_shuffle.sco.losses.Link`.
            smoothness: β.
            dimension: d.
            lipschitz: ``L = max|h′|·max‖x‖``, if something is to ask for it.

        Raises:
            ValueError: An argument is out of range.
        """
        return cls(
            LinearObjective(as_link(link), dimension=dimension), smoothness, lipschitz=lipschitz
        )

    @property
    def gradient_error(self) -> float:
        """A bound on ‖ĝ − ∇f_β(θ)‖ for every record."""
        return self.smoothness * self.accuracy

    def proximal_points(self, theta: Tensor, batch: Any) -> ProximalPoints:
        """Returns every record's proximal point, with a bound on its error that is often far below ``accuracy``.

        Args:
            theta: A point (d,), or one for each record (B, d).
            batch: B records.

        Raises:
            ValueError: The shapes do not fit, or a loss or ``prox`` is not what was promised (see
                the class).
        """
        none = torch.zeros(0, self.dimension, dtype=torch.float64)
        parts = [ProximalPoints(none, none[:, 0])]
        parts += [self._solve(point, part)[0] for point, part in self._chunks(theta, batch)]
        return ProximalPoints(
            torch.cat([part.points for part in parts]), torch.cat([part.errors for part in parts])
        )

    def _planned(self, accuracy: float | None) -> float:
        """Returns the accuracy that cutting planes promise, and sets the steps that may take."""
        if self.lipschitz is None:
            raise ValueError(
                "lipschitz must be given, from which the accuracy of proximal points follows; "
                "losses of "
                "opacus_shuffle.sco.losses without constraint, MoreauEnvelope.generalized_linear "
                "and prox= do without"
            )
        scale = self.lipschitz / self.smoothness
        relative = min(_ROUGH if accuracy is None else positive("accuracy", accuracy) / scale, 1.0)
        least = relative_error(_MOST_STEPS)
        if relative < least:
            raise ValueError(
                f"accuracy must not need more than {_MOST_STEPS} steps, got {accuracy!r} for "
                f"lipschitz={self.lipschitz!r} and smoothness={self.smoothness!r}: accept "
                f"{scale * least:.3g}"
            )
        self._steps = steps_for(relative)
        return relative * scale

    def _solve(self, theta: Tensor, batch: Any) -> tuple[ProximalPoints, Tensor]:
        """Returns the proximal points of one chunk and the envelope's gradients."""
        if self._exact:
            return self._solve_linear(theta, batch)
        rows = self._inside(theta if theta.ndim == 2 else theta[None]).expand(
            number_of_users(batch), -1
        )
        if self._prox is not None:
            points = self._prox(rows.clone(), batch)
            refuse_unless_finite("prox must return", points, rows.shape)
            solved = ProximalPoints(
                as_double(points), torch.full((len(rows),), self.accuracy, dtype=torch.float64)
            )
        else:
            solved = self._cut(batch, rows)
        gradients = self.smoothness * (rows - solved.points)
        if self.lipschitz is not None:
            gradients = gradients * (
                self.lipschitz / gradients.norm(dim=1, keepdim=True).clamp_min(self.lipschitz)
            )
        return solved, gradients

    def _cut(self, batch: Any, rows: Tensor) -> ProximalPoints:
        """Returns proximal points by cutting planes, and refuses losses for which they miss what was promised."""
        assert self.lipschitz is not None  # or nothing would have been planned
        solved = by_cutting_planes(
            self.objective,
            batch,
            rows,
            beta=self.smoothness,
            lipschitz=self.lipschitz,
            steps=self._steps,
            tolerance=self.accuracy,
            project=None
            if self.constraint is None
            else functools.partial(project_rows, self.constraint),
        )
        if bool((solved.errors > self.accuracy * (1 + _TOLERANCE)).any()):
            raise ValueError(
                "loss must be convex with subgradients of norm at most "
                f"lipschitz={self.lipschitz!r}, and small enough for "
                "its rounding not to matter: a proximal point is not certified to "
                f"{self.accuracy:.3g}; check the loss, or "
                "ask for less accuracy"
            )
        return solved

    def _solve_linear(self, theta: Tensor, batch: Any) -> tuple[ProximalPoints, Tensor]:
        """Returns the exact points and gradients; the latter do not go through θ − p, which would cancel."""
        objective = instance_of("objective", self.objective, (LinearObjective,))
        scores, features, targets = objective.scores(theta, batch)
        slopes = linear_coefficients(
            objective.link, scores, targets, features.square().sum(1), self.smoothness
        )
        gradients = elementwise(slopes, scores)[:, None] * features
        return ProximalPoints(
            theta - gradients / self.smoothness, torch.zeros_like(scores)
        ), gradients

    def _inside(self, rows: Tensor) -> Tensor:
        """Returns the points moved into Θ, and refuses those that are farther from it than rounding explains."""
        if self.constraint is None:
            return rows
        projected = project_rows(self.constraint, rows)
        away = float((projected - rows).norm(dim=1).max()) if len(rows) else 0.0
        if away > _TOLERANCE * self.constraint.diameter:
            raise ValueError(
                f"theta must lie in the constraint's set, got one at a distance of {away:.3g} from "
                "it; project it first"
            )
        return projected

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        solved, gradients = self._solve(theta, batch)
        values = self.objective.losses(solved.points, batch)
        return values + self.smoothness / 2 * (theta - solved.points).square().sum(1), gradients

    def _gradients(self, theta: Tensor, batch: Any) -> Tensor:
        return self._solve(theta, batch)[1]


@dataclass(frozen=True)
class ProximalPoints:
    """Approximate proximal points, with bounds on their errors.

    Attributes:
        points: p̂, (B, d), each in Θ.
        errors: Bounds on ‖p̂ − p‖, (B,).
    """

    points: Tensor
    errors: Tensor


def steps_for(relative: float) -> int:
    """Returns the steps of cutting planes that prove β‖p̂ − p‖ ≤ ``relative``·L."""
    return 1 if relative >= math.sqrt(0.5) else math.ceil((4 / relative) ** 2) - 15


def relative_error(steps: int) -> float:
    """Returns the bound on β‖p̂ − p‖/L that is proved after so many steps."""
    return min(math.sqrt(0.5), 4 / math.sqrt(steps + 15))


def by_cutting_planes(
    objective: Objective,
    batch: Any,
    theta: Tensor,
    *,
    beta: float,
    lipschitz: float,
    steps: int,
    tolerance: float,
    project: Callable[[Tensor], Tensor] | None = None,
) -> ProximalPoints:
    """Returns proximal points of convex losses that need not be smooth, by cutting planes, with certified errors.

    Each depends on its own record alone, to the last bit. The points ``theta`` (B, d) are in Θ,
    onto which ``project`` leads row by row (by default Θ is everything); ``steps`` counts cuts
    after the first; a point stays as it is when its error is certified to be at most ``tolerance``.
    A loss that is steeper than ``lipschitz``, or not convex, is refused.
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
    for step in range(1, steps + 1):
        if not bool(active.any()):
            break
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
                "loss must be convex in theta, got one that falls below a tangent; the Moreau "
                "envelope needs convexity"
            )
        radius = (
            ((gap + rounding).clamp_min(0) / beta - (best - offset).square().sum(1) / 4)
            .clamp_min(0)
            .sqrt()
        )
        improved = active & (radius < best_errors)
        best_errors = torch.where(improved, radius, best_errors)
        best_points = torch.where(improved[:, None], center + (best + offset) / 2, best_points)
        active = active & (best_errors > tolerance)

        difference = gradient - slope
        curvature = difference.square().sum(1)
        weight = torch.where(
            curvature > 0, beta * (primal - dual).clamp_min(0) / curvature, 0.0
        ).clamp_max(1)
        cut = value - base - (gradient * offset).sum(1)
        constant = constant + weight * (cut - constant)
        slope = slope + weight[:, None] * difference
        # Who has left off stands still, so that it meets no error that it would not meet alone. It
        # is still evaluated: the shape of a batch may change the rounding of its other records.
        offset = torch.where(active[:, None], inside(center - slope / beta) - center, offset)
    return ProximalPoints(best_points, best_errors)


def linear_coefficients(
    link: Link, scores: Tensor, targets: Any, squared_norms: Tensor, beta: float
) -> Tensor:
    """Returns the gradients of the envelopes of h(⟨θ, x⟩, y), as multiples of x, shape (B,).

    They are a ∈ ∂h(⟨θ, x⟩ − κa), κ = ‖x‖²/β; right to 2⁻⁵² of h′(⟨θ, x⟩), given h′ at the points
    asked for.
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
            f"lipschitz must bound every subgradient of the loss, got {lipschitz!r} and a longer "
            "one: "
            "pass a larger one, or a constraint on which the loss has this one"
        )
