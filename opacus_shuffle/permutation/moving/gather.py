"""Moves the entries of many tensors by row and column permutations, where they lie and with little scratch.

A shuffle of a network moves every weight, gradient and optimizer state: new[i, j] =
old[row_index[i], column_index[j]]. Advanced indexing (``w[rows][:, columns]``) writes each of them
twice into fresh memory, whose first touch costs more than the copy; here they go through a scratch
that the cache holds, and land where they were. Every tensor is seen as whole words of 1, 2, 4 or 8
bytes (16 = two of 8), so any dtype moves bit for bit.

>>> weight = torch.arange(6.0).reshape(2, 3)
>>> gather_([Move(weight, 2, 3, 1, row_index=torch.tensor([1, 0]), column_index=torch.tensor([2, 0, 1]))])
>>> float(weight[0, 0])
5.0
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from opacus_shuffle.core.validation import one_of
from opacus_shuffle.permutation.moving import torch_moves
from opacus_shuffle.permutation.moving.moves import Move, check_moves, indices_of, waves

EXECUTORS = ("auto", "torch", "triton")

_spec_of = functools.cache(importlib.util.find_spec)


@torch.no_grad()
def gather_(moves: Sequence[Move], *, executor: str = "auto") -> None:
    """Permutes rows and columns of every tensor, bit for bit the same with every executor.

    Indices are trusted to be permutations: checking would read them back from a GPU at every step.
    An index that is no permutation gives wrong entries or an error of PyTorch's, and with Triton it
    reads memory that is not the tensor's.

    Args:
        moves: The tensors, each once; they may differ in dtype and device, and share index tensors.
        executor: ``"torch"``, ``"triton"`` (GPU; a CPU only under Triton's interpreter), or
            ``"auto"``: triton on a GPU where it is installed, else torch.

    Raises:
        ValueError: For an unknown executor, sizes or indices that do not fit a tensor, a tensor
            that comes twice, or triton on a CPU without its interpreter.
    """
    one_of("executor", executor, EXECUTORS)
    check_moves(moves)
    by_device: defaultdict[torch.device, tuple[list[Move], list[Move]]] = defaultdict(
        lambda: ([], [])
    )
    for move in moves:
        tensor = move.tensor
        if tensor.numel() and any(index is not None for index in indices_of(move)):
            as_it_is = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            by_device[tensor.device][0 if as_it_is else 1].append(move)
    for device, (plain, copied) in by_device.items():
        execute = _executor(executor, device)
        execute(plain)
        for wave in waves(copied, lambda move: move.tensor.nbytes):
            copies = [move.tensor.clone(memory_format=torch.contiguous_format) for move in wave]
            execute(
                [
                    dataclasses.replace(move, tensor=copy)
                    for move, copy in zip(wave, copies, strict=True)
                ]
            )
            for move, copy in zip(wave, copies, strict=True):
                move.tensor.copy_(copy)


def _executor(name: str, device: torch.device) -> Callable[[Sequence[Move]], None]:
    """Returns the function that moves contiguous tensors on a device."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and _spec_of("triton") is not None else "torch"
    if name == "triton":
        # needs an optional package
        import opacus_shuffle.permutation.moving.triton_moves as triton_moves

        triton_moves.require(device)
        return triton_moves.execute
    return torch_moves.execute
