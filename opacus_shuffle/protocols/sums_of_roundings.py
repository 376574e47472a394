"""Adds up rows whose entries are rounded at random to a grid: users' clipped gradients.

An entry is in the count of ⌊g/2 + x + U⌋, x measured in grid steps and U uniform, fresh for every
entry. Single precision and ten bits of U decide all but two entries in a thousand: x in units of
2⁻¹⁰ steps is known to less than one unit, so unless the sum of both is within a unit of a whole
number, double precision and all bits of U would say the same. The others are worked out so, from
the ten bits that they have and 53 more. The distribution is that of rounding in double precision.

A large sum is taken by a compiled pass where Numba (the extra ``fast``) is installed: in double
precision from the start, by sixteen bits of U, which decide all but one entry in 65,536. The
distribution is the same. A seed repeats a run either way, but not with the other way's counts.

>>> from opacus_shuffle.core.randomness import seeded_generator
>>> source = seeded_generator("cpu", 1, "rounding")
>>> rows, steps = torch.full((1000, 3), 0.25), torch.ones(1000)
>>> sum_of_roundings(rows, steps, granularity=8, source=source) - 4000
tensor([269, 248, 224])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
WORTH_COMPILING = 10**6
"""Entries of a sum from which on it is compiled, which takes a process two seconds, once."""


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
    rows: torch.Tensor,
    steps: torch.Tensor,
    *,
    granularity: int,
    source: SecretGenerator,
    compiled: bool = False,
) -> torch.Tensor:
    """Returns the counts: int64, shape (d,).

    Args:
        rows: Shape (n, d), on the CPU, finite, single or double precision.
        steps: Shape (n,), float64, at least 0: how many grid steps a row's unit is. ``|row·steps|``
            must not exceed g/2; rounding errors beyond it are taken back.
        granularity: g, at most :data:`FINEST`.
        source: Of the random bits.
        compiled: By the compiled pass, if Numba is installed.
    """
    values, scale = rows.numpy(), steps.to(torch.float64).numpy()
    kernel = _compiled_pass() if compiled else None
    if kernel is not None:
        return torch.from_numpy(_sum_compiled(kernel, values, scale, granularity, source))
    scale = scale * _UNITS
    if values.dtype == np.float32 and not np.all((scale == 0) | ((scale > 1e-30) & (scale < 1e30))):
        values = values.astype(np.float64)  # such scales single precision does not hold
    total = np.zeros(values.shape[1], dtype=np.int64)
    # Memory for block after block, as asking for it each time costs more than the work.
    kinds = (np.float32, np.int32, np.int32, np.bool_)
    room = [np.empty(_ENTRIES + _LANES, dtype=kind) for kind in kinds]
    for some, columns in _blocks(*values.shape):
        total[columns] += _sum_block(values[some, columns], scale[some], granularity, source, room)
    return torch.from_numpy(total)


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


def _sum_compiled(
    kernel: Callable[..., None],
    values: npt.NDArray[np.floating],
    steps: npt.NDArray[np.float64],
    granularity: int,
    source: SecretGenerator,
) -> npt.NDArray[np.int64]:
    """Returns the counts by the compiled pass, and adds what sixteen bits do not decide."""
    scale, half = steps * _SIXTEEN_BITS, float(granularity * (_SIXTEEN_BITS // 2))
    width = values.shape[1]
    total, undecided = np.zeros(width, dtype=np.int64), [np.empty(0, dtype=np.int64)]
    for some, columns in _blocks(*values.shape):
        block = values[some, columns]
        words = source.words(-(-block.size // 4))
        bits = words.view(np.uint16)[: block.size].reshape(block.shape)
        kernel(values[some], scale[some], half, bits, total, columns.start)
        row, column = np.divmod(np.flatnonzero(bits == _SIXTEEN_BITS - 1), block.shape[1])
        undecided.append((some.start + row) * width + columns.start + column)
    row, column = np.divmod(np.concatenate(undecided), width)
    exact = np.clip(values[row, column].astype(np.float64) * scale[row], -half, half)
    more = source.uniforms(len(row)).numpy() >= 1 - (exact - np.floor(exact))
    np.add.at(total, column, more)
    return total


@functools.cache
def _compiled_pass() -> Callable[..., None] | None:
    """Returns the pass, compiled once a process; None where there is no Numba that runs.

    Nothing is kept on disk: a package need not be where one may write, and code that is kept
    elsewhere can be exchanged.
    """
    try:
        import numba
    except ImportError:
        return None
    return numba.njit(_round_and_add)


def _round_and_add(
    values: npt.NDArray[np.floating],
    scale: npt.NDArray[np.float64],
    half: float,
    bits: npt.NDArray[np.uint16],
    total: npt.NDArray[np.int64],
    left: int,
) -> None:
    """Adds ⌊g/2 + x + U⌋ of a block's entries to their columns' counts, by sixteen bits of U.

    Args:
        values: Whole rows. In a part of them Numba would not know that entries are neighbours, and
            would take them one at a time.
        scale: How many units of 2⁻¹⁶ steps a row's unit is.
        half: g/2 in these units.
        bits: Sixteen random bits for every entry of the block. Overwritten with the fraction of the
            sum, in units; where that is the largest, 2¹⁶ − 1, later bits of U may add one step.
        total: The counts of all columns.
        left: The block's first column.
    """
    # Whole numbers of 32 bits are what processors work on by eights; Numba's own have 64.
    middle, sixteen = np.int32(half), np.int32(16)
    for record in range(len(bits)):
        remainders = bits[record]
        row = values[record][left : left + len(remainders)]
        counts = total[left : left + len(remainders)]
        for entry in range(len(remainders)):
            units = min(max(row[entry] * scale[record], -half), half)
            later = np.int32(middle + np.int32(remainders[entry]))
            place = np.int32(np.int32(np.floor(units)) + later)
            counts[entry] += place >> sixteen
            remainders[entry] = place
