"""Moves contiguous tensors with PyTorch's own operations, in blocks that a cache holds.

* A small matrix that moves both ways is gathered into a scratch by rows, and back by columns.
* Rows move within blocks of columns: as many columns as the scratch holds of all rows go into it in
  their new order, and back.
* Columns move within blocks of rows: each is copied into a scratch that fits the second-level
  cache and gathered out of it, so that random reads never miss the cache.

>>> words = torch.arange(6)
>>> rows, columns = torch.tensor([1, 0]), torch.tensor([2, 0, 1])
>>> execute_with_torch([Move(words, 2, 3, 1, row_index=rows, column_index=columns)])
>>> words.tolist()
[5, 3, 4, 2, 0, 1]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

WAVE_BYTES = 256 * 2**20
"""Copies of tensors, on a GPU or of those that are not contiguous, come in waves of this size."""

SCRATCH_BYTES = 16 * 2**20
"""A CPU's scratch: larger ones leave the caches."""

NARROW_BYTES = 2**12
"""Columns of rows up to this size are gathered from all rows at once: the cache holds a row."""

CACHE_BYTES = 2**20
"""Buffer per CPU thread for columns: half of today's second-level caches."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The integers that entries of so many bytes are seen as; 16 bytes are two integers of 8."""

Item = TypeVar("Item")


class Move(NamedTuple):
    """One tensor seen as (rows, columns, inner), and where each row and column comes from.

    Attributes:
        tensor: What is moved, of any dtype, device and strides.
        rows: Its rows, in C order of its shape.
        columns: Columns of a row.
        inner: Entries of a column that move together, such as the k·k of a convolution's kernel.
        row_index: Shape (rows,), int64 or int32, a permutation: new row i is old row
            ``row_index[i]``. ``None``: rows stay. All indices of a call lie on the tensors' device,
            or all on the CPU.
        column_index: The same for columns, shape (columns,).
    """

    tensor: torch.Tensor
    rows: int
    columns: int
    inner: int
    row_index: torch.Tensor | None
    column_index: torch.Tensor | None


def waves(
    items: Sequence[Item], nbytes: Callable[[Item], int], limit: int = WAVE_BYTES
) -> Iterator[list[Item]]:
    """Splits items into consecutive runs of at least one item and at most ``limit`` bytes."""
    wave: list[Item] = []
    total = 0
    for item in items:
        if wave and total + nbytes(item) > limit:
            yield wave
            wave, total = [], 0
        wave.append(item)
        total += nbytes(item)
    if wave:
        yield wave


def execute_with_torch(moves: Sequence[Move]) -> None:
    """Moves contiguous tensors by ``index_select`` and ``gather`` on blocks that fit the cache."""
    scratch = _Scratch()
    word_index = functools.cache(_word_index)  # many tensors share an index
    for tensor, height, count, inner, rows, columns in moves:
        words = tensor.detach().view(-1).view(WORDS[tensor.element_size()])
        inner *= len(words) // tensor.numel()
        width = count * inner
        if height == 1:  # a vector, or one row of blocks: its columns are rows
            height, width, inner, rows, columns = count, inner, 1, columns, None
        matrix = words.view(height, width)
        on_cpu = matrix.device.type == "cpu"
        limit = SCRATCH_BYTES if on_cpu else WAVE_BYTES
        narrow = not on_cpu or matrix[0].nbytes <= NARROW_BYTES
        if rows is not None and columns is not None and narrow and matrix.nbytes <= limit:
            moved = torch.index_select(
                matrix, 0, word_index(rows, 1, words.device), out=scratch.like(matrix)
            )
            torch.gather(
                moved, 1, word_index(columns, inner, words.device).expand(height, -1), out=matrix
            )
            continue
        if rows is not None:
            for part in torch.split(matrix, max(1, limit // matrix[:, 0].nbytes), dim=1):
                moved = torch.index_select(
                    part, 0, word_index(rows, 1, words.device), out=scratch.like(part)
                )
                part.copy_(moved)
        if columns is not None:
            limit = CACHE_BYTES * torch.get_num_threads() if on_cpu else WAVE_BYTES
            for part in torch.split(matrix, max(1, limit // matrix[0].nbytes)):
                index = word_index(columns, inner, words.device).expand(len(part), -1)
                torch.gather(scratch.like(part).copy_(part), 1, index, out=part)


def _word_index(index: torch.Tensor, inner: int, device: torch.device) -> torch.Tensor:
    """Returns the int64 index of every word, where each entry stands for ``inner`` of them."""
    words = index.long()[:, None] * inner + torch.arange(inner, device=index.device)
    return words.view(-1).to(device)


class _Scratch:
    """Memory that the moves of a call share: touching fresh pages costs more than a copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, part: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialised contiguous tensor like this one, in place of the last."""
        if len(self._memory) < part.nbytes:
            size = max(part.nbytes, SCRATCH_BYTES)
            self._memory = torch.empty(size, dtype=torch.uint8, device=part.device)
        return self._memory[: part.nbytes].view(part.dtype).view(part.shape)
