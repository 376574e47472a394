"""Checks of arguments: each returns the clean value or raises a ``ValueError`` that names it.

>>> integer("num_users", 60_000.0)
60000
"""

from __future__ import annotations

import difflib
import math
import numbers
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def reject_unknown(
    function: str,
    unknown: Mapping[str, Any],
    known: Collection[str] = (),
    *,
    parameters: Mapping[str, str] | None = None,
) -> None:
    """Refuses leftover keywords, which stock Opacus would swallow without effect.

    Args:
        function: What was called.
        unknown: The leftover keywords.
        known: All that would have been right: they are listed, the one with the likest name is
            suggested.
        parameters: How each is written, where they are too many to be listed.
    """
    if not unknown:
        return
    plain = bool | int | float | str | tuple | list | dict | None  # short to print
    names = ", ".join(
        f"{name}={reprlib.repr(value) if isinstance(value, plain) else type(value).__name__}"
        for name, value in unknown.items()
    )
    written = parameters or {name: name for name in known}
    close = [
        written[match]
        for name in unknown
        for match in difflib.get_close_matches(name, list(written), 1)
    ]
    raise ValueError(
        f"{function} got unknown keyword(s): {names}; remove or correct them"
        + (f" (known: {', '.join(sorted(known))})" if known else "")
        + (f" (did you mean {', '.join(close)}?)" if close else "")
    )


def finite_number(name: str, value: Any, *, infinite: bool = False) -> float:
    """A finite float, or infinity where that is allowed, too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        finite = float(value)
    except OverflowError:  # a whole number or fraction beyond double precision
        finite = value = math.inf
    if not math.isfinite(finite) and not (infinite and finite == math.inf):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return finite


def number(
    name: str,
    value: Any,
    wanted: str,
    holds: Callable[[float], bool],
    remedy: str = "",
    *,
    infinite: bool = False,
) -> float:
    """A finite float of which a condition holds, or infinity where that is allowed, too.

    Raises:
        ValueError: If it does not; the argument, what it must do, its value and a remedy are named.
    """
    finite = finite_number(name, value, infinite=infinite)
    if not holds(finite):
        raise ValueError(f"{name} must {wanted}, got {value!r}{remedy}")
    return finite


def positive(name: str, value: Any, *, infinite: bool = False) -> float:
    """A float above zero; a norm that nothing is clipped to may be infinite."""
    return number(name, value, "be positive", lambda given: given > 0, infinite=infinite)


def not_negative(name: str, value: Any, *, infinite: bool = False) -> float:
    """A float of at least zero; an ε may be infinite."""
    return number(name, value, "not be negative", lambda given: given >= 0, infinite=infinite)


def moderate(name: str, value: Any) -> float:
    """A positive float in [1e-100, 1e100]: its square neither vanishes nor overflows."""
    wanted, remedy = "be positive and lie in [1e-100, 1e100]", ": measure it in another unit"
    return number(name, value, wanted, lambda finite: 1e-100 <= finite <= 1e100, remedy)


def noise_level(name: str, value: Any) -> float:
    """A noise multiplier in [1e-6, 1e12], beyond which double precision says nothing."""
    wanted = "be positive and lie in [1e-6, 1e12]"
    return number(name, value, wanted, lambda finite: 1e-6 <= finite <= 1e12)


def open_unit_interval(name: str, value: Any) -> float:
    """A float strictly between 0 and 1, as every δ must be."""
    return number(name, value, "lie strictly between 0 and 1", lambda finite: 0 < finite < 1)


def sampling_rate(name: str, value: Any) -> float:
    """A float in (0, 1]."""
    return number(name, value, "lie in (0, 1]", lambda finite: 0 < finite <= 1)


def integer(name: str, value: Any, *, minimum: int = 1, maximum: int = 2**53) -> int:
    """An integer (or a float that is one) from ``minimum`` to ``maximum``."""
    most = "2**53" if maximum == 2**53 else f"{maximum:,}"
    wanted = f"be a whole number of at least {minimum} (and at most {most})"
    whole = number(
        name, value, wanted, lambda finite: finite.is_integer() and minimum <= finite <= maximum
    )
    return int(whole)


def boolean(name: str, value: Any) -> bool:
    """True or False, and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """A member of ``allowed``."""
    choices = list(allowed)
    # Of the same kind, so that no array is compared with a choice.
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        texts = {str(choice).lower(): choice for choice in choices if isinstance(value, str)}
        close = difflib.get_close_matches(str(value).lower(), list(texts), 1)
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
            + "".join(f" (did you mean {texts[text]!r}?)" for text in close)
        )
    return value


def instance_of(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """An object of one of these classes."""
    if not isinstance(value, kinds):
        raise ValueError(
            f"{name} must be a {' or '.join(kind.__name__ for kind in kinds)}, got "
            f"{type(value).__name__}"
        )
    return value


def renyi_orders(orders: Any, *, maximum: int) -> npt.NDArray[np.float64]:
    """A non-empty vector of Rényi orders in (1, maximum]."""
    try:
        listed = list(orders) if isinstance(orders, Iterable) else [orders]
        vector = np.asarray(listed, dtype=np.float64)
    except (OverflowError, TypeError, ValueError):
        vector = np.empty(0)
    if vector.ndim != 1 or not vector.size or not np.all((vector > 1) & (vector <= maximum)):
        raise ValueError(
            f"orders must be one number or a list of numbers in (1, {maximum}] (the cost grows as "
            f"the square of the largest), got {reprlib.repr(orders)}"
        )
    return vector


def check_free(what: str, holder: Any, newcomer: Any) -> None:
    """Refuses a place in a registry that something else holds already.

    The same definition may come again, after a reload.

    Args:
        what: The place, in words.
        holder: The class or function that holds it; None if nobody does.
        newcomer: The one that asks for it.
    """
    (module, name), other = (
        (getattr(thing, "__module__", ""), getattr(thing, "__qualname__", repr(thing)))
        for thing in (holder, newcomer)
    )
    # All functions without a name have the same one.
    if holder is not None and ((module, name) != other or "<lambda>" in name):
        raise ValueError(
            f"{what} belongs to {name} of {module}: choose another name, or derive a class of your "
            "own"
        )
