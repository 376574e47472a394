"""Moves words with a Triton kernel: the rows and columns of many tensors in one launch.

A table on the device lists the tensors of one word size; a list of tiles says which rows of which
tensor a program moves.

How it works
    * **Whole** (rows that fit on the chip): a program loads whole rows coalesced, permutes them
      there (``tl.gather``) and stores them coalesced. Where only columns move it owns its rows, so
      that happens in place; a vector, or a small tensor that moves by rows only, is one row of
      columns.
    * **Pieces** (rows of a few times as many words): a program makes one piece of the new row out
      of all pieces of the old one, one after the other.
    * **Words** (still longer rows): every word is read from where it comes from. A GPU reads
      ``_SECTOR_BYTES`` at once, so that costs more than pieces until there are as many pieces as
      words in a sector.
    * **Rows** (no column moves): so do rows, which are read as they are.
    * Whatever changes rows goes to a scratch of at most ``WAVE_BYTES`` (or of one tensor) and is
      copied back by the same kernel.

Tables hold numbers of the tensors, offsets into one vector of all indices and offsets into the
scratch. So they stay on the device until the structure changes; what is sent for each shuffle are
the indices and the tensors' addresses, of which gradients get others all the time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from opacus_shuffle.permutation.moving import torch_moves
from opacus_shuffle.permutation.moving.moves import Move, indices_of, send, waves

STAGED_BYTES = 2**16
"""On-chip memory that a program takes at most; less on cards that have less."""

STAGED_WORDS = 2**14
"""Words that a program permutes on chip at most."""

_SMALLEST_BLOCK = 64

_ROWS_BLOCKS = (64, 1024)
"""Words of a row that a program reads where rows need not be whole."""

_TILE_WORDS = 8192

_SECTOR_BYTES = 32

_CACHED_TABLES = 32

_TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit  # type: ignore[untyped-decorator]
def move_kernel(  # type: ignore
    table, tiles, addresses, indices, scratch, WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Moves one tile: ``ROWS`` rows by ``BLOCK`` words of one tensor; a negative number is −1 − (offset into the scratch)."""
    tile = tiles + 3 * tl.program_id(0)
    line = table + tl.load(tile).to(tl.int64) * 7
    source_number = tl.load(line)
    target_number = tl.load(line + 1)
    row_offset = tl.load(line + 2)
    column_offset = tl.load(line + 3)
    height = tl.load(line + 4).to(tl.int32)
    width = tl.load(line + 5).to(tl.int32)
    inner = tl.load(line + 6).to(tl.int32)
    base = scratch.to(tl.int64) - 1
    source = tl.load(addresses + tl.maximum(source_number, 0))
    target = tl.load(addresses + tl.maximum(target_number, 0))
    source = tl.where(source_number < 0, base - source_number, source).to(tl.pointer_type(WORD))
    target = tl.where(target_number < 0, base - target_number, target).to(tl.pointer_type(WORD))
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
    if (
        MODE == "whole" or MODE == "pieces"
    ):  # row by row: tl.gather of one dimension goes through shared memory
        origins = tl.where(inside, origins, 0)
        for step in range(0, tl.minimum(height - first, ROWS)):
            row = (first + step).to(tl.int64)
            from_row = row
            if row_offset >= 0:
                from_row = tl.load(indices + row_offset + row).to(tl.int64)
            if MODE == "whole":
                values = tl.load(source + from_row * width + lanes, mask=inside, other=0)
                values = tl.gather(values, origins, 0)
                tl.debug_barrier()  # in place: nobody stores before everybody has loaded
                tl.store(target + row * width + lanes, values, mask=inside)
            else:  # what lies further on is taken from a later piece
                values = tl.full([BLOCK], 0, WORD)
                for start in range(0, width, BLOCK):
                    piece = tl.load(
                        source + from_row * width + start + lanes,
                        mask=start + lanes < width,
                        other=0,
                    )
                    piece = tl.gather(
                        piece, tl.minimum(tl.maximum(origins - start, 0), BLOCK - 1), 0
                    )
                    values = tl.where(origins >= start, piece, values)
                tl.store(target + row * width + words, values, mask=inside)
    else:
        rows = first + tl.arange(0, ROWS)
        live = rows < height
        from_rows = rows.to(tl.int64)
        if row_offset >= 0:
            from_rows = tl.load(indices + row_offset + rows, mask=live, other=0).to(tl.int64)
        both = live[:, None] & inside[None, :]
        values = tl.load(source + from_rows[:, None] * width + origins[None, :], mask=both, other=0)
        tl.store(target + rows.to(tl.int64)[:, None] * width + words[None, :], values, mask=both)


def require(device: torch.device) -> None:
    """Refuses devices that the kernel cannot run on."""
    if device.type == "cpu" and isinstance(move_kernel, triton.JITFunction):
        raise ValueError(
            "executor 'triton' got tensors on the CPU: pass executor='torch', or set "
            "TRITON_INTERPRET=1 before the first use"
        )


def execute(moves: Sequence[Move]) -> None:
    """Moves contiguous tensors that lie on one device."""
    by_size: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        if max(move.rows, 2 * move.columns * move.inner) < 2**30:
            by_size[min(move.tensor.itemsize, 8)].append(move)
        else:  # the kernel counts within a row in 32 bits
            torch_moves.execute([move])
    for word, group in by_size.items():
        _execute_words(group, word)


def _execute_words(moves: Sequence[Move], word: int) -> None:
    """Moves tensors whose entries are words of one size, or two such words."""
    device = moves[0].tensor.device
    indices, offsets = _gather_indices(moves)
    limit = staged_words(word, device)
    pointers = [move.tensor.data_ptr() for move in moves]
    shapes = tuple(
        _shape(move, pointer, offsets, word, limit)
        for move, pointer in zip(moves, pointers, strict=True)
    )
    launches, scratch_bytes = _launches(shapes, word, limit, device)
    addresses = send(torch.tensor(pointers), device)
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for table, tiles, constants in launches:
            move_kernel[(len(tiles),)](
                table, tiles, addresses, indices, scratch, WORD=_TYPES[word], **constants
            )


def staged_words(word: int, device: torch.device) -> int:
    """Returns how many words of this size a program permutes on the chip of this device, a power of two."""
    memory = STAGED_BYTES
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        memory = min(memory, getattr(card, "shared_memory_per_block_optin", 48 * 2**10))
    return min(STAGED_WORDS, 2 ** ((memory // word).bit_length() - 1))


def _gather_indices(moves: Sequence[Move]) -> tuple[torch.Tensor, dict[int, int]]:
    """Lays all indices one after the other, as int32; returns them and where each begins, by ``id``."""
    distinct = {
        id(index): index for move in moves for index in indices_of(move) if index is not None
    }
    offsets, start = {}, 0
    for key, index in distinct.items():
        offsets[key] = start
        start += len(index)
    return torch.cat(list(distinct.values())).to(torch.int32), offsets


class _Shape(NamedTuple):
    """A tensor but for where it lies: its rows, words of a row and of a column, offsets of its indices (−1: none)."""

    rows: int
    width: int
    inner: int
    row_offset: int
    column_offset: int
    aligned: bool

    def mode(self, word: int, limit: int) -> str:
        """Returns how the kernel moves it, where it can permute so many words on chip."""
        if self.column_offset < 0:
            return "rows"
        if self.width <= limit:
            return "whole"
        return "pieces" if self.width * word <= limit * _SECTOR_BYTES else "words"


def _shape(move: Move, pointer: int, offsets: dict[int, int], word: int, limit: int) -> _Shape:
    row_index, column_index = indices_of(move)
    rows, columns, inner = move.rows, move.columns, move.inner * (move.tensor.itemsize // word)
    if column_index is None and (columns * inner == 1 or rows * columns * inner <= limit):
        rows, columns, inner, row_index, column_index = 1, rows, columns * inner, None, row_index
    row_offset, column_offset = (
        -1 if index is None else offsets[id(index)] for index in (row_index, column_index)
    )
    width = columns * inner
    return _Shape(
        rows, width, inner, row_offset, column_offset, width % 16 == 0 and pointer % 16 == 0
    )


def block_of(mode: str, width: int, limit: int, *, aligned: bool) -> int:
    """Returns how many words of a row a program takes."""
    if mode in ("rows", "words"):
        return next((block for block in _ROWS_BLOCKS if block >= width), _ROWS_BLOCKS[-1])
    if mode == "whole":
        return max(_SMALLEST_BLOCK, 2 ** (width - 1).bit_length())
    return (
        limit if aligned else limit // 2
    )  # registers for pieces of ``limit`` words that come word by word do not suffice


def constants_of(mode: str, block: int, *, aligned: bool) -> dict[str, Any]:
    """Returns what the kernel is compiled for: several rows a program, which read their index once, and 16 words a thread."""
    rows = min(64, max(4, _TILE_WORDS // block))
    return {
        "ROWS": rows,
        "BLOCK": block,
        "MODE": mode,
        "ALIGNED": aligned,
        "num_warps": max(8, block // 512),
    }


_Launch = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
"""The table, the tiles, and what the kernel is compiled for."""


@functools.lru_cache(maxsize=_CACHED_TABLES)
def _launches(
    shapes: tuple[_Shape, ...], word: int, limit: int, device: torch.device
) -> tuple[list[_Launch], int]:
    """Returns the launches that move tensors of these shapes, in order, and the bytes of scratch that they need.

    First comes what can be moved where it lies, then waves by way of the scratch.
    """
    modes = [shape.mode(word, limit) for shape in shapes]
    here = [n for n, shape in enumerate(shapes) if modes[n] == "whole" and shape.row_offset < 0]
    nbytes = [
        -(-shape.rows * shape.width * word // 16) * 16 for shape in shapes
    ]  # so that all begin at a multiple of 16
    by_turns = list(waves(sorted(set(range(len(shapes))) - set(here)), nbytes.__getitem__))
    launches = _tabulate([(n, n, shapes[n], modes[n]) for n in here], limit, device)
    for wave in by_turns:
        starts = np.cumsum([0, *(nbytes[n] for n in wave)]).tolist()
        there = [
            (n, -1 - start, shapes[n], modes[n]) for n, start in zip(wave, starts, strict=False)
        ]
        back = [
            (start, n, shape._replace(row_offset=-1, column_offset=-1, inner=1), "rows")
            for n, start, shape, _ in there
        ]
        launches += _tabulate(there, limit, device) + _tabulate(back, limit, device)
    return launches, max((sum(nbytes[n] for n in wave) for wave in by_turns), default=16)


def _tabulate(
    lines: Sequence[tuple[int, int, _Shape, str]], limit: int, device: torch.device
) -> list[_Launch]:
    """Returns the launches, one for each variant of the kernel, for lines of source, target, shape and mode."""
    variants: defaultdict[tuple[str, int, bool], list[tuple[int, ...]]] = defaultdict(list)
    for source, target, shape, mode in lines:
        block = block_of(mode, shape.width, limit, aligned=shape.aligned)
        rows, width, inner, row_offset, column_offset, aligned = shape
        variants[mode, block, aligned].append(
            (source, target, row_offset, column_offset, rows, width, inner)
        )
    launches = []
    for (mode, block, aligned), group in variants.items():
        constants = constants_of(mode, block, aligned=aligned)
        table = np.array(group, dtype=np.int64)
        across = -(-table[:, 5] // block)
        count = -(-table[:, 4] // constants["ROWS"]) * across
        owner = np.repeat(np.arange(len(group)), count)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        tiles = np.stack(
            [owner, number // across[owner] * constants["ROWS"], number % across[owner] * block],
            axis=1,
        )
        launches.append(
            (
                torch.from_numpy(table).to(device),
                torch.from_numpy(tiles.astype(np.int32)).to(device),
                constants,
            )
        )
    return launches
