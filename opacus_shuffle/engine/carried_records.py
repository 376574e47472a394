"""Refuses networks in which records of one batch act on later ones: by a memory bank, a queue, a running mean that is read.

A step clips and hides what its own records do. What it reads of an earlier batch's is in none of its bounds. So a few records
are run through the network after others, and once more after other ones than these: what comes out, and its gradients, may not
change. What is kept and never read (attention weights to look at, say) changes nothing, and is not refused. What is read only
after more batches than two is not seen here: :mod:`~opacus_shuffle.engine.watched_buffers` warns of tensors by name.

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

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.engine.limited_reads import LimitedReads
from opacus_shuffle.engine.mixed_records import (
    EXTREMES,
    all_same,
    changed,
    has_records,
    pass_both_ways,
    repeated,
    rescaled,
    untouched,
)
from opacus_shuffle.networks.running import ATTRIBUTES, results
from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.finding.earlier_calls import EarlierCalls

Kept = dict[str, list[torch.Tensor] | str]
"""By name of the buffer or attribute: the tensors in it, or what it is as text if there are none."""


def refuse_carried_records(
    network: nn.Module, call_of: Callable[[int], tuple[int, Call]], *, axis: int = 0, more: Sequence[int] = ()
) -> None:
    """Refuses a network whose results on one batch depend on the records of one of the two batches before.

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
    flags = _flags_after(network, call)
    for change, kept_row in (*((each, 0) for each in (rescaled, repeated, *EXTREMES)), (repeated, 1)):
        try:
            earlier = changed(call, change, kept_row, records, axis)
            same = flags is not None and _flags_after(network, earlier) == flags
            if same and change in EXTREMES:
                continue
            found, kept = _after(network, earlier, call, records, axis, batches=1 if same else 2)
        except Exception:
            if change is not repeated:  # what the network may not take, a probability above one, say
                continue
            raise
        if not all(map(_as_far_apart, plain, found, again)):
            names = [name for name in plain_kept.keys() | kept.keys() if _differ(plain_kept.get(name), kept.get(name))]
            return ", ".join(sorted(names)) or "something else than its buffers and attributes"
    return None


def _flags_after(network: nn.Module, earlier: Call) -> dict[Any, Any] | None:
    """Returns the flags, numbers and texts that a forward pass leaves in a network, None if it leaves tensors, too."""
    with untouched(network):
        noted = EarlierCalls(network)
        with LimitedReads():
            pass_both_ways(network, earlier, lambda _: [], seed=0)
        return noted.plain_changes()


def _after(
    network: nn.Module, earlier: Call, call: Call, records: int, axis: int, *, batches: int = 2
) -> tuple[list[list[torch.Tensor]], Kept]:
    """Returns what a network gives in each of the batches after an earlier one, with gradients, and what it kept of that."""

    def told(outputs: Any) -> list[torch.Tensor]:
        return [each for each in results(outputs) if each.requires_grad or has_records(each, records, axis)]

    def bent(outputs: Any) -> list[torch.Tensor]:  # whose gradients are other ones for other records, as those of losses are
        return [each.sin() for each in results(outputs) if each.requires_grad]

    given = []
    with untouched(network):
        # Records that are made up may never bring what a loop waits for.
        with contextlib.nullcontext() if earlier is call else LimitedReads():
            pass_both_ways(network, earlier, bent, seed=0)
        kept = _kept(network)
        for seed in range(1, batches + 1):  # what is kept may be read two batches later alone
            found, gradients = pass_both_ways(network, call, told, seed=seed)
            given.append([*(each.clone() for each in found), *gradients])
    return given, kept


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
            elif name not in ATTRIBUTES and isinstance(
                value, int | float | str | list | tuple | dict | set | deque | np.ndarray
            ):
                found[whole] = repr(value)
    return found


def _differ(one: Any, other: Any) -> bool:
    """Returns whether two batches have left different things under a name."""
    if isinstance(one, list) and isinstance(other, list):
        return not all_same(one, other)
    return bool(one != other)
