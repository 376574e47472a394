"""Leaving out operations whose results nobody uses: a slice that is only asked for its shape must not fix an axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from opacus_shuffle.permutation.finding.labels import because
from opacus_shuffle.permutation.network import storage

SHAPES_ONLY = frozenset(f"aten.{name}_like" for name in ("zeros", "ones", "full", "empty")) | frozenset(
    f"aten.new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided")
)
"""Operations that ask a tensor for its shape alone."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened to tensors, to be labelled if it matters.

    Attributes:
        inputs, outputs: What it read, and what came out of it.
        label: Labels it.
        cause: What happened and where, in words.
        matters: Whatever comes of its outputs: it wrote to a tensor, or values left PyTorch.
        unread: Where those of its outputs are noted that nobody uses, before it is labelled.
    """

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    label: Callable[[], None]
    cause: str = ""
    matters: bool = False
    unread: list[torch.Tensor] = dataclasses.field(default_factory=list)


def label_live(events: Sequence[Event], results: Iterable[torch.Tensor], known: Iterable[torch.Tensor] = ()) -> None:
    """Labels, in order, what the results depend on, and what matters anyway.

    A tensor that is used, is not ``known`` beforehand and came out of nothing was made out of sight (``as_subclass``,
    ``torch.nn.Parameter(h)``): it may show what comes out of anything that has the same memory.
    """
    made = {id(tensor) for event in events for tensor in event.outputs} | set(map(id, known))
    used: set[int] = set()
    memories: set[int] = set()

    def use(tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            used.add(id(tensor))
            if id(tensor) not in made and (memory := storage(tensor)):
                memories.add(memory)

    def is_used(tensor: torch.Tensor) -> bool:
        return id(tensor) in used or (bool(memories) and storage(tensor) in memories)

    use(results)
    live = []
    for event in reversed(events):
        if event.matters or any(map(is_used, event.outputs)):
            event.unread.extend(tensor for tensor in event.outputs if not event.matters and not is_used(tensor))
            use(event.inputs)
            live.append(event)
    label_all(live[::-1])


def label_all(events: Iterable[Event]) -> None:
    """Labels what happened, in this order."""
    for event in events:
        with because(event.cause):
            event.label()
