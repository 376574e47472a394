"""Calls with one bad argument each: they answer, or raise an error that names it, and soon."""

import contextlib
import dataclasses
import math
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

SECONDS = 300
"""Of processor time, of one call: what hangs takes hours, whatever else the machine does."""
BAD = [
    *(
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        None,
        "",
        "1",
        "certified",
        b"1",
        [],
        {},
        [1.0, 2.0],
        (),
        object(),
        1j,
    ),
    *(0, -1, 0.5, 1, 2, 1e-308, 5e-324, 1e308, 2**53, 2**70, 10**400, -0.0, 1e-12, 1e15, -1e-300),
    *(
        np.float64(0.3),
        np.float32("nan"),
        np.int64(-3),
        np.bool_(True),
        np.array([1.0]),
        np.array(2.0),
        torch.tensor(math.nan),
    ),
    *(
        torch.tensor([1.0, 2.0]),
        Decimal("0.1"),
        Decimal("NaN"),
        Fraction(1, 3),
        Fraction(10**400, 3),
    ),
]
_NAN = (math.nan, Decimal("NaN"), np.float32("nan"))
_WORDS = ("bogus", b"1", 1j, object())
_ALSO = {"accountant": ("accounting mechanism",), "epochs": ("must be",)}
"""Words for an argument that are not its name: Opacus's, and of steps that follow from epochs."""
NEVER: dict[type, tuple[Any, ...]] = {
    bool: (*_NAN, "1", *_WORDS, {}, [], 2, 0.5, None),
    int: (*_NAN, True, np.bool_(True), "1", *_WORDS, {}, torch.tensor(math.nan)),
    float: (*_NAN, True, np.bool_(True), "1", *_WORDS, {}, torch.tensor(math.nan)),
    str: (*_NAN, "", *_WORDS, {}, -1, 0.5),
}
"""What cannot stand for an argument whose valid value is of this class.

For one of any other class: ``_WORDS`` and the numbers.
"""


class Hang(BaseException):
    """A call took too much processor time."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends what takes more processor time than that; a busy machine does not matter."""

    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def holds_nan(answer: Any) -> bool:
    """Whether an answer has NaN in it."""
    if isinstance(answer, torch.Tensor | np.ndarray):
        return bool(torch.as_tensor(answer).isnan().any())
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        return any(holds_nan(getattr(answer, field.name)) for field in dataclasses.fields(answer))
    if isinstance(answer, list | tuple):
        return any(map(holds_nan, answer))
    return isinstance(answer, float) and math.isnan(answer)


def verdict(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    names: tuple[str, ...],
    *,
    never: bool = False,
) -> str | None:
    """What is wrong with a call; None if nothing is.

    It answers (unless it never should), or its error has one of the argument's names.
    """
    try:
        with limited(SECONDS), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            answer = function(**arguments)
            return "answers NaN" if holds_nan(answer) else "is accepted" if never else None
    except Hang:
        return "hangs"
    except (ValueError, TypeError) as error:
        if names and not any(name in str(error) for name in names):
            return f"does not name it: {type(error).__name__}: {error}"
        return None if names else f"is refused: {error}"
    except Exception as error:
        return f"is obscure: {type(error).__name__}: {error}"


def require_named_refusals(
    function: Callable[..., Any], valid: Mapping[str, Any], **said: tuple[str, ...] | None
) -> None:
    """Asserts that a call answers whatever one of its arguments is, or names it.

    What is clearly no such argument, it refuses.

    Args:
        function: What is called, with keywords.
        valid: Arguments that it takes.
        **said: Other words for an argument in errors; None for one of which more values are valid
            than its class says.
    """
    first = verdict(function, valid, ())
    assert first is None, f"the valid arguments: {first}"
    complaints = []
    for name, value in valid.items():
        words = (name, name.removeprefix("target_"), *(said.get(name) or _ALSO.get(name, ())))
        free = value is None or (name in said and said[name] is None)
        never = () if free else NEVER.get(type(value), (*_NAN, *_WORDS, -1, 2**70))
        for bad in (*BAD, *never):
            refused = any(bad is impossible for impossible in never)
            if (wrong := verdict(function, {**valid, name: bad}, words, never=refused)) is not None:
                complaints.append(f"{name}={bad!r:.40} {wrong}"[:200])
    assert not complaints, "\n".join(complaints)
