"""Noticing where a network compares numbers in Python: sizes of tensors, and values that were read out of them.

``if x.shape[1] > 6`` never reaches PyTorch. So while a network is looked at, sizes and values are numbers that work as any
others, and so do sums and products of them; but what they compare as is asked for, and may be answered otherwise. Where they
become something else (a text, a key of a dictionary, a plain number, an array) nobody can ask any more, so that is told.

>>> __name__ = "a_network"  # comparisons of this package's own are not asked for
>>> size = Count(5)
>>> with asked(lambda operation, number, other, answer: not answer):
...     size % 2 == 1, size > 10
(False, True)
>>> size > 10
False
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Ask = Callable[[str, "Count | Amount", Any, bool | None], Any]
"""Is told of a comparison, and says what it shall give; or, with None for that, of a number that becomes something else."""

_ASK: ContextVar[Ask | None] = ContextVar("_ASK", default=None)

SIZES = frozenset(
    (torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement)  # type: ignore[attr-defined]
)
"""Functions that return sizes of a tensor."""

READS = frozenset((torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__))
"""Functions that return values of a tensor as numbers of Python."""

MAKING = frozenset((torch.tensor, torch.as_tensor, torch.scalar_tensor))
"""Functions that make a tensor of a number, which is then compared where nothing notices."""

CHECKS = ("torch.", "opacus_shuffle.permutation.", "opacus_shuffle.engine.")
"""Modules whose comparisons of sizes do not matter, as these check arguments or run hooks: they do the same at all sizes."""

ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "divmod", "and", "or", "xor", "lshift", "rshift")
OPERATIONS = {f"__{side}{name}__" for name in ARITHMETIC for side in ("", "r")}
ALONE = ("__neg__", "__pos__", "__abs__", "__round__", "__floor__", "__ceil__", "__trunc__", "__invert__", "bit_length")
BECOMING = ("__hash__", "__str__", "__repr__", "__format__", "__int__", "__float__")  # what NumPy asks for, too
COMPARISONS = {"__lt__": "<", "__le__": "<=", "__eq__": "==", "__ne__": "!=", "__gt__": ">", "__ge__": ">="}


@contextlib.contextmanager
def asked(ask: Ask) -> Iterator[None]:
    """A block in which comparisons of sizes and values in this thread ask what they shall answer."""
    token = _ASK.set(ask)
    try:
        yield
    finally:
        _ASK.reset(token)


class Noticing(TorchFunctionMode):
    """Has tensors give sizes and values that ask what they compare as.

    Args:
        ask: Is told a comparison and what it gives, and says what it shall give.
        read: Is told the name of a function that reads values, the tensor and what it gives, and returns what it shall give.
    """

    def __init__(self, ask: Ask, read: Callable[[str, torch.Tensor, Any], Any]) -> None:
        super().__init__()
        self._ask, self._read = ask, read

    def __enter__(self) -> Any:
        self._inside = contextlib.ExitStack()
        self._inside.enter_context(asked(self._ask))
        self._inside.enter_context(_lengths_noticed())
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._inside.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MAKING and isinstance(args[0], Count | Amount):
            self._ask(func.__name__, args[0], None, None)
        result = func(*args, **(kwargs or {}))
        if func in SIZES:
            return noticed(result, by_values=False)
        return self._read(func.__name__, args[0], result) if func in READS else result


def _noticed_length(thing: Any) -> int:
    """Does what ``len`` does; what a tensor itself may return there becomes a plain number on its way."""
    count = _PLAIN[builtins, "len"](thing)
    return noticed(count, by_values=False) if isinstance(thing, torch.Tensor) and _ASK.get() is not None else count


def _noticed_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function of numbers give those that notice for those that do."""

    @functools.wraps(function)
    def of_numbers(*args: Any) -> Any:
        result = function(*args)
        noticing = _ASK.get() is not None and any(isinstance(each, Count | Amount) for each in args)
        return _made_of(result, *args) if noticing else result

    return of_numbers


_PLAIN: dict[tuple[Any, str], Callable[..., Any]] = {(builtins, "len"): builtins.len}
_PLAIN |= {(math, name): getattr(math, name) for name in ("sqrt", "isqrt", "log", "log2", "log10")}
_NOTICED = {place: _noticed_function(function) for place, function in _PLAIN.items()} | {(builtins, "len"): _noticed_length}
_LOCK = threading.Lock()
_NOTICING = [0]
"""How many threads notice comparisons just now."""


@contextlib.contextmanager
def _lengths_noticed() -> Iterator[None]:
    """Has ``len(tensor)`` and functions of numbers notice, too, in this thread: others get what they always do."""
    with _LOCK:
        _NOTICING[0] += 1
        for (module, name), function in _NOTICED.items():
            setattr(module, name, function)
    try:
        yield
    finally:
        with _LOCK:
            _NOTICING[0] -= 1
            for (module, name), function in _PLAIN.items() if not _NOTICING[0] else ():
                setattr(module, name, function)


class Count(int):
    """A whole number that asks what it compares as, and knows the numbers that it was made ``of``."""

    by_values = False
    of: frozenset[float] = frozenset()

    def __bool__(self) -> bool:
        return _answer("bool", self, None, int.__bool__(self))


class Amount(float):
    """A number that asks what it compares as, and knows the numbers that it was made ``of``."""

    by_values = False
    of: frozenset[float] = frozenset()

    def __bool__(self) -> bool:
        return _answer("bool", self, None, float.__bool__(self))

    def is_integer(self) -> bool:
        """Returns whether it is a whole number, or what is answered."""
        return _answer("is_integer", self, None, float.is_integer(self))


def noticed(value: Any, *, by_values: bool) -> Any:
    """Returns numbers that notice in the place of numbers, also inside of lists and sizes."""
    return _noticed(value, by_values, None)


def _noticed(value: Any, by_values: bool, of: frozenset[float] | None) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_noticed(each, by_values, of) for each in value])
    if not isinstance(value, int | float):
        return value
    number = Count(value) if isinstance(value, int) else Amount(value)
    number.by_values, number.of = by_values, frozenset([value]) if of is None else of
    return number


def _made_of(value: Any, *numbers: Any) -> Any:
    """Returns numbers that notice in the place of such as were computed from these, some of which do."""
    noticing = [each for each in numbers if isinstance(each, Count | Amount)]
    return _noticed(value, any(each.by_values for each in noticing), frozenset[float]().union(*(each.of for each in noticing)))


def _answer(operation: str, number: Count | Amount, other: Any, answer: bool | None) -> Any:
    ask = _ASK.get()
    if ask is None or f"{sys._getframe(2).f_globals.get('__name__')}.".startswith(CHECKS):
        return answer
    return ask(operation, number, other, answer)


def _plain(number: Any, other: Any, name: str) -> Any:
    """Returns what an operation on plain numbers gives."""
    kind = float if isinstance(number, float) or isinstance(other, float) else int
    return getattr(kind, name)(kind(number), other)


def _operation(name: str) -> Callable[..., Any]:
    def operation(self: Any, other: Any = None, *rest: Any) -> Any:
        if not isinstance(other, int | float) or rest:
            return NotImplemented
        return _made_of(_plain(self, other, name), self, other)

    return operation


def _comparison(name: str, sign: str) -> Callable[[Any, Any], Any]:
    def comparison(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return _answer(sign, self, other, _plain(self, other, name))

    return comparison


def _alone(name: str) -> Callable[..., Any]:
    def alone(self: Any, *digits: Any) -> Any:
        return _made_of(getattr(super(type(self), self), name)(*digits), self)

    return alone


def _becoming(name: str) -> Callable[..., Any]:
    def becoming(self: Any, *form: Any) -> Any:
        _answer(name.strip("_"), self, None, None)
        return getattr(super(type(self), self), name)(*form)

    return becoming


for _kind in (Count, Amount):
    for _names, _make in ((OPERATIONS, _operation), (ALONE, _alone), (BECOMING, _becoming)):
        for _name in _names:
            if hasattr(_kind.__base__, _name):
                setattr(_kind, _name, _make(_name))
    for _name, _sign in COMPARISONS.items():
        setattr(_kind, _name, _comparison(_name, _sign))
