"""Simulates SCO Algorithms 1 and 2 bit by bit: the users' messages, the shuffler, the analyzer.

SCO is Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation. In each coordinate a user
sends g + b bits, labelled with the coordinate; ``ShuffleVectorSum.randomize`` returns the number of
ones. The shuffler permutes the bits of all users. The package sends only the counts, because the
shuffled bits of a coordinate reveal nothing else.

Labels stay attached to their bits. One permutation of all bits is therefore equivalent to
independent permutations of each coordinate's bits. The code permutes each coordinate separately and
stores one row of packed bits for each.

>>> import torch
>>> from opacus_shuffle import ShuffleVectorSum
>>> protocol = ShuffleVectorSum(num_users=40, dimension=2, max_norm=1.0, epsilon=1.0, delta=1e-6)
>>> vector = torch.tensor([0.6, -0.8])
>>> messages = [randomize(protocol, vector) for _ in range(40)]
>>> estimate = analyze(protocol, shuffle(messages))  # unbiased for the sum, (24, -32)
>>> bool((estimate - 40 * vector).norm() < 6 * protocol.mean_squared_error**0.5)
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.participation import permutation
from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.protocols.grid_sum import GridSum


@dataclasses.dataclass(frozen=True, eq=False)
class Messages:
    """The bits of one or many users' reports, coordinate by coordinate.

    Attributes:
        bits: uint8, shape (d, ⌈num_reports·bits_per_report/8⌉). Row j holds coordinate j's bits,
            most significant first, with zeros after the last.
        bits_per_report: g + b, the bits of one user in each coordinate.
        num_reports: The number of users whose bits these are.
    """

    bits: npt.NDArray[np.uint8]
    bits_per_report: int
    num_reports: int = 1

    @classmethod
    def of(cls, ones: npt.NDArray[np.int64], bits_per_report: int) -> Messages:
        """Makes one user's messages: the given number of ones in each coordinate, then zeros."""
        positions = np.arange(bits_per_report)
        return cls(np.stack([np.packbits(positions < count) for count in ones]), bits_per_report)

    def ones(self) -> npt.NDArray[np.int64]:
        """Counts the ones of each coordinate: shape (d,)."""
        return np.array([np.count_nonzero(np.unpackbits(row)) for row in self.bits], np.int64)


def randomize(protocol: GridSum, x: Any, generator: torch.Generator | None = None) -> Messages:
    """Returns one user's messages for a vector, or for a number in a scalar sum."""
    ones = protocol.randomize(x, generator).numpy()
    return Messages.of(ones, protocol.granularity + protocol.noise_bits)


def shuffle(messages: Sequence[Messages], generator: torch.Generator | None = None) -> Messages:
    """Returns the bits of all users in random order, as the analyzer gets them."""
    stream, first = stream_of(generator), messages[0]
    reports = sum(message.num_reports for message in messages)
    total = reports * first.bits_per_report
    rows = []
    for coordinate in range(len(first.bits)):
        pooled = np.concatenate(
            [
                np.unpackbits(
                    message.bits[coordinate], count=message.num_reports * message.bits_per_report
                )
                for message in messages
            ]
        )
        rows.append(np.packbits(pooled[permutation(total, stream)]))
    return Messages(np.stack(rows), first.bits_per_report, reports)


def analyze(protocol: GridSum, messages: Messages) -> torch.Tensor:
    """Returns the unbiased estimate of the senders' sum: float64, shape (d,)."""
    return protocol.decode(torch.from_numpy(messages.ones()), messages.num_reports)
