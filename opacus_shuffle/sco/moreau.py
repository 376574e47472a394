"""Moreau envelopes: smooth approximations of losses with kinks, one record at a time.

Definition 4.5 and Lemma 4.6 of Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation
(SCO). The β-envelope of a convex f is f_β(θ) = min_p f(p) + (β/2)‖θ − p‖², and its minimiser is the
*proximal point* p(θ). The envelope is convex and β-smooth. Its gradients β(θ − p(θ)) are no longer
than those of f (``docs/proofs/22_proximal_points.md``), and f_β ≤ f ≤ f_β + L²/(2β). Every user
smooths its own loss, on its own device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import instance_of, moderate
from opacus_shuffle.sco.objective import LinearObjective, Objective
from opacus_shuffle.sco.records import number_of_users

_HALVINGS = 64


class MoreauEnvelope(Objective):
    """The Moreau envelopes of an objective's losses; they are smooth, and an objective again.

    The losses of :mod:`opacus_shuffle.sco.losses` have their proximal points in closed form or by
    bisection, exact up to rounding. For another loss with a closed proximal point, derive a class
    and write :meth:`proximal_points`. The privacy of the optimisers requires that each of its rows
    depends on its own record only; nothing checks that.

    Args:
        objective: The losses f, convex in θ.
        smoothness: β > 0.

    Attributes:
        objective: The losses f.
        smoothness: β.

    Raises:
        ValueError: If an argument is out of range, or the losses have no known proximal points.
    """

    def __init__(self, objective: Objective, smoothness: float) -> None:
        self.objective: Objective = instance_of("objective", objective, (Objective,))
        self.dimension, self.chunk_size = objective.dimension, objective.chunk_size
        self.smoothness = moderate("smoothness", smoothness)
        if type(self) is MoreauEnvelope and not isinstance(objective, LinearObjective):
            raise ValueError(
                "loss must be one of opacus_shuffle.sco.losses to be smoothed by a Moreau envelope "
                f"(its proximal points are known), got {type(objective).__name__}: pass smoothness "
                "for a smooth loss; pass envelope with a class derived from MoreauEnvelope that "
                "has proximal_points(theta, batch); or use shuffle_sgd, which needs no smooth loss"
            )

    def smoothing_cost(self, lipschitz: float) -> float:
        """Returns L²/(2β), the most by which f exceeds its envelope."""
        return lipschitz**2 / (2 * self.smoothness)

    def proximal_points(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the proximal points of a chunk of records, exact up to rounding: (B, d).

        Args:
            theta: A point for each record (B, d).
            batch: B records.
        """
        raise NotImplementedError

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        if (factors := self.factors(theta, batch)) is not None:
            gradients = factors[0][:, None] * factors[1]
            points = theta - gradients / self.smoothness
        else:
            theta = theta.expand(number_of_users(batch), -1)
            points = self.proximal_points(theta, batch)
            gradients = self.smoothness * (theta - points)
        values = self.objective.losses(points, batch)
        return values + self.smoothness / 2 * (theta - points).square().sum(1), gradients

    def factors(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor] | None:
        """Returns slopes and features for a linear loss, directly: β(θ − p) would lose digits.

        The gradients are ax with a ∈ ∂h(⟨θ, x⟩ − κa), κ = ‖x‖²/β. The error of a is at most 2⁻⁵² of
        h′(⟨θ, x⟩), given h′ exactly.
        """
        objective = self.objective
        if not isinstance(objective, LinearObjective):
            return None
        link = objective.link
        scores, features, targets = objective.scores(theta, batch)
        kappa = features.square().sum(1) / self.smoothness
        # Any positive κ will do for a record without features: its gradient is zero.
        kappa = torch.where(kappa > 0, kappa, 1.0)
        if link.coefficient is not None:
            return link.coefficient(scores, targets, kappa), features
        # The root lies between 0 and h′(⟨θ, x⟩), because h′ increases.
        far = link.derivative(scores, targets)
        near = torch.zeros_like(far)
        for _ in range(_HALVINGS):
            middle = (near + far) / 2
            step = middle - link.derivative(scores - kappa * middle, targets)
            beyond = step * torch.sign(far) > 0  # the root is nearer to 0 than the middle
            near, far = torch.where(beyond, near, middle), torch.where(beyond, middle, far)
        return (near + far) / 2, features
