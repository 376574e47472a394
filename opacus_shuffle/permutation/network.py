"""Handling a network as it is found: out of its wrappers, run without a trace left, its results apart from its caches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from opacus_shuffle.core.opacus_compat import WRAPPER_NAMES, WRAPPING_PACKAGES
from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.operators import operator_of

Result = TypeVar("Result")
_WRAPPERS = re.compile(rf"^(?:(?:{'|'.join(WRAPPER_NAMES)})\.)+")


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
    """Returns a parameter's name without what wrappers have put before it."""
    return _WRAPPERS.sub("", name)


UNCOMPILED = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""The flag by which PyTorch has ``flex_attention`` run without a compiler, which would hide it."""


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Has attention computed as the plain operations that it consists of, without fused kernels."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    flexible = sys.modules.get("torch.nn.attention.flex_attention")
    compiled = getattr(flexible, UNCOMPILED, None)
    if compiled is not None:
        setattr(flexible, UNCOMPILED, True)
    try:
        with sdpa_kernel(SDPBackend.MATH), _PlainAttention():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        if compiled is not None:
            setattr(flexible, UNCOMPILED, compiled)


class _PlainAttention(TorchFunctionMode):
    """Computes each attention plainly, also where a network asks for fused kernels."""

    FUSED = (torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.multi_head_attention_forward)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.FUSED:
            return func(*args, **(kwargs or {}))
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **(kwargs or {}))


def without_graph(run: Callable[[], Result]) -> Result:
    """Returns what a run gives that notes nothing for gradients; if it takes gradients itself, it runs again, and may note."""
    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return run()


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


def python_random_states() -> tuple[Any, ...]:
    """Returns the global random states of Python and of NumPy, such that equal ones are equal."""
    numpy_state: Any = np.random.get_state(legacy=False)["state"]  # type: ignore[call-overload] # noqa: NPY002
    return random.getstate(), numpy_state["key"].tobytes(), numpy_state["pos"]


LOWEST, HIGHEST = 0, 0x12DD9BB3
"""Words of a random state that make the lowest and the highest draw (the second is what tempering makes 2³² − 1 of)."""


def seed_python(seed: int) -> None:
    """Seeds Python and NumPy; with -1 and -2 their first draws are the lowest or the highest that there are."""
    version, (*words, _), gauss = random.Random(seed).getstate()
    if seed < 0:
        words[:32] = [LOWEST if seed == -1 else HIGHEST] * 32
    random.setstate((version, (*words, 0 if seed < 0 else len(words)), gauss))
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))  # noqa: NPY002


def seed_draws(seed: int) -> None:
    """Seeds PyTorch's draws where there are any: ``torch.manual_seed`` would also seed GPUs that are yet to be used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def state_kept(network: nn.Module) -> Iterator[None]:
    """Restores random states, tensors that it writes to, the mode of every module and its other attributes at the end."""
    modes = [(each, each.training) for each in network.modules()]
    tables: list[Any] = [own for each in network.modules() for own in (each._buffers, each._parameters, each._modules)]
    held = [(own, own.copy()) for own in tables if isinstance(own, dict)]
    buffers = [
        (buffer, buffer.detach().clone())
        for buffer in network.buffers()
        if buffer.device.type != "meta" and buffer.layout == torch.strided
    ]
    seen: set[int] = set()
    attributes = [(vars(each), _plain_attributes(each, seen)) for each in network.modules()]
    written = _Written(network)
    try:
        with random_states_kept(), written:  # type: ignore[attr-defined]
            yield
    finally:
        written.take_back()
        for own, earlier in attributes:
            for name in [name for name in own if name not in earlier and name not in ATTRIBUTES]:
                del own[name]
            own.update({name: value for name, (value, _) in earlier.items()})
            for _, refill in earlier.values():
                refill()
        for each, training in modes:
            each.training = training
        for own, before in held:
            for name in own.keys() - before.keys():
                del own[name]
            own.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class _Written(InsightMode):
    """Keeps what parameters are before a forward pass writes to them, as averages of other ones may have it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shown = [(parameter, parameter.data) for parameter in network.parameters()]
        self._memories = {storage(data) for _, data in self._shown} - {0}
        self._before: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Keeps what an operation is about to write to."""
        if (operator := operator_of(func)).written:
            given = dict(zip(operator.arguments, args, strict=False)) | kwargs
            changed = [given.get(name) for name in operator.written]
            for memory in {storage(tensor) for tensor in tensors_in(changed)} & self._memories - self._before.keys():
                with self.outside():
                    self._before[memory] = [(data, data.clone()) for _, data in self._shown if storage(data) == memory]
        return self.go_on(func, args, kwargs)

    def take_back(self) -> None:
        """Has parameters be what they were, and where they were."""
        for data, content in itertools.chain(*self._before.values()):
            data.copy_(content)
        for parameter, data in self._shown:
            if storage(parameter) != storage(data):
                parameter.data = data


ATTRIBUTES = frozenset(vars(nn.Module()))
"""What all modules have; hooks among them."""

CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


def _plain_attributes(module: nn.Module, seen: set[int]) -> dict[str, tuple[Any, Callable[[], object]]]:
    """Returns a module's own attributes, and what puts back what those contained that are containers, tensors or helpers."""
    return {name: (value, _kept(value, seen)) for name, value in vars(module).items() if name not in ATTRIBUTES}


def _kept(value: Any, seen: set[int], *, helpers: bool = True) -> Callable[[], object]:
    """Returns what puts back into a container what it contains now, also inside of what it contains, and into a tensor.

    Other objects get their attributes back, unless they are Python's own, or held by such ``helpers``: those may be others'.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return lambda: None
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta":
        content = value.detach().clone()
        return lambda: None if torch.equal(value, content) else _overwrite(value, content)
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if id(value) in seen:
        return lambda: None
    if helpers and not isinstance(value, CLOSED) and type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
        seen.add(id(value))
        return _kept(getattr(value, "__dict__", None), seen, helpers=False)
    if type(value) not in CONTAINERS:
        return lambda: None
    seen.add(id(value))
    held = value.copy()
    inside = [_kept(each, seen, helpers=helpers) for each in (held.values() if isinstance(held, dict) else held)]

    def refill() -> None:
        value.clear()
        value.extend(held) if isinstance(value, list | deque) else value.update(held)
        for each in inside:
            each()

    return refill


def _overwrite(tensor: torch.Tensor, content: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(content)


CACHES = ("past_key_values", "cache_params")
"""Results of Hugging Face models that only save work for the next call."""

CLOSED = (torch.Tensor, nn.Module, ModuleType, bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)
"""What is not looked into for tensors."""


def results(outputs: Any) -> list[torch.Tensor]:
    """Returns the tensors in what a network returned, wherever they are, but for caches of past keys and values."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    waiting = [outputs]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        if each is None or isinstance(each, CLOSED) or id(each) in seen:
            continue
        if any(kind.__module__ == "transformers.cache_utils" for kind in type(each).__mro__):
            continue
        seen[id(each)] = each
        if isinstance(each, Mapping):
            waiting += [value for name, value in each.items() if name not in CACHES]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            waiting += list(each)
        else:
            slots = [getattr(kind, "__slots__", ()) for kind in type(each).__mro__]
            names = [name for slot in slots for name in ([slot] if isinstance(slot, str) else slot)]
            waiting += [getattr(each, name, None) for name in [*getattr(each, "__dict__", ()), *names] if name not in CACHES]
    return found[::-1]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in the arguments or results of an operation: lists at most, for which a general tree takes long."""
    found: list[torch.Tensor] = []
    _collect((values,), found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, _SEQUENCES):
            _collect(each, found)
        elif isinstance(each, dict):
            _collect(each.values(), found)


_SEQUENCES = (list, tuple)


def storage(tensor: torch.Tensor) -> int:
    """Returns where the tensor's memory begins, or 0 if it has none of its own."""
    try:
        with torch._C.DisableTorchFunction():  # to look at it here is no use of it by the network
            return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def kept_activations(network: nn.Module) -> list[torch.Tensor]:
    """Returns the tensors that the modules keep as plain attributes after a run; a loss may read them."""
    attributes = [
        value
        for module in network.modules()
        for name, value in vars(module).items()
        if name not in ATTRIBUTES
        # What torch.nn.utils computes a weight into.
        and not {f"{name}_g", f"{name}_orig"} & {key for key, _ in module.named_parameters(recurse=False)}
    ]
    return [leaf for leaf in tree_leaves(attributes) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)]


def movable_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters, and buffers that a checkpoint holds: numbers and masks, but no indices."""
    yield from module.named_parameters(remove_duplicate=False)
    for place, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            kept = name not in getattr(part, "_non_persistent_buffers_set", ())
            numbers = buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool
            if kept and numbers and buffer.dim() and buffer.layout == torch.strided:
                yield f"{place}.{name}" if place else name, buffer


def require_ready(network: nn.Module) -> None:
    """Refuses by name parameters that do not exist yet, or share memory so that they cannot be moved one by one."""
    parameters = dict(network.named_parameters())
    tensors = parameters | dict(network.named_buffers())
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ValueError(f"module: {name} is not initialised yet: run the network once before")
    require_apart(tensors, set(parameters))


def require_apart(tensors: Mapping[str, torch.Tensor], moving: Collection[str]) -> None:
    """Refuses by name tensors that would move and share memory with others, or with themselves."""
    spans: list[tuple[int, int, str]] = []
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in seen or not tensor.numel() or tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        seen.add(id(tensor))
        axes = list(zip(tensor.shape, tensor.stride(), strict=True))
        if name in moving and any(stride == 0 and size > 1 for size, stride in axes):
            raise ValueError(f"module: {name} is an expanded tensor, whose entries share memory: clone it")
        span = sum((size - 1) * abs(stride) for size, stride in axes)
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size(), name))
    spans.sort()
    for place, (_, stop, one) in enumerate(spans):
        for start, _, other in spans[place + 1 :]:
            if start >= stop:
                break
            if one in moving or other in moving:
                raise ValueError(f"module: {one} and {other} share memory without being the same tensor: untie them")
