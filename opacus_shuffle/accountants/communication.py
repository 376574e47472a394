"""What one user sends over a run, where the mechanism and the number of coordinates say it.

>>> from opacus_shuffle.accountants.mechanisms import ShuffleGauss
>>> week = [(ShuffleGauss(noise_multiplier=9.48, num_users=60_000), 7)]
>>> print(sent_per_user(week, dimension=1_000))
Every user sends 32 bits a coordinate in every round, 28 kB over the whole run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opacus_shuffle.core.validation import integer

if TYPE_CHECKING:
    from opacus_shuffle.accountants.mechanism import Mechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """What one user sends, without labels, headers and encryption.

    Attributes:
        bits_per_coordinate: Of one report; the largest, if rounds differ.
        count_bits_per_coordinate: Of one report that hands the shuffler a count in the place of
            each coordinate's bits; None where reports are no counts.
        bytes_per_user: Over the whole run, by ``bits_per_coordinate``, rounded up; the expected
            number where users are drawn.
        every_round: Whether every user reports in every round.
    """

    bits_per_coordinate: int
    count_bits_per_coordinate: int | None
    bytes_per_user: int
    every_round: bool

    def to_dict(self) -> dict[str, int | None]:
        """Plain values, for JSON."""
        return {
            "bits_per_coordinate": self.bits_per_coordinate,
            "count_bits_per_coordinate": self.count_bits_per_coordinate,
            "bytes_per_user": self.bytes_per_user,
        }

    def __str__(self) -> str:
        count = self.count_bits_per_coordinate
        counted = "" if count is None else f" ({count:,} if it hands the shuffler their count)"
        who, when, mean = ("Every user", "in every round", "")
        if not self.every_round:
            who, when, mean = ("A user", "in each round that it is drawn for", " on average")
        return (
            f"{who} sends {self.bits_per_coordinate:,} bits a coordinate{counted} {when}, "
            f"{size_of(self.bytes_per_user)} over the whole run{mean}."
        )


def sent_per_user(
    rounds: Sequence[tuple[Mechanism, int]], *, dimension: int | None = None
) -> Communication | None:
    """Returns what one user sends over all rounds.

    It is None where a mechanism does not say, or the coordinates are not known.

    Args:
        rounds: Mechanisms with their numbers of rounds.
        dimension: d, coordinates of a report, for mechanisms that do not state their own.

    Raises:
        ValueError: If ``dimension`` is not at least 1.
    """
    given = None if dimension is None else integer("dimension", dimension)
    reports, counts, total = [], [], 0.0
    for mechanism, count in rounds:
        bits, entries = mechanism.bits_per_coordinate, getattr(mechanism, "dimension", given)
        if bits is None or entries is None:
            return None
        reports.append(bits)
        counts.append(mechanism.count_bits_per_coordinate)
        total += count * mechanism.reporting_rate * entries * bits
    if not reports:
        return None
    known = [count for count in counts if count is not None]
    return Communication(
        bits_per_coordinate=max(reports),
        count_bits_per_coordinate=max(known) if len(known) == len(counts) else None,
        bytes_per_user=math.ceil(total / 8),
        every_round=all(mechanism.reporting_rate == 1 for mechanism, _ in rounds),
    )


def size_of(count: int) -> str:
    """Returns a number of bytes in words, rounded up.

    >>> size_of(999), size_of(1_001), size_of(5_306_880)
    ('999 B', '1.1 kB', '5.4 MB')
    """
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{-(-count * 10 // 1000**power) / 10:,g} {unit}"
    return f"{count} B"
