"""Noticing where values decide what a network does next, and having it go the other way, too.

Permutations have to keep the function on every input, and a run of the network shows one way through it alone.
:class:`Paths` notes each line of code that reads a value, or makes a tensor whose shape depends on values; and where it is told
to, it answers in place of the data.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import math
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from opacus_shuffle.permutation.finding.comparisons import Amount, Count, Noticing, noticed
from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.network import tensors_in
from opacus_shuffle.permutation.operators import operator_of
from opacus_shuffle.permutation.tensor_dict import TensorDict

Answer = bool | int | float | str
NONE, ALL = "none", "all"
"""Answers for a mask: that it chooses no entry, or every one."""

MOST_ANSWERS = 256
"""How many answers one place gets in a run at most: a loop until something is small would never end otherwise."""

COINS = 3
"""For how many reads of yes or no every combination of answers is tried: one line may read twice."""

MOST_OPERATIONS = 5_000
"""How many operations a run with answers may have, or 20 times those on the sample if more: endless loops end so."""

MOST_ENTRIES = 2**26
"""How many entries all tensors of a run on another input than the sample may have together, or 8 times those on the sample if
more: a number read from data, and answered with a million, may be a size."""

MOST_NUMBERS = 12
"""How many of the numbers that stand in the code around a place are tried at most."""

LONGEST_TEXT = 40
"""The longest text, in characters, in which such numbers are looked for."""

MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
"""Products whose shapes are computed here: PyTorch takes milliseconds for the shape of an operation alone."""

LEAVING = (
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__),
    *(torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__),
)
"""Methods by which a tensor's values leave PyTorch, to be read where nothing can follow them."""

PLUMBING = re.compile(r"(opacus_shuffle|torch(?!\.nn\.))\b")
"""Modules whose lines say nothing about what a network does."""

DRIVER = "opacus_shuffle.permutation.finding.exploring"
"""The module that runs networks: its callers are not the network."""


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A line of code at which values decide."""

    file: str
    line: int
    operation: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} ({self.operation})"


MASKS = Place("", 0, "every mask")
"""The place under which the answer stands for all masks that have none of their own."""


RANKED = Place("", 0, "every choice by rank")
"""The place by whose answer choices of the largest entry become each entry in turn, record by record."""

CHOOSING = frozenset(getattr(torch.ops.aten, name) for name in ("argmax", "argmin", "topk", "multinomial"))


class Paths(InsightMode):
    """Notes where values that vary from run to run decide what comes next.

    Args:
        varying: Tensors whose values vary: inputs, parameters, buffers. What is computed from them varies, and so does noise.
        answers: What to answer at some places, whatever the values are.
        coins: Answers everywhere yes or no by its bits, one per read, and at random after :data:`COINS`.
        most: How many operations there may be.
        most_entries: How many entries their results may have, once a number was read.

    Attributes:
        met: Per place the answers that were given.
        compared: Per place that compares sizes, those that it has compared, and with what.
        became: Per place at which sizes become something else (a text, a key, a plain number), which ones.
        spoken_of: Per place at which numbers were read or became something else, those that the code around speaks of.
        reads: How often one was given that may be yes or no.
        operations: How many there were.
        entries: How many entries their results had.
    """

    def __init__(
        self,
        varying: Iterable[torch.Tensor],
        answers: Mapping[Place, Answer] | None = None,
        *,
        coins: int | None = None,
        most: float = math.inf,
        most_entries: float = math.inf,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met: dict[Place, set[Answer]] = {}
        self.compared: dict[Place, set[tuple[Any, Any]]] = {}
        self.became: dict[Place, set[float]] = {}
        self.spoken_of: dict[Place, list[float]] = {}
        self.reads = self.operations = self.entries = 0
        self._most_entries, self._numbers_read = most_entries, False
        self._coins, self._random, self._most = coins, random.Random(coins), most
        self._answers = answers or {}
        self._given: Counter[Place] = Counter()
        self._varying: TensorDict[bool] = TensorDict()
        self._note(varying)
        self._noticing = Noticing(self._compares, self._reads)

    def __enter__(self) -> Any:
        self._noticing.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._noticing.__exit__(*error)

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what an operation returns, or what it is to answer."""
        self.operations += 1
        if self.operations > self._most:
            raise RuntimeError(f"it went on for more than {self._most} operations")
        if self._numbers_read and not func.is_view and self.entries + _entries(func, args, kwargs) > self._most_entries:
            raise RuntimeError(f"it would make tensors of more than {self._most_entries:,} entries")
        result = self.go_on(func, args, kwargs)
        if not func.is_view:
            self.entries += sum(tensor.numel() for tensor in tensors_in(result))
        operator = operator_of(func)
        if not operator.draws and not any(tensor in self._varying for tensor in tensors_in((args, kwargs))):
            return result
        if RANKED in self._answers and func.overloadpacket in CHOOSING:
            _choose_in_turn(args[0], result if isinstance(result, torch.Tensor) else result[1])
        elif operator.asks:
            result = self._answered(place_of(func), result)
        elif operator.counts:
            result = self._chosen(func, args, kwargs, result)
        self._note(tensors_in(result))
        return result

    def where(self, operation: str) -> str:
        """Returns an operation's name and the line that it is called in."""
        return str(place_of(operation))

    def _compares(self, operation: str, number: Count | Amount, other: Any, answer: bool | None) -> bool | None:
        """Returns what numbers compare as: what they do, or the answer for the place. None: they become something else."""
        place = place_of(operation)
        if answer is None:
            if not number.by_values:
                self.became.setdefault(place, set()).update(number.of)
                self._listen(place)
            return None
        if number.by_values or getattr(other, "by_values", False):
            return bool(self._answered(place, answer))
        of = number.of.union([float(number)], getattr(other, "of", ()))
        self.compared.setdefault(place, set()).add((of, other if other is None else float(other)))
        if place in self._answers and self._given[place] < MOST_ANSWERS:
            answer = bool(self._answers[place])
            self._given[place] += 1
        self.met.setdefault(place, set()).add(answer)
        return answer

    def _reads(self, way: str, tensor: torch.Tensor, value: Any) -> Any:
        """Returns what values leave PyTorch: what there are, or the answer for the place in each."""
        if tensor not in self._varying:
            return value
        if way == "item":
            return value if isinstance(value, bool) else noticed(value, by_values=True)
        place = place_of(f"Tensor.{way}")
        self.met.setdefault(place, set())
        self._listen(place)
        self._numbers_read = True
        is_array = isinstance(value, np.ndarray)
        first = next(iter(value.flat if is_array else tree_leaves(value)), None)
        if not isinstance(first, int | float | np.number | np.bool_):
            return value
        if place in self._answers and self._given[place] < MOST_ANSWERS:
            answer = self._answers[place]
            value = np.full_like(value, answer) if is_array else tree_map(lambda each: type(each)(answer), value)
            self._given[place] += 1
        self.met[place].add(float(first) if isinstance(first, float | np.floating) else int(first))
        return value if is_array else noticed(value, by_values=True)

    def _answered(self, place: Place, value: Any) -> Any:
        """Returns what a read gives: its value, or the answer for its place."""
        coin = self._coin() if isinstance(value, bool) and self._given[place] < MOST_ANSWERS else None
        if coin is not None:
            value = coin
            self._given[place] += 1
        elif place in self._answers and self._given[place] < MOST_ANSWERS:
            value = type(value)(self._answers[place])
            self._given[place] += 1
        self.met.setdefault(place, set()).add(value)
        if not isinstance(value, bool):
            self._numbers_read = True
            self._listen(place)
        return value

    def _chosen(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Returns what a mask chooses: what it says, or none or all where that is the answer for its place."""
        if not (masks := [leaf for leaf in tensors_in(args[1:] or args) if _chooses(func, leaf)]):
            return result
        place = place_of(func)
        coin = self._coin()
        answer = self._answers.get(place, self._answers.get(MASKS)) if coin is None else ALL if coin else NONE
        if answer is not None:
            with self.outside():
                filled = {id(mask): torch.full_like(mask, answer == ALL) for mask in masks}
            args = tree_map(lambda leaf: filled.get(id(leaf), leaf), args)
            result = self.go_on(func, args, kwargs)
        some = any(leaf.numel() for leaf in tensors_in(result))
        self.met.setdefault(place, set()).add(ALL if some else NONE)
        return result

    def _listen(self, place: Place) -> None:
        if place not in self.spoken_of:
            self.spoken_of[place] = spoken_of()

    def _coin(self) -> bool | None:
        """Returns the next coin's side, if coins decide."""
        self.reads += 1
        if self._coins is None:
            return None
        return bool(self._coins >> self.reads - 1 & 1) if self.reads <= COINS else self._random.random() < 0.5

    def _note(self, values: Iterable[Any]) -> None:
        for each in values:
            if isinstance(each, torch.Tensor):
                self._varying[each] = True
                if each._base is not None:  # written to through a view
                    self._varying[each._base] = True


def possible_answers(met: Answer | None) -> list[Answer]:
    """Returns what a place might have answered in place of what it did, or as well."""
    if isinstance(met, str):
        return [NONE, ALL]
    if isinstance(met, bool):
        return [False, True]
    if isinstance(met, int):
        return list(dict.fromkeys((0, 1, 2, 3, met + 1, 2 * met + 1, 64, -1)))
    if isinstance(met, float):
        return list(dict.fromkeys((0.0, 0.5, 1.0, -1.0, -met, 2 * met, 1e6, -1e6)))
    return []


def was_raised(error: BaseException) -> bool:
    """Returns whether a network's own code refused, with ``raise`` or ``assert``, rather than something that broke in it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return any(each.offset == trace.tb_lasti and each.opname == "RAISE_VARARGS" for each in dis.get_instructions(code))


def _entries(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Returns how many entries the results of an operation would have; 0 if that depends on values, or if it would fail."""
    operator = operator_of(func)
    where = {"device": "meta"} if "device" in operator.arguments else {}
    with torch._C._DisableTorchDispatch():  # nobody who watches the network is to see this
        try:
            if operator.pointwise:
                return math.prod(torch.broadcast_shapes(*(each.shape for each in tensors_in((args, kwargs)))))  # type: ignore[no-untyped-call]
            if operator.name in MATRIX_PRODUCTS:
                left, right = tensors_in(args)[-2:]
                return left.numel() // max(left.shape[-1], 1) * right.shape[-1]
            shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, dict(kwargs)))
            return sum(tensor.numel() for tensor in tensors_in(func(*shapes[0], **{**shapes[1], **where})))
        except Exception:
            return 0


def _choose_in_turn(among: torch.Tensor, chosen: torch.Tensor) -> None:
    """Makes choices among the entries of the last dimension other ones."""
    if chosen.shape[: among.dim() - 1] == among.shape[:-1]:
        with torch._C._DisableTorchDispatch():
            chosen.copy_((torch.arange(chosen.numel(), device=chosen.device) % among.shape[-1]).view(chosen.shape))


def _chooses(func: Any, leaf: Any) -> bool:
    """Returns whether an argument of an operation is a mask, which chooses, or is asked for the places that are not zero."""
    if not isinstance(leaf, torch.Tensor):
        return False
    return func.overloadpacket is torch.ops.aten.nonzero or leaf.dtype in (torch.bool, torch.uint8)


def _named(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


@functools.cache
def _is_plumbing(name: str) -> bool:
    return PLUMBING.match(name) is not None


def frames() -> Iterator[FrameType]:
    """Yields the frames of the network's code that are not plumbing, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := _named(frame)) != DRIVER:
        if not _is_plumbing(name):
            yield frame
        frame = frame.f_back


def spoken_of() -> list[float]:
    """Returns numbers that the code speaks of which is running: in itself, its variables and the attributes that it names."""
    found: dict[float, None] = {}
    own = (frame for frame in frames() if not str(frame.f_globals.get("__name__")).startswith(("torch.", "numpy.")))
    for frame in itertools.islice(own, 2):
        known = dict(frame.f_globals)
        for module in [each for each in frame.f_locals.values() if isinstance(each, nn.Module)]:
            known |= vars(module) | module._modules
        waiting = [frame.f_code, *frame.f_locals.values(), *(known[name] for name in frame.f_code.co_names if name in known)]
        while waiting and len(found) < MOST_NUMBERS:
            each = waiting.pop(0)
            if isinstance(each, CodeType):
                waiting += each.co_consts
            elif isinstance(each, str):
                found |= dict.fromkeys(map(float, re.findall(r"\d+", each) if len(each) <= LONGEST_TEXT else ()))
            elif isinstance(each, int | float) and not isinstance(each, bool | Count | Amount) and math.isfinite(each):
                found[float(each)] = None
            elif isinstance(each, tuple | list | dict | set | frozenset | nn.ModuleDict | nn.ParameterDict):
                waiting += itertools.islice(each, MOST_NUMBERS)
    return [each for each in found if each not in (0, 1, -1)]


def combined(numbers: Sequence[float]) -> list[float]:
    """Returns numbers, and what they make: ``n / 2 > 20``, ``n * 5 > 20`` and ``log2(n) > 20`` speak of other ones than n."""
    pairs = list(itertools.permutations([each for each in numbers if each], 2))
    found = [*numbers, *(one * two for one, two in pairs), *(one / two for one, two in pairs)]
    return [each for each in [*found, *(2**each for each in numbers if each < 12)] if math.isfinite(each)]


def place_of(operation: Any, *, outside: bool = False) -> Place:
    """Returns the innermost line of code that is not plumbing; or, if there is one, that is outside of PyTorch altogether."""
    name = operation if isinstance(operation, str) else operation.overloadpacket.__name__
    found = frames()
    frame = next(found, None)
    if outside:
        beyond = (each for each in itertools.chain([frame], found) if each and not _named(each).startswith("torch."))
        frame = next(beyond, frame)
    return Place("?", 0, name) if frame is None else Place(frame.f_code.co_filename, frame.f_lineno, name)
