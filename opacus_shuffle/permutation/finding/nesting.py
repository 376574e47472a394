"""Making a :class:`PermutationSpec` of traced axes: what is free, and inside of what.

A factor may have a permutation of its own for every position along another axis exactly if that
position is known wherever the factor occurs: query dimensions inside a head, channels inside a
normalisation group.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from opacus_shuffle.permutation.finding.axes import (
    Axes,
    Axis,
    atoms,
    cut_in_groups,
    factors,
    fix_all,
    grids,
    size_of,
    terms,
)
from opacus_shuffle.permutation.finding.traced_run import TracedRun
from opacus_shuffle.permutation.moving.layout import Block, Factor, Term
from opacus_shuffle.permutation.spec import PermutationSpec

LEVELS = ("paper", "heads", "residual")

LARGEST_JOINT_AXIS = 2**24
"""The largest size of several axes seen as one: their index vector needs 8 bytes an entry."""

Inside = dict[Axis, set[Axis]]
"""The free atoms, each with those for whose every position it has a permutation of its own."""


def build_spec(run: TracedRun, level: str, reads: tuple[str, ...] = ()) -> PermutationSpec:
    """Returns the specification that the axes allow at one of :data:`LEVELS`.

    What the run never reached, and what the level leaves out, is fixed.
    """
    _move_originals(run)
    _keep_unreached(run)
    for row, size in run.groups:
        cut_in_groups(row, size)
    for row, size in run.groups:  # the statistics of each group
        for _, grid in grids(row):
            run.occur([[atom for atom, step in grid if step >= size]])
    tensors = run.axes_of_all()
    own = set(run.atoms())
    fix_all(own - _atoms_in(run.occurrences), cause="never combined with anything")
    heads, contracted = set(atoms(run.heads)), set(atoms(run.contracted))
    streams = set(atoms(run.streams)) - heads
    if level != "residual":
        fix_all(streams, cause=f"level {level!r}")
    if level == "paper":
        fix_all(heads, cause=f"level {level!r}")
    known = known_positions([*run.occurrences, *tensors.values()])
    inside = {atom: _outer(atom, known) for atom in own if not atom.fixed and atom.size > 1}
    if level == "paper":  # one permutation of the values for all heads
        for atom in inside.keys() - contracted:
            inside[atom] -= heads
    for axes in tensors.values():
        _drop_wide_spans(axes, inside)
    kinds = dict.fromkeys(contracted, "query and key dimensions")
    kinds |= dict.fromkeys(heads, "heads") | dict.fromkeys(streams, "residual stream")
    return _write_down(run, tensors, inside, kinds, level, reads)


def _atoms_in(occurrences: Iterable[Iterable[Iterable[Axis]]]) -> set[Axis]:
    return {atom for axes in occurrences for row in axes for atom in atoms(row)}


def _move_originals(run: TracedRun) -> None:
    """Lets the original of a module move as the copy of it that PEFT trains.

    PEFT calls one or the other on the same input: the original while adapters are disabled.
    """
    for name in run.unreached():
        for other in sorted(run.used):
            if name == re.sub(r"\.modules_to_save\.[^.]+\.", ".original_module.", other):
                run.set(run.tensors[name], run.axes(run.tensors[other]))
                run.used.add(name)


def _keep_unreached(run: TracedRun) -> None:
    """Fixes every axis that an unreached tensor may share with others: all of a size it has.

    Nobody knows what such a parameter does on inputs that reach it. An axis of a size may be one,
    a part of a concatenation, or factors side by side, which a view joins.
    """
    sizes = {
        size: f"as long as an axis of {name}, which was not reached"
        for name in reversed(run.unreached())
        for size in run.tensors[name].shape
        if size > 1
    }
    every = [*run.occurrences, *run.axes_of_all().values()] if sizes else []
    waiting = [factors(row) for axes in every for row in axes]
    while waiting:
        row = waiting.pop()
        for start, stop in itertools.combinations(range(len(row) + 1), 2):
            if (size := size_of(row[start:stop])) in sizes:
                fix_all(row[start:stop], cause=sizes[size])
        waiting += [factors([part]) for axis in row if axis.kind == "sum" for part in axis.parts]


class _Row(NamedTuple):
    """An axis: its alternatives, the atoms in all of them, and how often each occurs at most."""

    terms: tuple[tuple[Axis, ...], ...]
    common: frozenset[Axis]
    most: Counter[Axis]


def _row(axes: tuple[Axis, ...]) -> _Row:
    alternatives = tuple(terms(axes))
    most = Counter[Axis]()
    for term in alternatives:
        most |= Counter(term)
    return _Row(alternatives, frozenset.intersection(*map(frozenset, alternatives)), most)


def known_positions(occurrences: Iterable[Iterable[Iterable[Axis]]]) -> dict[Axis, set[Axis]]:
    """Returns per atom the atoms (itself included) whose position is known wherever it occurs."""
    row_of = functools.cache(_row)
    distinct = {}
    for axes in occurrences:
        rows = [row_of(tuple(row)) for row in axes if row]
        distinct[tuple(row.terms for row in rows)] = rows
    known: dict[Axis, set[Axis]] = {}
    for rows in distinct.values():
        times = sum((row.most for row in rows), Counter[Axis]())
        for place, row in enumerate(rows):
            # An atom on two other axes has two positions: which one would be meant?
            elsewhere = {
                atom
                for other in (*rows[:place], *rows[place + 1 :])
                for atom in other.common
                if times[atom] == 1
            }
            for term in row.terms:
                for atom in term:
                    here = elsewhere.union(other for other in term if _alternate(term, atom, other))
                    known[atom] = known[atom] & here if atom in known else here
    return known


def _alternate(term: tuple[Axis, ...], atom: Axis, other: Axis) -> bool:
    """Returns whether every occurrence of the atom in a product has one of the other beside it."""
    if atom is other:
        return True
    row = [axis for axis in term if axis is atom or axis is other]
    return len(row) % 2 == 0 and all(one is not two for one, two in itertools.pairwise(row))


def _outer(atom: Axis, known: Mapping[Axis, set[Axis]]) -> set[Axis]:
    """Returns the atoms that this one is inside of; of two always together, the older one."""
    others = {other for other in known[atom] if other is not atom and other.size > 1}
    return {
        other
        for other in others
        if other.fixed or atom not in known[other] or other.order < atom.order
    }


def _spread(axes: Axes, inside: Inside) -> Iterator[tuple[Axis, Axis, int, int]]:
    """Yields (atom, outer, first axis, last axis) for each atom inside of one on another axis."""
    rows = [terms(row) for row in axes]
    for dim, row in enumerate(rows):
        for own in row:
            for atom, outer in ((a, o) for a in own for o in inside.get(a, set()).difference(own)):
                other = next(
                    place
                    for place, alternatives in enumerate(rows)
                    if place != dim and all(outer in term for term in alternatives)
                )
                yield atom, outer, min(dim, other), max(dim, other)


def _spans(axes: Axes, inside: Inside) -> list[tuple[int, int]]:
    """Returns a tensor's axes in stretches (start, stop), each to be seen as one axis."""
    spans = [(dim, dim + 1) for dim in range(len(axes))]
    for _, _, first, last in _spread(axes, inside):
        touched = [span for span in spans if span[0] <= last and span[1] > first]
        merged = (touched[0][0], touched[-1][1])
        spans = sorted([span for span in spans if span not in touched] + [merged])
    return spans


def _drop_wide_spans(axes: Axes, inside: Inside) -> None:
    """Gives up nesting that would need a huge index vector, or one atom twice in a grid."""
    for start, stop in _spans(axes, inside):
        row = [axis for row in axes[start:stop] for axis in row]
        twice = any(len(set(term)) < len(term) for term in terms(row))
        if stop - start > 1 and (size_of(row) > LARGEST_JOINT_AXIS or twice):
            for atom, outer, first, _ in list(_spread(axes, inside)):
                if start <= first < stop:
                    inside[atom].discard(outer)


def _write_down(
    run: TracedRun,
    tensors: Mapping[str, Axes],
    inside: Inside,
    kinds: Mapping[Axis, str],
    level: str,
    reads: tuple[str, ...],
) -> PermutationSpec:
    """Numbers the atoms and writes down where they lie; ``kinds`` says what some of them are."""
    numbers: dict[Axis, int] = {}
    blocks: dict[str, tuple[Block, ...]] = {}
    places: defaultdict[Axis, list[str]] = defaultdict(list)
    for name, axes in tensors.items():
        moving = []
        for start, stop in _spans(axes, inside):
            row = [axis for row in axes[start:stop] for axis in row]
            terms_ = []
            for offset, grid in grids(row):
                if any(atom in inside for atom, _ in grid):
                    numbered = [(numbers.setdefault(a, len(numbers)), step) for a, step in grid]
                    terms_.append(Term(offset, tuple(numbered)))
            if terms_:
                moving.append(Block(start, stop, size_of(row), tuple(terms_)))
            for atom in inside.keys() & set(atoms(row)):
                places[atom].append(name)
        if moving:
            blocks[name] = tuple(moving)
    outside = {outer for atom in places for outer in inside[atom]}
    names: dict[Axis, str] = {}
    used = Counter[str]()
    for atom in numbers:
        if atom in inside:
            name = _name(places[atom], run.tensors, kinds.get(atom), atom in outside)
            used[name] += 1
            names[atom] = name if used[name] == 1 else f"{name} ({used[name]})"
    for atom in outside:
        numbers.setdefault(atom, len(numbers))
    stay = [name for name in tensors if name in run.parameter_names and name not in blocks]
    unreached = tuple(name for name in run.unreached() if name not in blocks)
    return PermutationSpec(
        factors=tuple(
            Factor(
                names.get(atom, "fixed"),
                atom.size,
                tuple(sorted(numbers[outer] for outer in inside.get(atom, ()))),
                atom in inside,
            )
            for atom in numbers
        ),
        blocks=blocks,
        shapes={name: tuple(run.tensors[name].shape) for name in blocks},
        buffers=tuple(name for name in blocks if name not in run.parameter_names),
        unmoved={name: run.tensors[name].numel() for name in stay},
        aliases={name: tuple(run.aliases[name]) for name in blocks if name in run.aliases},
        unknown=dict(run.unknown),
        unreached=unreached,
        causes={
            name: "not reached" if name in unreached else _causes(tensors[name]) for name in stay
        },
        reads=reads,
        level=level,
    )


def _causes(axes: Axes) -> str:
    """Says why the axes of a tensor stay, each cause once."""
    causes = {
        dim: dict.fromkeys(
            atom.cause or "a constant or an input" for atom in atoms(row) if atom.size > 1
        )
        for dim, row in enumerate(axes)
    }
    return "; ".join(f"axis {dim}: {', '.join(given)}" for dim, given in causes.items() if given)


def _name(
    names: Sequence[str], tensors: Mapping[str, torch.Tensor], kind: str | None, has_inside: bool
) -> str:
    """Returns in plain words what is permuted, given the tensors that it moves."""
    if kind is None:
        kind = "channels" if tensors[names[0]].dim() > 2 else "units"
        place = names[0].rpartition(".")[0] or names[0]
    else:
        levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
        shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, levels)
        place = ".".join(parts[0] for parts in shared) or "the network"
    groups = "groups in " if has_inside and kind != "heads" else ""
    return f"{groups}{kind} of {place}"
