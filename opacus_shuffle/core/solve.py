"""Root finding on the safe side: the returned point was evaluated and meets its condition.

Every ε, noise level and shift that this library searches for is the end of a half-line: on one side
``excess(x) ≤ 0`` holds (ε is within its budget, δ is not exceeded), on the other it does not. The
root of a numerical solver may lie on the wrong side by a rounding error. These functions move it.

>>> root = safe_root(lambda x: 2 - x * x, unsafe=0.0, safe=5.0, tolerance=1e-9)
>>> round(root, 6), root * root >= 2
(1.414214, True)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

from scipy.optimize import brentq

_FINEST = 4 * math.ulp(1.0)
"""The smallest relative tolerance that brentq accepts."""


def safe_root(
    excess: Callable[[float], float],
    *,
    unsafe: float,
    safe: float,
    tolerance: float,
    relative_tolerance: float = _FINEST,
    step: float | None = None,
) -> float:
    """Returns a point where ``excess`` is at most zero, next to where it becomes positive.

    Args:
        excess: A monotone function: above zero on the unsafe side, at most zero on the safe side.
            It may jump, or have rounding errors near its root.
        unsafe: The end on the unsafe side.
        safe: The end on the safe side, above or below ``unsafe``; ``excess(safe)`` is at most zero.
        tolerance: Absolute error of the root.
        relative_tolerance: Relative error of the root, in addition.
        step: The first step from the root towards ``safe``, doubled each time; by default
            ``relative_tolerance`` times the root.

    Returns:
        A point x between the ends for which ``excess(x) ≤ 0`` was evaluated. It is within the
        tolerances and the steps of the root. It is ``unsafe`` if ``excess`` is at most zero even
        there.

    Raises:
        ValueError: If ``excess`` is above zero or NaN at ``safe``, or NaN at ``unsafe``.
    """
    cached = functools.cache(excess)
    if cached(unsafe) <= 0:
        return unsafe
    if not cached(safe) <= 0 or math.isnan(cached(unsafe)):
        raise ValueError(
            f"no safe root: excess is {cached(unsafe)!r} at unsafe={unsafe!r} and {cached(safe)!r} "
            f"at safe={safe!r}"
        )
    low, high = min(unsafe, safe), max(unsafe, safe)
    point = float(brentq(cached, low, high, xtol=tolerance, rtol=relative_tolerance))
    upwards = safe > unsafe
    pace = relative_tolerance if step is None else step
    while not cached(point) <= 0:
        if step is None:
            moved = point * (1 + pace) if upwards == (point > 0) else point * (1 - pace)
        else:
            moved = point + pace if upwards else point - pace
        if moved == point:  # a step below the last digit, or relative to zero
            step = pace = max(tolerance, math.ulp(point))
            continue
        point, pace = (min if upwards else max)(moved, safe), 2 * pace
    return point


def log_excess(value: float, target: float) -> float:
    """Returns log(value / target), positive whenever the value is above the target.

    The value may be 0.

    >>> log_excess(math.nextafter(0.1, 1), 0.1) > 0 > log_excess(0.0, 1e-308)
    True
    """
    least = max(min(1e-300, 1e-3 * target), math.ulp(0.0))  # replaces zero
    difference = math.log(max(value, least)) - math.log(target)
    # Logarithms may be equal where the numbers are not.
    return max(difference, 1e-16) if value > target else difference


def bracket(
    excess: Callable[[float], float],
    start: float,
    *,
    towards_safe: Iterable[float],
    towards_unsafe: Iterable[float],
) -> tuple[float | None, float | None]:
    """Tries points, starting from a first guess, until ``excess`` changes its sign.

    Args:
        excess: As in :func:`safe_root`.
        start: The first guess, on either side.
        towards_safe: Points beyond ``start`` on the safe side, nearest first.
        towards_unsafe: Points beyond ``start`` on the unsafe side, nearest first.

    Returns:
        ``(unsafe, safe)``, two consecutive points. ``None`` replaces the side that was not reached.
    """
    last, unsafe = start, excess(start) > 0
    for point in towards_safe if unsafe else towards_unsafe:
        if (excess(point) > 0) != unsafe:
            return (last, point) if unsafe else (point, last)
        last = point
    return (last, None) if unsafe else (None, last)
