"""Moves the entries of many tensors by permutations of rows and columns, in place.

A shuffle of a network moves every weight, gradient and optimizer state: new[i, j] =
old[row_index[i], column_index[j]]. Advanced indexing (``w[rows][:, columns]``) writes each tensor
twice into fresh memory, whose first access costs more than the copy. Here the entries go through a
buffer that fits the cache, and back into the same tensor. Every tensor is viewed as words of 1, 2,
4 or 8 bytes, so all dtypes move bit for bit.

:mod:`~opacus_shuffle.permutation.moving.torch_moves` moves words with PyTorch, and
:mod:`~opacus_shuffle.permutation.moving.triton_moves` on a GPU where Triton is installed.

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

    Sizes and indices are not checked, because that would read indices back from a GPU at every
    step. An index that is no permutation gives wrong entries or an error from PyTorch. With Triton,
    an index out of range reads other memory.

    Args:
        moves: The tensors, each once. They may differ in dtype and device, and share index tensors.
        executor: ``"torch"``, ``"triton"`` (GPU; a CPU only under Triton's interpreter), or
            ``"auto"``: Triton on a GPU where it is installed, otherwise PyTorch.

    Raises:
        ValueError: If the executor is unknown, a tensor occurs twice, shares memory with another
            one or is expanded, Triton runs on a CPU without its interpreter, or a CUDA graph is
            being captured.
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
                f"moves cannot run on {device} while a CUDA graph is being captured, because every "
                "replay would use the same permutation: shuffle outside of the graph"
            )
        # A tensor that begins inside of another one shares entries with it.
        spans = sorted(
            (move.tensor.data_ptr(), move.tensor.nbytes if move.tensor.is_contiguous() else 1)
            for move in group
        )
        for (start, size), (following, _) in itertools.pairwise(spans):
            if start + size > following:
                raise ValueError(
                    "moves: a tensor (or a part of its memory) occurs twice, and would be moved "
                    "twice: pass each tensor once"
                )
        for tensor, *_ in group:
            if not tensor.is_contiguous() and _is_expanded(tensor):
                raise ValueError(
                    f"moves: a tensor of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()} is expanded, so its entries share memory: pass its clone()"
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
    """Returns whether memory holds the entries in order, without a lazy conjugation or sign."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Returns whether entries along an axis share memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def _executor(name: str, device: torch.device) -> Callable[[Sequence[Move]], None]:
    """Returns the function that moves contiguous tensors on a device."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and _find_package("triton") else "torch"
    if name == "triton":
        # Triton is an optional package.
        import opacus_shuffle.permutation.moving.triton_moves as triton_moves

        return triton_moves.execute
    return execute_with_torch
