"""``Messages``: bits that carry the label of their coordinate, packed eight to a byte.

A user's messages are, for each coordinate, ``ones`` bits that are 1 and the rest 0; the shuffler
permutes all users' messages at random. Labels travel with their bits, so a random permutation of
everything is, read label by label, an independent random permutation of every coordinate's bits:
that is how it is held here, one row of packed bits per coordinate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from opacus_shuffle.core.participation import permutation
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import integer


@dataclasses.dataclass(frozen=True, eq=False)
class Messages:
    """The bits of one or many reports, coordinate by coordinate.

    Attributes:
        bits: uint8, shape (d, ⌈num_reports·bits_per_report/8⌉): row j holds coordinate j's bits,
            most significant first, with zeros behind the last.
        bits_per_report: g + b, one user's bits per coordinate.
        num_reports: How many users' messages are in it.
        granularity: g, which tells protocols of one size apart.
    """

    bits: npt.NDArray[np.uint8]
    bits_per_report: int
    granularity: int
    num_reports: int = 1

    def __post_init__(self) -> None:
        if not (
            isinstance(self.bits, np.ndarray)
            and self.bits.dtype == np.uint8
            and self.bits.ndim == 2
        ):
            raise ValueError(
                f"bits must be a uint8 array with a row per coordinate, got {self.bits!r}: "
                "randomize makes it"
            )
        for name in ("bits_per_report", "granularity", "num_reports"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))

    @classmethod
    def of(cls, ones: npt.NDArray[np.int64], *, bits_per_report: int, granularity: int) -> Messages:
        """Makes one user's messages: ``ones`` ones in each coordinate, then zeros."""
        place = np.arange(bits_per_report)
        return cls(
            np.stack([np.packbits(place < count) for count in ones]), bits_per_report, granularity
        )

    def ones(self) -> npt.NDArray[np.int64]:
        """How many ones each coordinate has: shape (d,)."""
        return np.array([np.count_nonzero(np.unpackbits(row)) for row in self.bits], np.int64)


def shuffled(messages: Sequence[Messages], stream: SecretGenerator) -> Messages:
    """Returns these messages in random order."""
    first = messages[0]
    reports = sum(message.num_reports for message in messages)
    total = reports * first.bits_per_report
    bits = np.empty((len(first.bits), -(-total // 8)), np.uint8)
    for coordinate in range(len(bits)):
        pooled = np.concatenate(
            [
                np.unpackbits(
                    message.bits[coordinate], count=message.num_reports * message.bits_per_report
                )
                for message in messages
            ]
        )
        bits[coordinate] = np.packbits(pooled[permutation(total, stream)])
    return Messages(bits, first.bits_per_report, first.granularity, reports)
