r"""ε that never rises with δ, where the numerical search for it may waver: near zero, at δ that no longer mean much.

Every pair's δ is a convex function of e^ε, so what holds at two δ holds between them on the chord in e^ε, and what holds at a
smaller δ holds at a larger one. From :data:`FIRST` on, an ε below :data:`SMALL` is therefore taken from fixed points, twice as
large each, in place of δ itself.

>>> wavering = {0.256: 2e-6, 0.512: 3e-6}
>>> [round(falling_epsilon(lambda delta: wavering.get(delta, 1e-3), delta), 8) for delta in (0.25, 0.3, 0.5, 0.6)]
[4.88e-05, 2e-06, 2e-06, 1.64e-06]
"""

from __future__ import annotations

import math
from collections.abc import Callable

FIRST, SMALL = 1e-3, 0.05
_POINTS = [FIRST * 2.0**power for power in range(10)]


def falling_epsilon(epsilon: Callable[[float], float], delta: float) -> float:
    """Returns a valid ε at δ that is no larger at any larger δ, as far as the one that is given wavers near zero alone.

    Args:
        epsilon: A valid ε at any δ in (0, 1), for every pair of data sets that it is about.
        delta: δ in (0, 1).
    """
    own = epsilon(delta)
    if delta < FIRST or own > SMALL:
        return own
    before, after = SMALL, 0.0
    points = [point for point in _POINTS if point <= delta]
    for point in reversed(points):
        found = epsilon(point)
        if found > SMALL:
            break
        before = min(before, found)
    low, high = points[-1], 1.0  # at δ = 1 anything holds
    if len(points) < len(_POINTS):
        high = _POINTS[len(points)]
        after = min(before, epsilon(high))
    share = (high - delta) / (high - low)
    chord = math.log1p(math.expm1(before) * share + math.expm1(after) * (1 - share))
    return min(before, chord * (1 + 1e-12))
