"""The smallest noise that meets a budget: bracketed, solved, and ended on the safe side.

>>> from opacus_shuffle.analysis import gaussian
>>> sigma = smallest_noise_multiplier(lambda s: gaussian.compute_epsilon(mu=1 / s, delta=1e-5), target_epsilon=1.0)
>>> round(sigma, 4), gaussian.compute_epsilon(mu=1 / sigma, delta=1e-5) <= 1.0
(3.7306, True)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

from opacus_shuffle.analysis.composition import OrderCapWarning
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.solve import safe_root
from opacus_shuffle.core.validation import positive

LOWEST, HIGHEST = 1e-3, 1e9
RELATIVE_TOLERANCE = 1e-7


def smallest_noise_multiplier(epsilon: Callable[[float], float], *, target_epsilon: float) -> float:
    """Returns the smallest σ (to 1e-7, rounded up) with ``epsilon(σ) ≤ target_epsilon``.

    Args:
        epsilon: ε as a non-increasing, continuous function of σ; a float at every σ in [1e-3, 1e9].
        target_epsilon: The budget, above 0.

    Returns:
        σ, at which ``epsilon`` was evaluated and found within the budget. Never below 1e-3.

    Raises:
        ValueError: If no σ up to 1e9 meets the budget (a bound by RDP has a floor, about log(1/δ)/16384), or ``epsilon``
            answers NaN.
    """
    target = positive("target_epsilon", target_epsilon)

    def excess(log_sigma: float) -> float:
        value = epsilon(math.exp(log_sigma))
        if math.isnan(value):
            raise ValueError(f"epsilon is NaN at noise_multiplier={math.exp(log_sigma):.6g}")
        difference = math.log(max(value, 1e-300)) - math.log(target)
        return max(difference, 1e-16) if value > target else difference  # logarithms may agree where the numbers do not

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrderCapWarning)
        low = high = 0.0
        reachable = False
        while excess(high) > 0:
            if high >= math.log(64) and not reachable:  # before many costly steps: does the end of the range meet it?
                floor = epsilon(HIGHEST)
                if floor > target:
                    raise ValueError(
                        f"no noise_multiplier up to {HIGHEST:g} meets target_epsilon={target_epsilon}: by this bound epsilon "
                        f"stays at {round_up(floor)}, however large the noise; raise the target or delta, or use bound='pair' "
                        "(one pair of data sets) or 'certified' (every data set, more noise)"
                    )
                reachable = True
            low, high = high, min(high + math.log(4), math.log(HIGHEST))
        if low == high:
            while low > math.log(LOWEST) and excess(low) <= 0:
                low, high = max(low - math.log(4), math.log(LOWEST)), low
            if excess(low) <= 0:
                return LOWEST
        tolerance = RELATIVE_TOLERANCE / 4
        return math.exp(safe_root(excess, unsafe=low, safe=high, tolerance=tolerance, step=tolerance))
