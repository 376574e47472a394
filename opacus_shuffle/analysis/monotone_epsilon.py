r"""ε near zero, at δ that no longer mean much, where its search may waver: chords cut off the spikes.

Every pair's δ is a convex function of e^ε, so what holds at two δ holds between them on the chord
in e^ε, and what holds at a smaller δ holds at a larger one. From :data:`FIRST` on, an ε below
:data:`SMALL` is therefore at most what such chords between fixed points give, twice as large each
(10.1 to 10.3 of docs/proofs/10_from_one_epsilon_to_another.md).

>>> def wavering(delta):
...     return {0.256: 2e-6, 0.3: 9e-3, 0.5: 2.5e-6, 0.512: 3e-6, 0.6: 0.0}.get(delta, 1e-3)
>>> [round(monotone_epsilon(wavering, delta), 8) for delta in (0.25, 0.3, 0.5, 0.6)]
[4.88e-05, 2e-06, 2e-06, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable

from opacus_shuffle.analysis.advanced_composition import subsample

FIRST, SMALL = 1e-3, 0.05
_POINTS = [FIRST * 2.0**power for power in range(10)]


def monotone_epsilon(epsilon: Callable[[float], float], delta: float) -> float:
    """Returns a valid ε at δ, at most the one that is given: a chord cuts off what wavers upwards.

    Args:
        epsilon: A valid ε at any δ in (0, 1), for every pair of data sets that it is about.
        delta: δ in (0, 1).

    Formal Guarantees:
        Those of the ε that is given (Proposition 10.3).
    """
    own = epsilon(delta)
    if delta < FIRST or not 0 < own <= SMALL:
        return own
    before = math.inf
    points = [point for point in _POINTS if point <= delta]
    for point in reversed(points):
        before = min(before, epsilon(point))
        if before > SMALL:
            break
    low, high, after = points[-1], 1.0, 0.0  # at δ = 1 anything holds
    if len(points) < len(_POINTS):
        high = _POINTS[len(points)]
        after = min(before, epsilon(high))
    chord = after + subsample(before - after, sample_rate=(high - delta) / (high - low))
    return min(own, before, chord * (1 + 1e-12))
