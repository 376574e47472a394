"""Excludes per-record gradients and inputs from copies and pickles of a private model.

Opacus stores gradients of records on parameters and inputs on layers, from the forward pass to the
step. ``torch.save`` of a whole model would write them to the file, and ``copy.deepcopy`` in the
middle of a batch would copy them. Therefore every parameter and every module of a private model
gets a ``__getstate__`` that leaves them out.

>>> import pickle, torch
>>> layer = nn.Linear(1, 1)
>>> exclude_records(layer)
>>> layer.weight.grad_sample = torch.ones(3, 1, 1)
>>> copied = pickle.loads(pickle.dumps(layer))
>>> copied.weight.grad_sample is None
True
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from opacus_shuffle.core.opacus_compat import without_records
from opacus_shuffle.engine.guards.raw_gradients import END, NETWORK, OWNER

_STATE = "__getstate__"
_OF_THIS_OBJECT = (_STATE, "get_clipping_coef", OWNER, END, NETWORK)
"""Attributes that concern this object and none of its copies."""


def _state(reference: Callable[[], Any]) -> Any:
    """Returns the state of an object for copies and pickles; see :func:`exclude_records`."""
    owner = reference()
    owner_class = type(owner)
    state = owner_class.__getstate__(owner) if hasattr(owner_class, _STATE) else vars(owner)
    if isinstance(state, tuple) and isinstance(state[0], dict):  # a class with slots
        return copied_attributes(state[0]), *state[1:]
    return copied_attributes(state) if isinstance(state, dict) else state


def copied_attributes(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes that a copy may have."""
    state = without_records(state)
    return {name: value for name, value in state.items() if name not in _OF_THIS_OBJECT}


def exclude_records(model: Any) -> None:
    """Excludes single records from copies and pickles of a model, its layers and parameters.

    Args:
        model: A network, or Opacus's wrapper or hooks of one.
    """
    parts = [*model.modules(), *model.parameters()] if isinstance(model, nn.Module) else [model]
    for part in parts:
        # A weak reference, because an object that refers to itself is freed late.
        vars(part)[_STATE] = functools.partial(_state, weakref.ref(part))
