"""Refuses networks whose per-sample gradients are not what clipping takes them for: one row for each record, of it alone.

Opacus takes the i-th row of every layer's batch for record i, and clips what it finds there together. Three things must hold:

1. Every trained layer has as many rows as there are records, at two numbers of records that no other axis of the run has.
   A layer that sees ``[time, batch, ...]`` has a row for each time step, and each of these is clipped by itself; where a batch
   is as large as a sequence is long, nothing else shows that.
2. Row i grows with the loss of record i, and with no other record's. Where a network sorts, flips or picks rows for one layer
   and puts them back behind it, one record's gradients lie in several rows, each of which may have the whole norm. Where a
   network returns a loss of the batch, row i stays when other records change: then the loss is a sum over records.
3. For ghost clipping, the rows add up to the batch's gradient. Opacus computes norms where a layer is called;
   ``F.linear(x, self.embedding.weight)`` calls none, so that this part of the gradient is in the sum, but not in the norm.

>>> class TimeFirst(nn.Sequential):
...     def forward(self, x):
...         return super().forward(x.transpose(0, 1)).sum(0)
>>> check_per_sample_gradients(TimeFirst(nn.Linear(3, 2)), lambda n: (n, ((torch.randn(n, 4, 3),), {})))
Traceback (most recent call last):
    ...
ValueError: module shows 4 rows for 6 records to 0 (Linear): ...
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import GradSampleModule
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.engine.clipping import HALF
from opacus_shuffle.engine.mixed_records import (
    UnprobedError,
    has_records,
    hooks_aside,
    repeated,
    rescaled,
    untouched,
    with_others,
)
from opacus_shuffle.networks.running import results, seed_draws
from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.network import tensors_in

REMEDY = (
    "so that what is clipped as one record is of several; sort and pick records in the loader's collate_fn, and let every "
    "layer see all of them, in their order"
)

FEWEST = 6
"""Records in the smaller of two looks: few cost little, and of fewer a layer may get all by chance where it picks some."""
TRIES = 6
"""Numbers of records that are tried, of which some may be those of another axis or not be taken by the network."""

SHOWN = 4
"""Layers that a message names."""

_PIECE = 4096
"""How many numbers of each record's gradient are kept of a wide layer, or fewer than twice as many."""


def check_per_sample_gradients(
    network: nn.Module,
    call_of: Callable[[int], tuple[int, Call]],
    *,
    axis: int = 0,
    batch_first: bool = True,
    ghost: bool = False,
    apart: bool = False,
    more: Sequence[int] = (),
    trained: Collection[str] | None = None,
) -> None:
    """Refuses a network whose layers have other rows than one for each record, of it alone.

    Args:
        network: As it trains; left without a trace.
        call_of: The arguments for so many records, which should be the same few again, and how many they are.
        axis: Where tensors have their records.
        batch_first: As of Opacus.
        ghost: Refuse gradients that do not grow as the loss does, too: ghost clipping makes reports small by factors of losses.
        apart: It is proved that layers have records in order, so that two or three of them will do.
        more: Numbers of records to try besides, should the network take only some.
        trained: Names of the parameters that are clipped; all others may have any rows. By default all that need gradients.

    Raises:
        ValueError: It has others; the message names the layers.
        UnprobedError: It cannot be told: the network did not run, or its arguments have no axis of records.
    """
    samplers = [GradSampleModule.GRAD_SAMPLERS.get(type(each), GradSampleModule) for each in network.modules()]
    apart = apart and all(each.__module__.startswith("opacus.") for each in samplers)
    taken = {size for each in (*network.parameters(), *network.buffers()) for size in each.shape}
    names = {
        id(each): name
        for name, each in network.named_parameters()
        if each.requires_grad and (trained is None or name in trained)
    }
    failure: Exception | None = None
    looks: dict[int, tuple[Call, _Rows]] = {}
    seen: set[str] = set()
    look = functools.partial(_rows_of_layers, network, names, axis, batch_first)
    unusual = itertools.islice((each for each in itertools.count(2 if apart else FEWEST) if each not in taken), TRIES)
    for wanted in itertools.chain(unusual, more):
        if len(looks) > 1 and (wanted not in more or seen.issuperset(names.values())):
            continue
        try:
            records, call = call_of(wanted)
            call = _mixed_up(call, records, axis)
            rows = look(call, torch.ones(records))
        except Exception as error:
            failure = error
            continue
        _check_counts(network, rows.counts, records, axis)
        seen |= rows.counts.keys()
        # A number that another axis has as well does not tell whose rows are counted.
        taken |= rows.sizes - {records}
        looks = {size: each for size, each in looks.items() if size not in taken}
        looks[records] = call, rows
    if not looks:
        raise UnprobedError from failure
    records, (call, rows) = next(iter(looks.items()))
    if not any(rows.outputs):
        _check_total(lambda call: look(call, torch.ones(records)), rows, call, records, axis)
    elif ghost or not apart:
        plain = rows if all(rows.outputs) else look(call, torch.ones(records), rows_alone=True)
        _check_growth(network, lambda factors: look(call, factors, rows_alone=True), plain, records, ghost=ghost)
    if ghost:
        _check_sums(rows)


class _Rows(NamedTuple):
    """What Opacus takes for gradients of records, by name of the parameter.

    Attributes:
        counts: How many rows there are.
        few: A few numbers of each row, where there are as many as records.
        whole: The same few numbers of the batch's gradient.
        sizes: Of the axes of everything that modules get and give.
        outputs: Whether each output has a row for each record.
    """

    counts: dict[str, int]
    few: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]
    sizes: set[int]
    outputs: list[bool]


def _rows_of_layers(
    network: nn.Module,
    names: Mapping[int, str],
    axis: int,
    batch_first: bool,
    call: Call,
    factors: torch.Tensor,
    *,
    rows_alone: bool = False,
) -> _Rows:
    """Runs a network under Opacus's hooks, with the rows of its outputs multiplied by their records' factors.

    Args:
        network: It runs, and is left as it was.
        names: Of the parameters to look at, by their identity.
        axis: Where tensors have their records.
        batch_first: As of Opacus.
        call: On these arguments.
        factors: One for each record.
        rows_alone: Leave out of the loss what has no row for each record.
    """
    enter_phase("whether layers see them in order")
    records = len(factors)
    if not any(has_records(leaf, records, axis) or _is_packed(leaf, records) for leaf in leaves(call)):
        raise UnprobedError
    parameters = [each for each in network.parameters() if each.requires_grad]  # of all, or hooks on the way do not run
    counts: dict[str, int] = {}
    few: dict[str, torch.Tensor] = {}
    sizes = {size for leaf in tensors_in(tree_leaves(call)) for size in leaf.shape}

    def take(module: nn.Module, *_: Any) -> None:
        """Keeps few numbers of a layer's gradients as soon as they are there, lest the memory hold those of all layers."""
        for each in module.parameters(recurse=False):
            samples = vars(each).get("grad_sample")
            if isinstance(samples, torch.Tensor) and id(each) in names:
                name = names[id(each)]
                if isinstance(padding := getattr(module, "padding_idx", None), int):
                    samples[:, padding] = 0  # where PyTorch has no gradient
                part = _few_numbers(samples.detach().flatten(1) if samples.dim() > 1 else samples.detach()[:, None])
                few[name] = part if name not in counts else torch.full_like(part, torch.nan)
                counts[name] = len(samples)
                each.grad_sample = None  # type: ignore[attr-defined]

    def note(_: nn.Module, inputs: Any, output: Any) -> None:
        sizes.update(size for each in (*tensors_in(inputs), *results(output)) for size in each.shape)

    with untouched(network), hooks_aside(network), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks that fire for inputs without gradients, as they are to
        watched: Any = GradSampleModule(network, batch_first=batch_first, loss_reduction="sum", strict=False)
        # After Opacus's hooks, and on no other module: outputs that pass a hook may not be written to.
        handles = [each.register_full_backward_hook(take) for each in network.modules() if each._backward_hooks]
        handles += [each.register_forward_hook(note) for each in network.modules()]
        try:
            seed_draws(0)
            outputs = [each for each in results(network(*call[0], **call[1])) if each.requires_grad]
            with_rows = [has_records(each, records, axis) for each in outputs]
            weights = torch.Generator().manual_seed(0)
            total = torch.zeros(())
            for each, has_rows in zip(outputs, with_rows, strict=True):
                weighted = each * torch.randn(each.shape, generator=weights).to(each)
                if has_rows:
                    weighted = weighted.movedim(axis, -1) * factors.to(each)
                if has_rows or not rows_alone:
                    total = total.to(each) + weighted.sum()
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
            for module in network.modules():  # of those whose gradients came otherwise
                take(module)
        finally:
            for handle in handles:
                handle.remove()
            watched.cleanup()
    whole = {
        names[id(each)]: _few_numbers(gradient.detach().reshape(1, -1))
        for each, gradient in zip(parameters, gradients, strict=True)
        if id(each) in names and gradient is not None and gradient.layout == torch.strided
    }
    return _Rows(counts, few, whole, sizes, with_rows)


def _mixed_up(call: Call, records: int, axis: int) -> Call:
    """Returns the records in an order of no meaning: the loader's own may be sorted."""
    order = torch.randperm(records, generator=torch.Generator().manual_seed(0))
    return tree_map_only(  # type: ignore[no-any-return]
        torch.Tensor,
        lambda each: each.index_select(axis, order.to(each.device)) if has_records(each, records, axis) else each,
        call,
        is_leaf=_is_packed,
    )


def leaves(call: Any) -> list[Any]:
    """Returns what arguments consist of, where a packed sequence is one thing: its rows are of several records each."""
    return tree_leaves(call, is_leaf=_is_packed)


def _is_packed(value: Any, records: int | None = None) -> bool:
    return isinstance(value, PackedSequence) and records in (None, int(value.batch_sizes[0]))


def _few_numbers(rows: torch.Tensor) -> torch.Tensor:
    """What tells records' gradients of a parameter apart: a random sum of their pieces, lest each look keep all of them."""
    weights = torch.randn(rows.shape[1] // _PIECE, generator=torch.Generator().manual_seed(0))
    if len(weights) < 2:
        return rows.clone()
    rows = rows.float() if rows.dtype in HALF else rows
    whole = len(weights) * _PIECE
    pieces = torch.stack([weights.to(rows) @ row[:whole].view(-1, _PIECE) for row in rows])  # one by one: no copy of all
    return torch.cat([pieces, rows[:, whole:]], dim=1)


def _check_counts(network: nn.Module, counts: Mapping[str, int], records: int, axis: int) -> None:
    """Refuses layers with another number of rows than there are records.

    Raises:
        ValueError: There are some.
    """
    rows = {name: count for name, count in counts.items() if count != records}
    if not rows:
        return
    seen = " or ".join(map(str, sorted(set(rows.values()))))
    positions = any(count == 1 for count in rows.values())
    raise ValueError(
        f"module shows {seen} row{'s' if seen != '1' else ''} for {records} records to {_layers(network, rows)}: each row "
        "would be clipped as a record, and one record may lie in several, or several in one; have these layers see "
        f"{'[time, batch, ...]' if axis else '[batch, ...]'} (by batch_first=True where a layer has it, or by transposing "
        "inside of the layer), let no layer turn one record into several, write no number of records into the network, or "
        "freeze them"
        + ("; where it is an embedding of positions, call opacus_shuffle.prepare_model(module) first" if positions else "")
    )


def _check_growth(
    network: nn.Module,
    look: Callable[[torch.Tensor], _Rows],
    rows: _Rows,
    records: int,
    *,
    ghost: bool,
) -> None:
    """Refuses layers where a record's gradient changes with others' losses, or does not grow with its own.

    Args:
        network: Names its layers.
        look: Gives gradients where outputs are multiplied by factors.
        rows: Gradients where they are not.
        records: How many there are.
        ghost: Whether gradients that do not grow are refused: they do not shrink either.

    Raises:
        ValueError: There are some.
    """

    def few(rows: _Rows) -> dict[str, torch.Tensor]:
        return {name: each for name, each in rows.few.items() if bool(torch.isfinite(each).all())}

    def differ(found: torch.Tensor, expected: torch.Tensor) -> bool:
        tolerance = 1e-3 * (expected.norm(dim=-1) + 1e-3 * expected.norm())
        return bool(((found - expected).norm(dim=-1) > tolerance).any())

    ones = torch.ones(records)
    growth = 2.0 ** torch.linspace(0, 20, records).round()  # multiplying by powers of two rounds nothing
    plain, grown = few(rows), few(look(growth))
    bent = [name for name in plain.keys() & grown.keys() if differ(grown[name] / growth.to(plain[name])[:, None], plain[name])]
    misplaced: dict[str, None] = {}
    for place in range(records) if bent else ():
        others = look(torch.where(torch.arange(records) == place, ones, 4 * ones)).few
        misplaced.update(dict.fromkeys(name for name in bent if differ(others[name][place], plain[name][place])))
    if misplaced:
        raise ValueError(
            f"module shows records in another order than the batch's to {_layers(network, misplaced)}, or scales one's "
            f"gradient by others', {REMEDY}"
        )
    if ghost and bent:
        raise ValueError(
            f"module changes gradients on their way to {_layers(network, bent)} (by clamping or normalising them in a hook, "
            "say), so that they do not shrink with the factors that grad_sample_mode='ghost' clips by: use 'hooks', or take "
            "that out"
        )


def _check_total(look: Callable[[Call], _Rows], rows: _Rows, call: Call, records: int, axis: int) -> None:
    """Refuses a loss of the batch in which one record's gradient depends on other records.

    Masks and labels below two stay, and integers below zero, which often say what is not to be counted.

    Raises:
        ValueError: It does.
    """

    def change(value: torch.Tensor, axis: int, kept: int) -> torch.Tensor:
        counts = not value.is_floating_point() and not value.is_complex()
        return value if counts and (not value.numel() or int(value.max()) < 2) else rescaled(value, axis, kept)

    try:
        other = look(with_others(call, records, axis, 0, change)).few
    except Exception:  # what the network does not take, a probability above one, say
        other = look(with_others(call, records, axis, 0, repeated)).few
    pairs = [(rows.few[name][0], other[name][0]) for name in rows.few.keys() & other.keys()]
    pairs = [(one, two) for one, two in pairs if bool(torch.isfinite(one).all() & torch.isfinite(two).all())]
    largest = max((float(each.abs().max()) for pair in pairs for each in pair if each.numel()), default=0.0)
    close = (1e-2 if any(one.dtype in HALF for one, _ in pairs) else 1e-5) * largest  # of one layer it may be rounding alone
    if any(bool(((one - two).abs() > close).any()) for one, two in pairs):
        raise ValueError(
            "module returns a loss of the batch that is not a sum or mean of one number per record: what one record's gradient "
            "is depends on the others, so that clipping bounds nobody's influence; return one loss per record, or their sum or "
            "mean, and let every layer see [batch, ...]"
        )


def _check_sums(rows: _Rows) -> None:
    """Refuses parameters whose gradients arise, in part, outside of the layer that owns them.

    Raises:
        ValueError: There are some.
    """
    pairs = {
        name: (whole.float(), rows.few[name].float().sum(0, keepdim=True) if name in rows.few else torch.zeros_like(whole))
        for name, whole in rows.whole.items()
    }
    scale = sum(float(whole.norm()) for whole, _ in pairs.values())
    unseen = [
        name
        for name, (whole, seen) in pairs.items()
        if float((whole - seen).norm()) > max(1e-2 * float(whole.norm() + seen.norm()), 1e-5 * scale)
    ]
    if unseen:
        raise ValueError(
            f"module uses {', '.join(unseen)} beside the layer that it belongs to (or under torch.utils.checkpoint), where "
            "grad_sample_mode='ghost' does not see its gradient and would not clip it; call the layer, use "
            "grad_sample_mode='hooks', or freeze it"
        )


def _layers(network: nn.Module, names: Iterable[str]) -> str:
    places = {name.rpartition(".")[0] for name in names}
    named = [
        f"{name or 'the module itself'} ({type(each).__name__})" for name, each in network.named_modules() if name in places
    ]
    return ", ".join(named[:SHOWN]) + (f" and {len(named) - SHOWN} more" if len(named) > SHOWN else "")
