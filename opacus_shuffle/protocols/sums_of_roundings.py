"""Rounds rows (users' clipped gradients) to a grid at random, and adds them up, on a CPU.

An entry x, in grid steps, contributes ⌊g/2 + x + U⌋ to its column's count, with a fresh uniform U
for every entry. Single precision and ten bits of U decide all but two entries in a thousand. In
units of 2⁻¹⁰ steps, x is accurate to less than one unit, so double precision and all bits of U give
the same result unless the sum of both is within a unit of a whole number. Those entries are
computed in double precision, from their ten bits and 53 more. The distribution is that of rounding
in double precision.

If Numba (the extra ``fast``) is installed, large sums run in a compiled loop, with eight bits of U,
which decide all but one entry in 256. The distribution is the same. A seed reproduces a run with
either implementation, but the two give different counts.

>>> from opacus_shuffle.core.randomness import seeded_generator
>>> source = seeded_generator("cpu", 1, "rounding")
>>> rows, steps = torch.full((1000, 3), 0.25), torch.ones(1000)
>>> sum_of_roundings(rows, steps, granularity=8, source=source) - 4000
tensor([269, 248, 224])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.compiled import jitted
from opacus_shuffle.core.randomness import SecretGenerator, room_for

FINEST = 2**12
"""The largest number of grid steps for which single precision is accurate enough."""
_BITS, _LANES = 10, 3
"""A random word of 32 bits contains three times ten bits."""
_UNITS = 2**_BITS
_MAGIC = 3 * 2**22
"""Adding this number rounds to whole numbers in single precision, stored in the last 22 bits."""
_STEPS_OF_MAGIC = int(np.float32(_MAGIC).view(np.int32)) >> _BITS
_ENTRIES = 2**18
"""The number of entries per block, so that a block fits into the processor's cache."""
_COLUMNS = 2**11
_EIGHT_BITS, _SIXTEEN_BITS = 2**8, 2**16
_TWOS, _TOP_BITS = np.uint64(0x0202020202020202), np.uint64(0x8080808080808080)
"""Masks for eight bytes at a time."""


def round_at_random(place: torch.Tensor, draws: SecretGenerator) -> torch.Tensor:
    """Returns ⌊place + U⌋ (int64) with U uniform in [0, 1), fresh for every entry.

    ``place`` (float64, at least 0) is overwritten. The first 16 bits of U decide all but one entry
    in 65,536, and cost a quarter of 64 bits; the other bits are drawn only where they matter.
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
    rows: torch.Tensor,
    steps: torch.Tensor,
    *,
    granularity: int,
    source: SecretGenerator,
    compiled: bool = False,
) -> torch.Tensor:
    """Returns the column counts of the randomly rounded rows: int64, shape (d,).

    Args:
        rows: Shape (n, d), on the CPU, finite, single or double precision.
        steps: Shape (n,), float64, at least 0: the number of grid steps per unit of each row.
            ``|row·steps|`` must not exceed g/2; larger values are clipped, as they come from
            rounding errors.
        granularity: g, at most :data:`FINEST`.
        source: The stream of random bits.
        compiled: Whether to use the compiled loop, if Numba is installed.
    """
    values, scale = rows.numpy(), steps.to(torch.float64).numpy()
    kernel = jitted(_round_and_add) if compiled else None
    if kernel is not None:
        return torch.from_numpy(_sum_compiled(kernel, values, scale, granularity, source))
    scale = scale * _UNITS
    if values.dtype == np.float32 and not _are_single(scale):
        values = values.astype(np.float64)
    total = np.zeros(values.shape[1], dtype=np.int64)
    # Buffers for all blocks, because allocating them anew costs more than the computation.
    types = (np.float32, np.int32, np.int32, np.bool_)
    room = [np.empty(_ENTRIES + _LANES, dtype=each) for each in types]
    words = room_for(_ENTRIES // 2)
    for some, columns in _blocks(*values.shape):
        block = values[some, columns]
        total[columns] += _sum_block(block, scale[some], granularity, source, room, words)
    return torch.from_numpy(total)


def _are_single(scale: npt.NDArray[np.float64]) -> bool:
    """Whether single precision represents these scales with full accuracy."""
    return bool(np.all((scale == 0) | ((scale > 1e-30) & (scale < 1e30))))


def _blocks(count: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yields rows and columns of blocks of at most ``_ENTRIES`` entries."""
    across = max(1, min(width, max(_COLUMNS, _ENTRIES // max(count, 1))))
    down = max(1, min(count, _ENTRIES // across))
    for left in range(0, width, across):
        for top in range(0, count, down):
            yield slice(top, top + down), slice(left, left + across)


def _sum_block(
    block: npt.NDArray[np.floating],
    scale: npt.NDArray[np.float64],
    granularity: int,
    source: SecretGenerator,
    room: list[npt.NDArray[Any]],
    words: bytearray,
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
    drawn = source.words(-(-third // 2), words).view(np.uint32)[:third]
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


def _sum_compiled(
    kernel: Callable[..., int],
    values: npt.NDArray[np.floating],
    steps: npt.NDArray[np.float64],
    granularity: int,
    source: SecretGenerator,
) -> npt.NDArray[np.int64]:
    """Returns the counts of the compiled loop, and completes the undecided entries."""
    scale, half = steps * _EIGHT_BITS, granularity * (_EIGHT_BITS // 2)
    quick = scale.astype(values.dtype if _are_single(scale) else np.float64)
    total = np.zeros(values.shape[1], dtype=np.int64)
    room = room_for(-(-_ENTRIES // 8))
    column, rest = np.empty(_ENTRIES, dtype=np.int64), np.empty(_ENTRIES)
    columns_left, rests_left = [column[:0]], [rest[:0]]
    for some, columns in _blocks(*values.shape):
        rows, block = values[some], values[some, columns]
        words = source.words(-(-block.size // 8), room)
        bits = words.view(np.uint8)[: block.size].reshape(block.shape)
        counts = total[columns]
        left = kernel(
            rows, quick[some], scale[some], half, bits, columns.start, counts, column, rest
        )
        columns_left.append(column[:left] + columns.start)
        rests_left.append(rest[:left].copy())
    more = source.uniforms(sum(map(len, rests_left))).numpy() >= 1 - np.concatenate(rests_left)
    np.add.at(total, np.concatenate(columns_left)[more], 1)
    return total


def _round_and_add(
    values: npt.NDArray[np.floating],
    quick_scale: npt.NDArray[np.floating],
    scale: npt.NDArray[np.float64],
    half: int,
    bits: npt.NDArray[np.uint8],
    left: int,
    total: npt.NDArray[np.int64],
    undecided: npt.NDArray[np.int64],
    rests: npt.NDArray[np.float64],
) -> int:
    """Adds ⌊g/2 + x + U⌋ of a block's entries to their columns' counts, by eight bits of U.

    A first loop, quick enough to wait for memory, works in the rows' own precision, which knows x
    in units of 2⁻⁸ steps to less than half of one. It rounds x half a unit up and adds one more, so
    that sums to which the error or the later bits of U may matter have the remainders 0 and 1. One
    entry in 128 has; a second loop works it out in double precision.

    Args:
        values: Whole rows. In a part of them Numba would not know that entries are neighbours, and
            would take them one at a time.
        quick_scale: How many units a row's unit is, in the precision of the first loop.
        scale: The same in double precision.
        half: g/2 in units.
        bits: Eight random bits for every entry of the block.
        left: The block's first column.
        total: The counts of the block's columns.
        undecided: Where to write the columns, counted from ``left``, of entries to which later bits
            of U may add one step.
        rests: Where to write what part of a unit these have beyond whole units.

    Returns:
        How many entries that are.
    """
    # Whole numbers of 32 bits are what processors work on by eights; Numba's own have 64.
    eight, shift = np.int32(8), np.float32(half + 1.5)
    width = bits.shape[1]
    counts, found = np.zeros(width, np.int32), 0
    # Eight remainders are looked at together; those beyond the last entry are never close.
    remainders = np.full(width // 8 * 8 + 8, 255, np.uint8)
    groups = remainders.view(np.uint64)
    close = np.empty(len(groups), np.int64)
    for record in range(len(bits)):
        row, coin = values[record][left : left + width], bits[record]
        for entry in range(width):
            place = np.int32(np.int32(row[entry] * quick_scale[record] + shift) + coin[entry])
            counts[entry] += place >> eight
            remainders[entry] = place
        number = 0
        for group in range(len(groups)):
            # Written always, kept if a byte is below 2, so that subtracting 2 borrows: processors
            # would mispredict a branch too often.
            close[number] = group
            number += ((groups[group] - _TWOS) & ~groups[group] & _TOP_BITS) != 0
        for group in close[:number]:
            for entry in range(8 * group, 8 * group + 8):
                if remainders[entry] < 2:
                    units = min(max(row[entry] * scale[record], -half), half)
                    whole = np.floor(units)
                    remainder = (int(whole) + half + coin[entry]) % 256
                    # The first loop has counted those as one step more.
                    counts[entry] -= remainder >= 254
                    undecided[found], rests[found] = entry, units - whole
                    found += remainder == 255
    for entry in range(width):
        total[entry] += counts[entry]
    return found
