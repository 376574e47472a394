"""Which shuffler moves a network, and which one follows an optimizer: one each."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

ATTACHED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def attached(owner: nn.Module | torch.optim.Optimizer) -> Any:
    """Returns the ``WeightShuffler`` of a network or an optimizer, None if it has none."""
    reference = ATTACHED.get(owner)
    return None if reference is None else reference()


def detach_shuffler(owner: nn.Module | torch.optim.Optimizer) -> None:
    """Detaches the shuffler that an earlier set-up has left at this network or optimizer, if there is one."""
    if (previous := attached(owner)) is not None:
        previous.detach()
