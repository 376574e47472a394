"""Following a network operation by operation: the tracer has every ATen operation of the forward labelled by its rule."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opacus_shuffle.networks.running import results
from opacus_shuffle.permutation.finding import (  # noqa: F401  (they register their rules)
    rules_algebra,
    rules_indexing,
    rules_layers,
    rules_order,
    rules_places,
    rules_shapes,
)
from opacus_shuffle.permutation.finding.draws import Draws
from opacus_shuffle.permutation.finding.labels import unify_dimensions
from opacus_shuffle.permutation.finding.liveness import SHAPES_ONLY, Event, depending, label_all, label_live
from opacus_shuffle.permutation.finding.paths import LEAVING, Paths, frames, place_of
from opacus_shuffle.permutation.finding.rules import find_rule
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun, bind
from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.network import kept_activations, plain_attention
from opacus_shuffle.permutation.operators import operator_of

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
RESTRIDE = (torch.ops.aten.as_strided, torch.ops.aten.as_strided_)
REPLACING = (torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_)
"""What gives a tensor another memory, or more of it."""

Strides = tuple[tuple[int, ...], tuple[int, ...], int]


class ReplacingError(Exception):
    """Raised where labels of what came before are needed at once, in a run of which nothing is to be labelled yet."""


class Tracer(InsightMode):
    """Tells a traced run every operation of a network.

    Args:
        network: The network.
        run: What is told.
        draws: Of a run before, from another random state: what is drawn again is a constant.

    Attributes:
        has_drawn: Whether the run has drawn.
        has_replaced: Whether it gave a tensor another memory.
        results: What it gave.
        kept: What modules keep of it.
    """

    def __init__(self, network: nn.Module, run: TracedRun, draws: Draws | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self._network = network
        self._parts = {id(part): name for name, part in network.named_modules() if name}
        self._draws = Draws() if draws is None else draws
        self._paused = False
        self._events: list[Event] = []
        self._reshaped: list[tuple[torch.Tensor, Strides, Strides]] = []  # in place: before and after
        self.has_drawn = self.has_replaced = False
        self.results: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self._kept: set[int] = set()
        # Fused kernels would make of a recurrent layer one operation that nobody can look into.
        self._recurrent = any(isinstance(each, nn.RNNBase) for each in network.modules())

    def trace(self, forward: Callable[[], Any]) -> Any:
        """Runs the forward, and then labels what its results depend on."""
        outputs = self.watch(forward)
        self.label()
        return outputs

    def watch(self, forward: Callable[[], Any], paths: Paths | None = None, *, alone: bool = True) -> Any:
        """Runs the forward, and notes what it does.

        ``paths`` watches, or decides, which way it goes. Unless it may be labelled ``alone``, nothing is labelled yet, not even
        where an operation gives a tensor another memory: such a run ends in a :class:`ReplacingError`.
        """
        self._events, self._reshaped, self._alone, self.has_drawn, self.has_replaced = [], [], alone, False, False
        self.run.traces += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before the flags are set: PyTorch warns of Intel GPUs when they are
            with (
                plain_attention(),
                torch.backends.mkldnn.flags(enabled=not self._recurrent),
                torch.backends.cudnn.flags(enabled=not self._recurrent),
                _Leaving(self),
                self,
                contextlib.nullcontext() if paths is None else paths,
            ):
                outputs = forward()
        self.results, self.kept, self._buffers = results(outputs), kept_activations(self._network), [*self._network.buffers()]
        return outputs

    def label(self) -> None:
        """Labels what the results of the run that was watched depend on."""
        self._kept = {id(tensor) for tensor in self.kept}
        known = [*self._network.parameters(), *self._buffers]
        with self._as_before() as events:
            rest = label_live(events, [*self.results, *self.kept, *self._buffers], known)
            unreached = {name: self.run.tensors[name] for name in self.run.unreached()}
            if unreached:
                self.run.unused.label(depending(rest, unreached), self.run.occurrences, self.run.dimensions)

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[list[Event]]:
        """Gives what happened so far, to be labelled inside: there, tensors have the shapes that they had before all of it."""
        events, reshaped = self._events, self._reshaped
        self._events, self._reshaped = [], []
        for tensor, before, _ in reversed(reshaped):
            _restride(tensor, before)
        try:
            yield events
        finally:
            for tensor, _, after in reshaped:
                _restride(tensor, after)

    def note(self, event: Event) -> None:
        """Notes what is to be labelled in the end."""
        self._events.append(event)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves untraced what runs inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Notes what an operation did."""
        strides = args[0].stride() if func.overloadpacket in RESTRIDE else None
        operator = operator_of(func)
        state = self._draws.state(args, kwargs) if operator.draws else None
        self.has_drawn |= operator.draws
        reshapes = operator.reshapes
        if reshapes and func.overloadpacket in REPLACING:
            self.has_replaced = True
            if not self._alone:
                raise ReplacingError(operator.name)
            with self.outside(), self._as_before() as events:  # its memory is another one from here on
                label_all(events)
        before = _strides(args[0]) if reshapes else None
        result = self.go_on(func, args, kwargs)
        if before is not None and func.overloadpacket not in REPLACING:
            after = _strides(args[0])
            self._reshaped.append((args[0], before, after))
            self.note(Event([], [], lambda: _restride(args[0], after), matters=True))
        if strides is not None and _same_entries(args, strides):
            if result is not args[0]:
                self.note(Event(args[:1], [result], lambda: self.run.copy_labels(result, args[0])))
        elif not self._paused:
            call = bind(func, args, kwargs, result)
            inputs = [] if call.name in SHAPES_ONLY else call.inputs
            matters = bool(call.written) or not call.outputs
            self.note(Event(inputs, call.outputs, lambda: self._label(call, state), self._cause(func), matters, call.unread))
        return result

    def _cause(self, func: Any) -> str:
        """Says which operation it is, of which part of the network and at which line of code."""
        part = next((name for each in frames() if (name := self._parts.get(id(each.f_locals.get("self"))))), "")
        return f"{place_of(func, outside=True)}" + (f" of {part}" if part else "")

    def _label(self, call: Call, state: bytes | None) -> None:
        self.run.follow(call)
        self.run.label(call, find_rule(call))
        # A mask that is drawn once and kept is noise no more.
        constant = state is not None and self._draws.is_constant(state)
        self.run.stay(call.outputs if constant else [tensor for tensor in call.outputs if id(tensor) in self._kept])


class _Leaving(TorchFunctionMode):
    """Notices tensors that become arrays or lists, or show what others do: no operation of PyTorch tells of it."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVING and isinstance(args[0], torch.Tensor):
            way = f"Tensor.{func.__name__}"
            label = functools.partial(self._tracer.run.leaves, args[0], way)
            self._tracer.note(Event(args[:1], [], label, str(place_of(way)), matters=True))
        if func == SET_DATA:
            label = functools.partial(_show, self._tracer.run, *args)
            self._tracer.note(Event(args, [], label, str(place_of("Tensor.data")), matters=True))
        return func(*args, **(kwargs or {}))


def _show(run: TracedRun, tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Labels a tensor that was given the memory of another one (``tensor.data = source``)."""
    if tensor.shape == source.shape:
        unify_dimensions(run.dimensions(tensor), run.dimensions(source))
    else:
        run.fix([tensor, source])
    run.use([source])
    run.choices.forget([tensor])


def _strides(tensor: torch.Tensor) -> Strides:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _restride(tensor: torch.Tensor, strides: Strides) -> None:
    """Has a tensor show its memory in another shape."""
    with torch.no_grad():
        tensor.as_strided_(*strides)


def _same_entries(args: Sequence[Any], strides: Sequence[int]) -> bool:
    """Returns whether ``as_strided`` of a tensor of these strides changed nothing but the memory order of axes of size 1."""
    source, size, stride = args[:3]
    offset = args[3] if len(args) > 3 and args[3] is not None else source.storage_offset()
    return (
        tuple(size) == tuple(source.shape)
        and offset == source.storage_offset()
        and all(stride[dim] == strides[dim] for dim, each in enumerate(size) if each > 1 and dim < len(strides))
    )
