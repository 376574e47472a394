"""Moves words with a Triton kernel: the rows and columns of many tensors in one launch.

A table on the device lists the tensors of one word size; a list of tiles says which rows of which tensor a program moves.

How it works
    * **Staged** (rows up to ``STAGED_BYTES``): a program loads whole rows coalesced, permutes them on chip (``tl.gather``) and
      stores them coalesced. Where only columns move it owns its rows, so that happens in place; a vector, or a small tensor
      that moves by rows only, is one row of columns.
    * **Direct** (rows only, or rows too long for the chip): every word is read from where it comes from.
    * Whatever changes rows goes to a scratch of at most ``WAVE_BYTES`` (or of one tensor) and is copied back by the same
      kernel.

Tables hold addresses of the tensors, offsets into one vector of all indices and offsets into the scratch. So they stay on the
device, and no copy from the host happens, until a tensor's memory or the structure changes.
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
from opacus_shuffle.permutation.moving.moves import Move, as_words, waves

STAGED_BYTES = 2**16
"""Rows up to this size, and up to ``STAGED_WORDS`` words, are permuted on chip."""

STAGED_WORDS = 2**14

_STAGED_BLOCKS = (64, 1024, 4096, STAGED_WORDS)
"""Words of a row that a program can hold: one launch for each that occurs."""

_DIRECT_BLOCKS = (64, 1024)
"""Words of a row that a program reads where rows need not be whole."""

_TILE_WORDS = 8192

_CACHED_TABLES = 32

_TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit  # type: ignore[untyped-decorator]
def move_kernel(  # type: ignore
    table, tiles, indices, scratch, WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    STAGED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Moves one tile: ``ROWS`` rows by ``BLOCK`` words of one tensor; a negative address is −1 − (offset into the scratch)."""
    tile = tiles + 3 * tl.program_id(0)
    entry = table + tl.load(tile).to(tl.int64) * 8
    source_address = tl.load(entry)
    target_address = tl.load(entry + 1)
    row_offset = tl.load(entry + 2)
    column_offset = tl.load(entry + 3)
    height = tl.load(entry + 4).to(tl.int32)
    width = tl.load(entry + 5).to(tl.int32)
    inner = tl.load(entry + 6).to(tl.int32)
    base = scratch.to(tl.int64)
    source = tl.where(source_address < 0, base - 1 - source_address, source_address).to(tl.pointer_type(WORD))
    target = tl.where(target_address < 0, base - 1 - target_address, target_address).to(tl.pointer_type(WORD))
    if ALIGNED:  # lets a thread load and store 16 bytes at a time
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        width = tl.multiple_of(width, 16)
    first = tl.load(tile + 1)
    words = tl.multiple_of(tl.load(tile + 2), BLOCK) + tl.arange(0, BLOCK)
    inside = words < width
    origins = words
    if COLUMNS:
        column = words // inner
        origins = tl.load(indices + column_offset + column, mask=inside, other=0) * inner + (words - column * inner)
    if STAGED:  # row by row: of one dimension, tl.gather goes through shared memory; of two, through shuffles without end
        origins = tl.where(inside, origins, 0)
        for step in range(ROWS):
            row = first + step
            mask = inside & (words * 0 + row < height)  # of one shape: newer interpreters refuse a vector and a scalar
            from_row = row.to(tl.int64)
            if row_offset >= 0:
                # The last tile may reach beyond the last row: it reads the last index again and stores nothing.
                from_row = tl.load(indices + row_offset + tl.minimum(row, height - 1)).to(tl.int64)
            values = tl.load(source + from_row * width + words, mask=mask, other=0)
            values = tl.gather(values, origins, 0)
            tl.debug_barrier()  # in place: nobody stores before everybody has loaded
            tl.store(target + row.to(tl.int64) * width + words, values, mask=mask)
    else:
        rows = first + tl.arange(0, ROWS)
        live = rows < height
        from_rows = rows.to(tl.int64)
        if row_offset >= 0:
            from_rows = tl.load(indices + row_offset + rows, mask=live, other=0).to(tl.int64)
        both = live[:, None] & inside[None, :]
        values = tl.load(source + from_rows[:, None] * width + origins[None, :], mask=both, other=0)
        tl.store(target + rows.to(tl.int64)[:, None] * width + words[None, :], values, mask=both)


def tile_rows(block: int) -> int:
    """Returns the rows of a tile whose rows are read ``block`` words at a time."""
    return min(64, max(1, _TILE_WORDS // block))


def require(device: torch.device) -> None:
    """Refuses devices that the kernel cannot run on."""
    if device.type == "cpu" and isinstance(move_kernel, triton.JITFunction):
        raise ValueError(
            "executor 'triton' got tensors on the CPU: pass executor='torch', or set TRITON_INTERPRET=1 before the first use"
        )


def execute(moves: Sequence[Move]) -> None:
    """Moves contiguous tensors that lie on one device."""
    by_size: defaultdict[int, list[Move]] = defaultdict(list)
    for move in map(as_words, moves):
        if max(move.rows, move.columns * move.inner) < 2**30:
            by_size[move.tensor.dtype.itemsize].append(move)
        else:  # the kernel counts within a row in 32 bits
            torch_moves.execute([move])
    for word, group in by_size.items():
        _execute_words(group, word)


class _Entry(NamedTuple):
    """A line of the table: addresses, offsets of indices (−1: none), rows, words of a row, words of a column."""

    source: int
    target: int
    row_offset: int
    column_offset: int
    rows: int
    width: int
    inner: int
    staged: bool

    @property
    def block(self) -> int:
        """Words of a row that a program takes."""
        blocks = _STAGED_BLOCKS if self.staged else _DIRECT_BLOCKS
        return next((block for block in blocks if block >= self.width), blocks[-1])

    @property
    def aligned(self) -> bool:
        """Whether every row begins at a multiple of 16 bytes."""
        addresses = (-1 - address if address < 0 else address for address in (self.source, self.target))
        return self.width % 16 == 0 and all(address % 16 == 0 for address in addresses)


def _execute_words(moves: Sequence[Move], word: int) -> None:
    """Moves the words of one size: what can be moved where it lies, then waves by way of the scratch."""
    indices, offsets = _gather_indices(moves)
    moved_here: list[_Entry] = []
    moved_away: list[tuple[int, _Entry]] = []  # with the bytes that they need, so that all begin at a multiple of 16
    for move in moves:
        entry = _entry(move, offsets, word)
        if entry.staged and entry.row_offset < 0:
            moved_here.append(entry)
        else:
            moved_away.append((-(-move.tensor.nbytes // 16) * 16, entry))
    by_turns = list(waves(moved_away, lambda pair: pair[0]))
    largest = max((sum(nbytes for nbytes, _ in wave) for wave in by_turns), default=16)
    scratch = torch.empty(largest, dtype=torch.uint8, device=indices.device)
    _launch(moved_here, word, indices, scratch)
    for wave in by_turns:
        start, there, back = 0, [], []
        for nbytes, entry in wave:
            there.append(entry._replace(target=-1 - start))
            back.append(_Entry(-1 - start, entry.source, -1, -1, entry.rows, entry.width, 1, staged=False))
            start += nbytes
        _launch(there, word, indices, scratch)
        _launch(back, word, indices, scratch)


def _gather_indices(moves: Sequence[Move]) -> tuple[torch.Tensor, dict[int, int]]:
    """Lays all indices one after the other, as int32; returns them and where each begins, by ``id``."""
    distinct = {id(index): index for move in moves for index in (move.row_index, move.column_index) if index is not None}
    offsets, start = {}, 0
    for key, index in distinct.items():
        offsets[key] = start
        start += len(index)
    return torch.cat(list(distinct.values())).to(torch.int32), offsets


def _entry(move: Move, offsets: dict[int, int], word: int) -> _Entry:
    """Returns the line of the table, with the tensor's own memory as the target."""
    rows, columns, inner, row_index, column_index = move.rows, move.columns, move.inner, move.row_index, move.column_index
    limit = min(STAGED_WORDS, STAGED_BYTES // word)
    if column_index is None and (columns * inner == 1 or move.tensor.numel() <= limit):
        rows, columns, inner, row_index, column_index = 1, rows, columns * inner, None, row_index
    row_offset, column_offset = (-1 if index is None else offsets[id(index)] for index in (row_index, column_index))
    address, width = move.tensor.data_ptr(), columns * inner
    staged = column_index is not None and width <= limit
    return _Entry(address, address, row_offset, column_offset, rows, width, inner, staged)


def _launch(entries: Sequence[_Entry], word: int, indices: torch.Tensor, scratch: torch.Tensor) -> None:
    """Runs the kernel over the entries, once for each block size that occurs."""
    if not entries:
        return
    device = indices.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for table, tiles, constants in _tabulate(tuple(entries), device):
            move_kernel[(len(tiles),)](table, tiles, indices, scratch, WORD=_TYPES[word], **constants, num_warps=8)


@functools.lru_cache(maxsize=_CACHED_TABLES)
def _tabulate(entries: tuple[_Entry, ...], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """Returns for every variant of the kernel its table, its tiles, both on the device, and its constants."""
    variants: defaultdict[tuple[int, bool, bool, bool], list[_Entry]] = defaultdict(list)
    for entry in entries:
        variants[entry.block, entry.column_offset >= 0, entry.staged, entry.aligned].append(entry)
    launches = []
    for (block, columns, staged, aligned), group in variants.items():
        table = np.array(group, dtype=np.int64)
        height = tile_rows(block)
        across = -(-table[:, 5] // block)
        count = -(-table[:, 4] // height) * across
        owner = np.repeat(np.arange(len(group)), count)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        tiles = np.stack([owner, number // across[owner] * height, number % across[owner] * block], axis=1).astype(np.int32)
        constants = {"ROWS": height, "BLOCK": block, "COLUMNS": columns, "STAGED": staged, "ALIGNED": aligned}
        launches.append((torch.from_numpy(table).to(device), torch.from_numpy(tiles).to(device), constants))
    return launches
