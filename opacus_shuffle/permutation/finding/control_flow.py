"""Noticing where values decide what a network does next, and answering otherwise there.

Permutations have to keep the function on every input, and a run shows one way through the network
alone. So each line at which a value is read (``if x.sum() < 0``, the number of an expert, a mask
that chooses) is noted, and the network runs once more for each of them, with another answer there.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from opacus_shuffle.permutation.network import tensors_in

MOST_ANSWERS = 64
"""How often a line is answered otherwise in one run: a loop until something is small would never end."""

MOST_OPERATIONS = 100_000
"""How many operations a run with other answers may have: a loop that waits for a value might never end otherwise."""

DRIVER = "opacus_shuffle.permutation.find"
"""The module that runs networks: its callers are not the network."""

_PLUMBING = re.compile(r"(opacus_shuffle|torch(?!\.nn\.))\b")
"""Modules whose lines say nothing about what a network does."""


class ControlFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the lines at which values that vary decide, and answers otherwise at some of them.

    Args:
        varying: Tensors whose values vary: inputs, parameters, buffers. What is computed from them
            varies, and so does noise.
        otherwise: Lines at which to answer otherwise: no for yes, another number, all entries for
            those that a mask chose.
        always: Whether to answer yes everywhere else, and have every mask choose all entries.

    Attributes:
        decisions: The lines at which values decided, each with whether what it asked for was yes or
            no.
    """

    def __init__(
        self,
        varying: Iterable[torch.Tensor] = (),
        otherwise: Collection[str] = (),
        *,
        always: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decisions: dict[str, bool] = {}
        self._otherwise, self._always = otherwise, always
        self._answered = Counter[str]()
        self._operations = 0
        self._varying = WeakIdKeyDictionary()  # type: ignore[no-untyped-call]
        self._note(varying)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._operations += 1
        if (self._otherwise or self._always) and self._operations > MOST_OPERATIONS:
            raise RuntimeError(f"it went on for more than {MOST_OPERATIONS:,} operations")
        varies = torch.Tag.nondeterministic_seeded in func.tags
        varies = varies or any(tensor in self._varying for tensor in tensors_in((args, kwargs)))
        if varies and torch.Tag.dynamic_output_shape in func.tags:
            args = self._choose(func, args)
        result = func(*args, **kwargs)
        if varies and torch.Tag.data_dependent_output in func.tags:
            return self._answer(line_of(func), result)
        if varies:
            self._note(tensors_in(result))
        return result

    def _note(self, varying: Iterable[torch.Tensor]) -> None:
        for tensor in varying:
            self._varying[tensor] = True
            if tensor._base is not None:  # it was written to through a view
                self._varying[tensor._base] = True

    def _answer(self, line: str, value: Any) -> Any:
        """Returns what reading a value gives: the value, or something else where that is asked for."""
        self.decisions[line] = self.decisions.get(line, True) and isinstance(value, bool)
        if (
            line not in self._otherwise and not (self._always and isinstance(value, bool))
        ) or not self._may_answer(line):
            return value
        if line not in self._otherwise:
            return True
        if isinstance(value, bool):
            return not value
        return int(value == 0) if isinstance(value, int) else -value or 1.0

    def _choose(self, func: Any, args: Any) -> Any:
        """Returns an operation's arguments, with masks that choose all where that is asked for, or none if they chose all."""
        masks = [mask for mask in tensors_in(args) if _chooses(func, mask)]
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


def _chooses(func: Any, tensor: torch.Tensor) -> bool:
    """Returns whether an argument of an operation is a mask, or is asked for the places of its entries that are not zero."""
    return func.overloadpacket is torch.ops.aten.nonzero or tensor.dtype in (
        torch.bool,
        torch.uint8,
    )


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
    """Returns the innermost line of the network's code, outside of PyTorch if there is one, with an operation's name."""
    name = operation if isinstance(operation, str) else operation.overloadpacket.__name__
    frames = list(network_frames())
    own = (
        frame for frame in frames if not str(frame.f_globals.get("__name__")).startswith("torch.")
    )
    if (frame := next(own, frames[0] if frames else None)) is None:
        return f"? ({name})"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({name})"


def was_raised(error: BaseException) -> bool:
    """Returns whether a network's own code refused, with ``raise`` or ``assert``, rather than something that broke in it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    instructions = dis.get_instructions(trace.tb_frame.f_code)
    return any(
        step.offset == trace.tb_lasti and step.opname == "RAISE_VARARGS" for step in instructions
    )
