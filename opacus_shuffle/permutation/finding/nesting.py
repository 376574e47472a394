"""Makes a :class:`PermutationSpec` from traced axes: which are free, and how they are nested.

A factor may have a permutation of its own for every position along another axis exactly if that
position is determined wherever the factor occurs. Examples are query dimensions inside of a head
and channels inside of a normalization group.
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
"""Largest size of several axes viewed as one. Their index vector needs 8 bytes per entry."""

Inside = dict[Axis, set[Axis]]
"""The free atoms, each with the atoms for whose positions it has permutations of its own."""


def build_spec(run: TracedRun, level: str, reads: tuple[str, ...] = ()) -> PermutationSpec:
    """Returns the specification that the axes allow at one of :data:`LEVELS`.

    Axes that the run never reached, and those that the level excludes, are fixed.
    """
    _unify_peft_originals(run)
    _fix_unreached(run)
    for row, size in run.groups:
        cut_in_groups(row, size)
    for row, size in run.groups:  # the statistics of each group
        for _, grid in grids(row):
            run.occur([[atom for atom, step in grid if step >= size]])
    tensors = run.axes_of_all()
    present = set(run.atoms())
    fix_all(present - _atoms_in(run.occurrences), cause="never used in a result")
    heads, contracted = set(atoms(run.heads)), set(atoms(run.contracted))
    streams = set(atoms(run.streams)) - heads
    if level != "residual":
        fix_all(streams, cause=f"level {level!r}")
    if level == "paper":
        fix_all(heads, cause=f"level {level!r}")
    determined = determined_positions([*run.occurrences, *tensors.values()])
    inside = {
        atom: _enclosing(atom, determined) for atom in present if not atom.fixed and atom.size > 1
    }
    if level == "paper":  # one permutation of the values for all heads
        for atom in inside.keys() - contracted:
            inside[atom] -= heads
    for axes in tensors.values():
        _drop_wide_spans(axes, inside)
    labels = dict.fromkeys(contracted, "query and key dimensions")
    labels |= dict.fromkeys(heads, "heads") | dict.fromkeys(streams, "residual stream")
    return _make_spec(run, tensors, inside, labels, level, reads)


def _atoms_in(occurrences: Iterable[Iterable[Iterable[Axis]]]) -> set[Axis]:
    return {atom for axes in occurrences for row in axes for atom in atoms(row)}


def _unify_peft_originals(run: TracedRun) -> None:
    """Unifies the original of a module with the copy of it that PEFT trains.

    PEFT calls one or the other on the same input: the original while adapters are disabled.
    """
    for name in run.unreached():
        for other in sorted(run.used):
            if name == re.sub(r"\.modules_to_save\.[^.]+\.", ".original_module.", other):
                run.set(run.tensors[name], run.axes(run.tensors[other]))
                run.used.add(name)


def _fix_unreached(run: TracedRun) -> None:
    """Fixes every axis that has the size of an axis of an unreached tensor.

    The tensor may share these axes with others on inputs that reach it. They include parts of
    concatenations, and neighbouring factors, which a view may join.
    """
    sizes = {
        size: f"same size as an axis of {name}, which was not reached"
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
        waiting += [
            factors([part]) for axis in row if axis.form == "sum" for part in axis.components
        ]


class _Row(NamedTuple):
    """The alternatives of an axis, the atoms common to all, and each atom as often as it occurs."""

    terms: tuple[tuple[Axis, ...], ...]
    common: frozenset[Axis]
    every: tuple[Axis, ...]


def _row(axes: tuple[Axis, ...]) -> _Row:
    alternatives = tuple(terms(axes))
    most = Counter[Axis]()
    for term in alternatives:
        most |= Counter(term)
    return _Row(
        alternatives,
        frozenset.intersection(*map(frozenset, alternatives)),
        tuple(most.elements()),
    )


def determined_positions(occurrences: Iterable[Iterable[Iterable[Axis]]]) -> dict[Axis, set[Axis]]:
    """Returns for each free atom the atoms whose position is determined wherever it occurs."""
    row_of = functools.cache(_row)
    every = ([row_of(tuple(row)) for row in axes if row] for axes in occurrences)
    distinct = {tuple(row.terms for row in rows): rows for rows in every}
    determined: dict[Axis, set[Axis]] = {}
    for rows in distinct.values():
        times = Counter(itertools.chain.from_iterable(row.every for row in rows))
        if all(atom.fixed for atom in times):
            continue
        for place, row in enumerate(rows):
            # An atom on two other axes has two positions, so none is determined.
            elsewhere = {
                atom
                for other in (*rows[:place], *rows[place + 1 :])
                for atom in other.common
                if times[atom] == 1
            }
            for term in row.terms:
                for atom in [atom for atom in term if not atom.fixed]:
                    here = elsewhere.union(
                        other for other in term if _always_paired(term, atom, other)
                    )
                    determined[atom] = determined[atom] & here if atom in determined else here
    return determined


def _always_paired(term: tuple[Axis, ...], atom: Axis, other: Axis) -> bool:
    """Returns whether each occurrence of an atom in a product is paired with one of the other."""
    if atom is other:
        return True
    row = [axis for axis in term if axis is atom or axis is other]
    return len(row) % 2 == 0 and all(one is not two for one, two in itertools.pairwise(row))


def _enclosing(atom: Axis, determined: Mapping[Axis, set[Axis]]) -> set[Axis]:
    """Returns the atoms that enclose this one; of two that always occur together, the older."""
    others = {other for other in determined[atom] if other is not atom and other.size > 1}
    return {
        other
        for other in others
        if other.fixed or atom not in determined[other] or other.order < atom.order
    }


def _nested_pairs(axes: Axes, inside: Inside) -> Iterator[tuple[Axis, Axis, int, int]]:
    """Yields (atom, outer, first axis, last axis) for each atom nested in one on another axis."""
    rows = [terms(row) for row in axes]
    for dim, row in enumerate(rows):
        for term in row:
            for atom, outer in (
                (a, o) for a in term for o in inside.get(a, set()).difference(term)
            ):
                other = next(
                    place
                    for place, alternatives in enumerate(rows)
                    if place != dim and all(outer in term for term in alternatives)
                )
                yield atom, outer, min(dim, other), max(dim, other)


def _spans(axes: Axes, inside: Inside) -> list[tuple[int, int]]:
    """Returns the ranges (start, stop) of a tensor's axes that are viewed as one axis."""
    spans = [(dim, dim + 1) for dim in range(len(axes))]
    for _, _, first, last in _nested_pairs(axes, inside):
        touched = [span for span in spans if span[0] <= last and span[1] > first]
        merged = (touched[0][0], touched[-1][1])
        spans = sorted([span for span in spans if span not in touched] + [merged])
    return spans


def _drop_wide_spans(axes: Axes, inside: Inside) -> None:
    """Removes nesting that would need a huge index vector, or one atom twice in a grid."""
    for start, stop in _spans(axes, inside):
        row = [axis for row in axes[start:stop] for axis in row]
        twice = any(len(set(term)) < len(term) for term in terms(row))
        if stop - start > 1 and (size_of(row) > LARGEST_JOINT_AXIS or twice):
            for atom, outer, first, _ in list(_nested_pairs(axes, inside)):
                if start <= first < stop:
                    inside[atom].discard(outer)


def _make_spec(
    run: TracedRun,
    tensors: Mapping[str, Axes],
    inside: Inside,
    labels: Mapping[Axis, str],
    level: str,
    reads: tuple[str, ...],
) -> PermutationSpec:
    """Numbers the atoms, and returns their positions as a specification, named by ``labels``."""
    numbers: dict[Axis, int] = {}
    blocks: dict[str, tuple[Block, ...]] = {}
    members: defaultdict[Axis, list[str]] = defaultdict(list)
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
                members[atom].append(name)
        if moving:
            blocks[name] = tuple(moving)
    outside = {outer for atom in members for outer in inside[atom]}
    names: dict[Axis, str] = {}
    used = Counter[str]()
    for atom in numbers:
        if atom in inside:
            name = _name(members[atom], run.tensors, labels.get(atom), atom in outside)
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
    """Returns the causes why the axes of a tensor are fixed, each once."""
    causes = {
        dim: dict.fromkeys(
            atom.cause or "a constant or an input" for atom in atoms(row) if atom.size > 1
        )
        for dim, row in enumerate(axes)
    }
    return "; ".join(f"axis {dim}: {', '.join(given)}" for dim, given in causes.items() if given)


def _name(
    names: Sequence[str], tensors: Mapping[str, torch.Tensor], label: str | None, has_inside: bool
) -> str:
    """Returns a readable name for an atom, given the tensors that it moves."""
    if label is None:
        label = "channels" if tensors[names[0]].dim() > 2 else "units"
        place = names[0].rpartition(".")[0] or names[0]
    else:
        levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
        shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, levels)
        place = ".".join(parts[0] for parts in shared) or "the network"
    groups = "groups in " if has_inside and label != "heads" else ""
    return f"{groups}{label} of {place}"
