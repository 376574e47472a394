"""Copies and pickles of a private model leave out what it keeps of single records.

Opacus keeps gradients of records on parameters and inputs of layers on layers, from the forward
pass to the step. ``torch.save`` of a whole model would write them down, and ``copy.deepcopy`` in
the middle of a batch would take them along. So every parameter and every module of a private model
says itself what leaves with it.

>>> import torch
>>> layer = nn.Linear(1, 1)
>>> leave_out_records(layer)
>>> layer.weight.grad_sample = torch.ones(3, 1, 1)
>>> copied = pickle.loads(pickle.dumps(layer))
>>> copied.weight.grad_sample is None
True
"""

from __future__ import annotations

import pickle
import weakref
from typing import Any, NoReturn

from torch import nn

from opacus_shuffle.core.opacus_compat import without_records
from opacus_shuffle.engine.raw_gradients import END, OWNER

_STATE = "__getstate__"
_PER_LAYER = "ft_compute_sample_grad"
_OF_THIS_OBJECT = (
    _STATE,
    "get_clipping_coef",
    OWNER,
    END,
)  # attributes that are about this very object


class _State:
    """What ``copy`` and ``pickle`` call for an object's state, as an attribute of that object."""

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self) -> Any:
        owner: Any = self._owner()
        found = type(owner).__getstate__(owner) if hasattr(type(owner), _STATE) else vars(owner)
        if isinstance(found, tuple) and isinstance(found[0], dict):  # a class with slots
            return leaving(found[0]), *found[1:]
        return leaving(found) if isinstance(found, dict) else found


class _Unpickled:
    """A function that pickle does not know; deep copies share it, as they share all functions."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._function(*arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unpickled:
        return self

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError(
            "a model with layers whose gradients functorch computes (grad_sample_mode='functorch', "
            "or layers that Opacus has "
            "no rule for) cannot be pickled whole: save model.state_dict(), or "
            "engine.save_checkpoint(...)"
        )


def leaving(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes that leave with a copy."""
    return {
        name: value for name, value in without_records(state).items() if name not in _OF_THIS_OBJECT
    }


def leave_out_records(model: Any) -> None:
    """From now on copies and pickles of this model, its layers and its parameters leave out what is kept of single records.

    Args:
        model: A network, or Opacus's wrapper of one.
    """
    if not isinstance(model, nn.Module):  # the hooks alone
        vars(model)[_STATE] = _State(model)
        return
    for each in [*model.modules(), *model.parameters()]:
        vars(each)[_STATE] = _State(each)
        function = vars(each).get(_PER_LAYER)
        if function is not None and not isinstance(function, _Unpickled):
            vars(each)[_PER_LAYER] = _Unpickled(function)
