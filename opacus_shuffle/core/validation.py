"""Checks of arguments: each returns the converted value or raises a ``ValueError`` that names it.

>>> integer("num_users", 60_000.0)
60000
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from opacus_shuffle.core.tables import did_you_mean


def reject_unknown(
    function: str,
    unknown: Mapping[str, Any],
    known: Collection[str] = (),
    *,
    parameters: Mapping[str, str] | None = None,
) -> None:
    """Refuses unknown keyword arguments, which stock Opacus would ignore.

    Args:
        function: The function, for the message.
        unknown: The unknown keywords with their values.
        known: The valid keywords; the message lists them and suggests the most similar one.
        parameters: How to write each valid keyword, if they are too many to list.
    """
    if not unknown:
        return
    plain = bool | int | float | str | tuple | list | dict | None  # with a short representation
    names = ", ".join(
        f"{name}={reprlib.repr(value) if isinstance(value, plain) else type(value).__name__}"
        for name, value in unknown.items()
    )
    written = parameters or {name: name for name in known}
    raise ValueError(
        f"{function} got unknown keyword(s): {names}; remove or correct them"
        + (f" (known: {', '.join(sorted(known))})" if known else "")
        + "".join(did_you_mean(name, written) for name in unknown)
    )


def finite_number(name: str, value: Any, *, infinite: bool = False) -> float:
    """Returns a finite float; also infinity if that is allowed."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        finite = float(value)
    except OverflowError:  # an int or Fraction beyond double precision
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
    """Returns a finite float that meets a condition; also infinity if that is allowed.

    Raises:
        ValueError: If it does not. The message names the argument, the condition (``wanted``), the
            value and the remedy.
    """
    finite = finite_number(name, value, infinite=infinite)
    if not holds(finite):
        raise ValueError(f"{name} must {wanted}, got {value!r}{remedy}")
    return finite


def positive(name: str, value: Any, *, infinite: bool = False) -> float:
    """Returns a float above zero; the norm of clipping may be infinite."""
    return number(name, value, "be positive", lambda given: given > 0, infinite=infinite)


def not_negative(name: str, value: Any, *, infinite: bool = False) -> float:
    """Returns a float of at least zero; an ε may be infinite."""
    return number(name, value, "not be negative", lambda given: given >= 0, infinite=infinite)


def moderate(name: str, value: Any) -> float:
    """Returns a float in [1e-100, 1e100], whose square neither underflows nor overflows."""
    return number(
        name,
        value,
        "be positive and lie in [1e-100, 1e100]",
        lambda finite: 1e-100 <= finite <= 1e100,
        ": measure it in another unit",
    )


def noise_level(name: str, value: Any) -> float:
    """Returns a noise multiplier in [1e-6, 1e12]; double precision is too coarse for others."""
    return number(
        name, value, "be positive and lie in [1e-6, 1e12]", lambda finite: 1e-6 <= finite <= 1e12
    )


def open_unit_interval(name: str, value: Any) -> float:
    """Returns a float strictly between 0 and 1, such as a δ."""
    return number(name, value, "lie strictly between 0 and 1", lambda finite: 0 < finite < 1)


def sampling_rate(name: str, value: Any) -> float:
    """Returns a float in (0, 1]."""
    return number(name, value, "lie in (0, 1]", lambda finite: 0 < finite <= 1)


def integer(name: str, value: Any, *, minimum: int = 1, maximum: int = 2**53) -> int:
    """Returns an integer from ``minimum`` to ``maximum``, also if it is given as a float."""
    most = "2**53" if maximum == 2**53 else f"{maximum:,}"
    wanted = f"be a whole number of at least {minimum} (and at most {most})"
    whole = number(
        name, value, wanted, lambda finite: finite.is_integer() and minimum <= finite <= maximum
    )
    return int(whole)


def boolean(name: str, value: Any) -> bool:
    """Returns True or False, and accepts no other truthy or falsy value."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """Returns the value if it is one of ``allowed``."""
    choices = list(allowed)
    # Comparing the types first avoids the elementwise comparison of an array with a choice.
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        texts = {str(choice).lower(): repr(choice) for choice in choices if isinstance(value, str)}
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
            + did_you_mean(str(value), texts)
        )
    return value


def instance_of(name: str, value: Any, classes: tuple[Any, ...]) -> Any:
    """Returns the value if it is an object of one of these classes."""
    if not isinstance(value, classes):
        raise ValueError(
            f"{name} must be a {' or '.join(each.__name__ for each in classes)}, got "
            f"{type(value).__name__}"
        )
    return value


def renyi_orders(orders: Any, *, maximum: int) -> npt.NDArray[np.float64]:
    """Returns a non-empty vector of Rényi orders in (1, maximum]."""
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


def check_unregistered(key: str, registered: Any, new: Any) -> None:
    """Refuses to register a class or function under a key that another one has.

    The same definition may be registered again, after a reload.

    Args:
        key: The key, in words.
        registered: The class or function that has the key; None if it is unused.
        new: The class or function to register.
    """
    (module, name), other = (
        (
            getattr(definition, "__module__", ""),
            getattr(definition, "__qualname__", repr(definition)),
        )
        for definition in (registered, new)
    )
    # All lambdas have the same name, so they cannot be recognised as the same definition.
    if registered is not None and ((module, name) != other or "<lambda>" in name):
        raise ValueError(
            f"{key} belongs to {name} of {module}: choose another name, or derive a class of your "
            "own"
        )
