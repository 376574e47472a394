"""Puts networks, optimizers and other objects back as they were: after a look at them, or where a load is refused.

>>> network = torch.nn.Linear(2, 1)
>>> before = network.weight.detach().clone()
>>> try:
...     with rolled_back_if_refused(network):
...         network.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(5)})
... except RuntimeError:
...     torch.equal(network.weight, before)
True
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

Undo = Callable[[], object]

_ENTERED_WHOLE = (nn.Module, torch.optim.Optimizer)
"""What is followed wherever it is met; of other objects only those that these hold themselves, which may be others'."""
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


@contextlib.contextmanager
def rolled_back(network: nn.Module) -> Iterator[None]:
    """A block after which a network is as it was: its tensors, modes, attributes and hooks, and all random states."""
    undo = list(_remember(network, {}))
    try:
        with random_states_kept():
            yield
    finally:
        for put_back in undo:
            put_back()


@contextlib.contextmanager
def rolled_back_if_refused(*owners: Any) -> Iterator[None]:
    """Puts modules, optimizers and other objects back as they were if the block raises.

    Args:
        *owners: A module or an optimizer with all that is inside of it, or any other object with its attributes. None is
            skipped. An object with a method ``remember`` says itself what puts it back. Tensors are kept on the CPU meanwhile.
    """
    known: dict[int, Any] = {}
    undo: list[Undo] = []
    for owner in owners:
        if hasattr(owner, "remember") and not isinstance(owner, _ENTERED_WHOLE):
            undo.append(owner.remember())
        else:
            undo += _remember(owner, known)
    try:
        yield
    except BaseException:
        for put_back in undo:
            put_back()
        raise


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the global random states of Python, NumPy and PyTorch, on the CPU and on GPUs in use, at the end."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  (others use the global one)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _remember(value: Any, known: dict[int, Any], *, inside_helper: bool = False) -> Iterator[Undo]:
    """Yields what puts a value back, and what it contains.

    Args:
        value: Anything that a network or an optimizer may hold.
        known: What has been met, by identity; held, so that no identity is given anew.
        inside_helper: Whether an object that is neither module nor optimizer holds it: what it refers to is not followed.
    """
    if value is None or isinstance(value, bool | int | float | str | type | ModuleType) or id(value) in known:
        return
    known[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield from _remember_tensor(value)
    elif isinstance(value, random.Random):
        yield _calling(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        yield _calling(value.bit_generator.__setattr__, "state", value.bit_generator.state)
    elif isinstance(value, np.random.RandomState | torch.Generator):
        yield _calling(value.set_state, value.get_state())
    elif type(value) in _CONTAINERS:
        held = value.copy()
        for entry in list(held.values() if isinstance(held, dict) else held):
            yield from _remember(entry, known, inside_helper=inside_helper)
        yield _refilling(value, held)
    elif isinstance(value, tuple):
        for entry in value:
            yield from _remember(entry, known, inside_helper=inside_helper)
    elif isinstance(value, _ENTERED_WHOLE):
        yield from _remember(vars(value), known)
    elif hasattr(value, "__dict__") and not inside_helper and not _is_python_s_own(value):
        yield from _remember(vars(value), known, inside_helper=True)


def _remember_tensor(tensor: torch.Tensor) -> Iterator[Undo]:
    """Yields what gives a tensor its memory and numbers back, and the attributes that Opacus keeps of records there."""
    if isinstance(tensor, nn.Parameter):
        yield _refilling(vars(tensor), dict(vars(tensor)))
    if tensor.layout != torch.strided or tensor.device.type == "meta" or is_lazy(tensor):
        return
    memory = tensor.data
    content = memory.to("cpu", copy=True)

    def put_back() -> None:
        if type(memory) is torch.Tensor:  # of other kinds, as of sharded tensors, neither question has a plain answer
            # Averages of weights are used by exchanging the memory of the parameters.
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
            if torch.equal(memory.to("cpu"), content):  # expanded tensors, for one, cannot be written to
                return
        memory.copy_(content)  # not the tensor itself, of whose versions gradients under way take notice

    yield put_back


def _refilling(container: Any, held: Any) -> Undo:
    """Returns what makes a container hold again what it held."""

    def refill() -> None:
        container.clear()
        container.extend(held) if isinstance(container, list | deque) else container.update(held)

    return refill


def _calling(function: Callable[..., object], *arguments: Any) -> Undo:
    return lambda: function(*arguments)


def _is_python_s_own(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in sys.stdlib_module_names
