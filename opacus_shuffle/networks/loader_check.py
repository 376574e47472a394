"""Checks a loader's ``collate_fn``, a network's use of padding, and a criterion.

If a ``collate_fn`` pads to the longest record, this record determines the padding of all others. A
network that reads padding, as a mean over time does, then mixes records before they are clipped.

>>> class Mean(nn.Module):
...     def forward(self, x):
...         return x.mean(1)
>>> records = [torch.randn(length, 2) for length in (4, 6, 5, 4)]
>>> pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
>>> check_padding(Mean(), DataLoader(records, collate_fn=pad))
Traceback (most recent call last):
    ...
ValueError: module reads the padding of data_loader's collate_fn: ...
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader

from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.networks.check import SEED
from opacus_shuffle.networks.running import random_states_kept, results, seed_draws
from opacus_shuffle.networks.sample_input import (
    TARGET,
    Call,
    first_records,
    from_batch,
    has_records,
    roll_records,
    run_quietly,
    sizes_along,
    tensors_of,
    with_others,
)
from opacus_shuffle.networks.training_check import MOST_RECORDS


def check_padding(network: nn.Module, data_loader: DataLoader) -> None:
    """Refuses networks whose outputs for a record depend on the padding by other records.

    The sequences of some records are cut to half the length of the shortest one, and collated.
    Then the longest record is collated in full with the others. The order of records may change.

    Args:
        network: It is not changed.
        data_loader: Nothing is checked if its ``collate_fn`` or the network does not take these
            records, or if the ``collate_fn`` draws random numbers.

    Raises:
        ValueError: The outputs of other records differ.
    """
    flat, run = list[Any](), partial(_outputs, network, data_loader)
    with contextlib.suppress(Exception):  # as of a data set that can only be iterated over
        records = first_records(data_loader, MOST_RECORDS, list)
        flat = [
            tree_flatten(
                record,  # a list of numbers or words in it is one sequence
                lambda v: (
                    isinstance(v, list) and isinstance(next(iter(v), None), int | float | str)
                ),
            )
            for record in records
        ]
    # Tokens, their mask and their labels have equal lengths in each record, so that axes with the
    # same lengths in all records are cut together.
    leaves = [*map(list, zip(*(leaf for leaf, _ in flat), strict=False))]
    columns = [[*zip(*map(_sizes, leaf), strict=False)] for leaf in leaves]
    for lengths in {axis for column in columns for axis in column if min(axis) > 1}:
        end = min(lengths) // 2
        cuts = [
            tuple(slice(end if axis == lengths else None) for axis in column) for column in columns
        ]
        short = [
            tree_unflatten([_cut(v, cut) for v, cut in zip(leaf, cuts, strict=True)], form)
            for leaf, form in flat
        ]
        longest = lengths.index(max(lengths))
        long = [records[longest], *short[:longest], *short[longest + 1 :]]
        # The entries of a tuple may include a mask or lengths, which are optional in forward.
        found = [_reads_padding(partial(run, more=more), short, long) for more in range(3)]
        if any(found) and False not in found:
            break
    else:
        return
    raise ValueError(
        "module reads the padding of data_loader's collate_fn: one longer record in a batch "
        "changes the network's outputs for the others, so that clipping does not bound a record's "
        "influence; mask the padding (an attention mask, pack_padded_sequence, a mean over each "
        "record's own length), or pad all records to one constant length in collate_fn"
    )


def check_collate(data_loader: DataLoader) -> None:
    """Refuses a ``collate_fn`` that mixes records, as mixup or a mean over the batch does.

    Two lists of records that differ in the last one alone are collated with the same draws. This
    record is a copy of an earlier one in both lists, because padding would differ otherwise.

    Args:
        data_loader: Nothing is checked if its ``collate_fn`` draws numbers that no seed repeats.

    Raises:
        ValueError: Rows of other records differ.
    """
    mixed = False
    with contextlib.suppress(Exception):  # as of a data set that can only be iterated over
        records = first_records(data_loader, MOST_RECORDS, list)
        count = len(records) + 1

        def rows(last: int, seed: int) -> list[torch.Tensor]:
            seed_draws(seed)
            batch = data_loader.collate_fn([*records, records[last]])
            shown = [t for t in tensors_of(batch) if count in t.shape]
            return [t.movedim(t.shape.index(count), 0) for t in shown]

        with random_states_kept():
            mixed = any(
                any(_missing(*pair) > 1 for pair in zip(before, rows(1, seed), strict=True))
                for seed in range(3)  # one permutation of records may move none
                for before, again in [(rows(0, seed), rows(0, seed))]
                if not any(map(_missing, before, again))
            )
    if mixed:
        raise ValueError(
            "data_loader's collate_fn mixes records: another record's content changes when one "
            "record does, so that clipping does not bound a record's influence; leave mixup and "
            "statistics of the batch out of collate_fn, and normalize each record by its own or by "
            "public statistics"
        )


def _sizes(value: Any) -> tuple[int, ...]:
    """Returns the sizes of a tensor's or an array's axes, or the length of another sequence."""
    length = [len(value)] if hasattr(value, "__len__") and not hasattr(value, "shape") else ()
    return tuple(getattr(value, "shape", length))


def _cut(value: Any, cut: tuple[slice, ...]) -> Any:
    """Returns a sequence up to a length, if any of its axes has one."""
    if not any(axis.stop for axis in cut):
        return value
    return value[cut] if hasattr(value, "shape") else value[cut[0]]


def _reads_padding(run: Callable[..., Any], short: Any, long: Any) -> bool | None:
    """Returns whether outputs differ with a longer record in the batch; None if unknown."""
    with contextlib.suppress(Exception):  # a training loop may compute other arguments
        after, before, again = run(long, 0), run(short, 0), run(short, 1)
        if not any(map(_differ, before, again)):
            return any(map(_differ, before, after))
    return None


def _outputs(
    network: nn.Module, data_loader: DataLoader, records: Any, seed: int, more: int
) -> Any:
    """Returns the output tensors of a network for collated records, records first.

    Args:
        network: The network.
        data_loader: Its ``collate_fn`` is used.
        records: Records of the data set.
        seed: The seed of random draws.
        more: How many optional entries of a tuple are passed; never the last one, the targets.
    """
    with random_states_kept():
        seed_draws(seed)
        batch = data_loader.collate_fn(records)
        args, named = from_batch(network, batch)
        if args and isinstance(batch, tuple | list):
            args = (*args, *batch[len(args) : -1][:more])
        given = results(run_quietly(network, args, named))
    return [t.movedim(t.shape.index(len(records)), 0) for t in given if len(records) in t.shape]


def _differ(short: torch.Tensor, long: torch.Tensor) -> bool:
    """Whether the second tensor lacks more than one row of the first, up to rounding.

    One row is that of the record in full length. If the second tensor is larger on another axis,
    padding may be at its end or at its beginning.
    """
    sizes = [*map(min, short.shape, long.shape)]

    first, last = [slice(size) for size in sizes], [slice(-size, None) for size in sizes]
    return min(_missing(short[tuple(end)], long[tuple(end)]) for end in (first, last)) > 1


def _missing(ones: torch.Tensor, others: torch.Tensor) -> int:
    """Returns how many rows of the first tensor the second one lacks, up to rounding."""
    share = _share(ones)
    ones, others = (t.reshape(len(t), -1).double().nan_to_num() for t in (ones, others))
    scale = ones.norm(dim=1)[:, None] + others.norm(dim=1)
    # Not by products of matrices, which would round away small differences.
    distances = torch.cdist(ones, others, compute_mode="donot_use_mm_for_euclid_dist")
    return int((~(distances <= share * scale).any(1)).sum())


def _share(tensor: torch.Tensor) -> float:
    """Returns the share of its norm by which rounding may change a tensor."""
    return 1e-2 if tensor.dtype.itemsize < 4 else 1e-5


def check_criterion_on(
    criterion: Callable[..., Any], network: nn.Module, data_loader: DataLoader
) -> None:
    """Refuses a criterion that mixes records, tested on a loader's first records.

    Args:
        criterion: It is called on the network's outputs (``logits`` of a model of ``transformers``)
            and the targets.
        network: It is not changed.
        data_loader: Tuples have targets after the network's arguments. Mappings have them under
            names with ``label``, or under names that the network does not take.

    Raises:
        ValueError: The criterion mixes records.

    Warns:
        PrivacyAssumptionWarning: The criterion does not take these outputs and targets.
    """
    try:
        batch = first_records(data_loader, MOST_RECORDS)
        args, named = from_batch(network, batch)
        outputs = run_quietly(network, args, named)
        outputs = tree_map_only(
            torch.Tensor,
            lambda t: t.detach().requires_grad_(t.is_floating_point()),
            getattr(outputs, "logits", outputs),
        )
        first = next(tensor for tensor in tensors_of(outputs) if tensor.dim())
        entries = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
        used = range(len(args)) if isinstance(entries.get(0), torch.Tensor) else [0, *named]
        targets = [v for name, v in entries.items() if name not in used or "label" in str(name)]
        targets = tree_map_only(torch.Tensor, lambda target: target.to(first.device), targets)
        criterion(outputs, *targets).sum()
        if len(first) != min(MOST_RECORDS, len(data_loader.dataset)):  # type: ignore[arg-type]
            raise TypeError("the network's first axis is not that of records")
    except Exception as error:
        warnings.warn(
            f"criterion was not checked, as criterion(outputs, targets) raised {error!r} on the "
            "module's outputs for data_loader's first records; no ε holds unless its loss is a sum "
            "or mean of one number per record: pass criterion=lambda outputs, targets: ... with "
            "the computation of your loop",
            PrivacyAssumptionWarning,
            stacklevel=2,
        )
        return
    check_criterion(criterion, (outputs, *targets), {})


def check_criterion(
    criterion: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> bool:
    """Refuses a criterion by which one record's loss depends on other records.

    Args:
        criterion: Gives one loss per record, or a loss of the batch.
        args: Its arguments, records on the first axis. Those that require gradients are outputs.
        keywords: Likewise.

    Returns:
        Whether there were at least two records to check.

    Raises:
        ValueError: One record's loss, or its gradient, depends on other records.
    """
    call: Call = tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), (args, keywords)
    )
    records = next(iter(sizes_along(call, 0)), 0)

    def kept(call: Call) -> list[torch.Tensor]:
        seed_draws(SEED)
        losses = criterion(*call[0], **call[1])
        outputs = [tensor for tensor in tensors_of(call) if tensor.requires_grad]
        rows = [losses, *torch.autograd.grad(losses.sum(), outputs, materialize_grads=True)]
        if losses.dim() and not has_records(losses, records, 0):
            return []  # records are on another axis
        return [row[TARGET].detach() for row in rows if has_records(row, records, 0)]

    if records <= TARGET:
        return False
    with random_states_kept(), torch.enable_grad():
        for shift in range(min(records, MOST_RECORDS)):  # two records may have the same label
            turn = partial(roll_records, shift=shift, records=records)
            first: Call = tree_map_only(torch.Tensor, turn, call)
            pairs = zip(kept(first), with_others(kept, first, records, 0), strict=True)
            if any((a - b).norm() > _share(a) * (a.norm() + b.norm()) for a, b in pairs):
                raise ValueError(
                    "criterion mixes records: one record's loss, or its gradient, changes when "
                    "another record does, so that clipping does not bound a record's influence; "
                    "compute each record's loss from its own output and target, without a divisor "
                    "that depends on the batch's labels: use reduction='none' and .mean(), or "
                    "opacus_shuffle.token_loss for tokens"
                )
    return True
