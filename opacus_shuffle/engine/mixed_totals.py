"""Refuses networks whose loss of a whole batch is not a sum over its records, as contrastive losses and norms of it are not.

Such a network returns no row per record, so that records cannot be compared by their outputs. But of a sum (or a mean) of one
number per record, the gradient at one record's row of a layer is the same whatever the other records are. So this is looked at
with others changed. Masks and labels below two stay, and integers below zero, which often say what is not to be counted.

>>> class Loss(nn.Module):
...     def forward(self, x):
...         return x.square().mean().sqrt()
>>> refuse_mixed_totals(nn.Sequential(nn.Linear(3, 2), Loss()), lambda n: (n, ((torch.randn(n, 3),), {})))
Traceback (most recent call last):
    ...
ValueError: module returns a loss of the batch that is not a sum or mean of one number per record: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.engine.mixed_records import has_records, rescaled, untouched
from opacus_shuffle.engine.records_apart import layers_with_parameters
from opacus_shuffle.permutation.network import results, seed_draws
from opacus_shuffle.permutation.sample_input import Call


def refuse_mixed_totals(network: nn.Module, call_of: Callable[[int], tuple[int, Call]], *, axis: int = 0) -> None:
    """Refuses a network with a loss of the batch in which one record's gradient depends on other records.

    Args:
        network: As it trains; left without a trace. Nothing is said of one that does not run, that returns rows of records, or
            that Opacus's hooks are on already.
        call_of: The arguments for so many records, or as many as there are, and how many they are.
        axis: Where tensors have their records.

    Raises:
        ValueError: It does.
    """
    if hasattr(network, "autograd_grad_sample_hooks"):  # which look at passes with gradients alone
        return
    try:
        mixed = _is_mixed(network, *call_of(4), axis)
    except Exception:  # which other checks meet as well
        return
    if mixed:
        raise ValueError(
            "module returns a loss of the batch that is not a sum or mean of one number per record: what one record's gradient "
            "is depends on the others, so that clipping bounds nobody's influence; return one loss per record, or their sum or "
            "mean"
        )


def _is_mixed(network: nn.Module, records: int, call: Call, axis: int) -> bool:
    """Returns whether gradients at one record's rows change when other records do."""
    if records < 2 or not any(has_records(leaf, records, axis) for leaf in tree_leaves(call)):
        return False
    plain = _gradients(network, call, records, axis)
    other = _gradients(network, _others_changed(call, records, axis), records, axis)
    if [each.shape for each in plain] != [each.shape for each in other]:
        return False
    rough = any(each.dtype in (torch.float16, torch.bfloat16) for each in plain)
    largest = max((float(each.abs().max()) for each in (*plain, *other)), default=0.0)
    close = (1e-2 if rough else 1e-5) * largest  # of all layers: of one alone it may be nothing but rounding
    return any(bool(((one - two).abs() > close).any()) for one, two in zip(plain, other, strict=True))


def _gradients(network: nn.Module, call: Call, records: int, axis: int) -> list[torch.Tensor]:
    """Returns the gradients of what has no rows at the first record's rows of layers; nothing if any result has rows."""
    places: list[torch.Tensor] = []

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        places.extend(each for each in results(output) if each.requires_grad and has_records(each, records, axis))

    handles = [each.register_forward_hook(note) for each in layers_with_parameters(network)]
    try:
        with untouched(network), torch.enable_grad():
            seed_draws(0)
            found = [each for each in results(network(*call[0], **call[1])) if each.requires_grad]
            if not found or any(has_records(each, records, axis) for each in found):
                return []
            weights = torch.Generator().manual_seed(0)
            total = torch.stack([(each * torch.randn(each.shape, generator=weights).to(each)).sum() for each in found]).sum()
            gradients = torch.autograd.grad(total, places, allow_unused=True)
            return [each.select(axis, 0).detach().clone() for each in gradients if each is not None and each.numel()]
    finally:
        for handle in handles:
            handle.remove()


def _others_changed(call: Call, records: int, axis: int) -> Call:
    """Returns the arguments with all records but the first changed."""

    def changed(value: torch.Tensor) -> torch.Tensor:
        if not has_records(value, records, axis) or not value.numel():
            return value
        if not value.is_floating_point() and not value.is_complex() and int(value.max()) < 2:
            return value
        result = rescaled(value, axis, 0).clone()
        result.select(axis, 0).copy_(value.select(axis, 0))
        return result

    return tree_map_only(torch.Tensor, changed, call)  # type: ignore[no-any-return]
