"""Moves words with PyTorch's own operations, in blocks that fit the cache.

How it works
    * Columns move within blocks of rows: each goes through a buffer that fits the second-level cache and is gathered out of it.
    * Rows move in place along the cycles of their permutation: a chunk of rows takes its sources, which the next chunk
      overwrites while they are still cached, and NumPy puts them to their places. Tensors up to ``SCRATCH_BYTES`` go through a
      scratch of their own size instead, which the last-level cache holds, unless columns of long rows move too.
    * Vectors that share an index move together: one by one, calling would cost more than moving.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Sequence

import torch

from opacus_shuffle.permutation.moving.moves import WAVE_BYTES, Move, as_words, waves

SCRATCH_BYTES = 16 * 2**20
"""Tensors up to this size may use a scratch of their own size on a CPU (per thread, kept); larger ones follow cycles."""

NARROW_BYTES = 2**12
"""Columns of rows up to this size are gathered out of the scratch: the first-level cache holds a row that is read at random."""

NUMPY_THREADS = 4
"""With fewer threads NumPy puts rows to their places: it copies them whole, on one core four times as fast as PyTorch."""

CACHE_BYTES = 2**20
"""Buffer per CPU thread: half of today's second-level caches."""

_thread = threading.local()


def execute_reference(moves: Sequence[Move]) -> None:
    """Moves contiguous tensors by advanced indexing: slow, and the truth that the others are tested against."""
    for move in map(as_words, moves):
        cube = move.tensor.view(move.rows, move.columns, move.inner)
        moved = cube if move.row_index is None else cube[move.row_index.long()]
        cube.copy_(moved if move.column_index is None else moved[:, move.column_index.long()])


def execute(moves: Sequence[Move]) -> None:
    """Moves contiguous tensors by ``index_select`` and ``gather`` on blocks that fit the cache."""
    word_index, chunks = functools.cache(_word_index), functools.cache(_cycle_chunks)  # many tensors share an index
    vectors: defaultdict[tuple[torch.Tensor, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    # By size, which is some 5% faster: the next one's indices are in the cache.
    for move in sorted(map(as_words, moves), key=lambda move: move.tensor.nbytes):
        rows, width, row_index, column_index = move.rows, move.columns * move.inner, move.row_index, move.column_index
        if rows == 1:  # a vector, or one row of blocks: its columns are rows
            rows, width, row_index, column_index = move.columns, move.inner, column_index, None
        columns = None if column_index is None else word_index(column_index, move.inner)
        row_index = None if row_index is None else word_index(row_index, 1)
        if width == 1 and move.tensor.nbytes <= CACHE_BYTES:
            assert row_index is not None
            vectors[row_index, move.tensor.dtype].append(move.tensor)
            continue
        matrix = move.tensor.view(rows, width) if width > 1 else move.tensor
        block = _block_rows(matrix)
        by_scratch = matrix.nbytes <= SCRATCH_BYTES and (columns is None or matrix[0].nbytes <= NARROW_BYTES)
        if row_index is None:
            assert columns is not None
            _columns_in_place(matrix, columns, *_scratch(matrix, block))
        elif by_scratch or matrix.device.type != "cpu":
            (moved,) = _scratch(matrix, rows)
            torch.index_select(matrix, 0, row_index, out=moved)
            if columns is None:
                matrix.copy_(moved)
            else:
                torch.gather(moved, 1, columns.expand(rows, -1), out=matrix)
        else:
            _rows_along_cycles(matrix, chunks(row_index, block), columns, *_scratch(matrix, block, block))
    for (index, _), group in vectors.items():
        for wave in waves(group, lambda vector: vector.nbytes, CACHE_BYTES):
            _gather_vectors(wave, index)


def _gather_vectors(vectors: Sequence[torch.Tensor], index: torch.Tensor) -> None:
    """Gathers vectors that share an index all at once, and writes them where they were."""
    moved = torch.gather(torch.stack(list(vectors)), 1, index.expand(len(vectors), -1))
    for vector, words in zip(vectors, moved.unbind(), strict=True):
        vector.copy_(words)


def _columns_in_place(matrix: torch.Tensor, columns: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copies each block into the cache and gathers its columns from there, so that random reads never miss the cache."""
    for part in torch.split(matrix, len(buffer)):
        rows = buffer[: len(part)]
        rows.copy_(part)
        torch.gather(rows, 1, columns.expand(len(part), -1), out=part)


def _rows_along_cycles(
    matrix: torch.Tensor, chunks: list[_Chunk], columns: torch.Tensor | None, buffer: torch.Tensor, second: torch.Tensor
) -> None:
    """Moves rows in place: each chunk reads its sources before the next one overwrites them, all but a cycle's first row."""
    head = matrix[0]
    for chunk in chunks:
        count = len(chunk.destinations)
        rows = moved = buffer[:count]
        torch.index_select(matrix, 0, chunk.sources, out=rows)
        if chunk.closes is not None:
            rows[chunk.closes] = head
        if chunk.opens is not None:
            head = matrix[chunk.opens].clone()
        if columns is not None:
            moved = second[:count]
            torch.gather(rows, 1, columns.expand(count, -1), out=moved)
        _put_rows(matrix, chunk.destinations, moved)


def _put_rows(matrix: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows to their places."""
    if torch.get_num_threads() < NUMPY_THREADS:
        matrix.numpy()[places.numpy()] = rows.numpy()
    else:
        target, source = _widest(matrix, rows)
        target.index_copy_(0, places, source)


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunk:
    """Rows that are written together: where they go, and where they come from."""

    destinations: torch.Tensor
    sources: torch.Tensor
    opens: int | None  # first row of the cycle that goes on in the next chunk, if one does
    closes: int | None  # position whose source is the first row of a cycle begun in an earlier chunk, overwritten by now


def _cycle_chunks(row_index: torch.Tensor, size: int) -> list[_Chunk]:
    """Lists the rows, cycle after cycle, in chunks of ``size``."""
    source = row_index.tolist()
    order: list[int] = []
    seen = bytearray(len(source))
    opens: dict[int, int] = {}
    closes: dict[int, int] = {}
    for first in range(len(source)):
        if seen[first]:
            continue
        start, row = len(order), first
        while not seen[row]:
            seen[row] = 1
            order.append(row)
            row = source[row]
        if start // size != (len(order) - 1) // size:
            opens[start // size] = first
            closes[(len(order) - 1) // size] = (len(order) - 1) % size
    destinations = torch.tensor(order, dtype=torch.int64)
    pairs = zip(torch.split(destinations, size), torch.split(row_index[destinations], size), strict=True)
    return [_Chunk(to, of, opens.get(number), closes.get(number)) for number, (to, of) in enumerate(pairs)]


def _word_index(index: torch.Tensor, inner: int) -> torch.Tensor:
    """Returns the index of every word, where each entry of the index stands for ``inner`` words; int64, as gathers demand."""
    index = index.long()
    return index if inner == 1 else (index[:, None] * inner + torch.arange(inner, device=index.device)).view(-1)


def _block_rows(matrix: torch.Tensor) -> int:
    row_bytes = matrix.element_size() * (matrix.shape[1] if matrix.dim() == 2 else 1)
    bytes_ = CACHE_BYTES * torch.get_num_threads() if matrix.device.type == "cpu" else WAVE_BYTES
    return min(len(matrix), max(1, bytes_ // row_bytes))


def _scratch(matrix: torch.Tensor, *rows: int) -> list[torch.Tensor]:
    """Returns uninitialised matrices of so many rows of this one.

    On a CPU they lie in memory that the thread keeps: the first touch of fresh pages costs more than a copy.
    """
    shapes = [(count, *matrix.shape[1:]) for count in rows]
    sizes = [-(-math.prod(shape) * matrix.element_size() // 64) * 64 for shape in shapes]  # bytes
    limit = SCRATCH_BYTES + 2 * CACHE_BYTES * torch.get_num_threads()
    if matrix.device.type != "cpu" or sum(sizes) > limit:
        return [matrix.new_empty(shape) for shape in shapes]
    memory = getattr(_thread, "memory", None)
    if memory is None or len(memory) < sum(sizes):
        _thread.memory = memory = torch.empty(sum(sizes), dtype=torch.uint8)
    words = memory.view(matrix.dtype)
    starts = itertools.accumulate((size // matrix.element_size() for size in sizes), initial=0)
    return [words.as_strided(shape, matrix.stride(), start) for shape, start in zip(shapes, starts, strict=False)]


def _widest(*matrices: torch.Tensor) -> list[torch.Tensor]:
    """Returns the same rows in words of 8 bytes where all divide into such: loops over words then take fewer steps."""
    fits = all(
        matrix.dim() == 2
        and (matrix.shape[1] * matrix.element_size()) % 8 == 0
        and (matrix.storage_offset() * matrix.element_size()) % 8 == 0
        for matrix in matrices
    )
    return [matrix.view(torch.int64) if fits else matrix for matrix in matrices]
