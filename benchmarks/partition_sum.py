"""Implements Algorithm 1 of Liew and Takahashi (SG): the sum that ``mean_ratio`` replaces.

The sum over partitions is exponential in the order: p(30) = 5,604 partitions, p(100) = 190,569,292,
p(2000) about 5e45. The tests use it as a reference, and the benchmark as the baseline.

>>> f"{shuffle_gauss_rdp(order=5, num_users=60, noise_multiplier=1.0):.12f}"
'0.074582791525'
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator


def partitions(total: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yields every way to write ``total`` as a sum of positive integers, largest part first.

    >>> list(partitions(4))
    [(4,), (3, 1), (2, 2), (2, 1, 1), (1, 1, 1, 1)]
    """
    if total == 0:
        yield ()
        return
    for part in range(min(total, largest or total), 0, -1):
        for rest in partitions(total - part, part):
            yield (part, *rest)


def shuffle_gauss_rdp(*, order: int, num_users: int, noise_multiplier: float) -> float:
    """Computes SG Theorem 1 by Algorithm 1.

    As printed, the algorithm omits the 2σ² under Σk² and the log(·)/(λ − 1) of the result.
    """
    logs = []
    for parts in partitions(order):
        if len(parts) > num_users:
            continue
        multinomial = math.lgamma(order + 1) - sum(math.lgamma(k + 1) for k in parts)
        counts = [*Counter(parts).values(), num_users - len(parts)]
        arrangements = math.lgamma(num_users + 1) - sum(math.lgamma(count + 1) for count in counts)
        exponent = sum(k * k for k in parts) / (2 * noise_multiplier**2)
        logs.append(multinomial + arrangements + exponent)
    top = max(logs)
    total = top + math.log(math.fsum(math.exp(value - top) for value in logs))
    return (total - order / (2 * noise_multiplier**2) - order * math.log(num_users)) / (order - 1)
