"""Finds the smallest noise that keeps a run within its privacy budget.

>>> from opacus_shuffle.analysis import gaussian
>>> def epsilon(noise_multiplier):
...     return gaussian.compute_epsilon(mu=1 / noise_multiplier, delta=1e-6)
>>> sigma = smallest_noise(epsilon, target_epsilon=1.0)
>>> round(sigma, 3)
4.225
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opacus_shuffle.accountants.bounds.registry import Bound, Rounds, evaluate_bound
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.analysis.composition import OrderCapWarning
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.solve import bracket, log_excess, safe_root
from opacus_shuffle.core.validation import open_unit_interval, positive

LOWEST, HIGHEST = 1e-3, 1e9
RELATIVE_TOLERANCE = 1e-4
"""By what share a multiplier may exceed the smallest one: an ε of some bounds takes a second."""
_FINEST = 1e-7
"""The same for functions of :func:`smallest_noise`."""
_SLOPE_STEP = 1.01
"""The factor of σ over which the slope of an estimate is taken."""
_LARGEST_STEP = math.log(8)
"""The largest step of a search, in log σ."""
_LEAST_SLOPE = 0.5
"""The least slope of log ε over log σ. It limits a step to that of ε ~ 1/√σ."""


def rounds_at(
    mechanism_class: type[Mechanism], steps: int, fields: Mapping[str, Any]
) -> Callable[[float], Rounds]:
    """Returns the rounds of a run as a function of their noise multiplier.

    Args:
        mechanism_class: The mechanism of every round.
        steps: The number of rounds.
        fields: The mechanism's other fields.
    """
    return lambda sigma: [(mechanism_class.build(**fields, noise_multiplier=sigma), steps)]


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

    If the bound has an estimate, which takes little time, the search begins where it meets the
    target, with its slope.

    Args:
        entry: The bound to calibrate by.
        rounds: Returns the rounds at a noise multiplier, all of the bound's mechanism. More noise
            must not cost more.
        target_epsilon: ε to stay within, above 0.
        delta: δ in (0, 1).
        adjacency: Between which data sets.
        lowest: The smallest multiplier to try.
        tolerance: Relative distance of the multiplier above the smallest one, as the slope of ε
            says.

    Returns:
        A multiplier whose ε was computed and is within the target; ``lowest`` if that is enough.

    Raises:
        ValueError: If an argument is out of range or no multiplier meets the target, and whatever
            the bound raises.
    """
    target = positive("target_epsilon", target_epsilon)

    def epsilon(sigma: float) -> float:
        return evaluate_bound(entry, rounds(sigma), delta=delta, adjacency=adjacency).epsilon

    start = slope = 1.0
    if entry.estimate is not None:
        estimated = functools.cache(_estimate_at(entry, rounds, delta, adjacency))
        start = _smallest(estimated, target=target, lowest=lowest, tolerance=1e-3) or HIGHEST
        here, beyond = (
            log_excess(estimated(at), target) for at in (start, min(_SLOPE_STEP * start, HIGHEST))
        )
        slope = max(_LEAST_SLOPE, (here - beyond) / math.log(_SLOPE_STEP))
    sigma = _smallest(
        epsilon, target=target, lowest=lowest, tolerance=tolerance, start=start, slope=slope
    )
    if sigma is None:
        raise _unreachable(target, epsilon(HIGHEST))
    return sigma


def estimated_noise(
    entry: Bound,
    rounds: Callable[[float], Rounds],
    *,
    target_epsilon: float,
    delta: float,
    adjacency: str = "zero_out",
    lowest: float = LOWEST,
) -> float:
    """Returns the smallest noise multiplier by a bound's estimate. It guarantees no budget.

    The arguments are those of :func:`noise_within`; the bound must have an estimate.
    """
    sigma = _smallest(
        _estimate_at(entry, rounds, delta, adjacency),
        target=positive("target_epsilon", target_epsilon),
        lowest=lowest,
        tolerance=_FINEST,
    )
    return sigma or HIGHEST


def _estimate_at(
    entry: Bound, rounds: Callable[[float], Rounds], delta: float, adjacency: str
) -> Callable[[float], float]:
    """Returns a bound's estimate of ε as a function of the noise multiplier."""
    if entry.estimate is None:
        raise ValueError(f"bound {entry.name!r} has no estimate: use noise_within")
    evaluate = functools.partial(
        entry.estimate, delta=open_unit_interval("delta", delta), adjacency=Adjacency(adjacency)
    )
    return lambda sigma: evaluate(rounds(sigma))


def smallest_noise(epsilon: Callable[[float], float], *, target_epsilon: float) -> float:
    """Returns the smallest noise multiplier, rounded up, whose ε stays within a target.

    Args:
        epsilon: Returns ε of a run at a noise multiplier; more noise must not cost more.
        target_epsilon: ε to stay within, above 0.

    Returns:
        A multiplier whose ε was computed and is within the target. It is below the target by at
        most 1e-7 of it, or the multiplier is too large by at most 1e-7 of itself; 1e-3 if that is
        enough.

    Raises:
        ValueError: If no multiplier up to 1e9 meets the target (a bound by RDP has a floor, about
            log(1/δ)/16384), or ε is NaN.
    """
    target = positive("target_epsilon", target_epsilon)
    if not callable(epsilon):
        raise ValueError(f"epsilon must be a function of the noise multiplier, got {epsilon!r}")
    sigma = _smallest(epsilon, target=target, tolerance=_FINEST)
    if sigma is None:
        raise _unreachable(target, epsilon(HIGHEST))
    return sigma


def _unreachable(target: float, floor: float) -> ValueError:
    """Returns the error for a target that no multiplier meets; ``floor`` is ε at the largest."""
    stays = round_up(floor) if math.isfinite(floor) else "infinity"
    return ValueError(
        f"no noise_multiplier up to {HIGHEST:g} meets target_epsilon={target}: by this bound "
        f"epsilon stays at {stays}, however large the noise; raise the target or "
        "delta, or use bound='pair' (one pair of data sets) or 'certified' (every data set, "
        "more noise)"
    )


def _smallest(
    epsilon: Callable[[float], float],
    *,
    target: float,
    tolerance: float,
    lowest: float = LOWEST,
    start: float = 1.0,
    slope: float = 1.0,
) -> float | None:
    """Returns the smallest σ up to ``HIGHEST`` whose ε is within the target; None if there is none.

    The search is in y = log(σ / ``lowest``), over which log ε is nearly straight. It begins at
    ``start`` and assumes that log ε falls with ``slope`` there. It ends at a σ that is too large by
    a share of ``tolerance`` or less: by that slope, or because ε is above the target just below.
    """
    end, gap = math.log(HIGHEST / lowest), tolerance * slope

    def sigma_at(y: float) -> float:
        return HIGHEST if y == end else min(lowest * math.exp(y), HIGHEST)

    @functools.cache
    def excess(y: float) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OrderCapWarning)
            value = epsilon(sigma_at(y))
        if math.isnan(value):
            raise ValueError(f"epsilon is NaN at noise_multiplier={sigma_at(y):.6g}")
        difference = log_excess(value, target)
        # Any value within the gap ends the search, so it aims at the middle of that range.
        return 0.0 if -gap <= difference <= 0 else difference + gap / 2

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
    return None if safe is None else sigma_at(safe)


def _walk(
    excess: Callable[[float], float], start: float, end: float, slope: float
) -> Iterator[float]:
    """Yields points from ``start`` to ``end``, and stops after one whose excess is 0.

    The first is where a line of that slope meets 0. The steps double from then on.
    """
    growth = 1.0
    while start != end and excess(start) != 0:
        # At least 1e-9, which is a step even if the excess is only a rounding error.
        step = min(growth * max(abs(excess(start)) / slope, 1e-9), _LARGEST_STEP)
        start = min(start + step, end) if start < end else max(start - step, end)
        growth *= 2
        yield start
