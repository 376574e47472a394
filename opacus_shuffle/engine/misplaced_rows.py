"""Refuses networks that show a layer the records in another order than the batch has them, or only some of them.

Opacus takes the i-th row of every layer's batch for record i, and clips what it finds there together. Where a network sorts,
flips or picks rows for one layer and puts them back behind it, one record's gradients lie in several rows. Each of these may
have the whole norm: a record then moves the sum by twice what the noise is made for, or all rows by a change of their order.

>>> class Flipped(nn.Sequential):
...     def forward(self, x):
...         return super().forward(x.flip(0)).flip(0)
>>> refuse_misplaced_rows(nn.Sequential(Flipped(nn.Linear(3, 3)), nn.Tanh()), lambda n: (n, ((torch.randn(n, 3),), {})))
Traceback (most recent call last):
    ...
ValueError: module shows records in another order than the batch's to 0.0 (Linear), ...
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.engine.mixed_records import has_records, untouched
from opacus_shuffle.engine.optimizers.usable_records import HALF
from opacus_shuffle.permutation.network import results, seed_draws
from opacus_shuffle.permutation.sample_input import Call

REMEDY = (
    "so that what is clipped as one record is of several; sort and pick records in the loader's collate_fn, and let every "
    "layer see all of them, in their order"
)

_PIECE = 4096
"""How many numbers of each record's gradient are kept of a wide layer, or fewer than twice as many."""


def refuse_misplaced_rows(
    network: nn.Module,
    call_of: Callable[[int], tuple[int, Call]],
    *,
    axis: int = 0,
    batch_first: bool = True,
    ghost: bool = False,
    apart: bool = False,
) -> None:
    """Refuses a network some of whose layers see records at other places than theirs.

    Args:
        network: As it trains; left without a trace. Nothing is looked at where it does not run.
        call_of: The arguments for so many records, or as many as there are, and how many they are.
        axis: Where tensors have their records.
        batch_first: As of Opacus.
        ghost: Refuse gradients that do not grow as the loss does, too: ghost clipping makes reports small by factors of losses.
        apart: It is proved that layers have records in order, so that few will do to see how gradients grow.

    Raises:
        ValueError: There are some; the message names the layers.
    """
    if hasattr(network, "autograd_grad_sample_hooks"):
        return
    found: tuple[list[str], list[str]] = [], []
    for wanted in (
        (2, 3) if apart else (6, 5)
    ):  # of two numbers at least one is not by chance that of something else than records
        try:
            records, call = call_of(wanted)
            found = _doubtful_layers(network, call, records, axis, batch_first)
        except Exception:
            return
        if not any(found):
            return
    misplaced, bent = found
    if misplaced:
        raise ValueError(
            f"module shows records in another order than the batch's to {', '.join(misplaced)}, or scales one's gradient by "
            f"others', {REMEDY}"
        )
    if ghost and bent:
        raise ValueError(
            f"module changes gradients on their way to {', '.join(bent)} (by clamping or normalising them in a hook, say), so "
            "that they do not shrink with the factors that grad_sample_mode='ghost' clips by: use 'hooks', or take that out"
        )


def _doubtful_layers(network: nn.Module, call: Call, records: int, axis: int, batch_first: bool) -> tuple[list[str], list[str]]:
    """Returns layers where a record's gradient changes with others' losses, and those where it does not grow with its own."""
    order = torch.randperm(records, generator=torch.Generator().manual_seed(0))  # the loader's own may be sorted
    mixed_up = tree_map_only(
        torch.Tensor, lambda each: each.index_select(axis, order.to(each.device)) if has_records(each, records, axis) else each,
        call,
    )  # fmt: skip

    def rows(factors: torch.Tensor) -> dict[str, torch.Tensor]:
        return _rows_of_layers(network, mixed_up, factors, axis, batch_first)

    def differ(found: torch.Tensor, expected: torch.Tensor) -> bool:
        tolerance = 1e-3 * (expected.norm(dim=-1) + 1e-3 * expected.norm())
        return bool(((found - expected).norm(dim=-1) > tolerance).any())

    def layers(names: Iterable[str]) -> list[str]:
        places = dict.fromkeys(name.rpartition(".")[0] for name in names)
        return [f"{name or 'the module itself'} ({type(network.get_submodule(name)).__name__})" for name in places]

    ones = torch.ones(records)
    growth = 2.0 ** torch.linspace(0, 20, records).round()  # multiplying by powers of two rounds nothing
    plain, grown = rows(ones), rows(growth)
    bent = [name for name in plain.keys() & grown.keys() if differ(grown[name] / growth.to(plain[name])[:, None], plain[name])]
    misplaced: dict[str, None] = {}
    for place in range(records) if bent else ():
        others = rows(torch.where(torch.arange(records) == place, ones, 4 * ones))
        misplaced.update(dict.fromkeys(name for name in bent if differ(others[name][place], plain[name][place])))
    return layers(misplaced), layers(bent)


def _rows_of_layers(
    network: nn.Module, call: Call, factors: torch.Tensor, axis: int, batch_first: bool
) -> dict[str, torch.Tensor]:
    """By name of the parameter: what Opacus takes for gradients of records, where outputs are multiplied by theirs' factor."""
    enter_phase("whether layers see them in order")
    records = len(factors)
    parameters = [each for each in network.parameters() if each.requires_grad]
    with untouched(network), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks that fire for inputs without gradients, as they are to
        watched: Any = GradSampleModule(network, batch_first=batch_first, loss_reduction="sum", strict=False)
        told: dict[str, torch.Tensor] = {}
        names = {id(each): name for name, each in network.named_parameters()}

        def take(module: nn.Module, *_: Any) -> None:
            """Keeps few numbers of a layer's gradients as soon as they are there, lest the memory hold those of all layers."""
            for each in module.parameters(recurse=False):
                samples = vars(each).get("grad_sample")
                if isinstance(samples, torch.Tensor) and len(samples) == records:
                    few = _few_numbers(samples.detach().reshape(records, -1))
                    told[names[id(each)]] = few if names[id(each)] not in told else torch.full_like(few, torch.nan)
                    each.grad_sample = None  # type: ignore[attr-defined]

        # After Opacus's hooks, and on no other module: outputs that pass a hook may not be written to.
        handles = [each.register_full_backward_hook(take) for each in network.modules() if each._backward_hooks]
        try:
            seed_draws(0)
            outputs = [each for each in results(network(*call[0], **call[1])) if each.requires_grad]
            weights = torch.Generator().manual_seed(0)
            total = torch.zeros(())
            for each in outputs:
                if has_records(each, records, axis):
                    weighted = each * torch.randn(each.shape, generator=weights).to(each)
                    total = total.to(each) + (weighted.movedim(axis, -1) * factors.to(each)).sum()
            torch.autograd.grad(total, parameters, allow_unused=True)
            for module in network.modules():  # of those whose gradients came otherwise
                take(module)
            return {name: each for name, each in told.items() if bool(torch.isfinite(each).all())}
        finally:
            for handle in handles:
                handle.remove()
            watched.cleanup()


def _few_numbers(rows: torch.Tensor) -> torch.Tensor:
    """What tells records' gradients of a parameter apart: a random sum of their pieces, lest each look keep all of them."""
    weights = torch.randn(rows.shape[1] // _PIECE, generator=torch.Generator().manual_seed(0))
    if len(weights) < 2:
        return rows.clone()
    rows = rows.float() if rows.dtype in HALF else rows
    whole = len(weights) * _PIECE
    pieces = torch.stack([weights.to(rows) @ row[:whole].view(-1, _PIECE) for row in rows])  # one by one: no copy of all
    return torch.cat([pieces, rows[:, whole:]], dim=1)


def refuse_unsorted_packs(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuses, as a hook before a recurrent layer's forward pass, packed sequences that are sorted within the network.

    Raises:
        ValueError: Some are.
    """
    if layer.training and any(isinstance(each, PackedSequence) and each.sorted_indices is not None for each in inputs):
        raise ValueError(
            f"pack_padded_sequence(enforce_sorted=False) shows records in another order than the batch's to a "
            f"{type(layer).__name__}, {REMEDY} (by length, the longest first; then pack with enforce_sorted=True)"
        )


def watch_packs(network: nn.Module) -> None:
    """Has Opacus's recurrent layers refuse sequences that are sorted within the network; once is enough."""
    for layer in network.modules():
        if isinstance(layer, DPRNNBase) and refuse_unsorted_packs not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(refuse_unsorted_packs)
