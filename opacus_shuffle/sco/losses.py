"""Convex losses of a linear score: logistic, absolute, hinge and squared, with what theorems ask of them.

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

from opacus_shuffle.core.validation import boolean, instance_of, one_of, positive
from opacus_shuffle.sco.records import each_record

Function = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Link:
    """A convex function h(s, y) of a score s, elementwise over a batch, and what is known of it.

    The functions are called on batches of one record, all at once by ``torch.func.vmap``, unless
    ``elementwise`` promises that they treat records one by one.

    Args:
        name: For messages.
        value: h: scores (B,) and targets to (B,).
        derivative: h′ in the score, any subgradient at a kink; by default by automatic
            differentiation of ``value``.
        lipschitz: The largest ``|h′|``; None if unbounded or unknown.
        coefficient: For a closed form of the proximal point: from scores s, targets and κ > 0 (all
            (B,)) to the a with a ∈ ∂h(s − κa). By default it is found by bisection.
        signed: Whether targets must be −1 or +1.
        elementwise: Your promise that ``value``, ``derivative`` and ``coefficient`` compute each
            record's answer from that record alone. They are then called on whole batches. The
            privacy guarantee rests on it, and nothing checks it.
    """

    name: str
    value: Function
    derivative: Function = None  # type: ignore[assignment]
    lipschitz: float | None = None
    coefficient: Callable[[Tensor, Any, Tensor], Tensor] | None = None
    signed: bool = False
    elementwise: bool = False

    def __post_init__(self) -> None:
        instance_of("name", self.name, (str,))
        for flag in ("signed", "elementwise"):
            boolean(flag, getattr(self, flag))
        remedy = "; if it treats records one by one as it is, say so by Link(..., elementwise=True)"
        for name in ("value", "derivative", "coefficient"):
            function = getattr(self, name)
            if not callable(function) and (function is not None or name == "value"):
                raise ValueError(
                    f"{name} must be a callable of scores and targets, got {function!r}"
                )
            if function is not None and not self.elementwise:
                object.__setattr__(
                    self, name, each_record(function, f"link {self.name}'s {name}", remedy)
                )
        if self.derivative is None:
            object.__setattr__(self, "derivative", self._differentiate)
        if self.lipschitz is not None:
            positive("lipschitz", self.lipschitz)

    def check(self, targets: Any) -> None:
        """Refuses labels that are not −1 or +1, for which hinge and logistic losses are silently wrong."""
        if self.signed and not (
            isinstance(targets, Tensor) and targets.ndim == 1 and bool((targets.abs() == 1).all())
        ):
            raise ValueError(
                f"y must hold -1 and +1 only, in shape (B,), for the {self.name} loss; use 2 * y - "
                "1 for 0 and 1"
            )

    def _differentiate(self, scores: Tensor, targets: Any) -> Tensor:
        """Returns h′ by one backward pass: the sum's gradient, since h is elementwise."""
        with torch.enable_grad():
            variable = scores.detach().clone().requires_grad_()
            values = self.value(variable, targets)
            if values.shape != scores.shape or not values.requires_grad:
                raise ValueError(
                    f"link must map scores {tuple(scores.shape)} to as many values by "
                    "differentiable operations, "
                    f"got shape {tuple(values.shape)}"
                )
            return torch.autograd.grad(values.sum(), variable)[0]


def as_link(value: str | Link | Function) -> Link:
    """Returns a link from its name ("absolute", "hinge", "logistic", "squared"), itself, or a function h(scores, targets)."""
    if isinstance(value, Link):
        return value
    if isinstance(value, str) or not callable(value):
        return LINKS[one_of("link", value, LINKS)]
    return Link(getattr(value, "__name__", "given"), value)


@dataclass(frozen=True)
class LinearLoss:
    """A loss h(⟨θ, x⟩, y) of θ (d,) and a batch of features (B, d) and targets (B,): one number per record, (B,)."""

    link: Link

    def __call__(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the losses, in θ's precision."""
        features, targets = batch
        return self.link.value(features.to(theta.dtype) @ theta, targets.to(theta.dtype))


LINKS: dict[str, Link] = {
    "logistic": Link(
        "logistic",
        lambda s, y: -logsigmoid(y * s),  # softplus would drop the last 2e-9 beyond its threshold
        lambda s, y: -y * torch.sigmoid(-y * s),
        lipschitz=1.0,
        signed=True,
        elementwise=True,
    ),
    "absolute": Link(
        "absolute",
        lambda s, y: (s - y).abs(),
        lambda s, y: torch.sign(s - y),
        lipschitz=1.0,
        # The residual shrinks by κ, but not beyond zero.
        coefficient=lambda s, y, k: ((s - y) / k).clamp(-1, 1),
        elementwise=True,
    ),
    "hinge": Link(
        "hinge",
        lambda s, y: (1 - y * s).clamp_min(0),
        lambda s, y: -y * (y * s < 1),
        lipschitz=1.0,
        # The margin grows by κ, but not beyond one.
        coefficient=lambda s, y, k: -y * ((1 - y * s) / k).clamp(0, 1),
        signed=True,
        elementwise=True,
    ),
    "squared": Link(
        "squared",
        lambda s, y: (s - y) ** 2 / 2,
        lambda s, y: s - y,
        coefficient=lambda s, y, k: (s - y) / (1 + k),
        elementwise=True,
    ),
}

logistic_loss = LinearLoss(LINKS["logistic"])
"""log(1 + exp(−y⟨θ, x⟩)) for y = ±1: ‖x‖-Lipschitz and ‖x‖²/4-smooth."""
absolute_loss = LinearLoss(LINKS["absolute"])
"""``|⟨θ, x⟩ − y|``: ‖x‖-Lipschitz, not smooth."""
hinge_loss = LinearLoss(LINKS["hinge"])
"""max(0, 1 − y⟨θ, x⟩) for y = ±1: ‖x‖-Lipschitz, not smooth."""
squared_loss = LinearLoss(LINKS["squared"])
"""(⟨θ, x⟩ − y)²/2: ‖x‖²-smooth; ``‖x‖·max|⟨θ, x⟩ − y|``-Lipschitz on a bounded set only."""
