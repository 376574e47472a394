"""Moreau envelopes: smooth stand-ins for losses with kinks, one record at a time.

Definition 4.5 and Lemma 4.6 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation
(SCO). The β-envelope of a convex f is f_β(θ) = min_{p ∈ Θ} f(p) + (β/2)‖θ − p‖², its minimiser the
*proximal point* p(θ). It is convex and β-smooth, its gradients β(θ − p(θ)) are no longer than f's
(``docs/proofs/22_proximal_points.md``), and f_β ≤ f ≤ f_β + L²/(2β). Every user smooths its own
loss, on its own device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import instance_of, moderate, positive
from opacus_shuffle.sco.constraints import Constraint, check_constraint, project_rows
from opacus_shuffle.sco.objective import LinearObjective, Objective
from opacus_shuffle.sco.records import number_of_users

SLACK = 1e-5
"""A gradient may exceed the Lipschitz constant by this fraction: single precision's rounding."""
_MOST_STEPS = 1_000_000
_ROUGH = 0.02
"""By default gradients are wrong by this fraction of L at most."""
_TOLERANCE = 1e-9
_EPSILON = 2.0**-52
_HALVINGS = 64


class MoreauEnvelope(Objective):
    """The Moreau envelopes of an objective's losses, which are smooth; an objective again.

    Of a loss of :mod:`opacus_shuffle.sco.losses` without constraint, proximal points are found in
    closed form or by bisection, exact up to rounding. Of any other loss they are found by cutting
    planes, which stop each record as soon as its error is certified to be within ``accuracy``:
    what is promised holds for every convex L-Lipschitz loss, before any data are seen. Gradients
    are moved into the ball of radius L, where the true ones are, so that the optimisers' protocol
    need never cut them.

    For a solver of your own derive a class, write :meth:`proximal_points`, and set ``accuracy`` to
    what it promises. The privacy of the optimisers rests on each of its rows depending on its own
    record alone, and nothing checks that.

    Args:
        objective: The losses f, convex in θ.
        smoothness: β > 0.
        lipschitz: L, a bound on the subgradients of f (on the constraint set, if there is one).
            Needed unless the proximal points are exact.
        constraint: The set Θ that proximal points are to stay in
            (:class:`~opacus_shuffle.sco.constraints.Constraint`); θ must lie in it. By default
            everything, as if f were defined everywhere (then its L must be, too).
        accuracy: The largest ‖p̂ − p‖ to be accepted; by default 0.02·L/β.

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
        constraint: Constraint | None = None,
        accuracy: float | None = None,
    ) -> None:
        self.objective: Objective = instance_of("objective", objective, (Objective,))
        self.dimension, self.chunk_size = objective.dimension, objective.chunk_size
        self.smoothness = moderate("smoothness", smoothness)
        self.lipschitz = None if lipschitz is None else moderate("lipschitz", lipschitz)
        self.constraint = None if constraint is None else check_constraint(constraint)
        self._exact = self.constraint is None and isinstance(objective, LinearObjective)
        self.accuracy, self._steps = 0.0, 0
        if not self._exact:
            self.accuracy, self._steps = self._planned(accuracy)

    @property
    def gradient_error(self) -> float:  # type: ignore[override]
        """A bound on ‖ĝ − ∇f_β(θ)‖ for every record."""
        return self.smoothness * self.accuracy

    def smoothing_cost(self, lipschitz: float) -> float:
        """Returns L²/(2β), by which f exceeds its envelope at most."""
        return lipschitz**2 / (2 * self.smoothness)

    def _planned(self, accuracy: float | None) -> tuple[float, int]:
        """Returns the accuracy that cutting planes promise, and the steps that may take."""
        if self.lipschitz is None:
            raise ValueError(
                "lipschitz must be given, from which the accuracy of proximal points follows; only "
                "the losses of opacus_shuffle.sco.losses without constraint do without"
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
        return relative * scale, steps_for(relative)

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        if self._exact:
            gradients = self._exact_gradients(theta, batch)
            points = theta - gradients / self.smoothness
        else:
            rows = theta if theta.ndim == 2 else theta[None].expand(number_of_users(batch), -1)
            rows = rows if self.constraint is None else self._inside(rows, self.constraint)
            points = self.proximal_points(rows, batch)
            gradients = self.smoothness * (rows - points)
            if self.lipschitz is not None:
                norms = gradients.norm(dim=1, keepdim=True)
                gradients = gradients * (self.lipschitz / norms.clamp_min(self.lipschitz))
        values = self.objective.losses(points, batch)
        return values + self.smoothness / 2 * (theta - points).square().sum(1), gradients

    def proximal_points(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the proximal points of a chunk of records, by cutting planes: (B, d), in Θ.

        Args:
            theta: A point for each record (B, d), in Θ.
            batch: B records.

        Raises:
            ValueError: If the loss is not what was promised (see the class).
        """
        assert self.lipschitz is not None  # or nothing would have been planned
        points, errors = by_cutting_planes(
            self.objective,
            batch,
            theta,
            beta=self.smoothness,
            lipschitz=self.lipschitz,
            steps=self._steps,
            tolerance=self.accuracy,
            constraint=self.constraint,
        )
        if bool((errors > self.accuracy * (1 + _TOLERANCE)).any()):
            raise ValueError(
                "loss must be convex with subgradients of norm at most "
                f"lipschitz={self.lipschitz!r}, and small enough for its rounding not to matter: a "
                f"proximal point is not certified to {self.accuracy:.3g}; check the loss, or ask "
                "for less accuracy"
            )
        return points

    def _exact_gradients(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the gradients for a linear loss, not by way of θ − p, which would cancel.

        They are ax with a ∈ ∂h(⟨θ, x⟩ − κa), κ = ‖x‖²/β; a is right to 2⁻⁵² of h′(⟨θ, x⟩), given h′
        at the points asked for.
        """
        objective = instance_of("objective", self.objective, (LinearObjective,))
        link = objective.link
        scores, features, targets = objective.scores(theta, batch)
        kappa = features.square().sum(1) / self.smoothness
        # A record without features has no gradient, whatever its coefficient.
        kappa = torch.where(kappa > 0, kappa, 1.0)
        if link.coefficient is not None:
            return link.coefficient(scores, targets, kappa)[:, None] * features
        far = link.derivative(scores, targets)
        near = torch.zeros_like(far)
        for _ in range(_HALVINGS):
            middle = (near + far) / 2
            # Beyond the root, as seen from 0.
            step = middle - link.derivative(scores - kappa * middle, targets)
            beyond = step * torch.sign(far) > 0
            near, far = torch.where(beyond, near, middle), torch.where(beyond, middle, far)
        return ((near + far) / 2)[:, None] * features

    def _inside(self, rows: Tensor, constraint: Constraint) -> Tensor:
        """Returns the points moved into Θ; refuses those farther off than rounding explains."""
        projected = project_rows(constraint, rows)
        away = float((projected - rows).norm(dim=1).max()) if len(rows) else 0.0
        if away > _TOLERANCE * constraint.diameter:
            raise ValueError(
                f"theta must lie in the constraint's set, got one at a distance of {away:.3g} from "
                "it; project it first"
            )
        return projected


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
    constraint: Constraint | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns proximal points by cutting planes, and certified bounds on their errors.

    The losses must be convex, and need not be smooth. Each point depends on its own record alone,
    to the last bit.

    Args:
        objective: The losses.
        batch: B records.
        theta: A point for each record, (B, d), in Θ.
        beta: β.
        lipschitz: L.
        steps: How many cuts to make after the first.
        tolerance: A point stays as it is when its error is certified to be at most that.
        constraint: Θ; by default everything.

    Returns:
        The points p̂, (B, d), each in Θ, and bounds on ‖p̂ − p‖, (B,).

    Raises:
        ValueError: If a loss is steeper than ``lipschitz``, or not convex.
    """

    def inside(points: Tensor) -> Tensor:
        return points if constraint is None else project_rows(constraint, points)

    center = theta.to(torch.float64)
    best_points, best_errors = center.clone(), center.new_full((len(center),), math.inf)
    active = torch.ones(len(center), dtype=torch.bool)
    base, slope = objective.losses_and_gradients(center, batch)
    _check_lipschitz(slope, lipschitz)
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
        rounding = rounding + _EPSILON * 4 * (step + 4) * (constant.abs() + linear.abs() + square)
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
    return best_points, best_errors


def _check_lipschitz(gradients: Tensor, lipschitz: float) -> None:
    """Raises a ValueError for subgradients longer than ``lipschitz``: nothing is proved of them."""
    largest = float(gradients.norm(dim=1).max()) if len(gradients) else 0.0
    if largest > lipschitz * (1 + SLACK):
        raise ValueError(
            f"lipschitz must bound every subgradient of the loss, got {lipschitz!r} and a longer "
            "one: pass a larger one, or a constraint on which the loss has this one"
        )
