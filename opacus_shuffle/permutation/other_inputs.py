"""Making other inputs of one: of other sizes and lengths, and with other values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from opacus_shuffle.networks.sample_input import Call

SHORT = 8

LENGTHS = (3, 6, 12, 17, 33)
"""Tried where what a network does is longer on longer inputs."""

MOST_ENTRIES = 10**6
"""Of an input that is made larger to see what a network does on larger ones."""


def other_sizes(call: Call) -> list[list[Call]]:
    """Returns inputs with one more record than there are, and shorter, and with one record, and longer.

    Each is a list of alternatives, of which those come first that change most: texts change along their second dimension,
    images along all from the third on, and further inputs along lengths of their own. Shorter is at most :data:`SHORT`, or half
    as long.
    """
    first = next((leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
    if first is None or not first.numel():
        return []
    rank, (records, *lengths) = first.dim(), first.shape
    ways = [range(2, rank), range(1, 2)] if rank > 3 else [range(dim, dim + 1) for dim in range(1, rank)]
    half = [max(min(size, 2), size // 2) for size in lengths]  # along a length of 1 nothing is carried on
    found = []
    for count, news in ((records + 1, ([min(size, SHORT) for size in half], half)), (1, ([2 * size for size in lengths],))):
        batch = _resized(call, range(1), {records: count})
        changes = [(way, {lengths[dim - 1]: new[dim - 1] for dim in way}) for new in news for way in ways]
        everywhere = [_resized(batch, range(1, 9), change) for _, change in changes]  # a mask may have the length twice
        found.append([*everywhere, *(_resized(batch, way, change) for way, change in changes), batch])
    others = {size: None for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) for size in leaf.shape[1:]}
    for size in others:  # of further inputs, along which the first has nothing
        if size and size not in first.shape:
            found += [
                [_resized(call, range(1, 9), {size: new})]
                for new in dict.fromkeys((4 * size, max(1, size // 2)))
                if new != size
            ]
    return found


def of_size(call: Call, target: float, near: int = 1) -> Iterator[Call]:
    """Yields inputs with so many records, or of such a length, and with a few less or more; none that is huge."""
    leaves = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    lengths = {size: None for leaf in leaves for size in leaf.shape[1:]}
    axes = [(range(1), size) for size in dict.fromkeys(leaf.shape[0] for leaf in leaves)]
    for dims, size in [*axes, *((range(1, 9), size) for size in lengths)]:
        for new in sorted(range(math.ceil(target) - near, math.ceil(target) + near + 1), key=lambda each: abs(each - target)):
            if new != size > 0 and 0 < new <= MOST_ENTRIES / max(leaf.numel() / size for leaf in leaves):
                yield _resized(call, dims, {size: new})


def with_as_many_records(call: Call, like: Call) -> Call:
    """Returns a call with the number of records that another has, as far as it can be told."""
    counts = [
        next((leaf.shape[0] for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
        for each in (call, like)
    ]
    return _resized(call, range(1), {counts[0]: counts[1]}) if all(counts) else call


def many_sizes(call: Call, lengths: Iterable[int]) -> Iterator[Call]:
    """Yields inputs of these lengths and numbers of records."""
    for size in lengths:
        yield from of_size(call, size, near=0)


def other_values(call: Call) -> Iterator[Call]:
    """Yields inputs of the same shapes: with other signs, at random, and of the same entries in other places."""
    generator = torch.Generator().manual_seed(0)

    def negated(leaf: torch.Tensor) -> torch.Tensor:
        return -leaf if leaf.is_floating_point() else leaf.flip(-1) if leaf.dim() else leaf

    def random(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_floating_point():
            return (3 * torch.randn(leaf.shape, generator=generator)).to(leaf)
        order = torch.randperm(leaf.numel(), generator=generator).to(leaf.device)
        return leaf.flatten()[order].view(leaf.shape)

    for change in (negated, random):
        yield tree_map_only(torch.Tensor, change, call)


def _resized(call: Call, dims: Iterable[int], sizes: Mapping[int, int]) -> Call:
    """Returns the call with all its tensors cut or repeated along those of these dimensions that have one of these sizes."""

    def change(leaf: torch.Tensor) -> torch.Tensor:
        for dim in dims:
            if dim < leaf.dim() and (size := leaf.shape[dim]) in sizes:
                leaf = leaf.index_select(dim, torch.arange(sizes[size], device=leaf.device) % size)
        return leaf

    return tree_map_only(torch.Tensor, change, call)


def form_of(call: Call) -> list[Any]:
    """Returns all of a call but the values of its tensors; other objects are the same only as themselves."""
    leaves, structure = tree_flatten(call)
    found: list[Any] = [structure]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        else:
            found.append((type(leaf), leaf if isinstance(leaf, bool | int | float | str) else id(leaf)))
    return found


def entries_in(call: Call) -> int:
    """Returns how many entries the tensors of a call have."""
    return sum(leaf.numel() for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor))
