"""Refuses networks in which records of one batch act on later ones: by a memory bank, a queue, a running mean that is read.

A step clips and hides what its own records do. What it reads of an earlier batch's is in none of its bounds. So a few records
are run through the network after others, and once more after other ones than these: what comes out, and its gradients, may not
change. What is kept and never read (attention weights to look at, say) changes nothing, and is not refused. What is read only
after more batches than one is not seen here: :mod:`~opacus_shuffle.engine.watched_buffers` warns of it by name.

>>> class Centred(nn.Linear):
...     mean = torch.zeros(3)
...     def forward(self, x):
...         before, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach().mean(0)
...         return super().forward(x - before)
>>> refuse_carried_records(nn.Sequential(nn.Tanh(), Centred(3, 2)), lambda n: (n, ((torch.randn(n, 3),), {})))
Traceback (most recent call last):
    ...
ValueError: module carries records of one batch into later ones by 1.mean: ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.engine.mixed_records import (
    all_same,
    has_records,
    pass_both_ways,
    repeated,
    rescaled,
    untouched,
)
from opacus_shuffle.permutation.network import ATTRIBUTES, results
from opacus_shuffle.permutation.sample_input import Call

Kept = dict[str, list[torch.Tensor] | str]
"""By name of the buffer or attribute: the tensors in it, or what it is as text if there are none."""


def refuse_carried_records(
    network: nn.Module, call_of: Callable[[int], tuple[int, Call]], *, axis: int = 0, more: Sequence[int] = ()
) -> None:
    """Refuses a network whose results on one batch depend on the records of the batch before.

    Args:
        network: As it trains; left without a trace. Nothing is said of one that does not run.
        call_of: The arguments for so many records, or as many as there are, and how many they are.
        axis: Where tensors have their records.
        more: Numbers of records to try besides, should it take only some.

    Raises:
        ValueError: They do; the message names the buffers and attributes that carry them.
    """
    for wanted in (4, *more):
        try:
            carriers = _carriers(network, *call_of(wanted), axis)
        except Exception:  # which the comparison of records meets as well
            continue
        if carriers is not None:
            raise ValueError(
                f"module carries records of one batch into later ones by {carriers}: a step then depends on records that it "
                "did not draw, which neither its clipping nor its noise accounts for; set it anew at the beginning of each "
                "forward pass, compute it from public data, or leave it out"
            )
        return


def _carriers(network: nn.Module, records: int, call: Call, axis: int) -> str | None:
    """Returns what carries records into the next batch, None if nothing does."""
    enter_phase("whether they stay in the network")
    plain, plain_kept = _after(network, call, call, records, axis)
    again, _ = _after(network, call, call, records, axis)
    for change, kept_row in ((rescaled, 0), (repeated, 0), (repeated, 1)):  # all are the last one, or the first
        try:
            earlier = _changed(call, change, kept_row, records, axis)
            found, kept = _after(network, earlier, call, records, axis)
        except Exception:
            if change is rescaled:  # what the network may not take, a probability above one, say
                continue
            raise
        if not _as_far_apart(plain, found, again):
            names = [name for name in plain_kept.keys() | kept.keys() if _differ(plain_kept.get(name), kept.get(name))]
            return ", ".join(sorted(names)) or "something else than its buffers and attributes"
    return None


def _changed(call: Call, change: Callable[..., torch.Tensor], kept: int, records: int, axis: int) -> Call:
    """Returns other records than those of a call."""

    def other(value: torch.Tensor) -> torch.Tensor:
        return change(value, axis, kept).clone() if has_records(value, records, axis) else value

    return tree_map_only(torch.Tensor, other, call)  # type: ignore[no-any-return]


def _after(network: nn.Module, earlier: Call, call: Call, records: int, axis: int) -> tuple[list[torch.Tensor], Kept]:
    """Returns what a network gives after an earlier batch and its gradients, and what it has kept of that batch."""

    def told(outputs: Any) -> list[torch.Tensor]:
        return [each for each in results(outputs) if each.requires_grad or has_records(each, records, axis)]

    def bent(outputs: Any) -> list[torch.Tensor]:  # whose gradients are other ones for other records, as those of losses are
        return [each.sin() for each in results(outputs) if each.requires_grad]

    with untouched(network):
        pass_both_ways(network, earlier, bent, seed=0)
        kept = _kept(network)
        found, gradients = pass_both_ways(network, call, told, seed=1)
        return [*(each.clone() for each in found), *gradients], kept


def _as_far_apart(plain: list[torch.Tensor], found: list[torch.Tensor], again: list[torch.Tensor]) -> bool:
    """Returns whether results differ by no more than those of the same run done again, as kernels that race may have it.

    These are the same computations on the same numbers, so that, but for such kernels, not even rounding may be another one:
    among a long queue's thousands of rows those of one batch count little.
    """
    if len(plain) != len(found) or len(plain) != len(again):
        return len(plain) != len(again)
    for one, other, same in zip(plain, found, again, strict=True):
        if one.shape != other.shape or one.shape != same.shape:
            return one.shape != same.shape
        if not all_same([one], [same]):
            continue  # it draws from the operating system, say
        if _distance(one, other) > 10 * _distance(one, same):
            return False
    return True


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the largest difference of two tensors' entries, where NaN is as far from NaN as numbers from themselves."""
    differ = (one != other) & ~(one.isnan() & other.isnan())
    gap = (one - other).abs()[differ] if one.is_floating_point() or one.is_complex() else differ[differ].float()
    return float(gap.nan_to_num(torch.inf).max()) if gap.numel() else 0.0


def _kept(network: nn.Module) -> Kept:
    """Returns copies of a network's buffers and of its modules' own attributes, by name."""
    found: Kept = {}
    for place, part in network.named_modules():
        for name, value in {**vars(part), **part._buffers}.items():
            tensors = [] if name in ATTRIBUTES else results(value)
            whole = f"{place}.{name}" if place else name
            if tensors:
                found[whole] = [each.detach().to_dense().clone() for each in tensors]
            elif name not in ATTRIBUTES and isinstance(value, int | float | list | tuple | dict | deque | np.ndarray):
                found[whole] = repr(value)
    return found


def _differ(one: Any, other: Any) -> bool:
    """Returns whether two batches have left different things under a name."""
    if isinstance(one, list) and isinstance(other, list):
        return not all_same(one, other)
    return bool(one != other)
