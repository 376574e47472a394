"""Refuses networks whose records depend on each other: clipping each record's gradient then bounds nobody's influence.

``x - x.mean(0)`` and batch statistics of one's own making look like any layer. So a few records are run through the network,
then one of them with the others changed, or made the same: neither its output nor its gradient may change. The network is run
as it trains, with the same random numbers each time, and left without a trace: random states, buffers, attributes and gradients
stay as they were. The losses of ghost clipping are looked at in the same way, when the first of them are computed. A network
of which :mod:`~opacus_shuffle.engine.records_apart` proves that it keeps records apart is spared these passes.

Where the loader's first records do not run through the network, the first batch that trains it is looked at in their place.
A network is trained unseen where that batch cannot be cut into records either (packed sequences, graphs), with a warning, or
where no output has a row per record; then :mod:`~opacus_shuffle.engine.per_sample_check` looks at its loss.

>>> class Centred(nn.Linear):
...     def forward(self, x):
...         return super().forward(x - x.mean(0))
>>> refuse_mixed_records(nn.Sequential(nn.Tanh(), Centred(3, 2)), lambda n: (n, ((torch.randn(n, 3),), {})))
Traceback (most recent call last):
    ...
ValueError: module mixes records in 1 (Centred): ...
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.networks.rollback import rolled_back
from opacus_shuffle.networks.running import results, seed_draws
from opacus_shuffle.networks.sample_input import Call

Gradients = list[torch.Tensor]


class UnprobedError(Exception):
    """Raised where nothing can be said: the network did not run, or no output has a row per record."""


def refuse_mixed_records(
    network: nn.Module, call_of: Callable[[int], tuple[int, Call]], *, axis: int = 0, more: Sequence[int] = ()
) -> None:
    """Refuses a network that mixes records.

    Args:
        network: As it trains.
        call_of: The arguments for so many records, or as many as there are, and how many they are.
        axis: Where tensors have their records.
        more: Numbers of records to try besides, should it take only some: records in groups of seven, say.

    Raises:
        ValueError: It does; the message names the innermost module that does it.
        UnprobedError: It cannot be told.
    """
    places: list[str] = []
    failure: Exception | None = None
    # Four rows may be none of records (the states of four layers): what is true of another number as well is no chance.
    for wanted in (4, 5, 6, *more):
        try:
            records, call = call_of(wanted)
            found = _mixing_place(network, call, records, axis)
        except Exception as error:
            failure = error
            continue
        if found is None:
            return
        places.append(found)
        if len(places) > 1:
            break
    if not places:
        raise UnprobedError from failure
    raise ValueError(
        f"module mixes records in {places[-1]}: one record's output or gradient changes when another record does, so that "
        "clipping bounds nobody's influence; compute what it takes from the batch (a mean, a norm, a rank) within each record, "
        "as nn.LayerNorm and nn.GroupNorm do"
    )


def refuse_mixed_losses(criterion: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Refuses a criterion that mixes records.

    Args:
        criterion: Gives one loss per record.
        args: What it is computed of.
        keywords: Likewise.

    Returns:
        Whether there were two records or more to look at.

    Raises:
        ValueError: It does.
    """
    call = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, keywords))
    sizes = [len(leaf) for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not sizes or sizes[0] < 2:
        return False
    try:
        refuse_mixed_records(_Losses(criterion), lambda records: (records, first_rows(call, records, sizes[0], 0)))
    except UnprobedError:
        pass
    except ValueError as error:
        raise ValueError(
            "criterion mixes records: one record's loss changes when another record does, so that factors per record clip "
            "nobody's gradient; compute each record's loss from its own output and target alone"
        ) from error
    return True


class _Losses(nn.Module):
    """A criterion as a network: it is called on the same arguments."""

    def __init__(self, criterion: Callable[..., Any]) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.criterion(*args, **keywords)


def first_rows(call: Call, records: int, whole: int, axis: int) -> Call:
    """Returns the arguments for so many records, beginning anew where there are too few."""
    rows = torch.arange(records) % whole

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.index_select(axis, rows.to(leaf.device)) if has_records(leaf, whole, axis) else leaf

    return tree_map_only(torch.Tensor, cut, call)  # type: ignore[no-any-return]


def _mixing_place(network: nn.Module, call: Call, records: int, axis: int) -> str | None:
    """Returns the name of the innermost module that mixes records, None if none does."""
    if records < 2 or not any(has_records(leaf, records, axis) for leaf in tree_leaves(call)):
        raise UnprobedError
    for kept in sorted({0, 1, records - 1}):
        rows, gradients = _rows(network, call, records, axis, kept)
        if not rows:
            raise UnprobedError
        for change in (rescaled, repeated):
            changed = with_others(call, records, axis, kept, change)
            try:
                other_rows, other_gradients = _rows(network, changed, records, axis, kept)
            except Exception:
                if change is rescaled:  # what the network may not take, a probability above one, say
                    continue
                raise
            if not all_same(rows, other_rows):
                return _first_difference(network, call, changed, records, axis, kept)
            # A changed record may overflow, and zero times infinity is not zero.
            finite = all(torch.isfinite(each).all() for each in other_gradients)
            if finite and not _same_gradients(gradients, other_gradients):
                return f"its gradients, {_called(network, '')}"
            del other_rows, other_gradients  # as large as the network, each
        del rows, gradients
    return None


def has_records(value: Any, records: int, axis: int) -> bool:
    """Returns whether a value is a tensor with ``records`` rows along an axis."""
    return isinstance(value, torch.Tensor) and value.dim() > axis and value.shape[axis] == records


def with_others(call: Call, records: int, axis: int, kept: int, change: Callable[..., torch.Tensor]) -> Call:
    """Returns the arguments with all records but one changed, to values that the network should take as well."""

    def changed(value: torch.Tensor) -> torch.Tensor:
        if not has_records(value, records, axis):
            return value
        other = change(value, axis, kept).clone()
        other.select(axis, kept).copy_(value.select(axis, kept))
        return other

    return tree_map_only(torch.Tensor, changed, call)  # type: ignore[no-any-return]


def rescaled(value: torch.Tensor, axis: int, kept: int) -> torch.Tensor:
    """Returns other values in the same order of size: scaled and shifted, one less for integers, negated for yes and no."""
    if value.dtype == torch.bool:
        return ~value
    if value.is_floating_point() or value.is_complex():
        return 1.5 * value + 0.25
    return torch.where(value > 0, value - 1, value)


def repeated(value: torch.Tensor, axis: int, kept: int) -> torch.Tensor:
    """Returns copies of a single other record for all records, which changes the order among values."""
    return value.select(axis, 0 if kept else -1).unsqueeze(axis).expand_as(value)


def _extreme(factor: float, *, signed: bool) -> Callable[..., torch.Tensor]:
    """Returns a change to values by which what is asked of records (is any above zero?) gets another answer."""

    def extreme(value: torch.Tensor, axis: int, kept: int) -> torch.Tensor:
        if value.is_floating_point() or value.is_complex():
            return factor * (value if signed else value.abs())
        return torch.full_like(value, value.max().item() if factor > 0 else 0)  # no index beyond those that there are

    return extreme


EXTREMES = (
    *(_extreme(each, signed=False) for each in (0.0, math.nan)),
    *(_extreme(each, signed=signed) for each in (1e3, -1e3) for signed in (False, True)),
)
"""Changes to zeros, to what is large, of one sign or of either, and to no numbers; of integers, to zeros or all the largest."""


def changed(call: Call, change: Callable[..., torch.Tensor], kept: int, records: int, axis: int) -> Call:
    """Returns other records than those of a call."""

    def other(value: torch.Tensor) -> torch.Tensor:
        return change(value, axis, kept).clone() if has_records(value, records, axis) else value

    return tree_map_only(torch.Tensor, other, call)  # type: ignore[no-any-return]


def _rows(network: nn.Module, call: Call, records: int, axis: int, kept: int) -> tuple[list[torch.Tensor], Gradients]:
    """Returns one record's outputs, and the gradients of a random combination of them."""
    enter_phase("whether they mix")

    def rows(outputs: Any) -> list[torch.Tensor]:
        return [each.select(axis, kept) for each in results(outputs) if has_records(each, records, axis)]

    with untouched(network):
        return pass_both_ways(network, call, rows, seed=kept)


def pass_both_ways(
    network: nn.Module, call: Call, told: Callable[[Any], list[torch.Tensor]], *, seed: int
) -> tuple[list[torch.Tensor], Gradients]:
    """Runs a network forwards and backwards, and leaves what it changes.

    Args:
        network: It runs.
        call: On these arguments.
        told: What is looked at of its outputs.
        seed: Of what it draws: a mixture may be drawn at random, and leave some records where they are.

    Returns:
        What is looked at, and the gradients of a random combination of it; none where gradients cannot be had.
    """
    parameters = [each for each in network.parameters() if each.requires_grad]
    watched = hasattr(network, "autograd_grad_sample_hooks")  # Opacus's hooks look at passes with gradients alone
    with torch.set_grad_enabled(not watched):
        seed_draws(seed)
        found = told(network(*call[0], **call[1]))
        weights = torch.Generator().manual_seed(0)
        total = sum((each * torch.randn(each.shape, generator=weights).to(each)).sum() for each in found if each.requires_grad)
        gradients: Gradients = []
        if isinstance(total, torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                computed = torch.autograd.grad(total, parameters, allow_unused=True)
                gradients = [each.detach() for each in computed if each is not None and each.layout == torch.strided]
    return [each.detach() for each in found], gradients


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors differ by no more than rounding."""
    if one.shape != other.shape:
        return False
    if (equal := torch.equal(one, other)) or not one.is_floating_point():
        return equal
    close = 1e-2 if one.dtype in (torch.float16, torch.bfloat16) else 1e-5
    finite = one[torch.isfinite(one)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=close * scale, equal_nan=True)


def all_same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Returns whether two lists of tensors differ by no more than rounding."""
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same_gradients(ones: Gradients, others: Gradients) -> bool:
    """Returns whether gradients differ by no more than a thousandth of their norm, or by rounding."""
    if len(ones) != len(others) or not ones:
        return len(ones) == len(others)
    # One after another: all of them in one vector would be the largest part of the memory that attaching takes.
    size, difference = 0.0, 0.0
    for one, other in zip(ones, others, strict=True):
        size += float(one.float().norm()) ** 2
        difference += float((one.float() - other.float()).norm()) ** 2
    return difference <= 1e-6 * size or not math.isfinite(size)


def _first_difference(network: nn.Module, call: Call, changed: Call, records: int, axis: int, kept: int) -> str:
    """Returns the name of the first module that finishes with another output for the same record."""

    def rows(value: Any) -> list[torch.Tensor]:
        return [leaf.select(axis, kept).detach() for leaf in results(value) if has_records(leaf, records, axis)]

    seen: list[list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]] = []
    names = {module: name for name, module in network.named_modules()}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        seen[-1].append((names[module], rows(inputs), rows(output)))

    handles = [module.register_forward_hook(note) for module in names]
    try:
        for each in (call, changed):
            seen.append([])
            with untouched(network), torch.no_grad():
                seed_draws(kept)
                network(*each[0], **each[1])
    finally:
        for handle in handles:
            handle.remove()
    for (name, inputs, outputs), (_, other_inputs, other_outputs) in zip(*seen, strict=False):
        if not all_same(outputs, other_outputs):
            inside = all_same(inputs, other_inputs)
            return _called(network, name if inside else name.rpartition(".")[0])
    return _called(network, "")


def _called(network: nn.Module, name: str) -> str:
    return f"{name or 'the module itself'} ({type(network.get_submodule(name)).__name__})"


@contextlib.contextmanager
def untouched(network: nn.Module) -> Iterator[None]:
    """A block after which random states, parameters, buffers and attributes are what they were before."""
    held = [(module, dict(vars(module))) for module in network.modules()]
    try:
        with rolled_back(network):
            yield
    finally:
        for module, before in held:
            now = vars(module)
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)


@contextlib.contextmanager
def hooks_aside(network: nn.Module) -> Iterator[None]:
    """A block in which a network has no hooks of Opacus's, which come back with all that they had noted."""
    handles = list(vars(network).get("autograd_grad_sample_hooks", ()))
    tables = [table for each in handles if (table := each.hooks_dict_ref()) is not None]
    owners = [vars(each) for each in (*network.parameters(), *network.modules())]
    before = [(table, dict(table)) for table in (*tables, *owners)]
    try:
        vars(network).pop("autograd_grad_sample_hooks", None)
        for handle in handles:
            handle.remove()
        yield
    finally:
        for table, held in before:
            table.clear()
            table.update(held)
