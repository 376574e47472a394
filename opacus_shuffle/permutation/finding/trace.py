"""Follows a network operation by operation, and records where Python reads values.

A run shows one path through the network. A line at which PyTorch gives a value to Python
(``if x.sum() < 0``, the number of an expert) may lead to another path on other inputs, so these
lines are recorded.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opacus_shuffle.networks.running import results
from opacus_shuffle.permutation.finding.axes import fixing_cause
from opacus_shuffle.permutation.finding.rules import find_rule
from opacus_shuffle.permutation.finding.traced_run import TracedRun, bind
from opacus_shuffle.permutation.network import FastMode, plain_operations, tensors_in

DRIVER = "opacus_shuffle.permutation.find"
"""The module that runs networks. Its callers do not belong to the network."""

EXPORTING = (
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
)
"""Methods that export values from PyTorch, or into other tensors, without an operation."""

_AS_STRIDED = torch.ops.aten.as_strided_.default
_LIBRARY = re.compile(r"(opacus_shuffle|torch(?!\.nn\.))\b")
"""Modules whose lines do not belong to the network."""


class Tracer(FastMode):  # type: ignore[no-untyped-call]
    """Reports every operation of a network to a traced run.

    Args:
        network: The network.
        run: The run that records what the operations do to axes.

    Attributes:
        reads: The lines at which Python reads a value, in order of their first use.
        shapes: Shapes of the network's results.
    """

    def __init__(self, network: nn.Module, run: TracedRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self.reads: dict[str, None] = {}
        self.shapes: list[torch.Size] = []
        self._network = network
        self._names = {id(module): name for name, module in network.named_modules() if name}

    def trace(self, forward: Callable[[], Any]) -> None:
        """Runs the forward pass, and fixes its results and all activations that are kept."""
        collecting = gc.isenabled()
        gc.disable()  # keeps all objects of the pass in the youngest generation
        try:
            with warnings.catch_warnings():
                # PyTorch warns about Intel GPUs when the flags below are set.
                warnings.simplefilter("ignore")
                with plain_operations(self._network), _ExportWatcher(self), self:
                    outputs = forward()
            with fixing_cause("an output of the network"):
                tensors = results(outputs)
                self.shapes = [tensor.shape for tensor in tensors]
                self.run.fix(tensors)
            # Activations that still exist without the results are kept for a loss or the next call.
            del outputs, tensors
            gc.collect(0)
        finally:
            if collecting:
                gc.enable()
        with fixing_cause("an activation that is kept after the pass"):
            self.run.fix_kept_activations(self._network.buffers())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in(*args, *kwargs.values())
        restrided = func is _AS_STRIDED
        before = _layout(args[0]) if restrided else None
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        # ``adaptive_avg_pool2d`` uses it only to change the strides of axes of size 1.
        if not (restrided and _layout(result) == before):
            with fixing_cause(lambda: self._cause(func)):
                call = bind(func, args, kwargs, inputs, outputs)
                self.run.apply(call, find_rule(call))
                if (
                    kwargs.get("generator") is not None
                ):  # which may have the same seed in every pass
                    self.run.stay(outputs)
        if torch.Tag.data_dependent_output in func.tags:
            self.reads[line_of(func)] = None
        return result

    def _cause(self, func: Any) -> str:
        """Returns the operation, its line of code and the module that called it."""
        names = (self._names.get(id(frame.f_locals.get("self"))) for frame in network_frames())
        name = next(filter(None, names), "")
        return f"{line_of(func)}" + (f" of {name}" if name else "")


class _ExportWatcher(TorchFunctionMode):
    """Fixes tensors whose values leave PyTorch, where they cannot be traced."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EXPORTING:
            name = f"Tensor.{func.__name__}"
            with fixing_cause(line_of(name)):
                self._tracer.run.fix_unknown(tensors_in(args), name)
        return func(*args, **(kwargs or {}))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the shape, offset and strides of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.shape, tensor.storage_offset(), [step for size, step in steps if size > 1]


def network_frames() -> Iterator[FrameType]:
    """Yields the frames of the network's code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) != DRIVER:
        if not _is_library(name):
            yield frame
        frame = frame.f_back


@functools.cache
def _is_library(name: str) -> bool:
    return _LIBRARY.match(name) is not None


def line_of(operation: Any) -> str:
    """Returns the innermost line of the network's code, outside of PyTorch if there is one."""
    name = operation if isinstance(operation, str) else operation.overloadpacket.__name__
    frames = list(network_frames())
    user_frames = (
        frame for frame in frames if not str(frame.f_globals.get("__name__")).startswith("torch.")
    )
    if (frame := next(user_frames, frames[0] if frames else None)) is None:
        return f"? ({name})"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({name})"
