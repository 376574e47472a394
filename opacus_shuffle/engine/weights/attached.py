"""Which shuffler moves a network, and which one follows an optimizer: one each."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn

ATTACHED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


MOVED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Networks whose weights lie, or have left, in an order that a shuffler has drawn."""


def warn_of_another_order(network: nn.Module) -> None:
    """Warns where a shuffled run starts from weights that another one has moved: places mean other units than before it."""
    if network in MOVED:
        warnings.warn(
            f"{type(network).__name__} has weights whose units another shuffled run has put in an order of its own: an average "
            "with weights of other runs, such as other clients', would mix different units, and nothing would show it; average "
            "only weights of runs without shuffle_weights (docs/weight_shuffling.rst)",
            stacklevel=2,
        )


def attached(owner: nn.Module | torch.optim.Optimizer) -> Any:
    """Returns the ``WeightShuffler`` of a network or an optimizer, None if it has none."""
    reference = ATTACHED.get(owner)
    return None if reference is None else reference()


def detach_shuffler(owner: nn.Module | torch.optim.Optimizer) -> None:
    """Detaches the shuffler that an earlier set-up has left at this network or optimizer, if there is one."""
    if (previous := attached(owner)) is not None:
        previous.detach()
