"""Leaving out operations whose results nobody uses: a slice that is only asked for its shape must not fix an axis."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch

from opacus_shuffle.permutation.finding.labels import Dimensions, atoms, because, fix_all
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


def depending(events: Sequence[Event], named: Mapping[str, torch.Tensor]) -> list[tuple[Event, frozenset[str]]]:
    """Returns those of these events, in order, that depend on some of these tensors, with the names of these.

    And what else went into them, without names: nothing has labelled it.
    """
    made = {id(tensor): frozenset([name]) for name, tensor in named.items()}
    found: dict[int, frozenset[str]] = {}
    for place, event in enumerate(events):
        if names := frozenset[str]().union(*(made.get(id(tensor), ()) for tensor in event.inputs)):
            made.update((id(tensor), names) for tensor in event.outputs)
            found[place] = names
    wanted: set[int] = set()
    for place in reversed(range(len(events))):
        if place in found or any(id(tensor) in wanted for tensor in events[place].outputs):
            found.setdefault(place, frozenset())
            wanted.update(map(id, events[place].inputs))
    return [(events[place], found[place]) for place in sorted(found)]


def label_all(events: Iterable[Event]) -> None:
    """Labels all of these events, in this order."""
    for event in events:
        with because(event.cause):
            event.label()


class Unused:
    """What is made of tensors that are not reached otherwise, and not used: on other inputs it may be used for anything.

    Attributes:
        made_into: Names of tensors that such a thing was made of, not empty.
        labelling: Whether such a thing is labelled now.
    """

    def __init__(self) -> None:
        self.made_into: set[str] = set()
        self.labelling = False
        self._made: list[tuple[str, frozenset[str], bool, Dimensions]] = []  # where, of what, is more made of it, its labels
        self._occurrences: list[range] = []

    def label(
        self,
        events: Sequence[tuple[Event, frozenset[str]]],
        occurrences: Sequence[Dimensions],
        dimensions: Callable[[torch.Tensor], Dimensions],
    ) -> None:
        """Labels such things, each with the names of what it is made of."""
        start, read = len(occurrences), {id(tensor) for event, _ in events for tensor in event.inputs}
        self.labelling = True
        try:
            label_all(event for event, _ in events)
        finally:
            self.labelling = False
        self._occurrences.append(range(start, len(occurrences)))
        for event, names in events:
            self._made += [(event.cause, names, id(tensor) in read, dimensions(tensor)) for tensor in event.outputs]

    def fix(self, used: Set[str], occurrences: Sequence[Dimensions]) -> dict[int, str]:
        """Fixes axes that such things alone have; returns the sizes of those of which nothing more is made, and where they are.

        What is made of ``used`` tensors alone is none of them.
        """
        aside = set(itertools.chain(*self._occurrences))
        met = {atom for i, rows in enumerate(occurrences) if i not in aside for each in rows for atom in atoms(each)}
        found: dict[int, str] = {}
        for where, names, more, rows in self._made:
            for each in rows if not names <= used else ():
                if alone := [atom for atom in atoms(each) if atom not in met]:
                    fix_all(alone, cause=f"nobody used what is made of it at {where}")
                    size = math.prod(axis.root.size for axis in each)
                    found |= {} if more else dict.fromkeys([size, *(atom.size for atom in atoms(each))], where)
        return found
