"""Moves the entries of many tensors by row and column permutations, in one pass over the memory and with little scratch.

A shuffle of a network moves every weight, gradient and optimizer state: new[i, j] = old[row_index[i], column_index[j]].
Advanced indexing (``w[rows][:, columns]``) reads and writes each of them twice, into fresh memory whose first touch costs more
than the copy; here they are read from the memory once, written once, and land where they were.

How it works
    * Every tensor is seen as whole words of 1, 2, 4 or 8 bytes (16 = two of 8), so any dtype moves bit for bit.
    * **torch**: blocks of rows go through a buffer that fits the second-level cache: rows are gathered into it, columns out of
      it. Columns alone stay within their block. Rows in place follow the cycles of the permutation: a chunk of rows takes its
      sources, which the next chunk overwrites while they are still cached. Tensors up to ``SCRATCH_BYTES`` go through a scratch
      of their own size, which the last-level cache holds.
    * **triton**: all tensors of one word size in one launch (:mod:`opacus_shuffle.permutation.moving.triton_gather`).
    * **reference**: advanced indexing, the truth that the others are tested against.

>>> weight = torch.arange(6.0).reshape(2, 3)
>>> gather_([Move(weight, 2, 3, 1, row_index=torch.tensor([1, 0]), column_index=torch.tensor([2, 0, 1]))])
>>> float(weight[0, 0])
5.0
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opacus_shuffle.core.validation import one_of

EXECUTORS = ("auto", "reference", "torch", "triton")
STORAGES = ("in_place", "swap")

SCRATCH_BYTES = 16 * 2**20
"""Tensors up to this size may use a scratch of their own size on a CPU (per thread, kept); larger ones follow cycles."""

NARROW_BYTES = 2**12
"""Columns of rows up to this size are gathered out of the scratch, without another buffer between."""

WAVE_BYTES = 256 * 2**20
"""Temporary copies of tensors that are not contiguous, and a GPU's scratch, are made in waves of about this size."""

CACHE_BYTES = 2**20
"""Buffer per CPU thread: half of today's second-level caches."""

_thread = threading.local()

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """One tensor seen as (rows, columns, inner), and where each row and column comes from.

    Attributes:
        tensor: What is moved, of any dtype, device and strides.
        rows: Its rows, in C order of its shape.
        columns: Columns of a row.
        inner: Entries of a column that move together, such as the k·k of a convolution's kernel.
        row_index: Shape (rows,), int64 or int32, a permutation on the tensor's device: new row i is old row ``row_index[i]``.
            ``None``: rows stay.
        column_index: The same for columns, shape (columns,).
    """

    tensor: torch.Tensor
    rows: int
    columns: int
    inner: int
    row_index: torch.Tensor | None
    column_index: torch.Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A contiguous tensor as a flat vector of integer words, in rows × columns × inner words; ``owner`` may be swapped."""

    words: torch.Tensor
    rows: int
    columns: int
    inner: int
    row_index: torch.Tensor | None
    column_index: torch.Tensor | None
    owner: torch.Tensor | None

    def install(self, words: torch.Tensor) -> None:
        """Gives the owner these words as its storage."""
        assert self.owner is not None
        self.owner.data = words.view(self.owner.dtype).view(self.owner.shape)


@torch.no_grad()
def gather_(moves: Sequence[Move], *, executor: str = "auto", storage: str = "in_place") -> None:
    """Permutes rows and columns of every tensor; all executors agree bit for bit.

    Indices are trusted to be permutations: checking would read them back from a GPU at every step. An index that is none gives
    wrong entries, or an error of PyTorch's, or with Triton reads memory that is not the tensor's.

    Args:
        moves: The tensors, each once; they may differ in dtype and device, and share index tensors.
        executor: ``"torch"``, ``"triton"`` (GPU; a CPU only under Triton's interpreter), ``"reference"`` (slow), or ``"auto"``:
            triton on a GPU where it is installed, else torch.
        storage: ``"in_place"`` keeps every tensor's memory where it is, so views, CUDA graphs and flat buffers stay right.
            ``"swap"`` may give tensors that move by rows, are contiguous and are all of their own unshared storage another
            storage instead: no copy back, one spare tensor of the largest size as scratch. A view of all of such a tensor that
            somebody else holds keeps the old memory, whose content is then undefined. Other tensors are moved in place.

    Raises:
        ValueError: For an unknown executor or storage, sizes or indices that do not fit a tensor, a tensor that comes twice, or
            triton on a CPU without its interpreter.
    """
    one_of("executor", executor, EXECUTORS)
    one_of("storage", storage, STORAGES)
    _check(moves)
    moves = [move for move in moves if move.tensor.numel() and any(index is not None for index in _indices(move))]
    for device in dict.fromkeys(move.tensor.device for move in moves):
        execute = _executor(executor, device)
        here = [move for move in moves if move.tensor.device == device]
        plain = [move for move in here if _is_plain(move.tensor)]
        execute([_job(move, move.tensor, swap=storage == "swap") for move in plain])
        for wave in waves([move for move in here if not _is_plain(move.tensor)], lambda move: move.tensor.nbytes):
            copies = [torch.empty(move.tensor.shape, dtype=move.tensor.dtype, device=device) for move in wave]
            for move, copy in zip(wave, copies, strict=True):
                copy.copy_(move.tensor)
            execute([_job(move, copy, swap=False) for move, copy in zip(wave, copies, strict=True)])
            for move, copy in zip(wave, copies, strict=True):
                move.tensor.copy_(copy)


def waves(items: Sequence, nbytes: Callable, limit: int = WAVE_BYTES) -> Iterator[list]:
    """Consecutive runs of at least one item and at most ``limit`` bytes."""
    wave: list = []
    total = 0
    for item in items:
        if wave and total + nbytes(item) > limit:
            yield wave
            wave, total = [], 0
        wave.append(item)
        total += nbytes(item)
    if wave:
        yield wave


def _check(moves: Sequence[Move]) -> None:
    """Refuses moves that do not fit their tensors."""
    seen: set[tuple[str, int]] = set()
    for number, move in enumerate(moves):
        tensor = move.tensor
        sizes = (move.rows, move.columns, move.inner)
        if min(sizes) < 0 or math.prod(sizes) != tensor.numel():
            raise ValueError(
                f"moves[{number}]: rows · columns · inner = {sizes} does not fit a tensor of {tuple(tensor.shape)}"
            )
        for name, index, size in (("row_index", move.row_index, move.rows), ("column_index", move.column_index, move.columns)):
            if index is None:
                continue
            if index.dtype not in (torch.int64, torch.int32) or index.shape != (size,) or index.device != tensor.device:
                raise ValueError(
                    f"moves[{number}]: {name} must be int64 or int32 of shape ({size},) on {tensor.device}, "
                    f"got {index.dtype} of shape {tuple(index.shape)} on {index.device}"
                )
        key = ("id", id(tensor)) if tensor.numel() == 0 else (str(tensor.device), tensor.data_ptr())
        if key in seen:
            raise ValueError(
                f"moves[{number}]: this tensor (or its memory) comes twice; a second move of it would undo the first"
            )
        seen.add(key)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory holds the entries in C order as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _indices(move: Move) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The indices that have more than one thing to permute."""
    return (move.row_index if move.rows > 1 else None, move.column_index if move.columns > 1 else None)


def _job(move: Move, tensor: torch.Tensor, *, swap: bool) -> Job:
    """The move of a contiguous tensor in words."""
    words = tensor.detach().view(-1).view(_WORDS[tensor.element_size()])
    inner = move.inner * (words.numel() // tensor.numel())
    owns = swap and tensor.untyped_storage().nbytes() == tensor.nbytes
    if owns and tensor.device.type == "cpu":
        owns = not torch.UntypedStorage.is_shared(tensor.untyped_storage())
    return Job(words, move.rows, move.columns, inner, *_indices(move), tensor if owns else None)


@functools.cache
def _has_triton() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _executor(name: str, device: torch.device) -> Callable[[Sequence[Job]], None]:
    """The function that moves jobs on a device."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and _has_triton() else "torch"
    if name == "triton":
        triton_gather = importlib.import_module("opacus_shuffle.permutation.moving.triton_gather")  # needs an optional package
        triton_gather.require(device)
        return triton_gather.execute
    return _reference if name == "reference" else execute_torch


def _reference(jobs: Sequence[Job]) -> None:
    """Advanced indexing, in place."""
    for job in jobs:
        cube = job.words.view(job.rows, job.columns, job.inner)
        moved = cube if job.row_index is None else cube[job.row_index.long()]
        moved = moved if job.column_index is None else moved[:, job.column_index.long()]
        if job.owner is not None:
            job.install(moved.reshape(-1).clone())
        else:
            cube.copy_(moved)


def execute_torch(jobs: Sequence[Job]) -> None:
    """Cache-sized blocks of ``index_select`` and ``gather``; swaps come ordered by size, so that one spare serves each size."""
    indices = _Indices()
    spare: torch.Tensor | None = None
    for job in sorted(jobs, key=lambda job: job.words.nbytes):
        rows, width, row_index, column_index = job.rows, job.columns * job.inner, job.row_index, job.column_index
        if rows == 1:  # a vector, or one row of blocks: its columns are rows
            rows, width, row_index, column_index = job.columns, job.inner, column_index, None
        columns = None if column_index is None else indices.columns(column_index, job.inner)
        row_index = None if row_index is None else indices.long(row_index)
        matrix = job.words.view(rows, width) if width > 1 else job.words
        block = _block_rows(matrix)
        if row_index is None:
            assert columns is not None
            _columns_in_place(matrix, columns, *_scratch(matrix, block))
        elif job.owner is not None:
            if spare is None or spare.dtype != job.words.dtype or spare.shape != job.words.shape:
                spare = torch.empty_like(job.words)
            _rows_into(spare.view_as(matrix), matrix, row_index, columns, *_scratch(matrix, block))
            job.install(spare)
            spare = job.words
        elif job.words.nbytes <= SCRATCH_BYTES or matrix.device.type != "cpu":
            moved, buffer = _scratch(matrix, rows, block)
            if columns is not None and matrix[0].nbytes <= NARROW_BYTES:  # a row read at random stays in the first-level cache
                torch.index_select(matrix, 0, row_index, out=moved)
                torch.gather(moved, 1, columns.expand(rows, -1), out=matrix)
            else:
                _rows_into(moved, matrix, row_index, columns, buffer)
                matrix.copy_(moved)
        else:
            _rows_along_cycles(matrix, indices.chunks(row_index, block), columns, *_scratch(matrix, block, block))


def _columns_in_place(matrix: torch.Tensor, columns: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copies each block into the cache and gathers its columns back: random reads then never miss the cache."""
    for part in torch.split(matrix, len(buffer)):
        rows = buffer[: len(part)]
        rows.copy_(part)
        torch.gather(rows, 1, columns.expand(len(part), -1), out=part)


def _rows_into(
    out: torch.Tensor, matrix: torch.Tensor, row_index: torch.Tensor, columns: torch.Tensor | None, buffer: torch.Tensor
) -> None:
    """Gathers rows, and columns of them where asked, into other memory."""
    if columns is None:
        torch.index_select(matrix, 0, row_index, out=out)
        return
    for part, sources in zip(torch.split(out, len(buffer)), torch.split(row_index, len(buffer)), strict=True):
        rows = buffer[: len(part)]
        torch.index_select(matrix, 0, sources, out=rows)
        torch.gather(rows, 1, columns.expand(len(part), -1), out=part)


def _rows_along_cycles(
    matrix: torch.Tensor, chunks: list[_Chunk], columns: torch.Tensor | None, buffer: torch.Tensor, second: torch.Tensor
) -> None:
    """Rows in place: each chunk reads its sources before the next one overwrites them, all but a cycle's first row."""
    target, wide_buffer, wide_second = _widest(matrix, buffer, second)
    head = matrix[0]
    for chunk in chunks:
        count = len(chunk.destinations)
        rows, moved = buffer[:count], wide_buffer[:count]
        torch.index_select(matrix, 0, chunk.sources, out=rows)
        if chunk.closes is not None:
            rows[chunk.closes] = head
        if chunk.opens is not None:
            head = matrix[chunk.opens].clone()
        if columns is not None:
            torch.gather(rows, 1, columns.expand(count, -1), out=second[:count])
            moved = wide_second[:count]
        target.index_copy_(0, chunk.destinations, moved)


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunk:
    """Rows that are written together: where to, where from, and the cycle that is cut at either end.

    ``opens``: the first row of the cycle that goes on in the next chunk; ``closes``: the position whose source is the first row
    of a cycle begun in an earlier one, overwritten by now.
    """

    destinations: torch.Tensor
    sources: torch.Tensor
    opens: int | None
    closes: int | None


def _cycle_chunks(row_index: torch.Tensor, size: int) -> list[_Chunk]:
    """The rows, cycle after cycle, in chunks of ``size``."""
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


class _Indices:
    """What the moves of one call make of their index tensors, which many of them share."""

    def __init__(self) -> None:
        self._made: dict[tuple, Any] = {}

    def _once(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def long(self, index: torch.Tensor) -> torch.Tensor:
        """The index as int64, which gathers along columns demand."""
        return index if index.dtype == torch.int64 else self._once(("long", id(index)), index.long)

    def columns(self, index: torch.Tensor, inner: int) -> torch.Tensor:
        """The index of every word of a row."""
        if inner == 1:
            return self.long(index)
        words = torch.arange(inner, device=index.device)
        return self._once((inner, id(index)), lambda: (index.long()[:, None] * inner + words).view(-1))

    def chunks(self, row_index: torch.Tensor, size: int) -> list[_Chunk]:
        """The chunks of its cycles."""
        return self._once(("chunks", id(row_index), size), lambda: _cycle_chunks(row_index, size))


def _block_rows(matrix: torch.Tensor) -> int:
    """Rows of a block."""
    row_bytes = matrix.element_size() * (matrix.shape[1] if matrix.dim() == 2 else 1)
    bytes_ = CACHE_BYTES * torch.get_num_threads() if matrix.device.type == "cpu" else WAVE_BYTES
    return min(len(matrix), max(1, bytes_ // row_bytes))


def _scratch(matrix: torch.Tensor, *rows: int) -> list[torch.Tensor]:
    """Uninitialised matrices of so many rows of this one; on a CPU they are the thread's: fresh pages cost more than a copy."""
    shapes = [(count, *matrix.shape[1:]) for count in rows]
    sizes = [-(-math.prod(shape) * matrix.element_size() // 64) * 64 for shape in shapes]
    limit = SCRATCH_BYTES + 2 * CACHE_BYTES * torch.get_num_threads()
    if matrix.device.type != "cpu" or sum(sizes) > limit:
        return [matrix.new_empty(shape) for shape in shapes]
    memory = getattr(_thread, "memory", None)
    if memory is None or len(memory) < sum(sizes):
        _thread.memory = memory = torch.empty(sum(sizes), dtype=torch.uint8)
    pieces = torch.split(memory[: sum(sizes)], sizes)
    return [
        piece[: math.prod(shape) * matrix.element_size()].view(matrix.dtype).view(shape)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def _widest(*matrices: torch.Tensor) -> list[torch.Tensor]:
    """The same rows in words of 8 bytes where all divide into such, for fewer steps of loops over words."""
    fits = all(
        matrix.dim() == 2
        and (matrix.shape[1] * matrix.element_size()) % 8 == 0
        and (matrix.storage_offset() * matrix.element_size()) % 8 == 0
        for matrix in matrices
    )
    return [matrix.view(torch.int64) if fits else matrix for matrix in matrices]
