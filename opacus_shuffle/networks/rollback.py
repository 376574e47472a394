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

from opacus_shuffle.networks.running import ATTRIBUTES

Undo = Callable[[], list[str]]
"""Puts something back, and returns the names of what had changed."""

_ENTERED_WHOLE = (nn.Module, torch.optim.Optimizer)
"""What is followed wherever it is met; of other objects only those that these hold themselves, which may be others'."""
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_TABLES = ("_modules", "_parameters", "_buffers")
"""Attributes of modules whose entries have the names that users know."""


@contextlib.contextmanager
def rolled_back(network: nn.Module) -> Iterator[list[str]]:
    """A block after which a network is as it was: its tensors, modes, attributes and hooks, and all random states.

    In the block it has no hooks of an earlier ``make_private``, which would note what is run there.

    Yields:
        A list, filled at the end of the block: the names of the parameters, buffers and attributes
        that it had changed.
    """
    undo = list(_remember(network, {}, ""))
    changed: list[str] = []
    try:
        _take_off_hooks(network)
        with random_states_kept():
            yield changed
    finally:
        for put_back in undo:
            changed += put_back()


def _take_off_hooks(network: nn.Module) -> None:
    """Removes the hooks of Opacus and of this package, but for those of ``prepare_model``, which are the user's own."""
    for handle in vars(network).pop("autograd_grad_sample_hooks", ()):
        handle.remove()
    for module in network.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                home = str(getattr(hook, "__module__", ""))
                if home.startswith("opacus_shuffle.") and not home.endswith(".position_ids"):
                    del hooks[key]


@contextlib.contextmanager
def rolled_back_if_refused(*owners: Any) -> Iterator[None]:
    """Puts modules, optimizers and other objects back as they were if the block raises.

    Args:
        *owners: A module or an optimizer with all that is inside of it, or any other object with
            its attributes. None is skipped. Tensors are kept on the CPU meanwhile.
    """
    known: dict[int, Any] = {}
    undo: list[Callable[[], object]] = []
    for owner in owners:
        undo += _remember(owner, known, None)
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


def _remember(
    value: Any, known: dict[int, Any], place: str | None, *, inside_helper: bool = False
) -> Iterator[Undo]:
    """Yields what puts a value back, and what it contains.

    Args:
        value: Anything that a network or an optimizer may hold.
        known: What has been met, by identity; held, so that no identity is given anew.
        place: The name of the value; None if nobody asks whether it has changed, as with hooks.
        inside_helper: Whether an object that is neither module nor optimizer holds it: what it
            refers to is not followed.
    """
    if (
        value is None
        or isinstance(value, bool | int | float | str | type | ModuleType)
        or id(value) in known
    ):
        return
    known[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield from _remember_tensor(value, place)
    elif isinstance(value, random.Random):
        yield _calling(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        yield _calling(value.bit_generator.__setattr__, "state", value.bit_generator.state)
    elif isinstance(value, np.random.RandomState | torch.Generator):
        yield _calling(value.set_state, value.get_state())
    elif type(value) in _CONTAINERS or isinstance(value, tuple):
        entries = value.items() if isinstance(value, dict) else [(None, entry) for entry in value]
        for key, entry in list(entries):
            yield from _remember(entry, known, _name_of(place, key), inside_helper=inside_helper)
        if not isinstance(value, tuple):
            yield _refilling(value, value.copy(), place)
    elif isinstance(value, _ENTERED_WHOLE):
        yield from _remember(vars(value), known, place)
    elif hasattr(value, "__dict__") and not inside_helper and not _is_python_s_own(value):
        yield from _remember(vars(value), known, place, inside_helper=True)


def _name_of(place: str | None, key: Any) -> str | None:
    """Returns the name of an entry of a container or of an object's attribute."""
    if place is None or key is None or key in _TABLES:
        return place
    if key in ATTRIBUTES:
        return None
    return f"{place}.{key}" if place else str(key)


def _remember_tensor(tensor: torch.Tensor, place: str | None) -> Iterator[Undo]:
    """Yields what gives a tensor its memory and numbers back, and a parameter the attributes that Opacus adds."""
    if isinstance(tensor, nn.Parameter):
        yield _refilling(vars(tensor), dict(vars(tensor)), None)
    if tensor.layout != torch.strided or tensor.device.type == "meta" or is_lazy(tensor):
        return
    memory = tensor.data
    content = memory.to("cpu", copy=True)

    def put_back() -> list[str]:
        if (
            type(memory) is torch.Tensor
        ):  # of other kinds, as of sharded tensors, neither question has a plain answer
            # Averages of weights are used by exchanging the memory of the parameters.
            if exchanged := tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
            if torch.equal(
                memory.to("cpu"), content
            ):  # expanded tensors, for one, cannot be written to
                return [place] if exchanged and place else []
        memory.copy_(
            content
        )  # not the tensor itself, of whose versions gradients under way take notice
        return [place] if place else []

    yield put_back


def _refilling(container: Any, held: Any, place: str | None) -> Undo:
    """Returns what makes a container hold again what it held."""

    def refill() -> list[str]:
        changed: list[str | None] = []
        if isinstance(held, dict):
            keys = [
                key
                for key in container.keys() | held.keys()
                if container.get(key, held) is not held.get(key, held)
            ]
            changed = [_name_of(place, key) for key in keys]
        elif list(map(id, container)) != list(map(id, held)):
            changed = [place]
        container.clear()
        container.extend(held) if isinstance(container, list | deque) else container.update(held)
        return [name for name in changed if name]

    return refill


def _calling(function: Callable[..., object], *arguments: Any) -> Undo:
    def call() -> list[str]:
        function(*arguments)
        return []

    return call


def _is_python_s_own(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in sys.stdlib_module_names
