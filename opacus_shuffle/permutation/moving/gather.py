"""Moves the entries of many tensors by row and column permutations, with little scratch.

A shuffle of a network moves every weight, gradient and optimizer state: new[i, j] =
old[row_index[i], column_index[j]]. Advanced indexing (``w[rows][:, columns]``) writes each of them
twice into fresh memory, whose first touch costs more than the copy; here they go through a scratch
that the cache holds, and land where they were. Every tensor is seen as whole words of 1, 2, 4 or 8
bytes, so any dtype moves bit for bit.

How words move is :mod:`~opacus_shuffle.permutation.moving.torch_moves`, and on a GPU
:mod:`~opacus_shuffle.permutation.moving.triton_moves`, where Triton is installed.

>>> weight = torch.arange(6.0).reshape(2, 3)
>>> rows, columns = torch.tensor([1, 0]), torch.tensor([2, 0, 1])
>>> gather_([Move(weight, 2, 3, 1, row_index=rows, column_index=columns)])
>>> float(weight[0, 0])
5.0
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from opacus_shuffle.core.validation import one_of
from opacus_shuffle.permutation.moving.torch_moves import Move, execute_with_torch, waves

EXECUTORS = ("auto", "torch", "triton")

_find_package = functools.cache(importlib.util.find_spec)


@torch.no_grad()
def gather_(moves: Sequence[Move], *, executor: str = "auto") -> None:
    """Permutes rows and columns of every tensor, bit for bit the same with every executor.

    Sizes and indices are trusted: checking would read indices back from a GPU at every step. An
    index that is no permutation gives wrong entries or an error of PyTorch's; one that leads out of
    the tensor reads other memory with Triton.

    Args:
        moves: The tensors, each once; they may differ in dtype and device, and share index tensors.
        executor: ``"torch"``, ``"triton"`` (GPU; a CPU only under Triton's interpreter), or
            ``"auto"``: triton on a GPU where it is installed, else torch.

    Raises:
        ValueError: For an unknown executor, a tensor that comes twice, shares a part of another
            one's memory or is expanded, triton on a CPU without its interpreter, or while a CUDA
            graph is captured.
    """
    one_of("executor", executor, EXECUTORS)
    by_device: defaultdict[torch.device, list[Move]] = defaultdict(list)
    for move in moves:
        stays = move.row_index is None and move.column_index is None
        if not stays and move.tensor.numel():
            by_device[move.tensor.device].append(move)
    for device, group in by_device.items():
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"moves lie on {device}, whose work a CUDA graph is capturing: every replay would "
                "move by the same permutation; shuffle outside of the graph"
            )
        # Where a tensor begins inside of another, they share entries.
        places = sorted(
            (move.tensor.data_ptr(), move.tensor.nbytes if move.tensor.is_contiguous() else 1)
            for move in group
        )
        for (start, size), (following, _) in itertools.pairwise(places):
            if start + size > following:
                raise ValueError(
                    "moves: a tensor (or a part of its memory) comes twice; a second move of it "
                    "would undo the first"
                )
        for tensor, *_ in group:
            if not tensor.is_contiguous() and _is_expanded(tensor):
                raise ValueError(
                    f"moves: a tensor of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()} is expanded, so that entries share memory and cannot move "
                    "apart: pass its clone()"
                )
    for device, group in by_device.items():
        execute = _executor(executor, device)
        in_order: list[Move] = []
        others: list[Move] = []
        for move in group:
            (in_order if _lies_in_order(move.tensor) else others).append(move)
        execute(in_order)
        for wave in waves(others, lambda move: move.tensor.nbytes):
            copies = [move.tensor.clone(memory_format=torch.contiguous_format) for move in wave]
            execute([move._replace(tensor=copy) for move, copy in zip(wave, copies, strict=True)])
            for move, copy in zip(wave, copies, strict=True):
                move.tensor.copy_(copy)


def _lies_in_order(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory holds its entries one after the other, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Returns whether entries along an axis are one and the same in memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def _executor(name: str, device: torch.device) -> Callable[[Sequence[Move]], None]:
    """Returns the function that moves contiguous tensors on a device."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and _find_package("triton") else "torch"
    if name == "triton":
        # needs an optional package
        import opacus_shuffle.permutation.moving.triton_moves as triton_moves

        return triton_moves.execute
    return execute_with_torch
