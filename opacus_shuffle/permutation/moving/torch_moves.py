"""Moves contiguous tensors with PyTorch's operations, in blocks that fit the cache.

* A small matrix whose rows and columns move is gathered into a buffer by rows, and back by columns.
* Rows move in blocks of columns. A block is gathered into the buffer in its new order, and copied
  back.
* Columns move in blocks of rows. A block is copied into a buffer that fits the second-level cache,
  and gathered from it, so random reads never miss the cache.

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
"""Largest size of copies that exist at one time, on a GPU or of non-contiguous tensors."""

SCRATCH_BYTES = 16 * 2**20
"""Size of the buffer on a CPU; larger ones do not fit the caches."""

NARROW_BYTES = 2**12
"""Columns of rows up to this size are gathered from all rows at once."""

CACHE_BYTES = 2**20
"""Buffer per CPU thread for columns: half of a usual second-level cache."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integer types as which entries of so many bytes are viewed; 16 bytes are two integers."""

Item = TypeVar("Item")


class Move(NamedTuple):
    """One tensor viewed as (rows, columns, inner), and the old indices of its rows and columns.

    Attributes:
        tensor: The tensor, of any dtype, device and strides.
        rows: Number of rows, in C order of its shape.
        columns: Number of columns.
        inner: Entries of a column that move together, such as the k·k taps of a convolution.
        row_index: Shape (rows,), int64 or int32, a permutation: new row i is old row
            ``row_index[i]``. ``None``: rows stay. All indices of a call are on the tensors' device,
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
    """Moves contiguous tensors by ``index_select`` and ``gather``, block by block."""
    buffer = _Buffer()
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
                matrix, 0, word_index(rows, 1, words.device), out=buffer.like(matrix)
            )
            torch.gather(
                moved, 1, word_index(columns, inner, words.device).expand(height, -1), out=matrix
            )
            continue
        if rows is not None:
            for part in torch.split(matrix, max(1, limit // matrix[:, 0].nbytes), dim=1):
                moved = torch.index_select(
                    part, 0, word_index(rows, 1, words.device), out=buffer.like(part)
                )
                part.copy_(moved)
        if columns is not None:
            limit = CACHE_BYTES * torch.get_num_threads() if on_cpu else WAVE_BYTES
            for part in torch.split(matrix, max(1, limit // matrix[0].nbytes)):
                index = word_index(columns, inner, words.device).expand(len(part), -1)
                torch.gather(buffer.like(part).copy_(part), 1, index, out=part)


def _word_index(index: torch.Tensor, inner: int, device: torch.device) -> torch.Tensor:
    """Returns the int64 index of every word, where each entry stands for ``inner`` of them."""
    words = index.long()[:, None] * inner + torch.arange(inner, device=index.device)
    return words.view(-1).to(device)


class _Buffer:
    """A buffer that the moves of a call share, because access to fresh pages is slow."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, part: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialized contiguous tensor like this one, which replaces the last."""
        if len(self._memory) < part.nbytes:
            size = max(part.nbytes, SCRATCH_BYTES)
            self._memory = torch.empty(size, dtype=torch.uint8, device=part.device)
        return self._memory[: part.nbytes].view(part.dtype).view(part.shape)
