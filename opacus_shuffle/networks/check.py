"""May a network train? Whether its per-sample gradients are what clipping takes them for: one of each record, of it alone.

Opacus takes the i-th row of every layer's batch for record i, and clips what it finds there
together. So a few records run through Opacus's own hooks, then again with all of them but one
changed and their part of the loss reweighted. Three things must hold:

1. Every trained layer has as many rows as there are records, at two numbers of records that no
   other axis of the run has. A layer that sees ``[time, batch, ...]`` has a row for each time step,
   and each of these would be clipped by itself; where a batch is as large as a sequence is long,
   nothing else shows that.
2. Records that were not changed have the same outputs and the same per-sample gradients. This fails
   where a network takes a mean over the batch, sorts or flips rows for one layer and puts them back
   behind it, scales gradients in a hook by the largest, or returns a loss of the batch that is no
   sum over records.
3. For ghost clipping, which makes gradients small by factors of losses: the rows add up to the
   batch's gradient, and grow with their record's loss. Opacus computes norms where a layer is
   called; ``F.linear(x, self.embedding.weight)`` calls none, so that this part of the gradient is
   in the sum, but not in the norm.

What a look at few records cannot tell is in docs/pitfalls.rst.

>>> class Centred(nn.Linear):
...     def forward(self, x):
...         return super().forward(x - x.mean(0))
>>> print(per_sample_check(nn.Sequential(nn.Tanh(), Centred(3, 2)), lambda n: ((torch.randn(n, 3),), {})).problem)
module mixes records in 1 (Centred): one record's output changes when another record does, ...
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.networks.rollback import random_states_kept, rolled_back
from opacus_shuffle.networks.running import has_records, results, seed_draws
from opacus_shuffle.networks.sample_input import Call

FEWEST = 6
"""Records in the look that counts rows; the one that compares records has fewer, as it is repeated."""
TRIES = 4
"""Numbers of records that are tried from there on; some may be sizes of another axis, or not be taken by the network."""

SORT_BEFORE = (
    "so that what is clipped as one record is of several; sort and pick records in the loader's "
    "collate_fn, and let every "
    "layer see all of them, in their order"
)
"""The remedy where layers see records in another order."""

_SHOWN = 4
"""Layers that a message names."""
_PIECE = 4096
"""How many numbers of each record's gradient are kept of a wide layer, or fewer than twice as many."""
_HALF = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class NetworkCheck:
    """What looking at a network's per-sample gradients has shown.

    Attributes:
        seen: Whether it ran on several records. If not, nothing is known of it.
        problem: Why no network like this may be clipped: the module, what was seen, the remedy.
            Empty if it may.
        failure: What the network raised, if it was not seen for that.
        changed: The parameters, buffers and attributes that a run leaves changed:
            :mod:`~opacus_shuffle.networks.batch_state` tells whether records act on later batches
            by these.
        call: The arguments that it ran on.
        records: How many records there were.
    """

    seen: bool
    problem: str = ""
    failure: Exception | None = None
    changed: Sequence[str] = ()
    call: Call = ((), {})
    records: int = 0


@dataclasses.dataclass(frozen=True)
class _Look:
    """What one run of a network shows, by name of the parameter where it is of parameters.

    Attributes:
        outputs: Those with a row for each record, records first.
        has_rows: Whether gradients come from outputs with a row for each record.
        has_others: Whether gradients come from other outputs, losses say.
        wrong_counts: How many rows a parameter's gradient has, if not as many as there are records.
        rows: A few numbers of each record's gradient.
        whole: The same few numbers of the batch's gradient.
        sizes: Of the axes of everything that modules get and give.
        changed: What the run leaves changed in the network.
    """

    outputs: list[torch.Tensor]
    has_rows: bool
    has_others: bool
    wrong_counts: dict[str, int]
    rows: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]
    sizes: set[int]
    changed: list[str]


def per_sample_check(
    network: nn.Module,
    call_of: Callable[[int], Call],
    *,
    axis: int = 0,
    ghost: bool = False,
    expanded: bool = False,
    more: Sequence[int] = (),
    trained: Collection[str] | None = None,
) -> NetworkCheck:
    """Tells whether every record's gradient is its own, and whether Opacus finds it where it looks for it.

    The network runs once on six records, and three times on fewer, with the same random numbers
    each time.

    Args:
        network: As it trains; left without a trace.
        call_of: The arguments for so many records, which should be the same few again.
        axis: Where tensors have their records: 0, or 1 where layers see ``[time, batch, ...]``.
        ghost: Ask for the third condition, too.
        expanded: Ask whether PyTorch's expanded weights, ``grad_sample_mode="ew"``, find the same
            rows as Opacus's hooks: where a parameter is used in a function, they take the rows of
            what that function gets.
        more: Numbers of records to try besides, should the network take only some.
        trained: Names of the parameters that are clipped; all others may have any rows. By default
            all that need gradients.
    """
    taken = {
        size for tensor in (*network.parameters(), *network.buffers()) for size in tensor.shape
    }
    names = {
        id(parameter): name
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and (trained is None or name in trained)
    }
    failure: Exception | None = None
    looks: dict[int, tuple[Call, _Look]] = {}
    seen: set[str] = set()
    for records in itertools.chain(_unusual_sizes(taken), more):
        if len(looks) > 1 and (records not in more or seen.issuperset(names.values())):
            continue
        try:
            call = call_of(records)
            look = _look(network, names, call, axis, torch.ones(records))
        except Exception as error:
            failure = error
            continue
        if look.wrong_counts:
            return NetworkCheck(
                seen=True, problem=_wrong_counts(network, look.wrong_counts, records, axis)
            )
        seen |= look.rows.keys()
        # A number that another axis has as well does not tell whose rows are counted.
        taken |= look.sizes - {records}
        looks = {size: earlier for size, earlier in looks.items() if size not in taken}
        looks[records] = call, look
    seen_by_hooks = bool(looks)
    try:
        if not looks:  # Opacus's hooks fail in some networks; outputs can be compared without them
            names, call = {}, call_of(FEWEST)
            looks[FEWEST] = call, _look(network, names, call, axis, torch.ones(FEWEST))
        records = min(looks)
        call, look = looks[records]
        problem = _dependence(network, names, call, look, records, axis, ghost=ghost)
    except Exception as error:
        return NetworkCheck(seen=False, failure=failure or error)
    if ghost and not problem:
        problem = _unseen_gradients(look)
    if expanded and seen_by_hooks and not problem:
        problem = _expanded_weights(network, names, call, look, records, axis)
    return NetworkCheck(seen_by_hooks, problem, failure, look.changed, call, records)


def check_criterion(
    criterion: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> bool:
    """Refuses a criterion by which one record's loss depends on other records.

    Args:
        criterion: Gives one loss per record.
        args: What it is computed of.
        keywords: Likewise.

    Returns:
        Whether there were two records or more to look at.

    Raises:
        ValueError: It does.
    """
    call: Call = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, keywords))
    records = next(
        (len(leaf) for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()),
        0,
    )
    if records < 2:
        return False

    def losses(call: Call) -> torch.Tensor:
        seed_draws(0)
        found = criterion(*call[0], **call[1])
        return found.detach() if has_records(found, records, 0) else torch.zeros(records)

    with random_states_kept():
        before = losses(call)
        for keep in _kept_one_by_one(records):
            for change in _CHANGES:
                try:
                    after = losses(_with_others(call, keep, 0, change))
                except Exception:
                    continue  # labels beyond those that there are, say
                if not _same(before[keep], after[keep]):
                    raise ValueError(
                        "criterion mixes records: one record's loss changes when another record "
                        "does, so that factors per "
                        "record clip nobody's gradient; compute each record's loss from its own "
                        "output and target alone"
                    )
                break
    return True


def _unusual_sizes(taken: Collection[int]) -> Iterator[int]:
    """Yields numbers of records that are no size of the network: one of six or more, a smaller one, and some more.

    Args:
        taken: Sizes, to which more may come meanwhile.
    """
    larger = (size for size in itertools.count(FEWEST) if size not in taken)
    yield next(larger)
    yield from (size for size in range(3, FEWEST) if size not in taken)
    yield from itertools.islice(larger, TRIES)


def _look(
    network: nn.Module,
    names: Mapping[int, str],
    call: Call,
    axis: int,
    factors: torch.Tensor,
    *,
    rows_alone: bool = False,
) -> _Look:
    """Runs a network under Opacus's hooks, with the rows of its outputs multiplied by their records' factors.

    Args:
        network: It runs, and is left as it was.
        names: Of the parameters to look at, by their identity; if there are none, at outputs alone,
            without hooks.
        call: On these arguments.
        axis: Where tensors have their records.
        factors: One for each record.
        rows_alone: Leave out of the loss what has no row for each record.

    Raises:
        Exception: What the network raises; a ValueError if no argument has an axis of records.
    """
    records = len(factors)
    given = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    if not any(has_records(leaf, records, axis) for leaf in given):
        raise ValueError("no argument has an axis of records")
    # The loss is of all parameters, trained or not, or hooks on the way do not run.
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    wrong_counts: dict[str, int] = {}
    rows: dict[str, torch.Tensor] = {}
    sizes = {size for leaf in given for size in leaf.shape}

    def take(module: nn.Module, *_: Any) -> None:
        """Keeps few numbers of a layer's gradients as soon as they are there, lest the memory hold those of all layers."""
        for parameter in module.parameters(recurse=False):
            samples = vars(parameter).get("grad_sample")
            if isinstance(samples, torch.Tensor) and id(parameter) in names:
                name = names[id(parameter)]
                parameter.grad_sample = None  # type: ignore[attr-defined]
                if len(samples) != records:
                    wrong_counts[name] = len(samples)
                    continue
                rows[name] = rows.get(name, 0) + _numbers_by_record(module, samples)

    def note(_: nn.Module, inputs: Any, output: Any) -> None:
        sizes.update(
            size
            for leaf in tree_leaves((inputs, output))
            if isinstance(leaf, torch.Tensor)
            for size in leaf.shape
        )

    with rolled_back(network) as changed, torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of hooks that fire for inputs without gradients, as they are to
        if names:
            GradSampleModule(network, batch_first=axis == 0, loss_reduction="sum", strict=False)
        for module in network.modules():
            module.register_forward_hook(note)
            if (
                module._backward_hooks
            ):  # Opacus's; outputs that pass a hook may not be written to, so there are no others
                module.register_full_backward_hook(take)
        seed_draws(0)
        outputs = [
            _records_moved(output, records, axis)
            for output in results(network(*call[0], **call[1]))
        ]
        rowed = [output for output in outputs if has_records(output, records, axis)]
        others = [
            output
            for output in outputs
            if output.requires_grad and not has_records(output, records, axis)
        ]
        total = _loss([*rowed, *([] if rows_alone else others)], factors, axis)
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        for module in network.modules():  # of those whose gradients came otherwise
            take(module)
        shown = [output.detach().movedim(axis, 0).clone() for output in rowed]
    whole = {
        names[id(parameter)]: _few_numbers(gradient.detach().reshape(1, -1))
        for parameter, gradient in zip(parameters, gradients, strict=True)
        if id(parameter) in names and gradient is not None and gradient.layout == torch.strided
    }
    has_rows = any(output.requires_grad for output in rowed)
    by_hooks = {
        f"{place}.activations".lstrip(".")
        for place, module in network.named_modules()
        if module._parameters
    }
    changed = [name for name in changed if name not in {*by_hooks, "autograd_grad_sample_hooks"}]
    return _Look(shown, has_rows, bool(others), wrong_counts, rows, whole, sizes, changed)


def _records_moved(output: torch.Tensor, records: int, axis: int) -> torch.Tensor:
    """Moves the records of an output to their axis, where another one alone has so many entries: ``[time, batch, ...]``."""
    places = [place for place, size in enumerate(output.shape) if size == records]
    return output if len(places) != 1 or axis >= output.dim() else output.movedim(places[0], axis)


def _loss(outputs: Iterable[torch.Tensor], factors: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns a random sum of outputs, in which each record's rows are multiplied by its factor."""
    weights = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            weighted = output * torch.randn(output.shape, generator=weights).to(output)
            if has_records(output, len(factors), axis):
                weighted = weighted.movedim(axis, -1) * factors.to(output)
            total = total.to(weighted) + weighted.sum()
    return total


def _expanded_weights(
    network: nn.Module, names: Mapping[int, str], call: Call, look: _Look, records: int, axis: int
) -> str:
    """Returns which rows of PyTorch's expanded weights are not those of Opacus's hooks, an empty text if all are."""
    rows: dict[str, torch.Tensor] = {}
    with rolled_back(network), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expanded = GradSampleModuleExpandedWeights(
                network, batch_first=axis == 0, loss_reduction="sum"
            )
            seed_draws(0)
            outputs = [
                _records_moved(output, records, axis)
                for output in results(expanded(*call[0], **call[1]))
            ]
            rowed = [output for output in outputs if has_records(output, records, axis)]
            _loss(rowed or outputs, torch.ones(records), axis).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            return f"module cannot be trained with grad_sample_mode='ew' ({error}): use 'hooks'"
        for module in network.modules():
            for parameter in module.parameters(recurse=False):
                samples = vars(parameter).pop("grad_sample", None)
                parameter.grad = None
                if samples is None or id(parameter) not in names:
                    continue
                name = names[id(parameter)]
                if len(samples) != records:
                    return _wrong_counts(network, {name: len(samples)}, records, axis)
                rows[name] = _numbers_by_record(module, samples)
    differing = _differing(
        look, dataclasses.replace(look, rows=rows), torch.ones(records, dtype=torch.bool), 1.0
    )
    if not differing:
        return ""
    return (
        f"module uses parameters of {_layers(network, differing)} in a function that sees other "
        "rows than the batch's, "
        "which grad_sample_mode='ew' clips as if they were records: use 'hooks', or let it see "
        "[batch, ...]"
    )


def _numbers_by_record(module: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    """Returns a few numbers of each record's gradient of one of a module's parameters."""
    if isinstance(padding := getattr(module, "padding_idx", None), int):
        samples[:, padding] = 0  # where PyTorch has no gradient
    return _few_numbers(samples.detach().reshape(len(samples), -1))


def _few_numbers(rows: torch.Tensor) -> torch.Tensor:
    """What tells records' gradients of a parameter apart: a random sum of their pieces, lest each look keep all of them."""
    weights = torch.randn(rows.shape[1] // _PIECE, generator=torch.Generator().manual_seed(0))
    if len(weights) < 2:
        return rows.clone()
    rows = rows.float() if rows.dtype in _HALF else rows
    whole = len(weights) * _PIECE
    pieces = torch.stack(
        [weights.to(rows) @ row[:whole].view(-1, _PIECE) for row in rows]
    )  # one by one: no copy of all
    return torch.cat([pieces, rows[:, whole:]], dim=1)


def _kept_one_by_one(records: int) -> list[torch.Tensor]:
    """Returns masks of two records, each of which is kept while all others change: neither the first nor the last."""
    return [torch.arange(records) == place for place in ((1, 2) if records > 2 else range(records))]


def _rescaled(value: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns the next record's values, scaled and shifted, one less for integers, negated for yes and no."""
    value = value.roll(-1, axis)
    if value.dtype == torch.bool:
        return ~value
    return (
        _other_numbers(value, axis)
        if _is_number(value)
        else torch.where(value > 0, value - 1, value)
    )


def _next(value: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns the next record's values."""
    return value.roll(-1, axis)


def _other_numbers(value: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns other numbers in the same order of size, and what counts or chooses, such as lengths, as it is.

    Numbers of either sign change theirs: a network may choose by it.
    """
    if not _is_number(value):
        return value
    signed = value.is_floating_point() and bool((value < 0).any())
    return (-1.5 if signed else 1.5) * value + 0.25


def _other_labels(value: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns other numbers, and other labels but those that may say what a loss counts: below two, or below zero."""
    if _is_number(value) or not value.numel() or int(value.max()) < 2:
        return _other_numbers(value, axis)
    return torch.where(value > 0, value - 1, value)


def _is_number(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


_CHANGES = (_rescaled, _next, _other_numbers)
"""What becomes of other records' values; the first is used that the network takes (a probability is not above one, say)."""
_CHANGES_IN_A_LOSS = (_other_labels, _other_numbers)
"""The same where a loss of the batch is returned, which is divided by what is counted in it."""


def _with_others(
    call: Call, keep: torch.Tensor, axis: int, change: Callable[..., torch.Tensor]
) -> Call:
    """Returns arguments in which all records but those kept are others."""

    def replaced(value: torch.Tensor) -> torch.Tensor:
        if not has_records(value, len(keep), axis):
            return value
        kept_rows = keep.to(value.device).view(-1, *[1] * (value.dim() - axis - 1))
        return torch.where(kept_rows, value, change(value, axis))

    return tree_map_only(torch.Tensor, replaced, call)  # type: ignore[no-any-return]


def _dependence(
    network: nn.Module,
    names: Mapping[int, str],
    call: Call,
    look: _Look,
    records: int,
    axis: int,
    *,
    ghost: bool,
) -> str:
    """Returns how one record's outputs or gradients depend on other records, an empty text if they do not.

    Raises:
        Exception: What the network raises on all other records.
    """
    if look.has_rows and look.has_others:
        look = _look(network, names, call, axis, torch.ones(records), rows_alone=True)
    growth = 2.0 if ghost and look.has_rows else 1.0  # multiplying by powers of two rounds nothing

    def look_again(keep: torch.Tensor, factor: float) -> tuple[Call, _Look]:
        factors = torch.where(keep, factor, 8.0)
        for change in _CHANGES if look.has_rows else _CHANGES_IN_A_LOSS:
            other = _with_others(call, keep, axis, change)
            try:
                return other, _look(network, names, other, axis, factors, rows_alone=look.has_rows)
            except Exception as error:
                failure = error
        raise failure

    for keep in _kept_one_by_one(records):
        other, found = look_again(keep, growth)
        if not all_same(
            [rows[keep] for rows in look.outputs], [rows[keep] for rows in found.outputs]
        ):
            return (
                f"module mixes records in {_mixing_place(network, call, other, keep, axis)}: one "
                "record's output changes when "
                "another record does, so that clipping bounds nobody's influence; compute what it "
                "takes from the batch (a "
                "mean, a norm, a rank) within each record, as nn.LayerNorm and nn.GroupNorm do"
            )
        differing = _differing(look, found, keep, growth)
        if differing and not look.has_rows:
            return (
                "module returns a loss of the batch that is not a sum or mean of one number per "
                "record: what one record's "
                "gradient is depends on the others, so that clipping bounds nobody's influence; "
                "return one loss per record, or "
                "their sum or mean, and let every layer see [batch, ...]"
                + (
                    " (or, where arguments are [time, batch, ...], pass batch_first=False)"
                    if axis == 0
                    else ""
                )
            )
        if differing and growth != 1 and not _differing(look, look_again(keep, 1.0)[1], keep, 1.0):
            return (
                f"module changes gradients on their way to {_layers(network, differing)} (by "
                "clamping or normalising them in a "
                "hook, say), so that they do not shrink with the factors that "
                "grad_sample_mode='ghost' clips by: use 'hooks', "
                "or take that out"
            )
        if differing:
            return (
                "module shows records in another order than the batch's to "
                f"{_layers(network, differing)}, or scales one's "
                f"gradient by others', {SORT_BEFORE}; a mean or norm of the batch may be taken of "
                "each record alone, as "
                "nn.LayerNorm and nn.GroupNorm do"
            )
    return ""


def _differing(look: _Look, found: _Look, keep: torch.Tensor, growth: float) -> list[str]:
    """Returns the names of parameters whose gradients of the kept records are not what they were, times their growth."""
    largest = max(
        (float(rows.nan_to_num(0.0, 0.0, 0.0).norm()) for rows in look.rows.values()), default=0.0
    )
    names = []
    for name in look.rows.keys() & found.rows.keys():
        before, after = look.rows[name][keep], found.rows[name][keep] / growth
        finite = (torch.isfinite(before) & torch.isfinite(after)).all(dim=-1)
        close = 1e-2 if before.dtype in _HALF else 1e-5
        # In one layer all may be rounding: what is left of gradients that cancel.
        tolerance = close * (before.norm(dim=-1) + after.norm(dim=-1)) + 0.1 * close * largest
        if bool(((before - after).norm(dim=-1) > tolerance)[finite].any()):
            names.append(name)
    return names


def all_same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Returns whether two lists of tensors differ by no more than rounding."""
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if (equal := torch.equal(one, other)) or not one.is_floating_point():
        return equal
    finite = one[torch.isfinite(one)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(
        one, other, rtol=0.0, atol=(1e-2 if one.dtype in _HALF else 1e-5) * scale, equal_nan=True
    )


def _mixing_place(
    network: nn.Module, call: Call, other: Call, keep: torch.Tensor, axis: int
) -> str:
    """Returns the name of the first module that finishes with another output for the same record: the innermost."""
    names = {module: name for name, module in network.named_modules()}
    seen: list[list[tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]]] = []

    def kept(value: Any) -> list[torch.Tensor]:
        tensors = [tensor for tensor in results(value) if has_records(tensor, len(keep), axis)]
        return [tensor.detach().movedim(axis, 0)[keep].clone() for tensor in tensors]

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        seen[-1].append((module, kept(inputs), kept(output)))

    for arguments in (call, other):
        seen.append([])
        with rolled_back(network), torch.no_grad():
            for module in names:
                module.register_forward_hook(note)
            seed_draws(0)
            network(*arguments[0], **arguments[1])
    for (module, inputs, outputs), (_, other_inputs, other_outputs) in zip(*seen, strict=False):
        if not all_same(outputs, other_outputs):
            # Where its inputs differ already, a function between the modules mixes them: of the
            # module around.
            place = (
                names[module]
                if all_same(inputs, other_inputs)
                else names[module].rpartition(".")[0]
            )
            return _called(network, place)
    return _called(network, "")


def _wrong_counts(network: nn.Module, counts: Mapping[str, int], records: int, axis: int) -> str:
    """Returns which layers have another number of rows than there are records, and what to do."""
    owners = {name: network.get_submodule(name.rpartition(".")[0]) for name in counts}
    single = [
        name
        for name, count in counts.items()
        if count == 1 and isinstance(owners[name], nn.Embedding)
    ]
    if positions := [name.rpartition(".")[0] for name in single]:
        return (
            "module has embeddings that see a batch of one whatever the batch is, "
            f"{', '.join(positions)}, so Opacus cannot "
            "record their per-sample gradients; call opacus_shuffle.prepare_model(model) first, "
            "pass position ids of shape "
            "[batch, length], or freeze them"
        )
    seen = " or ".join(map(str, sorted(set(counts.values()))))
    return (
        f"module shows {seen} row{'s' if seen != '1' else ''} for {records} records to "
        f"{_layers(network, counts)}: each row "
        "would be clipped as a record, and one record may lie in several, or several in one; have "
        "these layers see "
        f"{'[time, batch, ...]' if axis else '[batch, ...]'} (by batch_first=True where a layer "
        "has it, or by transposing "
        "inside of the layer), let no layer turn one record into several, write no number of "
        "records into the network, or "
        "freeze them"
    )


def _unseen_gradients(look: _Look) -> str:
    """Returns which parameters have gradients that arise, in part, outside of the layer that owns them."""
    pairs = {
        name: (
            whole.float(),
            look.rows[name].float().sum(0, keepdim=True)
            if name in look.rows
            else torch.zeros_like(whole),
        )
        for name, whole in look.whole.items()
    }
    scale = sum(float(whole.norm()) for whole, _ in pairs.values())
    unseen = [
        name
        for name, (whole, seen) in pairs.items()
        if float((whole - seen).norm())
        > max(1e-2 * float(whole.norm() + seen.norm()), 1e-5 * scale)
    ]
    if not unseen:
        return ""
    return (
        f"module uses {', '.join(unseen)} beside the layer that it belongs to (or under "
        "torch.utils.checkpoint), where "
        "grad_sample_mode='ghost' does not see its gradient and would not clip it; call the layer, "
        "use "
        "grad_sample_mode='hooks', or freeze it"
    )


def _layers(network: nn.Module, names: Iterable[str]) -> str:
    """Returns the layers that own some parameters, in the network's order."""
    owners = {name.rpartition(".")[0] for name in names}
    named = [_called(network, name) for name, _ in network.named_modules() if name in owners]
    return ", ".join(named[:_SHOWN]) + (
        f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    )


def _called(network: nn.Module, name: str) -> str:
    return f"{name or 'the module itself'} ({type(network.get_submodule(name)).__name__})"
