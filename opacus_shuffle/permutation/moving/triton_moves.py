"""Moves words with a Triton kernel: the rows and columns of many tensors in a few launches.

A list of tiles on the device determines what each program moves: a whole number of rows of one
tensor, or consecutive words of it.

How it works
    * **Whole** (rows that fit on the chip): a program loads as many whole rows as fit its block,
      which are contiguous, permutes their columns on the chip (``tl.gather``) and stores them. If
      only columns move, this happens in place. A vector, or a small tensor of which only rows move,
      is treated as one row of columns.
    * **Words** (longer rows): every word is read from its old position, although a GPU reads 32
      bytes at once.
    * **Rows** (no column moves): whole rows are read, so consecutive words are contiguous.
    * If rows move, they are read from a copy. Copies of at most ``WAVE_BYTES`` (or of one tensor)
      exist at one time. One launch copies all tensors of such a wave; PyTorch would take one launch
      for each.

The tiles hold numbers of the tensors and offsets into one vector of all indices, so they stay on
the device until the structure changes. For each shuffle only the indices and the addresses of the
tensors are sent, because gradients often have new addresses.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from opacus_shuffle.permutation.moving.torch_moves import (
    WORDS,
    Move,
    execute_with_torch,
    waves,
)

STAGED_BYTES = 2**16
"""Largest on-chip memory of a program; less on cards that have less."""

STAGED_WORDS = 2**14
"""Largest number of words that a program permutes on the chip."""

BLOCK_WORDS = 4096
"""Words of a program's block, unless a row is longer: 16 for each of 256 threads."""

_BLOCKS = 4
"""Blocks of whole rows that a program moves with indices that it reads once."""

_CACHED_PLANS = 32

_ALIGNMENT = 16
"""Bytes that a thread loads and stores at once; the words of a row must be a multiple too."""

_TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit  # type: ignore[untyped-decorator]
def move_kernel(  # type: ignore
    tiles, addresses, indices, WORD: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    MODE: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Moves one tile: up to ``BLOCKS`` blocks of whole rows, or one block of words."""
    tile = tiles + 7 * tl.program_id(0).to(tl.int64)
    number = tl.load(tile)
    row_offset = tl.load(tile + 1)
    column_offset = tl.load(tile + 2)
    height = tl.load(tile + 3)
    width = tl.load(tile + 4)
    inner = tl.load(tile + 5)
    first = tl.load(tile + 6)
    source = tl.load(addresses + 2 * number).to(tl.pointer_type(WORD))
    target = tl.load(addresses + 2 * number + 1).to(tl.pointer_type(WORD))
    if ALIGNED:  # lets a thread load and store 16 bytes at a time
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        width = tl.multiple_of(width, 16)
    lanes = tl.arange(0, BLOCK)
    if MODE == "whole":
        # Rows of a block lie one after the other, so that narrow ones fill it too. In a long block
        # there is one, whose number is then a scalar: one for each word would take registers.
        together = BLOCK // width
        down = 0
        if not LONG:
            down = lanes // width
        words = lanes - down * width
        column = words // inner
        inside = lanes < together * width
        origins = tl.load(indices + column_offset + column, mask=inside, other=0) * inner
        origins += down * width + (words - column * inner)
        origins = tl.where(inside, origins, 0)
        for step in range(0, tl.minimum(BLOCKS, (height - first + together - 1) // together)):
            row = first + step * together
            from_rows = row + down
            there = from_rows < height
            from_rows = from_rows.to(tl.int64)
            if row_offset >= 0:
                from_rows = tl.load(indices + row_offset + from_rows, mask=there, other=0)
                from_rows = from_rows.to(tl.int64)
            live = inside & there
            values = tl.load(source + from_rows * width + words, mask=live, other=0)
            values = tl.gather(values, origins, 0)
            tl.debug_barrier()  # in place: nobody stores before everybody has loaded
            tl.store(target + row.to(tl.int64) * width + lanes, values, mask=live)
    else:
        # The tensor is one run of words, of which a block may begin and end in the middle of rows.
        start = first.to(tl.int64) * BLOCK
        live = start + lanes < height.to(tl.int64) * width
        if MODE == "copy":  # from where it lies to where the launches after this one read it
            values = tl.load(target + start + lanes, mask=live, other=0)
            tl.store(source + start + lanes, values, mask=live)
        else:
            row = start // width
            words = (start - row * width).to(tl.int32) + lanes
            down = words // width
            words -= down * width
            from_rows = row + down
            if row_offset >= 0:
                from_rows = tl.load(indices + row_offset + from_rows, mask=live, other=0)
                from_rows = from_rows.to(tl.int64)
            if MODE == "words":
                column = words // inner
                words -= column * inner
                words += tl.load(indices + column_offset + column, mask=live, other=0) * inner
            values = tl.load(source + from_rows * width + words, mask=live, other=0)
            tl.store(target + start + lanes, values, mask=live)


def execute(moves: Sequence[Move]) -> None:
    """Moves contiguous tensors that lie on one device.

    Raises:
        ValueError: On a CPU without Triton's interpreter.
    """
    on_cpu = bool(moves) and moves[0].tensor.device.type == "cpu"
    if on_cpu and isinstance(move_kernel, triton.JITFunction):
        raise ValueError(
            "executor 'triton' got tensors on the CPU: pass executor='torch', or set "
            "TRITON_INTERPRET=1 before the first use"
        )
    by_size: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        if move.tensor.numel() < 2**29 or max(move.rows, 2 * move.columns * move.inner) < 2**30:
            by_size[move.tensor.element_size()].append(move)
        else:  # the kernel counts rows and words of a row in 32 bits
            execute_with_torch([move])
    for size, group in by_size.items():
        _execute_words(group, size)


def _execute_words(moves: Sequence[Move], size: int) -> None:
    """Moves tensors whose entries have one size."""
    device = moves[0].tensor.device
    word = WORDS[size].itemsize
    # All indices, one after the other; many tensors share one.
    pairs = [(move.row_index, move.column_index) for move in moves]
    laid = {id(index): index for pair in pairs for index in pair if index is not None}
    ends = itertools.accumulate(map(torch.Tensor.numel, laid.values()), initial=0)
    offsets = {id(None): -1, **dict(zip(laid, ends, strict=False))}
    targets = [move.tensor.data_ptr() for move in moves]
    factor = size // word
    lines = tuple(
        [
            (offsets[id(row)], offsets[id(column)], rows, columns, inner * factor, place % 16)
            for (_, rows, columns, inner, row, column), place in zip(moves, targets, strict=True)
        ]
    )
    plan = _plan(lines, word, staged_words(word, device), device)
    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=device)
    places = np.array(targets)
    sources = np.where(plan.offsets < 0, places, scratch.data_ptr() + plan.offsets)
    addresses = _send(torch.from_numpy(np.stack([sources, places], axis=1)), device)
    indices = _send(torch.cat(list(laid.values())).to(torch.int32), device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for tiles, count, constants in plan.launches:
            if device.type == "cuda":  # or another stream could get their memory too early
                tiles.record_stream(torch.cuda.current_stream(device))
            move_kernel[(count,)](tiles, addresses, indices, WORD=_TYPES[word], **constants)


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Sends a tensor to a device from pinned memory, so the host does not wait."""
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def staged_words(word: int, device: torch.device) -> int:
    """Returns how many words a program permutes on the chip of this device: a power of two."""
    memory = STAGED_BYTES
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        memory = min(memory, getattr(card, "shared_memory_per_block_optin", 48 * 2**10))
    return min(STAGED_WORDS, 2 ** ((memory // word).bit_length() - 1))


def constants_of(mode: str, width: int, word: int, *, aligned: bool) -> dict[str, Any]:
    """Returns the compile-time constants: up to 16 words a thread, or 64 bytes for a copy."""
    block = max(BLOCK_WORDS, 2 ** (width - 1).bit_length()) if mode == "whole" else BLOCK_WORDS
    if mode == "copy":
        block = 4 * BLOCK_WORDS // word
    return {
        "BLOCK": block,
        "BLOCKS": _BLOCKS,
        "MODE": mode,
        "LONG": block > BLOCK_WORDS,  # a block holds one row
        "ALIGNED": aligned,
        "num_warps": max(8, block // 512) if mode == "whole" else 8,
    }


_Line = tuple[int, int, int, int, int, int]
"""A tensor without its address: offsets of indices (−1: none), rows, columns, inner, and the
remainder of the address."""


class _Plan(NamedTuple):
    """How to move tensors of some shapes.

    Attributes:
        scratch: Bytes of the copies that exist at one time.
        offsets: The offset of each tensor's copy; −1 for tensors that move in place.
        launches: Tiles, their number, and the kernel's compile-time constants.
    """

    scratch: int
    offsets: npt.NDArray[np.int64]
    launches: list[tuple[torch.Tensor, int, dict[str, Any]]]


@functools.lru_cache(maxsize=_CACHED_PLANS)
def _plan(lines: tuple[_Line, ...], word: int, limit: int, device: torch.device) -> _Plan:
    """Plans how to move tensors of these shapes; a program permutes ``limit`` words on chip."""
    modes, shapes, copied = [], [], []
    for row_offset, column_offset, rows, columns, inner, _ in lines:
        if column_offset < 0 and (columns * inner == 1 or rows * columns * inner <= limit):
            # A vector, or a small matrix, is one row of columns.
            rows, columns, inner, row_offset, column_offset = (
                *(1, rows, columns * inner),
                *(-1, row_offset),
            )
        width = columns * inner
        mode = "rows" if column_offset < 0 else "whole" if width <= limit else "words"
        in_place = mode == "whole" and row_offset < 0
        modes.append(mode)
        shapes.append((row_offset, column_offset, rows, width, inner))
        copied.append(0 if in_place else rows * width * word)
    offsets = np.full(len(lines), -1)
    scratch, launches = 0, []
    for wave in waves(range(len(lines)), copied.__getitem__):
        place = 0
        tiled = [("copy", number) for number in wave if copied[number]]
        for _, number in tiled:
            offsets[number] = place
            place += -(-copied[number] // _ALIGNMENT) * _ALIGNMENT
        scratch = max(scratch, place)
        variants: defaultdict[tuple[Any, ...], list[tuple[int, ...]]] = defaultdict(list)
        for mode, number in [*tiled, *((modes[number], number) for number in wave)]:
            width = shapes[number][3]
            aligned = width % _ALIGNMENT == 0 and lines[number][-1] == 0
            constants = constants_of(mode, width, word, aligned=aligned)
            variants[tuple(constants.items())].append((number, *shapes[number]))
        for variant, group in variants.items():
            constants = dict(variant)
            tiles = torch.from_numpy(_tiles(np.array(group), **constants)).to(device)
            launches.append((tiles, len(tiles), constants))
    return _Plan(scratch, offsets, launches)


def _tiles(
    lines: npt.NDArray[np.int64], BLOCK: int, BLOCKS: int, MODE: str, **_: Any
) -> npt.NDArray[np.int32]:
    """Returns the tiles: the line of a tensor, and the first row or the number of the block."""
    rows, width = lines[:, 3], lines[:, 4]
    steps, ends = np.ones_like(rows), -(-rows * width // BLOCK)
    if MODE == "whole":
        steps, ends = BLOCKS * (BLOCK // width), rows
    counts = -(-ends // steps)
    before = np.cumsum(counts) - counts
    first = (np.arange(counts.sum()) - np.repeat(before, counts)) * np.repeat(steps, counts)
    return np.column_stack([np.repeat(lines, counts, axis=0), first]).astype(np.int32)
