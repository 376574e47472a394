"""Tensors to be moved, seen as rows and columns of words, with where each row and column comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch

WAVE_BYTES = 256 * 2**20
"""Temporary copies of tensors that are not contiguous, and a GPU's scratch, are made in waves of about this size."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The integers that entries of so many bytes are seen as; 16 bytes are two integers of 8."""


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """One tensor seen as (rows, columns, inner), and where each row and column comes from.

    Attributes:
        tensor: What is moved, of any dtype, device and strides.
        rows: Its rows, in C order of its shape.
        columns: Columns of a row.
        inner: Entries of a column that move together, such as the k·k of a convolution's kernel.
        row_index: Shape (rows,), int64 or int32, a permutation on the tensor's device: new row i is
            old row ``row_index[i]``. ``None``: rows stay.
        column_index: The same for columns, shape (columns,).
    """

    tensor: torch.Tensor
    rows: int
    columns: int
    inner: int
    row_index: torch.Tensor | None
    column_index: torch.Tensor | None


def check_moves(moves: Sequence[Move]) -> None:
    """Refuses moves that do not fit their tensors, by their numbers."""
    seen: set[tuple[torch.device | None, int]] = set()
    fit: set[tuple[int, int, torch.device]] = set()  # many tensors share an index
    for number, move in enumerate(moves):
        tensor = move.tensor
        sizes = (move.rows, move.columns, move.inner)
        if min(sizes) < 0 or math.prod(sizes) != tensor.numel():
            raise ValueError(
                f"moves[{number}]: rows · columns · inner = {sizes} does not fit a tensor of "
                f"{tuple(tensor.shape)}"
            )
        for name, index, size in (
            ("row_index", move.row_index, move.rows),
            ("column_index", move.column_index, move.columns),
        ):
            if index is None or (id(index), size, tensor.device) in fit:
                continue
            if (
                index.dtype not in (torch.int64, torch.int32)
                or index.shape != (size,)
                or index.device != tensor.device
            ):
                raise ValueError(
                    f"moves[{number}]: {name} must be int64 or int32 of shape ({size},) on "
                    f"{tensor.device}, "
                    f"got {index.dtype} of shape {tuple(index.shape)} on {index.device}"
                )
            fit.add((id(index), size, tensor.device))
        key = (None, id(tensor)) if tensor.numel() == 0 else (tensor.device, tensor.data_ptr())
        if key in seen:
            raise ValueError(
                f"moves[{number}]: this tensor (or its memory) comes twice; a second move of it "
                "would undo the first"
            )
        seen.add(key)


def indices_of(move: Move) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the row and the column index, None where there are fewer than two things to permute."""
    return (
        move.row_index if move.rows > 1 else None,
        move.column_index if move.columns > 1 else None,
    )


def as_words(move: Move) -> Move:
    """Returns the move of a contiguous tensor seen as a flat vector of words, integers of its entries' size."""
    words = move.tensor.detach().view(-1).view(WORDS[move.tensor.element_size()])
    return Move(
        words,
        move.rows,
        move.columns,
        move.inner * (words.numel() // move.tensor.numel()),
        *indices_of(move),
    )


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies from the host to a device, to a GPU of NVIDIA's out of pinned memory, so that the host does not wait."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def waves(items: Sequence, nbytes: Callable, limit: int = WAVE_BYTES) -> Iterator[list]:
    """Splits items into consecutive runs of at least one item and at most ``limit`` bytes."""
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
