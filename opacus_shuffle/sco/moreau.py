"""Moreau envelopes: smooth stand-ins for losses with kinks, one record at a time.

Definition 4.5 and Lemma 4.6 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation (SCO). The β-envelope of a
convex f is f_β(θ) = min_{p ∈ Θ} f(p) + (β/2)‖θ − p‖², its minimiser the *proximal point* p(θ). It is convex and β-smooth, its
gradients β(θ − p(θ)) are no longer than f's (``docs/proofs/22_proximal_points.md``), and f_β ≤ f ≤ f_β + L²/(2β). Every user
smooths its own loss, on its own device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import boolean, instance_of, integer, moderate, not_negative, positive
from opacus_shuffle.sco.constraints import as_constraint, project_rows
from opacus_shuffle.sco.each_record import EachRecord
from opacus_shuffle.sco.losses import Function, Link, as_link
from opacus_shuffle.sco.objective import LinearObjective, Objective, elementwise
from opacus_shuffle.sco.proximal import (
    ProximalPoints,
    by_contraction,
    by_cutting_planes,
    linear_coefficients,
    relative_error,
    steps_for,
)
from opacus_shuffle.sco.records import as_double, number_of_users, refuse_unless_finite

_MOST_STEPS = 1_000_000
# By default gradients are wrong by this fraction of L at most.
_ROUGH, _FINE = 0.02, 1e-6
_TOLERANCE = 1e-9


class MoreauEnvelope(Objective):
    """The Moreau envelopes of an objective's losses, which are smooth; an objective again.

    Proximal points are found as ``prox`` says; else, of a generalised linear loss
    (:class:`~opacus_shuffle.sco.objective.LinearObjective`) without constraint, by closed form or bisection, exact up to
    rounding; else by a contraction, exponentially fast, if ``inner_smoothness`` is given; else by cutting planes. The last two
    take ``accuracy``, and stop each record as soon as its error is certified, or ``iterations``, and make so many: what is
    promised holds for every convex L-Lipschitz loss, before any data are seen. Gradients are moved into the ball of radius L,
    where the true ones are, so that the optimisers' protocol need never cut them.

    Args:
        objective: The losses f, convex in θ.
        smoothness: β > 0.
        lipschitz: L, a bound on the subgradients of f (on the constraint set, if there is one). Needed unless the proximal
            points are exact.
        constraint: The set Θ that proximal points are to stay in, as :func:`~opacus_shuffle.sco.constraints.as_constraint`
            takes it; θ must lie in it. By default everything, as if f were defined everywhere (then its L must be, too).
        diameter: Of a constraint that does not tell its own.
        inner_smoothness: H, if ∇f is H-Lipschitz.
        accuracy: The largest ‖p̂ − p‖ to be accepted; by default 0.02·L/β, or 1e-6·L/β with ``inner_smoothness``. With ``prox``,
            what that promises (by default 0).
        iterations: How many steps to make instead.
        prox: From points (B, d) and a batch to proximal points (B, d). It is called on batches of one record, vectorised by
            ``torch.func.vmap`` where that can be, else one after the other, which is slow.
        prox_elementwise: Your promise that ``prox`` computes each record's point from that record alone. It is then called on
            whole batches. The privacy guarantee rests on it, and nothing checks it.
        chunk_size: How many records are worked on at once; by default as many as the objective does.

    Attributes:
        smoothness: β.
        lipschitz: A bound on the norm of the gradients: L; None if none was given.
        accuracy: A bound on ‖p̂ − p‖, up to rounding if it is 0.
        gradient_error: A bound on the error of the gradients: β times the accuracy.

    Raises:
        ValueError: An argument is out of range, or would need more than a million steps. Later: the loss turns out not to be
            convex or L-Lipschitz, or θ to be outside Θ.
    """

    def __init__(
        self,
        objective: Objective,
        smoothness: float,
        *,
        lipschitz: float | None = None,
        constraint: Any = None,
        diameter: float | None = None,
        inner_smoothness: float | None = None,
        accuracy: float | None = None,
        iterations: int | None = None,
        prox: Callable[[Tensor, Any], Tensor] | None = None,
        prox_elementwise: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        self.objective: Objective = instance_of("objective", objective, (Objective,))
        self.dimension = objective.dimension
        self.chunk_size = integer("chunk_size", objective.chunk_size if chunk_size is None else chunk_size)
        self.smoothness = moderate("smoothness", smoothness)
        self.lipschitz = None if lipschitz is None else moderate("lipschitz", lipschitz)
        self.constraint = None if constraint is None else as_constraint(constraint, diameter)
        self._inner = None if inner_smoothness is None else moderate("inner_smoothness", inner_smoothness)
        self._prox = prox
        if not boolean("prox_elementwise", prox_elementwise) and prox is not None:
            remedy = "; if it treats records one by one as it is, say so by prox_elementwise=True"
            self._prox = EachRecord(prox, "prox", remedy)
        self._exact = prox is None and self.constraint is None and isinstance(objective, LinearObjective)
        if accuracy is not None and iterations is not None:
            raise ValueError(f"accuracy and iterations cannot both be given, got {accuracy!r} and {iterations!r}; drop one")
        if prox is not None:
            if not callable(prox):
                raise ValueError(f"prox must be a callable prox(theta, batch), got {prox!r}")
            if iterations is not None:
                raise ValueError(f"iterations cannot be given with prox, which makes its own, got {iterations!r}")
            self.accuracy = 0.0 if accuracy is None else not_negative("accuracy", accuracy)
        else:
            self.accuracy = 0.0 if self._exact else self._plan(accuracy, iterations)

    @classmethod
    def generalized_linear(
        cls,
        link: str | Link | Function,
        smoothness: float,
        *,
        dimension: int,
        lipschitz: float | None = None,
        chunk_size: int = 1024,
    ) -> MoreauEnvelope:
        """Returns the exact envelope of h(⟨θ, x⟩, y), for batches ``(x, y)``.

        Args:
            link: "absolute", "hinge", "logistic" or "squared"; or a convex function h(scores, targets), elementwise, which is
                called on one record at a time; or a :class:`~opacus_shuffle.sco.losses.Link`.
            smoothness: β.
            dimension: d.
            lipschitz: ``L = max|h′|·max‖x‖``, if something is to ask for it.
            chunk_size: How many records are worked on at once.

        Raises:
            ValueError: An argument is out of range.
        """
        return cls(LinearObjective(as_link(link), dimension=dimension, chunk_size=chunk_size), smoothness, lipschitz=lipschitz)

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
            ValueError: The shapes do not fit, or a loss or ``prox`` is not what was promised (see the class).
        """
        none = torch.zeros(0, self.dimension, dtype=torch.float64)
        parts = [ProximalPoints(none, none[:, 0], 0)]
        parts += [self._solve(point, part)[0] for point, part in self._chunks(theta, batch)]
        points, errors = torch.cat([part.points for part in parts]), torch.cat([part.errors for part in parts])
        return ProximalPoints(points, errors, max(part.steps for part in parts))

    def _plan(self, accuracy: float | None, iterations: int | None) -> float:
        """Decides which solver makes how many steps, and returns the accuracy that they promise."""
        if self.lipschitz is None:
            raise ValueError(
                "lipschitz must be given, from which the accuracy of proximal points follows; losses of "
                "opacus_shuffle.sco.losses without constraint, MoreauEnvelope.generalized_linear and prox= do without"
            )
        inner = self._inner
        ratio = None if inner is None else inner / self.smoothness
        scale = self.lipschitz / self.smoothness
        if iterations is not None:
            steps = integer("iterations", iterations)
            promised = scale * relative_error(steps, smooth_ratio=ratio)
        else:
            relative = (_ROUGH if ratio is None else _FINE) if accuracy is None else positive("accuracy", accuracy) / scale
            relative = min(relative, 1.0)
            steps, promised = steps_for(relative, smooth_ratio=ratio), relative * scale
            if steps > _MOST_STEPS:
                raise ValueError(
                    f"accuracy must not need more than {_MOST_STEPS} steps, got {accuracy!r}, which may need {steps:.3g}; "
                    f"accept {scale * relative_error(_MOST_STEPS, smooth_ratio=ratio):.3g}, or pass inner_smoothness if the "
                    "loss is smooth"
                )
        solver = by_cutting_planes if inner is None else functools.partial(by_contraction, smoothness=inner)
        self._solver = functools.partial(
            solver,
            self.objective,
            beta=self.smoothness,
            lipschitz=self.lipschitz,
            steps=steps,
            tolerance=promised if iterations is None else None,
            project=None if self.constraint is None else functools.partial(project_rows, self.constraint),
        )
        return promised

    def _solve(self, theta: Tensor, batch: Any) -> tuple[ProximalPoints, Tensor]:
        """Returns the proximal points of one chunk and the envelope's gradients."""
        if self._exact:
            return self._solve_linear(theta, batch)
        rows = self._inside(theta if theta.ndim == 2 else theta[None]).expand(number_of_users(batch), -1)
        if self._prox is not None:
            points = self._prox(rows.clone(), batch)
            refuse_unless_finite("prox must return", points, rows.shape)
            found = ProximalPoints(as_double(points), torch.full((len(rows),), self.accuracy, dtype=torch.float64), 0)
        else:
            found = self._solver(batch, rows)
            missed = found.errors > self.accuracy * (1 + _TOLERANCE)
            if self._inner is None and bool(missed.any()):  # as cutting planes are of losses that are not convex
                raise ValueError(
                    f"loss must be convex with subgradients of norm at most lipschitz={self.lipschitz!r}, and small enough for "
                    f"its rounding not to matter: a proximal point is not certified to {self.accuracy:.3g}; check the loss, or "
                    "ask for less accuracy"
                )
        gradients = self.smoothness * (rows - found.points)
        if self.lipschitz is not None:
            gradients = gradients * (self.lipschitz / gradients.norm(dim=1, keepdim=True).clamp_min(self.lipschitz))
        return found, gradients

    def _solve_linear(self, theta: Tensor, batch: Any) -> tuple[ProximalPoints, Tensor]:
        """Returns the exact points and gradients; the latter do not go through θ − p, which would cancel."""
        objective = instance_of("objective", self.objective, (LinearObjective,))
        scores, features, targets = objective.scores(theta, batch)
        slopes = linear_coefficients(objective.link, scores, targets, features.square().sum(1), self.smoothness)
        gradients = elementwise(slopes, scores)[:, None] * features
        return ProximalPoints(theta - gradients / self.smoothness, torch.zeros_like(scores), 0), gradients

    def _inside(self, rows: Tensor) -> Tensor:
        """Returns the points moved into Θ, and refuses those that are farther from it than rounding explains."""
        if self.constraint is None:
            return rows
        projected = project_rows(self.constraint, rows)
        away = float((projected - rows).norm(dim=1).max()) if len(rows) else 0.0
        if away > _TOLERANCE * self.constraint.diameter:
            raise ValueError(
                f"theta must lie in the constraint's set, got one at a distance of {away:.3g} from it; project it first"
            )
        return projected

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        found, gradients = self._solve(theta, batch)
        values = self.objective.losses(found.points, batch)
        return values + self.smoothness / 2 * (theta - found.points).square().sum(1), gradients

    def _gradients(self, theta: Tensor, batch: Any) -> Tensor:
        return self._solve(theta, batch)[1]
