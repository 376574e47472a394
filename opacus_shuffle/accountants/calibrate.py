"""The one calibrator: the smallest noise that keeps a run within its budget.

>>> from opacus_shuffle.analysis import gaussian
>>> sigma = smallest_noise(lambda noise: gaussian.compute_epsilon(mu=1 / noise, delta=1e-6), target_epsilon=1.0)
>>> round(sigma, 3)
4.225
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

from opacus_shuffle.analysis.composition import OrderCapWarning
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.solve import bracket, log_excess, safe_root
from opacus_shuffle.core.validation import positive

LOWEST, HIGHEST = 1e-3, 1e9
RELATIVE_TOLERANCE = 1e-7


def smallest_noise(
    epsilon: Callable[[float], float], *, target_epsilon: float, lowest: float = LOWEST, tolerance: float = RELATIVE_TOLERANCE
) -> float:
    """Returns the smallest noise multiplier (rounded up) whose ε stays within a target.

    Args:
        epsilon: ε of a run at a noise multiplier; more noise must not cost more.
        target_epsilon: ε to stay within, above 0.
        lowest: The least multiplier to try.
        tolerance: Relative, by which it may be too large.

    Returns:
        A multiplier whose ε was computed and found within the target; ``lowest`` if that is enough.

    Raises:
        ValueError: If no multiplier up to 1e9 meets the target (a bound by RDP has a floor, about log(1/δ)/16384), or ε is NaN.
    """
    target, lowest = positive("target_epsilon", target_epsilon), positive("lowest", lowest)
    if lowest > HIGHEST:
        raise ValueError(f"lowest must not exceed {HIGHEST:g}, got {lowest!r}: no more noise is tried")
    if not callable(epsilon):
        raise ValueError(f"epsilon must be a function of the noise multiplier, got {epsilon!r}")

    @functools.cache
    def spent(sigma: float) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OrderCapWarning)
            value = epsilon(sigma)
        if math.isnan(value):
            raise ValueError(f"epsilon is NaN at noise_multiplier={sigma:.6g}")
        return value

    def excess(log_sigma: float) -> float:
        return log_excess(spent(math.exp(log_sigma)), target)

    start, quarter = max(0.0, math.log(lowest)), math.log(4)
    more = [start + quarter, start + 2 * quarter, start + 3 * quarter]
    unsafe, safe = bracket(excess, start, towards_safe=more, towards_unsafe=_steps(start, math.log(lowest), -quarter))
    if safe is None:  # before many costly steps: does the end of the range meet it?
        floor = spent(HIGHEST)
        if floor > target:
            raise ValueError(
                f"no noise_multiplier up to {HIGHEST:g} meets target_epsilon={target}: by this bound epsilon stays at "
                f"{round_up(floor)}, however large the noise; raise the target or delta, or use bound='pair' (one pair of data "
                "sets) or 'certified' (every data set, more noise)"
            )
        unsafe, safe = bracket(excess, more[-1], towards_safe=_steps(more[-1], math.log(HIGHEST), quarter), towards_unsafe=())
    if unsafe is None:
        return lowest
    assert safe is not None
    close = tolerance / 4
    return math.exp(safe_root(excess, unsafe=unsafe, safe=safe, tolerance=close, step=close))


def _steps(start: float, end: float, step: float) -> list[float]:
    """Points from ``start`` on to ``end``."""
    points = []
    while start != end:
        start = max(start + step, end) if step < 0 else min(start + step, end)
        points.append(start)
    return points
