"""Rounds rows at random and adds them up with a Triton kernel, in one pass over their entries.

A program takes some columns of some rows. An entry's random bits are those of Philox, a counter
that is encrypted by rounds: the counter is the entry's place (its column, its four rows, the number
of its tensor) and the key is fresh for every sum, so no two entries share bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

_MOST_ROWS = 32
_BLOCK = 512


@triton.jit(do_not_specialize=["key", "number", "rows"])  # type: ignore[untyped-decorator]
def round_and_add(  # type: ignore
    values, scale, counts, key, number, rows, width, MIDDLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds ⌊g/2 + x + U⌋ of ``ROWS`` rows' entries to the counts of ``BLOCK`` columns.

    Args:
        values: The rows, one after the other.
        scale: How many units of 2⁻³² steps a row's unit is, in double precision.
        counts: Of all columns.
        key: Of Philox.
        number: Of this tensor, among those that share the key.
        rows: How many there are.
        width: How many columns.
        MIDDLE: g/2 in units.
        ROWS: A multiple of four.
        BLOCK: A power of two.
    """
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first = tl.program_id(1) * ROWS
    middle = tl.full([BLOCK], MIDDLE, tl.int64)
    limit = middle.to(tl.float64)
    zeros = tl.full([BLOCK], 0, tl.uint32)
    total = tl.full([BLOCK], 0, tl.int64)
    for begin in range(0, ROWS, 4):
        four = first + begin
        words = tl.philox(
            key,
            columns.to(tl.uint32),
            zeros + four.to(tl.uint32),
            zeros + number.to(tl.uint32),
            (columns >> 32).to(tl.uint32),
        )
        for lane in tl.static_range(4):
            row = four + lane
            live = inside & (row < rows)
            place = values + row.to(tl.int64) * width + columns
            entry = tl.load(place, mask=live, other=0.0).to(tl.float64)
            units = entry * tl.load(scale + row, mask=row < rows, other=0.0)
            # Cut off towards zero, so that no norm grows; what is left is rounded exactly.
            whole = tl.minimum(tl.maximum(units, -limit), limit).to(tl.int64)
            sums = middle + whole + words[lane].to(tl.int64)
            total += tl.where(live, sums >> 32, 0)
    tl.atomic_add(counts + columns, total, mask=inside)


def add_roundings(
    pieces: Sequence[torch.Tensor],
    steps: torch.Tensor,
    counts: Sequence[torch.Tensor],
    *,
    granularity: int,
    key: int,
) -> None:
    """Adds the counts of each tensor's rows to its vector of ``counts``; all lie on one device."""
    scale = steps * 2.0**32
    together = min(max(4, triton.next_power_of_2(len(steps))), _MOST_ROWS)
    on_device = torch.cuda.device(steps.device) if steps.is_cuda else contextlib.nullcontext()
    with on_device:
        for number, (rows, total) in enumerate(zip(pieces, counts, strict=True)):
            height, width = rows.shape
            if not rows.numel():
                continue
            round_and_add[triton.cdiv(width, _BLOCK), triton.cdiv(height, together)](
                rows.contiguous(),
                scale,
                total,
                key,
                number,
                height,
                width,
                MIDDLE=granularity << 31,
                ROWS=together,
                BLOCK=_BLOCK,
            )
