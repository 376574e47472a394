"""Arguments on which a module is run: a sample input, a loader's first records, or a guess."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from opacus_shuffle.networks.running import (
    random_states_kept,
    rolled_back,
    without_graph,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a module, by position and by keyword."""

IGNORED = -100
"""The label of tokens that a loss ignores."""


def normalise(sample_input: Any, name: str = "sample_input") -> Call:
    """Returns a tensor, a tuple or list, or a mapping of keywords as arguments of a call."""
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), {}
    if isinstance(sample_input, tuple | list) and sample_input:
        return tuple(sample_input), {}
    named = isinstance(sample_input, Mapping) and all(isinstance(key, str) for key in sample_input)
    if named and sample_input:
        return (), dict(sample_input)
    raise ValueError(
        f"{name} must be a tensor, a non-empty tuple or list of positional arguments, or a "
        f"non-empty mapping from names to keyword arguments, got {type(sample_input).__name__}"
    )


def call_of(module: nn.Module, sample_input: Any) -> Call:
    """Returns a sample input as arguments of a call; a guess if it is None."""
    return guess(module) if sample_input is None else normalise(sample_input)


def guess(module: nn.Module) -> Call:
    """Guesses an argument of two records from the module's first layer; always the same one.

    Raises:
        ValueError: The first layer with parameters, in the order of registration, is no linear,
            recurrent or embedding layer and no convolution.
    """
    layers = (layer for layer in module.modules() if not any(layer.children()))
    first: Any = next((layer for layer in layers if any(True for _ in layer.parameters())), None)
    draws = torch.Generator().manual_seed(0)
    if isinstance(first, nn.Embedding):
        tokens = torch.randint(1, first.num_embeddings, (2, 8), generator=draws, device="cpu")
        # All tokens except the one for padding: indices wrap around after the last token.
        padding = -1 if first.padding_idx is None else first.padding_idx
        return _on_device_of(module, (((tokens + padding) % first.num_embeddings,), {}))
    if isinstance(first, nn.Linear):
        shape = [2, first.in_features]
    elif isinstance(first, nn.RNNBase):
        shape = [2, 3, first.input_size]
    elif hasattr(first, "in_channels"):
        shape = [2, first.in_channels, *[32] * len(first.kernel_size)]
    else:
        raise ValueError(
            f"sample_input must be given: the first layer of {type(module).__name__} does "
            "not determine its shape; pass a tensor, a tuple of arguments or a mapping of keyword "
            "arguments"
        )
    numbers = torch.randn(shape, generator=draws, device="cpu").to(next(first.parameters()).dtype)
    return _on_device_of(module, ((numbers,), {}))


def from_batch(module: nn.Module, batch: Any) -> Call:
    """Returns the arguments of ``module.forward`` for one batch of a data loader.

    Args:
        module: The module. Its signature decides which entries are arguments.
        batch: A tensor is the only argument. A mapping gives the keyword arguments that ``forward``
            accepts. In a tuple or list ``(inputs..., targets)``, as many entries are inputs as
            ``forward`` requires, at least the first one. If the first entry is itself a mapping, or
            a tuple or list with tensors, it contains the arguments.

    Raises:
        ValueError: The arguments contain no tensor.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    names = [parameter.name for parameter in parameters]
    several = isinstance(batch, tuple | list)
    first = batch[0] if several and batch else batch
    call: Call = (), {}
    if isinstance(first, Mapping):
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        call = (), {name: value for name, value in first.items() if takes_any or name in names}
    elif not several:
        call = (batch,), {}
    # A list of strings (untokenised texts) is a tuple's entry, not a list of arguments.
    elif isinstance(first, tuple | list) and tensors_of(first):
        call = tuple(first), {}
    else:
        positional = [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        needed = max(1, sum(parameter.default is parameter.empty for parameter in positional))
        call = (tuple(batch[:needed]) if len(batch) >= needed else ()), {}
    if not tensors_of(call):
        entries = f" with {', '.join(map(str, first))}" if isinstance(first, Mapping) else ""
        raise ValueError(
            "data_loader must yield tensors, or mappings or tuples (inputs..., targets) with "
            f"tensors, for {type(module).__name__}.forward, which takes {', '.join(names)}, got a "
            f"{type(batch).__name__}{entries}; pass shuffle_weights=find_permutations(module, "
            "sample_input) with an input that module(...) accepts"
        )
    return _on_device_of(module, call)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in the containers that PyTorch supports."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def first_records(
    data_loader: DataLoader, count: int = 2, collate: Callable[[Any], Any] | None = None
) -> Any:
    """Returns the first records of a loader's data set as one batch.

    Nothing is drawn from its sampler or any random state.

    Args:
        data_loader: The loader of the data set.
        count: The number of records.
        collate: Makes a batch of the records; by default the loader's ``collate_fn``.

    Raises:
        ValueError: The data set is empty, or can only be iterated over.
    """
    dataset, collate = data_loader.dataset, collate or data_loader.collate_fn
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        raise ValueError(
            "data_loader.dataset must have a length, an index, and a record, got "
            f"{type(dataset).__name__}; pass shuffle_weights=find_permutations(module, "
            "sample_input) with an input that module(...) accepts"
        )
    # Worker processes have random states of their own. Here transforms use those of this process.
    with random_states_kept():
        if data_loader.batch_sampler is None:  # each entry of the data set is passed on alone
            return collate(dataset[0])
        return collate([dataset[index] for index in range(min(count, len(dataset)))])


def run_quietly(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a forward pass in evaluation mode without gradients, and restores the module."""
    with rolled_back(module):
        module.eval()
        return without_graph(lambda: module(*args, **kwargs))


def _on_device_of(module: nn.Module, call: Call) -> Call:
    """Returns the arguments with their tensors on the device of the module's first tensor."""
    first = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(first.device), call)


def sizes_along(value: Any, axis: int) -> list[int]:
    """Returns the sizes along an axis of the tensors in containers."""
    # A packed sequence has several records in one tensor, which cannot be split into records.
    leaves = tree_leaves(value, is_leaf=lambda part: isinstance(part, PackedSequence))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tensor.shape[axis] for tensor in tensors if tensor.dim() > axis]


def has_records(value: Any, records: int, axis: int) -> bool:
    """Returns whether a value is a tensor with ``records`` entries along an axis."""
    return isinstance(value, torch.Tensor) and value.dim() > axis and value.shape[axis] == records


def take_records(call: Call, whole: int, rows: Iterable[int], axis: int = 0) -> Call:
    """Returns a call with the given rows of its ``whole`` records; rows count modulo ``whole``."""
    indices = [row % whole for row in rows]

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if not has_records(tensor, whole, axis):
            return tensor
        return tensor.index_select(axis, torch.tensor(indices, device=tensor.device))

    return tree_map_only(torch.Tensor, taken, call)


def copies_of(call: Call, record: int, records: int, axis: int = 0) -> Call:
    """Returns a call in which all other records are copies of one.

    If there are labels of −100, the other records get more of them, because the number of labels
    may be the divisor of a loss of the whole batch.
    """

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not has_records(tensor, records, axis):
            return tensor
        kept = tensor.narrow(axis, record, 1)
        copies = kept.repeat_interleave(records, axis)
        if tensor.dtype == torch.int64 and (tensor == IGNORED).any():
            copies[..., :-1] = IGNORED
            copies.narrow(axis, record, 1).copy_(kept)
        return copies

    return tree_map_only(torch.Tensor, copied, call)
