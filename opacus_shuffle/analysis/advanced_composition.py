r"""Composes (ε_j, δ_j) steps with sampling before each of them.

These are Theorems 1 and 2 of Yang, Ji and Xiang's weight shuffling (WS). They reproduce the numbers
of WS; for Gaussian steps the PRV accountant is far better. Theorem 1: k steps are (ε, δ)-DP
together for

    ε = min{Σ ε_j,  ½ Σ ε_j² + √(2·log(1/δ′)·Σ ε_j²)},   δ′ = δ − Σ δ_j > 0,

and Theorem 2: a step that each record enters with probability at most q is (log(1 + q(e^ε − 1)),
qδ)-DP. The paper does not print how δ is split between Σ δ_j and δ′; one half each
(``delta_split=0.5``) is this library's reading.

>>> sampled = subsample(0.1976, sample_rate=0.02)
>>> round(compose([(sampled, 500)], slack=2.5e-6), 3)
0.5
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from opacus_shuffle.core.validation import (
    integer,
    not_negative,
    open_unit_interval,
    sampling_rate,
)

RELATIVE_ERROR = 1e-12
"""Every ε is enlarged by this fraction, which exceeds the rounding error of its few operations."""


def subsample(epsilon: float, *, sample_rate: float) -> float:
    """Returns ε of a step on a sample (WS Theorem 2), whose δ is multiplied by ``sample_rate``."""
    epsilon, sample_rate = (
        not_negative("epsilon", epsilon, infinite=True),
        sampling_rate("sample_rate", sample_rate),
    )
    if epsilon > 700:  # (1 − q) + q·e^ε overflows
        return (
            epsilon
            if sample_rate == 1
            else float(np.logaddexp(math.log1p(-sample_rate), epsilon + math.log(sample_rate)))
        )
    return math.log1p(sample_rate * math.expm1(epsilon))


def compose(epsilons: Sequence[tuple[float, int]], *, slack: float) -> float:
    """Returns ε of composed steps (WS Theorem 1), rounded up.

    Args:
        epsilons: (ε_j, number of repetitions) of each type of step.
        slack: δ′.
    """
    total = math.fsum(epsilon * count for epsilon, count in epsilons)
    if total == math.inf:
        return math.inf
    peak = max((epsilon for epsilon, _ in epsilons), default=0.0)
    if peak == 0:
        return 0.0
    squares = math.fsum(
        (epsilon / peak) ** 2 * count for epsilon, count in epsilons
    )  # over peak², lest it underflows
    return min(total, peak * (peak * squares / 2 + math.sqrt(-2 * math.log(slack) * squares))) * (
        1 + RELATIVE_ERROR
    )


def compute_epsilon(
    steps: Sequence[tuple[Callable[[float], float], float, int]],
    *,
    delta: float,
    delta_split: float = 0.5,
) -> float:
    """Returns ε of a whole run from the ε of one step as a function of its δ.

    Args:
        steps: For each type of step: its ε ≥ 0 as a non-increasing function of its δ (before
            sampling), the sampling rate, and the number of repetitions.
        delta: δ in (0, 1) of the run.
        delta_split: The share of δ that goes to Σ δ_j, in (0, 1).

    Returns:
        ε, rounded up; 0 if the steps together see a record with probability at most their share of
        δ.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        Those of the steps' own ε: proved if they are (WS Theorems 1 and 2 are Theorems 22 and 29 of
        Steinke's survey, arXiv 2210.00597), for the adjacency in which the record is left out or
        turned into a null record.
    """
    delta = open_unit_interval("delta", delta)
    seen = math.fsum(
        sampling_rate("sample_rate", rate) * integer("steps", count) for _, rate, count in steps
    )

    split = open_unit_interval("delta_split", delta_split)
    share, slack = split * delta / seen, (1 - split) * delta
    if share >= 1:
        return 0.0
    if not share or not slack:  # shares of a delta near the smallest number
        return math.inf
    return compose(
        [(subsample(step(share), sample_rate=rate), count) for step, rate, count in steps],
        slack=slack,
    )
