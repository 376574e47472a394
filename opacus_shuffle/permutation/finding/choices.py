"""Which entry of an axis was chosen for each place of another, by an index tensor: the matrix of its expert for each record.

Units may have a permutation of their own for every expert only where it is known whose units they are. After the choice no axis
says so, but the place does, in all that was computed of nothing else than what was chosen like that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

import torch

from opacus_shuffle.permutation.finding.labels import Axis, Dimensions, Factors, atoms, only, unify
from opacus_shuffle.permutation.network import storage
from opacus_shuffle.permutation.tensor_dict import TensorDict


@dataclasses.dataclass(eq=False)
class Index:
    """An index tensor: along which axis of each size it chose."""

    among: dict[int, Axis] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fact that each place along some axes has chosen one entry of another axis (its expert, say)."""

    index: Index
    places: tuple[Axis, ...]
    among: Axis

    def now(self) -> Choice:
        """Returns the choice by the atoms that its axes consist of by now."""
        return Choice(self.index, tuple(atoms(self.places)), self.among.root)


class Choices:
    """What is known of choices in a run."""

    def __init__(self) -> None:
        self._made: Choice | None = None  # by the operation that is being labelled
        self._of: TensorDict[frozenset[Choice]] = TensorDict()  # what a tensor was computed of was chosen like that
        self._indices: TensorDict[Index] = TensorDict()

    def choose(self, index: torch.Tensor, places: Factors, among: Factors) -> None:
        """Notes that an index tensor chooses an entry of an axis for each place; for other tensors' axes it is the same one."""
        if len(among) == 1 and among[0].root.kind == "atom":
            if index not in self._indices:
                self._indices[index] = Index()
            unify(self._indices[index].among.setdefault(among[0].root.size, among[0]), among[0])
            self._made = Choice(self._indices[index], tuple(places), among[0])

    def known_by(self, present: Collection[Axis]) -> Dimensions:
        """Returns the axis along which the operation that is being labelled chooses, if it is one of these."""
        return [[self._made.among]] if self._made and self._made.among.root in present else []

    def forget(self, written: Sequence[torch.Tensor]) -> None:
        """Forgets index tensors where one was written to, by whatever name: it chooses other entries now."""
        memories = {storage(index) for index in self._indices} if written else set()
        if any(not tensor.is_floating_point() or storage(tensor) in memories for tensor in written):
            self._indices = TensorDict()

    def follow(
        self,
        inputs: Mapping[torch.Tensor, Sequence[Axis]],
        outputs: Mapping[torch.Tensor, Sequence[Axis]],
        occurrences: Sequence[Dimensions],
    ) -> list[Dimensions]:
        """Follows choices through an operation; returns what occurred inside of it, with the axes of what was chosen.

        Args:
            inputs: The atoms of each, as often as they are there.
            outputs: Likewise.
            occurrences: Without what was chosen.
        """
        made = {self._made.now()} if self._made else set[Choice]()
        self._made = None
        known = [
            (set(axes), {each.now() for each in self._of.get(tensor, ())} | {each for each in made if each.among in axes})
            for tensor, axes in inputs.items()
        ]
        hidden = set(itertools.chain.from_iterable(outputs.values()))
        choices = [each for each in set().union(*(held for _, held in known)) if each.among not in hidden]

        def following(choice: Choice, row: Sequence[Axis]) -> set[Axis]:
            """Returns the atoms of which all that was computed with them was chosen like that."""
            if choice.among in row or any(row.count(place) != 1 for place in choice.places):
                return set()
            held, missed = (set().union(*(axes for axes, of in known if (choice in of) is each)) for each in (True, False))
            return {atom for atom in held - missed if atom in row and not atom.fixed}

        for tensor, row in outputs.items():
            moving = {atom for atom in row if not atom.fixed}
            self._of[tensor] = frozenset(each for each in choices if moving and moving == following(each, row))
        found = []
        for dimensions in occurrences:
            present = atoms(axis for each in dimensions for axis in each)
            follow = {each.among: atoms_ for each in choices if (atoms_ := following(each, present))}
            found.append([*dimensions, *([axis] for axis in follow)])
            # Of all other atoms it is not known.
            found += [[only(each, set(present) - atoms_) for each in dimensions] for atoms_ in follow.values()]
        return found
