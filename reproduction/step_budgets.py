r"""Splits the budget of a run into equal steps, as WS section V-B does.

WS is Yang, Ji and Xiang's weight shuffling. The composition is that of WS Theorems 1 and 2
(:mod:`opacus_shuffle.analysis.advanced_composition`).

>>> epsilon, delta = step_budget(epsilon=0.5, delta=5e-6, steps=500, sample_rate=0.02)
>>> round(epsilon, 4), round(delta, 10)
(0.1976, 2.5e-07)
"""

from __future__ import annotations

import math

from opacus_shuffle.analysis.advanced_composition import RELATIVE_ERROR
from opacus_shuffle.core.validation import (
    integer,
    open_unit_interval,
    positive,
    sampling_rate,
)


def step_budget(
    *, epsilon: float, delta: float, steps: int, sample_rate: float = 1.0, delta_split: float = 0.5
) -> tuple[float, float]:
    """Returns the (ε_s, δ_s) that each of ``steps`` equal steps may spend before sampling.

    The formula is that of WS section V-B.

    Args:
        epsilon: ε > 0 of the run.
        delta: δ in (0, 1) of the run.
        steps: T, at least 1.
        sample_rate: q in (0, 1].
        delta_split: The share of δ that goes to Σ δ_j.

    Raises:
        ValueError: If an argument is out of range.
    """
    epsilon, delta = positive("epsilon", epsilon), open_unit_interval("delta", delta)
    steps, rate = integer("steps", steps), sampling_rate("sample_rate", sample_rate)
    split = open_unit_interval("delta_split", delta_split)
    slope = math.sqrt(-2 * math.log(max((1 - split) * delta, math.ulp(0.0))) * steps)
    # The smaller of Theorem 1's two forms, so the larger of the two roots; the second without
    # cancellation.
    sampled = max(
        epsilon / steps, 2 * epsilon / (slope + math.sqrt(slope * slope + 2 * steps * epsilon))
    )
    before = sampled - math.log(rate) if sampled > 700 else math.log1p(math.expm1(sampled) / rate)
    return before * (1 - RELATIVE_ERROR), min(
        split * delta / (rate * steps), math.nextafter(1.0, 0.0)
    )
