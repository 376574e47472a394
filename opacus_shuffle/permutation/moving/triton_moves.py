"""Moves words with a Triton kernel: the rows and columns of many tensors in one launch.

A table on the device lists the tensors of one word size; a list of tiles says which rows of which
tensor a program moves.

How it works
    * **Whole** (rows that fit on the chip): a program loads whole rows coalesced, permutes them
      there (``tl.gather``) and stores them coalesced. Where only columns move it owns its rows, so
      that happens in place; a vector, or a small tensor that moves by rows only, is one row of
      columns.
    * **Words** (longer rows): every word is read from where it comes from, though a GPU reads 32
      bytes at once.
    * **Rows** (no column moves): so do rows, which are read as they are.
    * Whatever changes rows is read from a copy, of at most ``WAVE_BYTES`` (or of one tensor) at a
      time.

Tables hold numbers of the tensors and offsets into one vector of all indices. So they stay on the
device until the structure changes; what is sent for each shuffle are the indices and the tensors'
addresses, of which gradients get others all the time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from opacus_shuffle.permutation.moving.torch_moves import Move, execute_with_torch, waves

STAGED_BYTES = 2**16
"""On-chip memory that a program takes at most; less on cards that have less."""

STAGED_WORDS = 2**13
"""Words that a program permutes on chip at most."""

_SMALLEST_BLOCK = 64

_WIDE_BLOCK = 1024
"""Words of a longer row that a program reads where rows need not be whole."""

_TILE_WORDS = 8192

_CACHED_TABLES = 32

_TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit  # type: ignore[untyped-decorator]
def move_kernel(  # type: ignore
    table, tiles, addresses, indices, WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Moves one tile, ``ROWS`` rows by ``BLOCK`` words of one tensor."""
    tile = tiles + 3 * tl.program_id(0)
    line = table + tl.load(tile).to(tl.int64) * 6
    number = tl.load(line)
    row_offset = tl.load(line + 1)
    column_offset = tl.load(line + 2)
    height = tl.load(line + 3).to(tl.int32)
    width = tl.load(line + 4).to(tl.int32)
    inner = tl.load(line + 5).to(tl.int32)
    source = tl.load(addresses + 2 * number).to(tl.pointer_type(WORD))
    target = tl.load(addresses + 2 * number + 1).to(tl.pointer_type(WORD))
    if ALIGNED:  # lets a thread load and store 16 bytes at a time
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        width = tl.multiple_of(width, 16)
    first = tl.load(tile + 1)
    lanes = tl.arange(0, BLOCK)
    words = tl.multiple_of(tl.load(tile + 2), BLOCK) + lanes
    inside = words < width
    origins = words
    if MODE != "rows":
        column = words // inner
        origins = tl.load(indices + column_offset + column, mask=inside, other=0) * inner + (
            words - column * inner
        )
    if MODE == "whole":  # row by row: tl.gather of one dimension goes through shared memory
        origins = tl.where(inside, origins, 0)
        for step in range(0, tl.minimum(height - first, ROWS)):
            row = (first + step).to(tl.int64)
            from_row = row
            if row_offset >= 0:
                from_row = tl.load(indices + row_offset + row).to(tl.int64)
            values = tl.load(source + from_row * width + lanes, mask=inside, other=0)
            values = tl.gather(values, origins, 0)
            tl.debug_barrier()  # in place: nobody stores before everybody has loaded
            tl.store(target + row * width + lanes, values, mask=inside)
    else:
        rows = first + tl.arange(0, ROWS)
        live = rows < height
        from_rows = rows.to(tl.int64)
        if row_offset >= 0:
            from_rows = tl.load(indices + row_offset + rows, mask=live, other=0).to(tl.int64)
        both = live[:, None] & inside[None, :]
        values = tl.load(source + from_rows[:, None] * width + origins[None, :], mask=both, other=0)
        tl.store(target + rows.to(tl.int64)[:, None] * width + words[None, :], values, mask=both)


def execute(moves: Sequence[Move]) -> None:
    """Moves vectors of words that lie on one device.

    Raises:
        ValueError: On a CPU without Triton's interpreter.
    """
    on_cpu = any(move.tensor.device.type == "cpu" for move in moves)
    if on_cpu and isinstance(move_kernel, triton.JITFunction):
        raise ValueError(
            "executor 'triton' got tensors on the CPU: pass executor='torch', or set "
            "TRITON_INTERPRET=1 before the first use"
        )
    by_size: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        if max(move.rows, move.columns * move.inner) < 2**30:
            by_size[move.tensor.itemsize].append(move)
        else:  # the kernel counts rows and words of a row in 32 bits
            execute_with_torch([move])
    for word, group in by_size.items():
        _execute_words(group, word)


def _execute_words(moves: Sequence[Move], word: int) -> None:
    """Moves vectors of words of one size."""
    device = moves[0].tensor.device
    offsets: dict[int, int] = {}
    laid: list[torch.Tensor] = []  # all indices, one after the other
    for index in (index for move in moves for index in (move.row_index, move.column_index)):
        if index is not None and id(index) not in offsets:
            offsets[id(index)] = sum(map(len, laid))
            laid.append(index)
    indices = torch.cat(laid).to(torch.int32)
    limit = staged_words(word, device)
    moving = [(move.tensor, _shape(move, offsets, limit)) for move in moves]
    in_place = [entry for entry in moving if entry[1].in_place]
    others = [entry for entry in moving if not entry[1].in_place]
    for wave in (in_place, *waves(others, lambda entry: entry[0].nbytes)):
        sources = [tensor if shape.in_place else tensor.clone() for tensor, shape in wave]
        pairs = [
            (source.data_ptr(), tensor.data_ptr())
            for source, (tensor, _) in zip(sources, wave, strict=True)
        ]
        addresses = torch.tensor(pairs)
        if device.type == "cuda":  # out of pinned memory, so that the host does not wait
            addresses = addresses.pin_memory().to(device, non_blocking=True)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for table, tiles, constants in _launches(tuple(shape for _, shape in wave), device):
                move_kernel[(len(tiles),)](
                    table, tiles, addresses, indices, WORD=_TYPES[word], **constants
                )


def staged_words(word: int, device: torch.device) -> int:
    """Returns how many words a program permutes on the chip of this device, a power of two."""
    memory = STAGED_BYTES
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        memory = min(memory, getattr(card, "shared_memory_per_block_optin", 48 * 2**10))
    return min(STAGED_WORDS, 2 ** ((memory // word).bit_length() - 1))


class _Shape(NamedTuple):
    """A tensor but for where it lies: offsets of indices (−1: none), rows, words of row, column."""

    row_offset: int
    column_offset: int
    rows: int
    width: int
    inner: int
    mode: str
    aligned: bool

    @property
    def in_place(self) -> bool:
        """Whether each program reads and writes rows of its own alone."""
        return self.mode == "whole" and self.row_offset < 0


def _shape(move: Move, offsets: dict[int, int], limit: int) -> _Shape:
    """Returns how to move a vector of words, where the kernel can permute so many words on chip."""
    row_index, column_index = move.row_index, move.column_index
    rows, columns, inner = move.rows, move.columns, move.inner
    if column_index is None and (columns * inner == 1 or rows * columns * inner <= limit):
        rows, columns, inner, row_index, column_index = 1, rows, columns * inner, None, row_index
    width = columns * inner
    mode = "rows" if column_index is None else "whole" if width <= limit else "words"
    row_offset, column_offset = (
        -1 if index is None else offsets[id(index)] for index in (row_index, column_index)
    )
    aligned = width % 16 == 0 and move.tensor.data_ptr() % 16 == 0
    return _Shape(row_offset, column_offset, rows, width, inner, mode, aligned)


def constants_of(mode: str, width: int, *, aligned: bool) -> dict[str, Any]:
    """Returns what the kernel is compiled for: several rows a program, 16 words a thread."""
    block = max(_SMALLEST_BLOCK, 2 ** (width - 1).bit_length())
    if mode != "whole" and width > _SMALLEST_BLOCK:
        block = _WIDE_BLOCK
    rows = min(64, max(4, _TILE_WORDS // block))
    # Words that are gathered one by one take more registers: half as many words a thread.
    warps = 16 if mode == "words" else max(8, block // 512)
    return {"ROWS": rows, "BLOCK": block, "MODE": mode, "ALIGNED": aligned, "num_warps": warps}


_Launch = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""The table, the tiles, and what the kernel is compiled for."""


@functools.lru_cache(maxsize=_CACHED_TABLES)
def _launches(shapes: tuple[_Shape, ...], device: torch.device) -> list[_Launch]:
    """Returns the launches that move tensors of these shapes, one per variant of the kernel."""
    variants: defaultdict[tuple[Any, ...], list[tuple[int, ...]]] = defaultdict(list)
    for number, shape in enumerate(shapes):
        constants = constants_of(shape.mode, shape.width, aligned=shape.aligned)
        variants[tuple(constants.items())].append((number, *shape[:5]))
    launches = []
    for variant, group in variants.items():
        constants = dict(variant)
        tiles = [
            (number, row, column)
            for number, line in enumerate(group)
            for row in range(0, line[3], constants["ROWS"])
            for column in range(0, line[4], constants["BLOCK"])
        ]
        table = torch.tensor(group, dtype=torch.int64)
        tile_list = torch.tensor(tiles, dtype=torch.int32)
        launches.append((table.to(device), tile_list.to(device), constants))
    return launches
