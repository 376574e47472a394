"""Runs networks without their wrappers, and restores them afterwards.

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
import gc
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from opacus_shuffle.core.opacus_compat import (
    WRAPPER_NAMES,
    WRAPPING_PACKAGES,
    forget_unfinished_passes,
)
from opacus_shuffle.core.randomness import SecretGenerator

Result = TypeVar("Result")
_WRAPPERS = re.compile(rf"^(?:(?:{'|'.join(WRAPPER_NAMES)})\.)+")
_CLOSED = (nn.Module, ModuleType, FunctionType, type, str, bytes)
"""Objects in which no tensors are searched."""


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the network inside of Opacus's, distributed and compiled wrappers."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    while any(kind.__module__.startswith(WRAPPING_PACKAGES) for kind in type(module).__mro__):
        inside = [child for name, child in module.named_children() if name in WRAPPER_NAMES]
        if len(inside) != 1:
            break
        module = inside[0]
    return module


def plain_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of wrappers."""
    return _WRAPPERS.sub("", name)


def without_graph(run: Callable[[], Result]) -> Result:
    """Returns the result of a run without a graph, unless the run itself computes gradients."""
    try:
        with torch.no_grad():
            return run()
    except RuntimeError:  # an error for another reason is raised again by the second run
        with torch.enable_grad():
            return run()


def seed_draws(seed: int) -> None:
    """Seeds the global random states of Python, NumPy, and PyTorch on the devices in use."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (networks may draw from the global one)
    # torch.manual_seed would also seed GPUs that are not in use yet.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def results(outputs: Any) -> list[torch.Tensor]:
    """Returns all tensors inside of a network's output, in no particular order."""
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # the references prevent that an identity is used again
    waiting = [outputs]
    while waiting:
        value = waiting.pop()
        # Caches of past keys and values only save work for the next call.
        cache = type(value).__module__ == "transformers.cache_utils"
        if id(value) in seen or cache or isinstance(value, _CLOSED):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        else:
            waiting += gc.get_referents(value)  # the contents of a container or another object
    return tensors


_UNNAMED = ("_modules", "_parameters", "_buffers")
"""Attributes of modules whose entries are named without the attribute."""
_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as its hooks."""


class Snapshot:
    """The state of networks, optimizers and other objects, which can be restored repeatedly.

    Args:
        *owners: Modules and optimizers with all their contents, or other objects with their
            attributes. Copies of tensors are on the CPU.
    """

    def __init__(self, *owners: Any) -> None:
        self._tensors: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._known: dict[int, Any] = {}  # the references prevent that an identity is used again
        for owner in owners:
            self._remember(owner, "")

    def restore(self) -> dict[str, bool]:
        """Restores the state.

        Returns:
            The names of the parameters, buffers and attributes that had changed, with whether they
            contain tensors.
        """
        changed: dict[str, bool] = {}
        for generator, state in self._generators:
            generator.set_state(state)
        for path, container, content in self._containers:
            now, before = _entries(container), _entries(content)
            keys = [key for key in now | before if now.get(key, now) is not before.get(key, before)]
            if keys:
                container.clear()
                getattr(container, "extend" if hasattr(container, "extend") else "update")(content)
            for key in keys:
                name, values = _name_of(path, key), [now.get(key), before.get(key)]
                tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(values))
                changed[name] = tensors or changed.get(name, False)
        for path, tensor, memory, content in self._tensors:
            # Averages of weights are used by exchanging the memory of the parameters. The tensor
            # itself is not written to, because that changes its version, which backward() checks.
            same = tensor.data_ptr() == memory.data_ptr()
            if not same or not torch.equal(memory.to("cpu"), content):
                tensor.data = memory
                memory.copy_(content)
                changed[path] = True
        for parameter, gradient in self._gradients:  # .grad is not in vars(parameter)
            parameter.grad = gradient
        return {name: tensors for name, tensors in changed.items() if "\0" not in name}

    def _remember(self, value: Any, path: str, *, inside: bool = False) -> None:
        """Stores the content of a value.

        Args:
            value: Any content of a network or an optimizer.
            path: The name of the value. It contains a null character if changes are not reported.
            inside: Whether the value belongs to an object that is neither module nor optimizer. Its
                references are not followed, because it may share the objects with others.
        """
        if id(value) in self._known:
            return
        self._known[id(value)] = value
        whole = isinstance(value, nn.Module | torch.optim.Optimizer)
        is_builtin = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter):  # Opacus adds attributes to it
                self._containers.append(("\0", vars(value), dict(vars(value))))
                self._gradients.append((value, value.grad))
                self._remember(value.grad, "\0")
            if value.layout == torch.strided and value.device.type != "meta" and not is_lazy(value):
                copied = value.data.to("cpu", copy=True)
                self._tensors.append((path, value, value.data, copied))
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, list | tuple | dict | set | deque):
            for key, entry in _entries(value).items():
                self._remember(entry, _name_of(path, key), inside=inside)
            if not isinstance(value, tuple):
                self._containers.append((path, value, value.copy()))
        # The state of a secret generator is not restored, which would repeat its stream.
        elif not isinstance(value, SecretGenerator) and (
            whole or (hasattr(value, "__dict__") and not inside and not is_builtin)
        ):
            self._remember(vars(value), path, inside=not whole)


def _entries(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _name_of(path: str, key: Any) -> str:
    """Returns the name of an entry of a container or of an object's attribute."""
    if not isinstance(key, str) or key in _UNNAMED:
        return path
    if key in _ATTRIBUTES:
        return "\0"
    return f"{path}.{key}" if path else key


@contextlib.contextmanager
def rolled_back(network: nn.Module, before: Snapshot | None = None) -> Iterator[dict[str, bool]]:
    """Restores a network after a block: tensors, modes, attributes, hooks and random states.

    Within the block, the network has no hooks of an earlier ``make_private``, which would record
    these runs, and no inputs that they have stored for a backward pass.

    Args:
        network: The network.
        before: A snapshot of its current state, if there is one.

    Yields:
        What :meth:`Snapshot.restore` returns, filled at the end of the block.
    """
    before, changed = before or Snapshot(network), dict[str, bool]()
    try:
        for handle in vars(network).pop("autograd_grad_sample_hooks", ()):
            handle.remove()
        forget_unfinished_passes(network)
        for module in network.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in list(hooks.items()):
                    home = str(getattr(hook, "__module__", ""))
                    if home.startswith("opacus_shuffle.") and not home.endswith(".position_ids"):
                        del hooks[key]
        with random_states_kept():
            yield changed
    finally:
        changed |= before.restore()


@contextlib.contextmanager
def rolled_back_if_refused(*owners: Any) -> Iterator[None]:
    """Restores modules, optimizers and other objects if the block raises an error.

    Args:
        *owners: As of :class:`Snapshot`.
    """
    before = Snapshot(*owners)
    try:
        yield
    except BaseException:
        before.restore()
        raise


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restores the random states of Python, NumPy and PyTorch, on devices in use, at the end."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  (others use the global one)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
