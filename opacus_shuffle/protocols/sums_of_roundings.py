"""Adds up rows whose entries are rounded at random to a grid: users' clipped gradients.

An entry is in the count of ⌊g/2 + x + U⌋, x measured in grid steps and U uniform, fresh for every
entry. Single precision and ten bits of U decide all but two entries in a thousand: x in units of
2⁻¹⁰ steps is known to less than one unit, so unless the sum of both is within a unit of a whole
number, double precision and all bits of U would say the same. The others are worked out so, from
the ten bits that they have and 53 more. The distribution is that of rounding in double precision.

>>> from opacus_shuffle.core.randomness import seeded_generator
>>> source = seeded_generator("cpu", 1, "rounding")
>>> rows, steps = torch.full((1000, 3), 0.25), torch.ones(1000)
>>> sum_of_roundings(rows, steps, granularity=8, source=source) - 4000
tensor([269, 248, 224])
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.randomness import SecretGenerator

FINEST = 2**12
"""Grids with more steps than this do not fit into single precision."""
_BITS, _LANES = 10, 3
"""Three times ten bits are in a random number of 32."""
_UNITS = 2**_BITS
_MAGIC = 3 * 2**22
"""Single precision has no fractions here: adding it rounds, and the last 22 bits are the number."""
_STEPS_OF_MAGIC = int(np.float32(_MAGIC).view(np.int32)) >> _BITS
_ENTRIES = 2**17
"""Entries that are worked on at a time: what a processor's cache holds."""
_COLUMNS = 2**11
_SIXTEEN_BITS = 2**16


def round_at_random(place: torch.Tensor, draws: SecretGenerator) -> torch.Tensor:
    """Returns ⌊place + U⌋, int64, with U uniform in [0, 1) for every entry.

    ``place`` (float64, at least 0) is overwritten.

    The first 16 bits of U decide all but one in 65,536, and cost a quarter of what 64 do; the rest
    is drawn where it matters.
    """
    place = place.mul_(_SIXTEEN_BITS)
    coarse = place.floor()
    rest = place.sub_(coarse)
    bits = draws.words(-(-coarse.numel() // 4)).view(np.uint16)[: coarse.numel()]
    coarse.add_(torch.from_numpy(bits).view(coarse.shape))
    sums = coarse.long()
    tied = ((sums & (_SIXTEEN_BITS - 1)) == _SIXTEEN_BITS - 1).nonzero(as_tuple=True)
    sums[tied] += draws.uniforms(len(tied[0])) >= 1 - rest[tied]
    return sums >> 16


def sum_of_roundings(
    rows: torch.Tensor, steps: torch.Tensor, *, granularity: int, source: SecretGenerator
) -> torch.Tensor:
    """Returns the counts: int64, shape (d,).

    Args:
        rows: Shape (n, d), on the CPU, finite, single or double precision.
        steps: Shape (n,), float64, at least 0: how many grid steps a row's unit is. ``|row·steps|``
            must not exceed g/2; rounding errors beyond it are taken back.
        granularity: g, at most :data:`FINEST`.
        source: Of the random bits.
    """
    scale = (steps.to(torch.float64) * _UNITS).numpy()
    values, (count, width) = rows.numpy(), rows.shape
    if values.dtype == np.float32 and not np.all((scale == 0) | ((scale > 1e-30) & (scale < 1e30))):
        values = values.astype(np.float64)  # such scales single precision does not hold
    total = np.zeros(width, dtype=np.int64)
    across = max(1, min(width, max(_COLUMNS, _ENTRIES // max(count, 1))))
    down = max(1, min(count, _ENTRIES // across))
    # Memory for block after block, as asking for it each time costs more than the work.
    kinds = (np.float32, np.int32, np.int32, np.bool_)
    room = [np.empty(down * across + _LANES, dtype=kind) for kind in kinds]
    for left in range(0, width, across):
        for top in range(0, count, down):
            block = values[top : top + down, left : left + across]
            total[left : left + across] += _sum_block(
                block, scale[top : top + down], granularity, source, room
            )
    return torch.from_numpy(total)


def _sum_block(
    block: npt.NDArray[np.floating],
    scale: npt.NDArray[np.float64],
    granularity: int,
    source: SecretGenerator,
    room: list[npt.NDArray[Any]],
) -> npt.NDArray[np.int32]:
    """Returns the counts of a block of rows that fits into the cache."""
    count, width = block.shape
    entries, middle = count * width, granularity * (_UNITS // 2)
    units, sums, near = room[0][:entries], room[1][:entries], room[3][:entries]
    np.multiply(
        block,
        scale.astype(block.dtype)[:, None],
        out=units.reshape(count, width),
        casting="same_kind",
    )
    # One unit more, so that entries within a unit of a whole step, on either side, have the
    # remainders 0 and 1.
    units += np.float32(_MAGIC + 1 + middle % _UNITS)
    third = -(-entries // _LANES)
    bits = room[2][: _LANES * third]
    drawn = source.words(-(-third // 2)).view(np.uint32)[:third]
    for lane in range(_LANES):
        part = bits[lane * third : (lane + 1) * third].view(np.uint32)
        np.right_shift(drawn, lane * _BITS, out=part)
        part &= _UNITS - 1
    np.add(units.view(np.int32), bits[:entries], out=sums)
    remainders = np.bitwise_and(sums, _UNITS - 1, out=units.view(np.int32))
    close = np.flatnonzero(np.less(remainders, 2, out=near))
    sums >>= _BITS
    if len(close):
        row, column = np.divmod(close, width)
        exact = np.clip(block[row, column].astype(np.float64) * scale[row], -middle, middle)
        coarse = np.floor(exact)
        later = (source.words(len(close)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        more = later >= 1 - (exact - coarse)
        whole = (coarse.astype(np.int64) + middle % _UNITS + bits[close] + more) >> _BITS
        sums[close] = whole + _STEPS_OF_MAGIC
    offset = (count * (_STEPS_OF_MAGIC - middle // _UNITS)) % 2**32
    # Modulo 2^32.
    summed: npt.NDArray[np.uint32] = np.add.reduce(
        sums.view(np.uint32).reshape(count, width), axis=0, dtype=np.uint32
    )
    return (summed - np.uint32(offset)).view(np.int32)
