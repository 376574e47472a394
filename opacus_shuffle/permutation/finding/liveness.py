"""Leaving out operations whose results nobody uses: a slice that is only asked for its shape must not fix an axis."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

import torch

from opacus_shuffle.permutation.finding.labels import CAUSE, because
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


def label_live(events: Sequence[Event], results: Iterable[torch.Tensor], known: Iterable[torch.Tensor] = ()) -> list[Event]:
    """Labels, in order, what the results depend on, and what matters anyway; returns the rest.

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
    live, rest = [], []
    for event in reversed(events):
        if event.matters or any(map(is_used, event.outputs)):
            event.unread.extend(tensor for tensor in event.outputs if not event.matters and not is_used(tensor))
            use(event.inputs)
            live.append(event)
        else:
            rest.append(event)
    label_all(live[::-1])
    return rest[::-1]


def depending(events: Iterable[Event], named: Mapping[str, torch.Tensor]) -> Iterator[tuple[Event, frozenset[str]]]:
    """Yields those of these events, in order, that depend on some of these tensors, with the names of these."""
    made = {id(tensor): frozenset([name]) for name, tensor in named.items()}
    for event in events:
        if names := frozenset[str]().union(*(made.get(id(tensor), ()) for tensor in event.inputs)):
            made.update((id(tensor), names) for tensor in event.outputs)
            yield event, names


def label_all(events: Iterable[Event]) -> None:
    """Labels what happened, in this order."""
    for event in events:
        with because(event.cause):
            event.label()


class Unused:
    """What is made of tensors that are not reached otherwise, and not used: on other inputs it may be used for anything.

    Attributes:
        made_into: Names of tensors that such a thing was made of, not empty.
        labelled: Names of the tensors of which that is made which is labelled now, if it is such a thing.
    """

    def __init__(self) -> None:
        self.made_into: set[str] = set()
        self.labelled: frozenset[str] = frozenset()
        self._sizes: dict[tuple[str, frozenset[str]], dict[int, set[int]]] = {}  # by where it is made, and the trace

    @contextlib.contextmanager
    def made_of(self, names: frozenset[str]) -> Iterator[None]:
        """Takes what is labelled inside for something that is made of these tensors."""
        self.labelled = names
        try:
            yield
        finally:
            self.labelled = frozenset()

    def note(self, results: Iterable[torch.Tensor], shown: Iterable[str], trace: int) -> None:
        """Notes the results of an operation on views or entries of these tensors, in one of the traces."""
        if self.labelled:
            self.made_into.update(shown)
            sizes = self._sizes.setdefault((CAUSE.get(), self.labelled), {}).setdefault(trace, set())
            sizes.update(size for tensor in results for size in tensor.shape)

    def sizes(self, used: Set[str]) -> dict[int, str]:
        """Returns the sizes of results that all traces have made, so none of a batch, and where; but of ``used`` tensors."""
        found = [(where, by_trace) for (where, names), by_trace in self._sizes.items() if not names <= used]
        return {size: where for where, by_trace in found for size in set.intersection(*by_trace.values())}
