"""Which optimizers can train shuffled weights: those whose state lies where it can follow a permutation.

>>> refuse_optimizer(torch.optim.Adafactor(torch.nn.Linear(2, 2).parameters()))
Traceback (most recent call last):
...
ValueError: optimizer Adafactor keeps factored, flat or sparse state, which cannot follow a permutation of the weights: use ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from opacus_shuffle.core.validation import instance_of

FLAT_STATE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam)
"""Optimizers of PyTorch whose state is factored or flat, or whose updates are sparse, so that it cannot follow."""


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer inside of Opacus's."""
    while hasattr(optimizer, "original_optimizer"):
        optimizer = optimizer.original_optimizer
    instance_of("optimizer", optimizer, (torch.optim.Optimizer,))
    return optimizer


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers that are known not to treat the entries of a tensor alike, or keep tensors where nobody looks.

    Raises:
        ValueError: It says what does not fit.
    """
    if isinstance(optimizer, FLAT_STATE):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} keeps factored, flat or sparse state, which cannot follow a permutation of "
            "the weights: use SGD, Adam, AdamW or RMSprop"
        )
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, value in vars(optimizer).items():
        known = name in ("state", "param_groups", "defaults")
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
        if not known and any(leaf.numel() > 1 for leaf in tensors):
            raise ValueError(
                f"optimizer {type(optimizer).__name__} keeps tensors in its attribute {name!r}, outside of its state, where "
                "they cannot follow a permutation of the weights: use SGD, Adam, AdamW or RMSprop"
            )
