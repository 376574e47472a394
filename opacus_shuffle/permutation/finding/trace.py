"""Following a network operation by operation, with other answers where values decide.

Permutations have to keep the function on every input, and a run shows one way through the network
alone. So each line at which a value is read (``if x.sum() < 0``, the number of an expert, a mask
that chooses) is noted; :mod:`~opacus_shuffle.permutation.find` runs the network once more for each
of them, with another answer there.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from opacus_shuffle.networks.running import results
from opacus_shuffle.permutation.finding.axes import because
from opacus_shuffle.permutation.finding.rules import find_rule
from opacus_shuffle.permutation.finding.traced_run import TracedRun, bind
from opacus_shuffle.permutation.network import plain_operations, tensors_in

MOST_ANSWERS = 64
"""How often a line is answered otherwise in one run: a loop until something is small must end."""

DRIVER = "opacus_shuffle.permutation.find"
"""The module that runs networks: its callers are not the network."""

LEAVING = (
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
"""Methods by which values leave PyTorch, or show up elsewhere, without an operation that tells."""

_PLUMBING = re.compile(r"(opacus_shuffle|torch(?!\.nn\.))\b")
"""Modules whose lines say nothing about what a network does."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a traced run every operation of a network, and answers otherwise at some lines.

    Args:
        network: The network.
        run: What is told.
        inputs: Tensors whose values vary, as those of parameters and buffers do. What is computed
            from them varies, and so does noise.
        otherwise: Lines at which to answer otherwise where a value that varies is read: no for yes,
            another number, all entries for those that a mask chose.
        always: Whether to answer yes everywhere else, and have every mask choose all entries.

    Attributes:
        decisions: The lines at which such values decided, each with whether they were yes or no.
        shapes: Shapes of the network's results.
    """

    def __init__(
        self,
        network: nn.Module,
        run: TracedRun,
        inputs: Iterable[torch.Tensor] = (),
        otherwise: Collection[str] = (),
        *,
        always: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self.decisions: dict[str, bool] = {}
        self.shapes: list[torch.Size] = []
        self._network, self._otherwise, self._always = network, otherwise, always
        self._parts = {id(part): name for name, part in network.named_modules() if name}
        self._answered = Counter[str]()
        run.vary([*inputs, *network.parameters(), *network.buffers()])

    def trace(self, forward: Callable[[], Any]) -> None:
        """Runs the forward, follows it, and fixes its results and whatever else outlives it."""
        collecting = gc.isenabled()
        gc.disable()  # so that all that the pass makes is young at its end
        try:
            with warnings.catch_warnings():
                # Before the flags are set: PyTorch warns of Intel GPUs when they are.
                warnings.simplefilter("ignore")
                with plain_operations(self._network), _Leaving(self), self:
                    outputs = forward()
            with because("an output of the network"):
                tensors = results(outputs)
                self.shapes = [tensor.shape for tensor in tensors]
                self.run.fix(tensors)
            # What is left when nobody refers to the results is kept by something for later: for a
            # loss, or for the next call.
            del outputs, tensors
            gc.collect(0)
        finally:
            if collecting:
                gc.enable()
        with because("an activation that is kept after the pass"):
            self.run.fix_survivors(self._network.buffers())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in(args, kwargs)
        varies = torch.Tag.nondeterministic_seeded in func.tags or self.run.vary_any(inputs)
        if varies and torch.Tag.dynamic_output_shape in func.tags:
            args = self._choose(func, args)
        restrided = func is torch.ops.aten.as_strided_.default
        before = _layout(args[0]) if restrided else None
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        # As ``adaptive_avg_pool2d`` does, it may only change how axes of size 1 lie in memory.
        if not (restrided and _layout(result) == before):
            with because(lambda: self._cause(func)):
                call = bind(func, args, kwargs, inputs, outputs)
                self.run.apply(call, find_rule(call))
                if kwargs.get("generator") is not None:  # it may be seeded alike before every pass
                    self.run.stay(outputs)
        if varies:
            if torch.Tag.data_dependent_output in func.tags:
                return self._answer(line_of(func), result)
            self.run.vary(outputs)
        return result

    def _cause(self, func: Any) -> str:
        """Says which operation it is, of which part of the network and at which line of code."""
        parts = (self._parts.get(id(frame.f_locals.get("self"))) for frame in network_frames())
        part = next(filter(None, parts), "")
        return f"{line_of(func)}" + (f" of {part}" if part else "")

    def _answer(self, line: str, value: Any) -> Any:
        """Returns what reading a value gives: the value, or another where that is asked for."""
        yes_or_no = isinstance(value, bool)
        self.decisions[line] = self.decisions.get(line, True) and yes_or_no
        otherwise = line in self._otherwise
        if not (otherwise or (self._always and yes_or_no)) or not self._may_answer(line):
            return value
        if yes_or_no:
            return not value if otherwise else True
        return int(value == 0) if isinstance(value, int) else -value or 1.0

    def _choose(self, func: Any, args: Any) -> Any:
        """Returns an operation's arguments, with masks that choose all or none where asked for."""
        asks = func.overloadpacket is torch.ops.aten.nonzero
        masks = [
            mask for mask in tensors_in(args) if asks or mask.dtype in (torch.bool, torch.uint8)
        ]
        line = line_of(func)
        if masks:
            self.decisions.setdefault(line, False)
        if not masks or not (self._always or line in self._otherwise) or not self._may_answer(line):
            return args
        some = self._always or not all(bool(mask.all()) for mask in masks)
        filled = {id(mask): torch.full_like(mask, some) for mask in masks}
        return tree_map_only(torch.Tensor, lambda tensor: filled.get(id(tensor), tensor), args)

    def _may_answer(self, line: str) -> bool:
        self._answered[line] += 1
        return self._answered[line] <= MOST_ANSWERS


class _Leaving(TorchFunctionMode):
    """Fixes tensors whose values leave PyTorch, where nothing can follow them."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVING:
            name = f"Tensor.{func.__name__}"
            with because(line_of(name)):
                self._tracer.run.fix_unknown(tensors_in(args), name)
        return func(*args, **(kwargs or {}))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor's entries lie in its memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.shape, tensor.storage_offset(), [step for size, step in steps if size > 1]


def network_frames() -> Iterator[FrameType]:
    """Yields the frames of the network's code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) != DRIVER:
        if not _is_plumbing(name):
            yield frame
        frame = frame.f_back


@functools.cache
def _is_plumbing(name: str) -> bool:
    return _PLUMBING.match(name) is not None


def line_of(operation: Any) -> str:
    """Returns the innermost line of the network's code, outside of PyTorch if there is one."""
    name = operation if isinstance(operation, str) else operation.overloadpacket.__name__
    frames = list(network_frames())
    own = (
        frame for frame in frames if not str(frame.f_globals.get("__name__")).startswith("torch.")
    )
    if (frame := next(own, frames[0] if frames else None)) is None:
        return f"? ({name})"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({name})"
