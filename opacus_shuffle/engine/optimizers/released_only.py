"""Parameters of a private run move by released gradients alone, whichever optimizer steps.

Between the backward pass and the private step ``.grad`` holds what nobody has clipped or noised, and any optimizer would take
it: the one inside of the private one, called by itself, or another one over the same parameters, or over those of the same
network that the private one leaves alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

OWNER = "private_optimizer"
"""The attribute of a private network's parameters that holds the optimizer whose steps may move them, whoever forgets it."""


class ReleasedOnly:
    """Lets the optimizer inside step once for every release.

    Attributes:
        released: Whether there is a release that it has not stepped by.
        stepping: Whether it is being stepped by the private optimizer, be it in several steps of its own (lookahead).
    """

    released = False
    stepping = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        """What PyTorch calls before a step.

        Raises:
            ValueError: If nothing was released for it.
        """
        if not self.released:
            raise ValueError(
                f"{type(optimizer).__name__}.step() was called on the optimizer inside of a private one: its gradients are "
                "neither clipped, noised nor accounted; call step() of the optimizer that make_private returned"
            )
        self.released = self.stepping


def guard_steps(optimizer: torch.optim.Optimizer, guard: ReleasedOnly | None) -> None:
    """Puts a guard, or none, before the steps of an optimizer, in the place of an earlier one."""
    for handle in [key for key, each in optimizer._optimizer_step_pre_hooks.items() if isinstance(each, ReleasedOnly)]:
        del optimizer._optimizer_step_pre_hooks[handle]
    if guard is not None:
        optimizer.register_step_pre_hook(guard)


def guard_of(optimizer: torch.optim.Optimizer) -> ReleasedOnly | None:
    """The guard before the steps of an optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return next((each for each in hooks if isinstance(each, ReleasedOnly)), None)


def own_gradients(parameters: Iterable[torch.Tensor], optimizer: Any) -> None:
    """From now on refuses steps of other optimizers by gradients of these parameters that wait for this one's step.

    Args:
        parameters: Those of a network, trained by the optimizer or not.
        optimizer: A private one, with a method ``awaits(parameter)``.
    """
    _look_at_all_steps()
    for each in parameters:
        vars(each)[OWNER] = optimizer


@functools.cache
def _look_at_all_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_waiting)


def _refuse_waiting(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
    """What PyTorch calls before the steps of all optimizers of the process, and before their own guards, which say more."""
    if (guard := guard_of(optimizer)) is not None and not guard.released:
        return
    for each in (each for group in optimizer.param_groups for each in group["params"]):
        owner = getattr(each, OWNER, None)
        if owner is not None and each.grad is not None and owner.awaits(each):
            raise ValueError(
                f"{type(optimizer).__name__}.step() would move parameters of a private run by gradients that are neither "
                "clipped, noised nor accounted: call step() of the optimizer that make_private returned, and let it hold all "
                "that is to be trained (on public data, call optimizer.zero_grad() and model.disable_hooks() first)"
            )
