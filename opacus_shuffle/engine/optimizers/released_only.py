"""Parameters of a private run move by released gradients alone, whichever optimizer steps.

Between the backward pass and the private step ``.grad`` holds what nobody has clipped or noised, and any optimizer would take
it: the one inside of the private one, called by itself, or another one over the same parameters, or over those of the same
network that the private one leaves alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

GUARD = "private_guard"
"""The attribute of an optimizer inside of a private one that holds the leave to step."""
OWNER = "private_optimizer"
"""The attribute of a private network's parameters that holds the optimizer whose steps may move them.

It keeps that optimizer alive as long as the parameters: gradients that wait for its step do not become anybody's when a script
forgets it.
"""


@dataclasses.dataclass
class Leave:
    """Whether the optimizer inside may step: once for every release.

    Attributes:
        released: Whether there is a release that it has not stepped by.
        stepping: Whether it is being stepped by the private optimizer, be it in several steps of its own (lookahead).
    """

    released: bool = False
    stepping: bool = False


def own_gradients(parameters: Iterable[torch.Tensor], optimizer: Any) -> None:
    """From now on refuses steps of other optimizers by gradients of these parameters that wait for this one's step.

    Args:
        parameters: Those of a network, trained by the optimizer or not.
        optimizer: A private one, with a method ``awaits(parameter)``.
    """
    for each in parameters:
        vars(each)[OWNER] = optimizer


def private_optimizers(network: Any) -> list[Any]:
    """The optimizers whose steps may move parameters of a network."""
    parameters = network.parameters() if isinstance(network, torch.nn.Module) else ()
    owners = [vars(each).get(OWNER) for each in parameters]
    return list({id(each): each for each in owners if each is not None}.values())


@functools.cache
def look_at_all_steps() -> None:
    """Has PyTorch ask before the steps of all optimizers of the process."""
    register_optimizer_step_pre_hook(_refuse_unreleased)


def _refuse_unreleased(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
    """Refuses a step by gradients that are not released."""
    leave: Leave | None = getattr(optimizer, GUARD, None)
    if leave is not None and not leave.released:
        raise ValueError(
            f"{type(optimizer).__name__}.step() was called on the optimizer inside of a private one: its gradients are neither "
            "clipped, noised nor accounted; call step() of the optimizer that make_private returned"
        )
    for each in (each for group in optimizer.param_groups for each in group["params"]):
        owner = getattr(each, OWNER, None)
        if owner is not None and each.grad is not None and owner.awaits(each):
            raise ValueError(
                f"{type(optimizer).__name__}.step() would move parameters of a private run by gradients that are neither "
                "clipped, noised nor accounted: call step() of the optimizer that make_private returned, and let it hold all "
                "that is to be trained (on public data, call optimizer.zero_grad() and model.disable_hooks() first)"
            )
    if leave is not None:
        leave.released = leave.stepping
