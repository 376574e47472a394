"""Checks a loader's ``collate_fn``, a network's use of padding, and a criterion.

Each check compares a record among others with the same record among copies of itself, as
:mod:`~opacus_shuffle.networks.check` does for networks. If a ``collate_fn`` pads to the longest
record, this record determines the padding of all others. A network that reads padding, as a mean
over time does, then mixes records before they are clipped.

>>> class Mean(nn.Module):
...     def forward(self, x):
...         return x.mean(1)
>>> records = [torch.randn(length, 2) for length in (4, 6, 5, 4)]
>>> pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
>>> check_loader(Mean(), DataLoader(records, collate_fn=pad))
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

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.networks.check import SEED, differ
from opacus_shuffle.networks.running import random_states_kept, results, seed_draws
from opacus_shuffle.networks.sample_input import (
    Call,
    copies_of,
    first_records,
    from_batch,
    has_records,
    run_quietly,
    sizes_along,
    tensors_of,
)

_LOADED = 32
"""The number of records that are read from a loader."""
_COMPARED = 6
"""The number of records that are collated, or whose losses are compared."""


def check_loader(network: nn.Module, data_loader: DataLoader) -> None:
    """Refuses a ``collate_fn`` that mixes records, and a network that reads its padding.

    The shortest of some records is collated with others, the longest one among them, and with
    copies of itself. The order of records may change.

    Args:
        network: It is not changed.
        data_loader: Nothing is checked if its ``collate_fn`` or the network does not accept these
            records, or if the ``collate_fn`` draws random numbers that no seed repeats.

    Raises:
        ValueError: The shortest record's rows differ.
    """
    records = list[Any]()
    with contextlib.suppress(Exception):  # as of a data set that can only be iterated over
        records = sorted(first_records(data_loader, _LOADED, list), key=_size)
    if len(records) < 2:
        return
    *others, longest = records[: _COMPARED - 1] + records[-1:]
    copies = [others[0]] * len(others)

    # The longest record stays, because draws depend on the shape of padded tensors. One permutation
    # of records may move none.
    mixed = [
        _rows_are_found(
            lambda records: tensors_of(data_loader.collate_fn(records)),
            [*others, longest],
            [*copies, longest],
            seeds=(seed, seed),
        )
        for seed in range(3)
    ]
    if False in mixed:
        raise ValueError(
            "data_loader's collate_fn mixes records: another record's content changes when one "
            "record does, so that clipping does not bound a record's influence; leave mixup and "
            "statistics of the batch out of collate_fn, and normalize each record by its own or by "
            "public statistics"
        )
    if _size(longest) == _size(others[0]):
        return
    # The entries of a tuple may include a mask or lengths, which are optional in forward.
    masked = [
        _rows_are_found(
            partial(_outputs, network, data_loader, optional),
            [*others, longest],
            [*copies, others[0]],
            seeds=(0, 1),
        )
        for optional in range(3)
    ]
    if False in masked and True not in masked:
        raise ValueError(
            "module reads the padding of data_loader's collate_fn: one longer record in a batch "
            "changes the network's outputs for the others, so that clipping does not bound a "
            "record's influence; mask the padding (an attention mask, pack_padded_sequence, a mean "
            "over each record's own length), or pad all records to one constant length in "
            "collate_fn"
        )


def _size(record: Any) -> int:
    """Returns the number of bytes of a record, which is larger for longer sequences."""
    arrays = [leaf if hasattr(leaf, "nbytes") else np.asarray(leaf) for leaf in tree_leaves(record)]
    return sum(array.nbytes for array in arrays)


def _outputs(
    network: nn.Module, data_loader: DataLoader, optional: int, records: Any
) -> list[torch.Tensor]:
    """Returns the output tensors of a network for collated records.

    Args:
        network: The network.
        data_loader: Its ``collate_fn`` is used.
        optional: How many optional entries of a tuple are passed; never the last one, the targets.
        records: Records of the data set.
    """
    batch = data_loader.collate_fn(records)
    args, named = from_batch(network, batch)
    if args and isinstance(batch, tuple | list):
        args = (*args, *batch[len(args) : -1][:optional])
    return results(run_quietly(network, args, named))


def _rows_are_found(
    run: Callable[[list[Any]], list[torch.Tensor]],
    records: list[Any],
    copies: list[Any],
    *,
    seeds: tuple[int, int],
) -> bool | None:
    """Returns whether a record's rows are the same among copies of it; None if unknown.

    Args:
        run: Returns tensors for records.
        records: The record, and others.
        copies: Copies of the record, and possibly the last one of the others.
        seeds: The seed of these runs, and one with which a run must have the same results.
    """

    def rows(records: list[Any], seed: int) -> list[torch.Tensor]:
        with random_states_kept():
            seed_draws(seed)
            tensors, count = run(records), len(records)
        return [t.movedim(t.shape.index(count), 0) for t in tensors if count in t.shape]

    shared = 1 + (records[-1] is copies[-1])
    with contextlib.suppress(Exception):  # a training loop may compute other arguments
        before, again, after = (
            rows(records, seeds[0]),
            rows(records, seeds[1]),
            rows(copies, seeds[0]),
        )
        if all(_found(*pair) == len(records) for pair in zip(before, again, strict=True)):
            return all(_found(*pair) >= shared for pair in zip(before, after, strict=True))
    return None


def _found(ones: torch.Tensor, others: torch.Tensor) -> int:
    """Returns how many rows of the first tensor are also in the second one, up to rounding.

    If one of the tensors is larger on another axis, it may have padding at its end or at its
    beginning.
    """
    sizes = [*map(min, ones.shape, others.shape)]
    first, last = [slice(size) for size in sizes], [slice(-size, None) for size in sizes]
    return max(
        sum(not all(differ(row, other) for other in others[tuple(end)]) for row in ones[tuple(end)])
        for end in (first, last)
    )


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
        batch = first_records(data_loader, _LOADED)
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
        if len(first) != min(_LOADED, len(data_loader.dataset)):  # type: ignore[arg-type]
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
    records = next(iter(sizes_along((args, keywords), 0)), 0)

    def rows(call: Call) -> list[torch.Tensor]:
        args, keywords = tree_map_only(
            torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), call
        )
        seed_draws(SEED)
        losses = criterion(*args, **keywords)
        outputs = [tensor for tensor in tensors_of((args, keywords)) if tensor.requires_grad]
        gradients = torch.autograd.grad(losses.sum(), outputs, materialize_grads=True)
        if losses.dim() and not has_records(losses, records, 0):
            return []  # records are on another axis
        return [row.detach() for row in (losses, *gradients) if has_records(row, records, 0)]

    if records < 2:
        return False
    with random_states_kept(), torch.enable_grad():
        before = rows((args, keywords))
        for record in range(min(records, _COMPARED)):
            after = rows(copies_of((args, keywords), record, records))
            if any(differ(a[record], b[record]) for a, b in zip(before, after, strict=True)):
                raise ValueError(
                    "criterion mixes records: one record's loss, or its gradient, changes when "
                    "another record does, so that clipping does not bound a record's influence; "
                    "compute each record's loss from its own output and target, without a divisor "
                    "that depends on the batch's labels: use reduction='none' and .mean(), or "
                    "opacus_shuffle.token_loss for tokens"
                )
    return True
