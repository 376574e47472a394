"""Finds the smallest noise that keeps a run within its privacy budget.

>>> from opacus_shuffle.analysis import gaussian
>>> def spent(noise):
...     return gaussian.compute_epsilon(mu=1 / noise, delta=1e-6)
>>> sigma = smallest_noise(spent, target_epsilon=1.0)
>>> round(sigma, 3)
4.225
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

from opacus_shuffle.accountants.bounds.registry import Bound, Rounds, ask
from opacus_shuffle.analysis.composition import OrderCapWarning
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.solve import bracket, log_excess, safe_root
from opacus_shuffle.core.validation import open_unit_interval, positive

LOWEST, HIGHEST = 1e-3, 1e9
RELATIVE_TOLERANCE = 1e-7
CLOSE = 1e-4
"""Relative gap below the target accepted for slow bounds."""
_ROUGHLY, _MOST_GUESSES = 1e-6, 6


def noise_within(
    entry: Bound,
    rounds: Callable[[float], Rounds],
    *,
    target_epsilon: float,
    lowest: float = LOWEST,
    **budget: Any,
) -> float:
    """Returns the smallest noise multiplier within a budget, rounded up.

    At it ``rounds(noise_multiplier)`` stay within the budget.

    Args:
        entry: The bound that is meant.
        rounds: What would run at a noise multiplier, all of the bound's mechanism.
        target_epsilon: ε to stay within, above 0.
        lowest: The least multiplier to try.
        **budget: ``delta``, ``adjacency`` and ``tolerance``, as :func:`least_within` takes them.

    Returns:
        A multiplier whose ε was computed and found within the target; ``lowest`` if that is enough.

    Raises:
        ValueError: As :func:`smallest_noise`, or as the bound.
    """
    return _enough(
        *least_within(entry, rounds, target_epsilon=target_epsilon, lowest=lowest, **budget),
        target_epsilon,
    )


def least_within(
    entry: Bound,
    rounds: Callable[[float], Rounds],
    *,
    target_epsilon: float,
    delta: float,
    adjacency: str = "zero_out",
    lowest: float = LOWEST,
    highest: float = HIGHEST,
    tolerance: float = RELATIVE_TOLERANCE,
) -> tuple[float | None, float]:
    """Returns the least number x at which ``rounds(x)`` stay within a budget.

    A larger x must cost no more.

    Where the bound has rough values, which take next to no time, the search is for the rough value
    at which the bound meets the target: three or four times are mostly enough.

    Args:
        entry: The bound that is meant.
        rounds: What would run at such a number, all of the bound's mechanism.
        target_epsilon: ε to stay within, above 0.
        delta: δ in (0, 1).
        adjacency: Between which data sets.
        lowest: The least number to try.
        highest: The largest number to try.
        tolerance: Relative, by which the number may be too large. Where the bound has rough values,
            ε may be below the target by 1e-4 of it, or by this if it is more.

    Returns:
        A number whose ε was computed and found within the target, None if there is none up to the
        highest, and that ε or the highest number's.

    Raises:
        ValueError: If an argument is out of range, or as the bound.
    """
    target = positive("target_epsilon", target_epsilon)
    search = functools.partial(_smallest, lowest=lowest, highest=highest)

    @functools.cache
    def spent(x: float) -> float:
        return ask(entry, rounds(x), delta=delta, adjacency=adjacency).epsilon

    if entry.rough is None:
        return search(spent, target, tolerance=tolerance)
    rough = functools.partial(
        entry.rough, delta=open_unit_interval("delta", delta), adjacency=Adjacency(adjacency)
    )

    def guess(rough_target: float) -> float | None:
        return search(lambda x: rough(rounds(x)), rough_target, tolerance=_ROUGHLY)[0]

    least = _guessed(spent, guess, target, lowest=lowest, tolerance=max(tolerance, CLOSE))
    if least is not None:
        return least, spent(least)
    return search(spent, target, tolerance=max(tolerance, CLOSE / 10))


def _guessed(
    spent: Callable[[float], float],
    guess: Callable[[float], float | None],
    target: float,
    *,
    lowest: float,
    tolerance: float,
) -> float | None:
    """Returns a multiplier with ε in [target·(1 − tolerance), target].

    It is found by secants: ``lowest`` if that is enough, None if they do not settle.
    """
    aim, last = 0.0, (0.0, 0.0)  # logarithms, over the target's
    for number in range(_MOST_GUESSES):
        aimed = target * math.exp(aim)
        sigma = guess(aimed) if aimed > 0 else None  # the smallest targets have nothing below them
        if sigma is None:
            return None
        epsilon = spent(sigma)
        if epsilon <= target and (sigma == lowest or epsilon >= target * (1 - tolerance)):
            return sigma
        if not 0 < epsilon < math.inf:
            return None
        missed = math.log(epsilon / target) + tolerance / 2  # to the safe side
        slope = (missed - last[1]) / (aim - last[0]) if number else 1.0
        if not 0.1 < slope < 10:
            return None
        aim, last = aim - missed / slope, (aim, missed)
    return None


def smallest_noise(epsilon: Callable[[float], float], *, target_epsilon: float) -> float:
    """Returns the smallest noise multiplier, rounded up, whose ε stays within a target.

    Args:
        epsilon: ε of a run at a noise multiplier; more noise must not cost more.
        target_epsilon: ε to stay within, above 0.

    Returns:
        A multiplier whose ε was computed and found within the target, too large by at most 1e-7 of
        itself; 1e-3 if that is enough.

    Raises:
        ValueError: If no multiplier up to 1e9 meets the target (a bound by RDP has a floor, about
            log(1/δ)/16384), or ε is NaN.
    """
    target = positive("target_epsilon", target_epsilon)
    if not callable(epsilon):
        raise ValueError(f"epsilon must be a function of the noise multiplier, got {epsilon!r}")
    return _enough(
        *_smallest(epsilon, target, lowest=LOWEST, highest=HIGHEST, tolerance=RELATIVE_TOLERANCE),
        target,
    )


def _enough(sigma: float | None, floor: float, target: float) -> float:
    """Checks that some multiplier meets the target, and returns it."""
    if sigma is None:
        raise ValueError(
            f"no noise_multiplier up to {HIGHEST:g} meets target_epsilon={target}: by this bound "
            f"epsilon stays at {round_up(floor)}, however large the noise; raise the target or "
            "delta, or use bound='pair' (one pair of data sets) or 'certified' (every data set, "
            "more noise)"
        )
    return sigma


def _smallest(
    epsilon: Callable[[float], float],
    target: float,
    *,
    lowest: float,
    highest: float,
    tolerance: float,
) -> tuple[float | None, float]:
    """Returns the smallest noise multiplier and its ε.

    It is None if there is none, and ε is the largest one's.
    """
    bottom, top = math.log(lowest), math.log(highest)
    exact = {bottom: lowest, top: highest}  # what a rounded logarithm would miss

    beyond: dict[float, ValueError] = {}

    @functools.cache
    def spent(log_sigma: float) -> float:
        sigma = exact.get(log_sigma) or math.exp(log_sigma)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OrderCapWarning)
            try:
                value = epsilon(sigma)
            except ValueError as error:
                if log_sigma <= start:  # another argument is wrong
                    raise
                # There is no mechanism with so much noise: it would be enough.
                value, beyond[log_sigma] = 0.0, error
        if math.isnan(value):
            raise ValueError(f"epsilon is NaN at noise_multiplier={sigma:.6g}")
        return value

    def excess(log_sigma: float) -> float:
        return log_excess(spent(log_sigma), target)

    start, step = max(0.0, bottom), math.log(4)
    more, less = _steps(start, top, step), _steps(start, bottom, -step)
    unsafe, safe = bracket(excess, start, towards_safe=more, towards_unsafe=less)
    if safe is None:
        return None, spent(top)
    if unsafe is None:
        return lowest, spent(bottom)
    close = tolerance / 4
    root = safe_root(excess, unsafe=unsafe, safe=safe, tolerance=close, step=close)
    if root in beyond:
        raise ValueError(f"target_epsilon={target} is met by no noise: raise it; {beyond[root]}")
    return exact.get(root) or math.exp(root), spent(root)


def _steps(start: float, end: float, step: float) -> list[float]:
    """Returns points from ``start`` to ``end`` whose distances grow by a factor of three."""
    points = []
    while start != end:
        start = max(start + step, end) if step < 0 else min(start + step, end)
        step *= 3
        points.append(start)
    return points
