"""``Estimate``: what a shuffle-private optimiser has found, what it reveals, and how it came about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.protocols.statement import PrivacyStatement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The outcome of a shuffle-private optimiser.

    Attributes:
        theta: The estimate, float64, shape (d,).
        privacy: What the run reveals, to whom.
        history: Every round's norm of the noisy mean gradient; it is computed from shuffled
            messages alone, so that it may be published.
        choices: What was used: batch size, step size, smoothness, …
        excess_loss_bound: At least E[f(theta)] − min over the set of f, where f is the mean loss of
            a fresh user, the expectation is over users and randomness, and the minimum is over the
            constraint set. Proved if all users follow the protocol and are independent with one
            distribution, every user's loss is convex, and Lipschitz and smooth as stated, and
            ``diameter``, where given, is at least the distance from the start to a minimiser. It
            never depends on the data: it reveals nothing, nor notices when this fails (a
            ``clip=True`` that cuts, say). None where nothing is proved: steps that are too long, or
            practical.
    """

    theta: Tensor
    privacy: PrivacyStatement
    history: list[float]
    choices: Mapping[str, Any]
    excess_loss_bound: float | None = None

    def __str__(self) -> str:
        used = ", ".join(f"{name}={_short(value)}" for name, value in self.choices.items())
        if self.excess_loss_bound is None:
            quality = "excess loss: nothing is proved for these settings"
        else:
            quality = (
                f"expected excess loss at most {round_up(self.excess_loss_bound)} (users "
                "independent with one distribution; "
                "loss convex and as Lipschitz and smooth as stated)"
            )
        counted = f"estimate of {self.theta.numel()} parameters after {len(self.history)} rounds"
        return f"{counted}\n{used}\n{quality}\n{self.privacy}"


def _short(value: Any) -> str:
    """Returns a value in a few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{name}={_short(part)}' for name, part in value.items())})"
    if isinstance(value, torch.Tensor | list | tuple):
        shown = [_short(part) for part in (value if len(value) <= 4 else [value[0], value[-1]])]
        return f"[{', '.join(shown)}]" if len(value) <= 4 else f"[{shown[0]}, …, {shown[1]}]"
    return str(value)
