"""Sums of counts modulo a power of two: all that a secure aggregation reveals, and all that the analyzer needs.

The analyzer of a sum of bits reads one count for each coordinate. A secure aggregation that shows
the sum of the users' counts modulo M, and nothing else, shows it no more than the shuffled bits do:
the same ε holds, with no shuffler. M need not exceed the sum of all counts: it lies near what it is
for vectors of zero, and M has to tell how far from that.

>>> from opacus_shuffle import ShuffleVectorSum
>>> protocol = ShuffleVectorSum.with_noise_multiplier(1000, 3, 1.0, 1.5, delta=1e-6)
>>> modulus = smallest_modulus(protocol, largest_coordinate=5.0)
>>> counts = torch.tensor([protocol.num_users * protocol.granularity // 2 + protocol.num_users * protocol.noise_bits // 2] * 3)
>>> torch.equal(unwrapped(protocol, counts % modulus, 1000, modulus), counts)
True
"""

from __future__ import annotations

import math

import torch

from opacus_shuffle.core.validation import instance_of, integer, not_negative
from opacus_shuffle.protocols.grid_sum import GridSum

DEVIATIONS = 6.0
"""Standard deviations of the noise to either side: a coordinate's noise wraps around with a chance of 2·10⁻⁹."""


def smallest_modulus(protocol: GridSum, largest_coordinate: float | None = None) -> int:
    """Returns the smallest power of two modulo which a round's sum is still found.

    Args:
        protocol: What the users' counts are made by.
        largest_coordinate: No coordinate of the sum of all vectors is larger than that, in the
            vectors' own unit; the noise is given six standard deviations besides, which it exceeds
            with a chance of 2·10⁻⁹. A coordinate beyond that wraps around, to a number of the other
            sign: that costs utility, never privacy. By default there is room for every sum of
            counts, and nothing ever wraps around.
    """
    values = _largest_count(protocol, protocol.num_users) + 1
    if largest_coordinate is not None:
        reach = not_negative("largest_coordinate", largest_coordinate) + DEVIATIONS * math.sqrt(
            protocol.variance
        )
        values = min(values, math.ceil(2 * reach / protocol.grid_step) + 2)
    return 1 << (values - 1).bit_length()


def unwrapped(
    protocol: GridSum, residues: torch.Tensor, num_reports: int, modulus: int
) -> torch.Tensor:
    """Returns the numbers of ones from what they are modulo M: those nearest to what vectors of zero would give.

    If M has room for every number of ones, the residues are these.

    Args:
        protocol: What the users' counts were made by.
        residues: int64, shape (d,), sums of counts modulo M.
        num_reports: How many users' counts were added up.
        modulus: M.
    """
    size, found = integer("modulus", modulus), instance_of("residues", residues, (torch.Tensor,))
    integer("num_reports", num_reports, maximum=protocol.num_users)
    if found.dtype != torch.int64 or found.shape != (protocol.dimension,):
        raise ValueError(
            f"residues must be int64 of shape ({protocol.dimension},), got {found.dtype} "
            f"{tuple(found.shape)}"
        )
    lowest = round(protocol.expected_ones(num_reports)) - size // 2
    if size > _largest_count(protocol, num_reports):
        lowest = 0
    return (found - lowest) % size + lowest


def _largest_count(protocol: GridSum, num_reports: int) -> int:
    """All bits of a coordinate."""
    return num_reports * (protocol.granularity + protocol.noise_bits)
