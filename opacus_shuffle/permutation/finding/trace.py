"""Following a network operation by operation: the tracer has every ATen operation of the forward labelled by its rule."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opacus_shuffle.networks.running import results
from opacus_shuffle.permutation.finding import (  # noqa: F401  (they register their rules)
    rules_indexing,
    rules_layers,
    rules_places,
    rules_shapes,
)
from opacus_shuffle.permutation.finding.control_flow import ControlFlow, line_of, network_frames
from opacus_shuffle.permutation.finding.labels import because
from opacus_shuffle.permutation.finding.rules import find_rule
from opacus_shuffle.permutation.finding.traced_run import TracedRun, bind
from opacus_shuffle.permutation.network import plain_attention, recomputed_weights

LEAVING = (
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__),
    *(
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__reduce_ex__,
    ),
)
"""Methods by which a tensor's values leave PyTorch, to be read where nothing can follow them."""

SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
RESTRIDE = (torch.ops.aten.as_strided, torch.ops.aten.as_strided_)
REPLACING = (torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_)
"""What gives a tensor another memory, or more of it."""


class Tracer(ControlFlow):  # type: ignore[no-untyped-call]
    """Tells a traced run every operation of a network.

    Args:
        network: The network.
        run: What is told.
        varying, otherwise, always: As of :class:`ControlFlow`; parameters and buffers vary, too.
    """

    def __init__(
        self,
        network: nn.Module,
        run: TracedRun,
        varying: Iterable[torch.Tensor] = (),
        otherwise: Collection[str] = (),
        *,
        always: bool = False,
    ) -> None:
        super().__init__(
            [*varying, *network.parameters(), *network.buffers()], otherwise, always=always
        )
        self.run = run
        self._network = network
        self._parts = {id(part): name for name, part in network.named_modules() if name}
        self._paused = False

    def trace(self, forward: Callable[[], Any]) -> None:
        """Runs the forward, labels what it does, and fixes its results and whatever else outlives it."""
        # Fused kernels would make of a recurrent layer one operation that nobody can look into.
        recurrent = any(isinstance(part, nn.RNNBase) for part in self._network.modules())
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # before the flags are set: PyTorch warns of Intel GPUs when they are
            with (
                plain_attention(),
                torch.backends.mkldnn.flags(enabled=not recurrent),
                torch.backends.cudnn.flags(enabled=not recurrent),
                _Leaving(self.run),
                self,
            ):
                outputs = forward()
        with because("an output of the network"):
            self.run.fix(results(outputs))
        # What is left when nobody refers to the results is kept by something for later: for a loss,
        # or for the next call.
        del outputs
        gc.collect()
        with because("an activation that is kept after the pass"):
            self.run.fix_survivors([*self._network.buffers(), *recomputed_weights(self._network)])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves untraced what runs inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        strides = args[0].stride() if func.overloadpacket in RESTRIDE else None
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not self._paused:
            with because(self._cause(func)):
                self._label(func, args, kwargs or {}, result, strides)
        return result

    def _label(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        strides: Sequence[int] | None,
    ) -> None:
        """Labels what an operation returned; ``strides`` are those of the operand of ``as_strided`` before it."""
        if strides is not None and _same_entries(args, strides):
            if result is not args[0]:
                self.run.copy_labels(result, args[0])
            return
        call = bind(func, args, kwargs, result)
        self.run.follow(call)
        self.run.label(call, find_rule(call))
        if (
            kwargs.get("generator") is not None
        ):  # somebody's own, which may be seeded alike before every pass
            self.run.stay(call.outputs)
        if func.overloadpacket in REPLACING:
            self.run.forget(args[0])
            self.run.fix(args[:1])

    def _cause(self, func: Any) -> str:
        """Says which operation it is, of which part of the network and at which line of code."""
        parts = (self._parts.get(id(frame.f_locals.get("self"))) for frame in network_frames())
        part = next(filter(None, parts), "")
        return f"{line_of(func)}" + (f" of {part}" if part else "")


class _Leaving(TorchFunctionMode):
    """Notices tensors that become arrays or lists, or show what others do: no operation of PyTorch tells of it."""

    def __init__(self, run: TracedRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVING and isinstance(args[0], torch.Tensor):
            way = f"Tensor.{func.__name__}"
            with because(line_of(way)):
                self._run.leaves(args[0], way)
        if func == SET_DATA:
            with because(line_of("Tensor.data")):
                self._run.show(*args)
        return func(*args, **(kwargs or {}))


def _same_entries(args: Sequence[Any], strides: Sequence[int]) -> bool:
    """Returns whether ``as_strided`` of a tensor of these strides changed nothing but the memory order of axes of size 1."""
    source, size, stride = args[:3]
    offset = args[3] if len(args) > 3 and args[3] is not None else source.storage_offset()
    return (
        tuple(size) == tuple(source.shape)
        and offset == source.storage_offset()
        and all(
            stride[dim] == strides[dim]
            for dim, count in enumerate(size)
            if count > 1 and dim < len(strides)
        )
    )
