"""Sums of counts modulo a power of two, which is all that a secure aggregation reveals.

The analyzer of a sum of bits reads one count for each coordinate. A secure aggregation that shows
the sum of the users' counts modulo M, and nothing else, shows it no more than the shuffled bits do:
the same ε holds, with no shuffler. M need not exceed the sum of all counts: it lies near what it is
for vectors of zero, and M has to tell how far from that.

>>> from opacus_shuffle import ShuffleVectorSum
>>> protocol = ShuffleVectorSum.with_noise_multiplier(1000, 3, 1.0, 1.5, delta=1e-6)
>>> modulus = smallest_modulus(protocol, largest_coordinate=5.0)
>>> ones = (protocol.granularity + protocol.noise_bits) // 2
>>> counts = torch.tensor([protocol.num_users * ones] * 3)
>>> torch.equal(unwrapped(protocol, counts % modulus, 1000, modulus), counts)
True
"""

from __future__ import annotations

import math

import torch

from opacus_shuffle.core.validation import instance_of, integer, not_negative
from opacus_shuffle.protocols.grid_sum import GridSum

DEVIATIONS = 6.0
"""Of the noise, to either side: a coordinate's noise wraps around with a chance of 2·10⁻⁹."""


def smallest_modulus(protocol: GridSum, largest_coordinate: float | None = None) -> int:
    """Returns the smallest power of two modulo which a round's sum can be decoded.

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
    """Returns the counts of ones from their values modulo M.

    They are those nearest to what vectors of zero would give. If M has room for every number of
    ones, the residues are these.

    Args:
        protocol: What the users' counts were made by.
        residues: int64, shape (d,), sums of counts modulo M.
        num_reports: How many users' counts were added up.
        modulus: M.
    """
    size = integer("modulus", modulus)
    instance_of("residues", residues, (torch.Tensor,))
    integer("num_reports", num_reports, maximum=protocol.num_users)
    if residues.dtype != torch.int64 or residues.shape != (protocol.dimension,):
        raise ValueError(
            f"residues must be int64 of shape ({protocol.dimension},), got {residues.dtype} "
            f"{tuple(residues.shape)}"
        )
    lowest = round(protocol.expected_ones(num_reports)) - size // 2
    if size > _largest_count(protocol, num_reports):
        lowest = 0
    return (residues - lowest) % size + lowest


def _largest_count(protocol: GridSum, num_reports: int) -> int:
    """Returns the largest count that a coordinate can have."""
    return num_reports * (protocol.granularity + protocol.noise_bits)
