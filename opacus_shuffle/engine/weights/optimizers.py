"""The optimizer of shuffled weights: found inside of Opacus's, refused if its state cannot follow, and watched."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from opacus_shuffle.core.validation import instance_of


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer inside of Opacus's."""
    while hasattr(optimizer, "original_optimizer"):
        optimizer = optimizer.original_optimizer
    instance_of("optimizer", optimizer, (torch.optim.Optimizer,))
    return optimizer


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that are known not to treat the entries of a tensor alike, or keep tensors where nobody looks."""
    keeps = f"optimizer {type(optimizer).__name__} keeps"
    cannot_follow = "cannot follow a permutation of the weights: use SGD, Adam, AdamW or RMSprop"
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor | torch.optim.SparseAdam):
        raise ValueError(f"{keeps} factored, flat or sparse state, which {cannot_follow}")
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, value in vars(optimizer).items():
        known = name in ("state", "param_groups", "defaults")
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
        if not known and any(leaf.numel() > 1 for leaf in tensors):
            raise ValueError(f"{keeps} tensors in its attribute {name!r}, outside of its state, where they {cannot_follow}")


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer keeps something of single units, such as momentum."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values)


def warn_of_state_that_stays(optimizer: torch.optim.Optimizer) -> None:
    """Says that a step was made with loaded weights and the state of others."""
    warnings.warn(
        f"weights were loaded, and the state of {type(optimizer).__name__} was not: if this run has shown them before, "
        "their units are in another order than those of its momentum and the like; load the state that was saved with "
        "them, or begin with optimizer.state.clear()",
        stacklevel=2,
    )


def after_each_update(optimizer: torch.optim.Optimizer, then: Callable[[], None]) -> list[RemovableHandle]:
    """Has hooks call ``then`` after each ``step`` of the optimizer, but for steps inside of a step (such as lookahead's)."""
    running: list[FrameType] = []

    def begin(*_: Any) -> None:
        callers = _callers()
        running[:] = [frame for frame in running if frame in callers] + callers[:1]

    def end(*_: Any) -> None:
        here, *callers = _callers()
        running[:] = [frame for frame in running if frame is not here and frame in callers]
        if not running:
            then()

    return [optimizer.register_step_pre_hook(begin), run_first(optimizer.register_step_post_hook(end))]


def run_first(handle: RemovableHandle) -> RemovableHandle:
    """Has a hook run before those that were there already, so that they see what it has made."""
    hooks: Any = handle.hooks_dict_ref()
    hooks.move_to_end(handle.id, last=False)
    return handle


def _callers() -> list[FrameType]:
    """Returns the frames of a hook's caller and of those that it was called by, innermost first."""
    return [frame for frame, _ in traceback.walk_stack(sys._getframe(2))]
