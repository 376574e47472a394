"""Convex losses of a linear score, with their Lipschitz constants and proximal points.

Each is h(⟨θ, x⟩, y) with a convex *link* h, of θ (d,) and a batch of features (B, d) and targets
(B,). If ``|h′|`` ≤ l, ``|h″|`` ≤ m and ‖x‖ ≤ R for every user, the loss is (l·R)-Lipschitz and
(m·R²)-smooth in θ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Link:
    """A convex function h(s, y) of a score s, with its properties.

    All functions work on whole batches, entry by entry: the result for a record depends on that
    record only. The privacy of the optimisers requires this.

    Attributes:
        name: For messages.
        value: h, from scores (B,) and targets (B,) to (B,).
        derivative: h′ with respect to the score; any subgradient at a kink.
        lipschitz: The largest ``|h′|``; None if h′ is unbounded.
        coefficient: The proximal point in closed form: from scores s, targets and κ > 0 (all (B,))
            to the a with a ∈ ∂h(s − κa). None: it is found by bisection.
        signed: Whether targets must be −1 or +1.
    """

    name: str
    value: Function
    derivative: Function
    lipschitz: float | None = None
    coefficient: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    signed: bool = False


@dataclass(frozen=True)
class LinearLoss:
    """A loss h(⟨θ, x⟩, y) of θ (d,) and a batch; it returns one number per record, (B,)."""

    link: Link

    def __call__(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the losses, in θ's precision."""
        features, targets = batch
        return self.link.value(features.to(theta.dtype) @ theta, targets.to(theta.dtype))


logistic_loss = LinearLoss(
    Link(
        "logistic",
        # PyTorch's softplus is linear beyond a threshold, with an error of 2e-9.
        lambda s, y: -logsigmoid(y * s),
        lambda s, y: -y * torch.sigmoid(-y * s),
        lipschitz=1.0,
        signed=True,
    )
)
"""log(1 + exp(−y⟨θ, x⟩)) for y = ±1: ‖x‖-Lipschitz and ‖x‖²/4-smooth."""

absolute_loss = LinearLoss(
    Link(
        "absolute",
        lambda s, y: (s - y).abs(),
        lambda s, y: torch.sign(s - y),
        lipschitz=1.0,
        # The proximal step reduces the residual by κ, but not beyond zero.
        coefficient=lambda s, y, k: ((s - y) / k).clamp(-1, 1),
    )
)
"""``|⟨θ, x⟩ − y|``: ‖x‖-Lipschitz, not smooth."""

hinge_loss = LinearLoss(
    Link(
        "hinge",
        lambda s, y: (1 - y * s).clamp_min(0),
        lambda s, y: -y * (y * s < 1),
        lipschitz=1.0,
        # The proximal step increases the margin by κ, but not beyond one.
        coefficient=lambda s, y, k: -y * ((1 - y * s) / k).clamp(0, 1),
        signed=True,
    )
)
"""max(0, 1 − y⟨θ, x⟩) for y = ±1: ‖x‖-Lipschitz, not smooth."""

squared_loss = LinearLoss(
    Link(
        "squared",
        lambda s, y: (s - y) ** 2 / 2,
        lambda s, y: s - y,
        coefficient=lambda s, y, k: (s - y) / (1 + k),
    )
)
"""(⟨θ, x⟩ − y)²/2: ‖x‖²-smooth; ``‖x‖·max|⟨θ, x⟩ − y|``-Lipschitz on a bounded set only."""
