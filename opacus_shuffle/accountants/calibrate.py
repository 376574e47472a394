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
from collections.abc import Callable, Iterator

from scipy.optimize import minimize_scalar

from opacus_shuffle.accountants.bounds.registry import Bound, Rounds, ask
from opacus_shuffle.analysis.composition import OrderCapWarning
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.solve import bracket, log_excess, safe_root
from opacus_shuffle.core.validation import open_unit_interval, positive

LOWEST, HIGHEST = 1e-3, 1e9
RELATIVE_TOLERANCE = 1e-7
CLOSE = 1e-4
"""Relative gap below the target that ends a search by a bound with rough values, which is slow."""
_RATES = (1e-3, 0.999)
"""Rates of secret coins that are tried."""
_ROUGHLY, _NEARBY = 0.1, 1.02
"""Relative gap that ends a search by rough values, and the factor over which their slope is taken.
"""
_LARGEST_STEP = math.log(8)
"""The largest step of a search, in log x."""
_LEAST_SLOPE = 0.5
"""Of log ε over log x, with which a search goes no farther than it would for ε ~ 1/√x."""


def noise_within(
    entry: Bound,
    rounds: Callable[[float], Rounds],
    *,
    target_epsilon: float,
    delta: float,
    adjacency: str = "zero_out",
    lowest: float = LOWEST,
    tolerance: float = RELATIVE_TOLERANCE,
) -> float:
    """Returns the smallest noise multiplier within a budget, rounded up.

    At it ``rounds(noise_multiplier)`` stay within the budget.

    Args:
        entry: The bound that is meant.
        rounds: What would run at a noise multiplier, all of the bound's mechanism.
        target_epsilon: ε to stay within, above 0.
        delta: δ in (0, 1).
        adjacency: Between which data sets.
        lowest: The least multiplier to try.
        tolerance: As :func:`least_within` takes it.

    Returns:
        A multiplier whose ε was computed and found within the target; ``lowest`` if that is enough.

    Raises:
        ValueError: As :func:`smallest_noise`, or as the bound.
    """
    sigma = least_within(
        entry,
        rounds,
        target_epsilon=target_epsilon,
        delta=delta,
        adjacency=adjacency,
        lowest=lowest,
        tolerance=tolerance,
    )
    if sigma is None:
        floor = ask(entry, rounds(HIGHEST), delta=delta, adjacency=adjacency)
        raise _out_of_reach(target_epsilon, floor.epsilon)
    return sigma


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
) -> float | None:
    """Returns the least number x at which ``rounds(x)`` stay within a budget.

    A larger x must cost no more. Where the bound has rough values, which take little time, the
    search begins at the x that these say.

    Args:
        entry: The bound that is meant.
        rounds: What would run at such a number, all of the bound's mechanism.
        target_epsilon: ε to stay within, above 0.
        delta: δ in (0, 1).
        adjacency: Between which data sets.
        lowest: The least number to try.
        highest: The largest number to try.
        tolerance: Relative, by which ε may be below the target, or, where ε jumps, the number too
            large. It is 1e-4 at least where the bound has rough values.

    Returns:
        A number whose ε was computed and found within the target, None if there is none up to the
        highest.

    Raises:
        ValueError: If an argument is out of range, or as the bound.
    """
    target = positive("target_epsilon", target_epsilon)
    search = functools.partial(_least, target=target, lowest=lowest, highest=highest)

    def spent(x: float) -> float:
        return ask(entry, rounds(x), delta=delta, adjacency=adjacency).epsilon

    start = slope = 1.0
    for estimate in entry.rough:  # each begins where the one before it says, at last the bound
        rough = functools.cache(_rough_epsilon(estimate, rounds, delta, adjacency))
        guess = search(rough, tolerance=_ROUGHLY, start=start, slope=slope) or highest
        # A straight line through two rough values says where the target is met.
        here, beyond = (
            log_excess(rough(x), target) for x in (guess, min(_NEARBY * guess, highest))
        )
        slope = max(_LEAST_SLOPE, (here - beyond) / math.log(_NEARBY))
        # No farther than a step of the search: at ε = 0 the line would say that nothing is needed.
        start = guess * math.exp(min(max(here / slope, -_LARGEST_STEP), _LARGEST_STEP))
    close = max(tolerance, CLOSE) if entry.rough else tolerance
    return search(spent, tolerance=close, start=start, slope=slope)


def least_noisy_rate(
    entry: Bound,
    rounds: Callable[[float, float], Rounds],
    *,
    target_epsilon: float,
    delta: float,
    adjacency: str = "zero_out",
    lowest: float = LOWEST,
) -> float:
    """Returns the sampling rate at which the mean gradient is least noisy within a budget.

    It is the best by the bound's rough values, to three digits.

    Args:
        entry: The bound that is meant, which has rough values.
        rounds: What would run at a noise multiplier and a rate.
        target_epsilon: ε to stay within, above 0.
        delta: δ in (0, 1).
        adjacency: Between which data sets.
        lowest: The least multiplier to try.

    Raises:
        ValueError: If an argument is out of range.
    """
    target = positive("target_epsilon", target_epsilon)

    def noise_of_mean(rate: float) -> float:
        rough = _rough_epsilon(entry.rough[0], lambda sigma: rounds(sigma, rate), delta, adjacency)
        sigma = _least(
            rough, target=target, lowest=lowest, highest=HIGHEST, tolerance=RELATIVE_TOLERANCE
        )
        return rounds(sigma or HIGHEST, rate)[0][0].noise_of_mean

    best = minimize_scalar(noise_of_mean, bounds=_RATES, method="bounded", options={"xatol": 1e-3})
    return round(float(best.x), 3)


def _rough_epsilon(
    estimate: Callable[..., float],
    rounds: Callable[[float], Rounds],
    delta: float,
    adjacency: str,
) -> Callable[[float], float]:
    """Returns a bound's rough ε as a function of the noise multiplier."""
    rough = functools.partial(
        estimate, delta=open_unit_interval("delta", delta), adjacency=Adjacency(adjacency)
    )
    return lambda sigma: rough(rounds(sigma))


def smallest_noise(epsilon: Callable[[float], float], *, target_epsilon: float) -> float:
    """Returns the smallest noise multiplier, rounded up, whose ε stays within a target.

    Args:
        epsilon: ε of a run at a noise multiplier; more noise must not cost more.
        target_epsilon: ε to stay within, above 0.

    Returns:
        A multiplier whose ε was computed and found within the target: below it by at most 1e-7 of
        it, or the multiplier is too large by at most 1e-7 of itself; 1e-3 if that is enough.

    Raises:
        ValueError: If no multiplier up to 1e9 meets the target (a bound by RDP has a floor, about
            log(1/δ)/16384), or ε is NaN.
    """
    target = positive("target_epsilon", target_epsilon)
    if not callable(epsilon):
        raise ValueError(f"epsilon must be a function of the noise multiplier, got {epsilon!r}")
    sigma = _least(
        epsilon, target=target, lowest=LOWEST, highest=HIGHEST, tolerance=RELATIVE_TOLERANCE
    )
    if sigma is None:
        raise _out_of_reach(target, epsilon(HIGHEST))
    return sigma


def _out_of_reach(target: float, floor: float) -> ValueError:
    """Returns what to raise where no multiplier meets the target."""
    stays = round_up(floor) if math.isfinite(floor) else "infinity"
    return ValueError(
        f"no noise_multiplier up to {HIGHEST:g} meets target_epsilon={target}: by this bound "
        f"epsilon stays at {stays}, however large the noise; raise the target or "
        "delta, or use bound='pair' (one pair of data sets) or 'certified' (every data set, "
        "more noise)"
    )


def _least(
    epsilon: Callable[[float], float],
    *,
    target: float,
    lowest: float,
    highest: float,
    tolerance: float,
    start: float = 1.0,
    slope: float = 1.0,
) -> float | None:
    """Returns the least x whose ε is within the target; None if there is none.

    The search is in y = log(x / ``lowest``), over which log ε is nearly straight. It begins at
    ``start``, where log ε is taken to fall with the slope, and ends at an x whose ε is below the
    target by a share ``tolerance``, or less, or which is by no more than that too large.
    """
    end = math.log(highest / lowest)

    def place(y: float) -> float:
        return highest if y == end else min(lowest * math.exp(y), highest)

    @functools.cache
    def excess(y: float) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OrderCapWarning)
            value = epsilon(place(y))
        if math.isnan(value):
            raise ValueError(f"epsilon is NaN at noise_multiplier={place(y):.6g}")
        difference = log_excess(value, target)
        # What is close enough ends the search, so its middle is aimed at.
        return 0.0 if -tolerance <= difference <= 0 else difference + tolerance / 2

    first = min(max(math.log(start / lowest), 0.0), end)
    unsafe, safe = bracket(
        excess,
        first,
        towards_safe=_walk(excess, first, end, slope),
        towards_unsafe=_walk(excess, first, 0.0, slope),
    )
    if safe is not None and unsafe is not None:
        safe = safe_root(
            excess, unsafe=unsafe, safe=safe, tolerance=tolerance / 4, step=tolerance / 4
        )
    return None if safe is None else place(safe)


def _walk(
    excess: Callable[[float], float], start: float, end: float, slope: float
) -> Iterator[float]:
    """Yields points from ``start`` to ``end``, none beyond one whose excess is 0.

    The first is where a line of that slope meets 0, the others are farther and farther beyond.
    """
    farther = 1.0
    while start != end and excess(start) != 0:
        # At least 1e-9, which is a step even where the excess is but a rounding.
        step = min(farther * max(abs(excess(start)) / slope, 1e-9), _LARGEST_STEP)
        start = min(start + step, end) if start < end else max(start - step, end)
        farther *= 2
        yield start
