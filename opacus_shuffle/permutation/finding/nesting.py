"""Making a :class:`PermutationSpec` of the labels of one traced run: what is free, inside of what, and at which level.

A factor may have a permutation of its own for every position along another axis exactly if that
position is known wherever the factor occurs: query dimensions inside a head, channels inside a
normalisation group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from opacus_shuffle.permutation.finding.labels import (
    Axis,
    Dimensions,
    atoms,
    factors,
    fix_all,
    grids,
    terms,
)
from opacus_shuffle.permutation.finding.packings import LARGEST_JOINT_AXIS
from opacus_shuffle.permutation.finding.traced_run import TracedRun
from opacus_shuffle.permutation.moving.layout import Block, Factor, Term
from opacus_shuffle.permutation.spec import PermutationSpec

LEVELS = ("paper", "heads", "residual")


def known_positions(occurrences: Iterable[Dimensions]) -> dict[Axis, set[Axis]]:
    """Returns per atom the atoms (itself included) whose position is known wherever it occurs."""
    known: dict[Axis, set[Axis]] = {}
    seen = set()
    for dimensions in occurrences:
        alternatives = [terms(each) for each in dimensions if each]
        key = tuple(tuple(each) for each in alternatives)
        if key in seen:
            continue
        seen.add(key)
        common = [set.intersection(*map(set, each)) for each in alternatives]
        # How often each atom occurs, at most.
        count = sum(
            (functools.reduce(operator.or_, map(Counter, each)) for each in alternatives),
            Counter[Axis](),
        )
        for place, each in enumerate(alternatives):
            # An atom on two other axes has two positions: which one would be meant?
            rest = {
                atom
                for i, other in enumerate(common)
                if i != place
                for atom in other
                if count[atom] == 1
            }
            for term in each:
                for atom in term:
                    here = rest.union(other for other in term if _alternate(term, atom, other))
                    known[atom] = known[atom] & here if atom in known else here
    return known


def _alternate(term: tuple[Axis, ...], atom: Axis, other: Axis) -> bool:
    """Returns whether every occurrence of the atom in a product has its own occurrence of the other beside it."""
    if atom is other:
        return True
    row = [each for each in term if each is atom or each is other]
    return len(row) % 2 == 0 and all(one is not two for one, two in itertools.pairwise(row))


def build_spec(
    run: TracedRun, level: str, decisions: Mapping[str, int] | None = None
) -> PermutationSpec:
    """Returns the specification that the labels allow at one of :data:`LEVELS`.

    What the run never reached, and what the level leaves out, is fixed.
    """
    _keep_unreached(run)
    reached = {
        atom for dimensions in run.occurrences for each in dimensions for atom in atoms(each)
    }
    for dimensions in run.parameters.values():
        for each in dimensions:
            fix_all(
                (atom for atom in atoms(each) if atom not in reached),
                cause="never combined with anything",
            )
    heads = set(atoms(run.heads))
    streams = set(atoms(run.streams)) - heads
    contracted = set(atoms(run.contracted))
    kinds = dict.fromkeys(contracted, "query and key dimensions")
    kinds |= dict.fromkeys(heads, "heads") | dict.fromkeys(streams, "residual stream")
    if level != "residual":
        fix_all(streams, cause=f"level {level!r}")
    if level == "paper":
        fix_all(heads, cause=f"level {level!r}")
    known = known_positions([*run.occurrences, *run.parameters.values()])
    labelled = {
        atom
        for dimensions in run.parameters.values()
        for each in dimensions
        for atom in atoms(each)
    }
    inside = {atom: _outer(atom, known) for atom in labelled if not atom.fixed and atom.size > 1}
    if level == "paper":  # one permutation of the values for all heads
        inside = {
            atom: outer if atom in contracted else outer - heads for atom, outer in inside.items()
        }
    _drop_wide_joints(run, inside)
    return dataclasses.replace(
        _assemble(run, inside, level, kinds), decisions=dict(decisions or {})
    )


def _keep_unreached(run: TracedRun) -> None:
    """Fixes every axis that a tensor which was not reached may share with others: all of a size that it has.

    Nobody knows what such a parameter does on inputs that reach it. A view may make an axis of
    factors side by side.
    """
    sizes: dict[int, str] = {}
    for name in reversed(run.unreached()):
        sizes |= dict.fromkeys(run.tensors[name].shape, f"{name}, which was not reached")
    sizes.pop(1, None)
    rows = {
        tuple(axis for each in dimensions for axis in factors(each))
        for dimensions in run.occurrences
        if sizes
    }
    waiting = [
        *rows,
        *(
            tuple(axis for each in dims for axis in factors(each))
            for dims in run.parameters.values()
            if sizes
        ),
    ]
    while waiting:
        row = waiting.pop()
        for start in range(len(row)):
            size = 1
            for stop in range(start, len(row)):
                size *= row[stop].size
                if size in sizes:
                    fix_all(row[start : stop + 1], cause=f"as long as an axis of {sizes[size]}")
        waiting += [
            tuple(factors([part])) for axis in row if axis.kind == "sum" for part in axis.parts
        ]


def _outer(atom: Axis, known: Mapping[Axis, set[Axis]]) -> set[Axis]:
    """Returns the atoms that this one is inside of; of two that always occur together, the older one is outside."""
    found = set()
    for other in known[atom]:
        mutual = not other.fixed and atom in known[other]
        if other is not atom and other.size > 1 and not (mutual and other.order > atom.order):
            found.add(other)
    return found


def _joints(
    dimensions: Dimensions, inside: Mapping[Axis, set[Axis]]
) -> list[tuple[Axis, Axis, int, int]]:
    """Returns where an atom is inside of one on another axis of the same tensor: (atom, outer, first axis, last axis)."""
    found = []
    rows = [terms(each) for each in dimensions]
    for axis, each in enumerate(rows):
        for term in each:
            for atom in term:
                for outer in inside.get(atom, ()):
                    if outer not in term:
                        other = next(
                            i
                            for i, row in enumerate(rows)
                            if i != axis and all(outer in t for t in row)
                        )
                        found.append((atom, outer, min(axis, other), max(axis, other)))
    return found


def _drop_wide_joints(run: TracedRun, inside: dict[Axis, set[Axis]]) -> None:
    """Gives up nesting that would need a huge index vector, or would put one atom twice into the same grid."""
    changed = True
    while changed:
        changed = False
        for name, dimensions in run.parameters.items():
            shape = run.tensors[name].shape
            for start, stop, joined in _spans(shape, dimensions, inside):
                size = math.prod(shape[start:stop])
                twice = any(
                    len(set(term)) < len(term)
                    for term in terms([axis for each in dimensions[start:stop] for axis in each])
                )
                if joined and (size > LARGEST_JOINT_AXIS or twice):
                    for atom, outer, first, _ in _joints(dimensions, inside):
                        if start <= first < stop:
                            inside[atom].discard(outer)
                            changed = True


def _spans(
    shape: Sequence[int], dimensions: Dimensions, inside: Mapping[Axis, set[Axis]]
) -> list[tuple[int, int, bool]]:
    """Returns the axes in groups that must be seen as one: (start, stop, whether there was a reason to join)."""
    spans = [[axis, axis + 1, 0] for axis in range(len(dimensions))]
    pairs = [(first, last) for _, _, first, last in _joints(dimensions, inside)]
    sliced = [
        i
        for i, each in enumerate(dimensions)
        if math.prod(axis.root.size for axis in each) != max(shape[i], 1)
    ]
    for first, last in [*pairs, *([(sliced[0], sliced[-1])] if sliced else [])]:
        touched = [span for span in spans if span[0] <= last and span[1] > first]
        merged = [min(span[0] for span in touched), max(span[1] for span in touched), 1]
        spans = sorted([span for span in spans if span not in touched] + [merged])
    return [(start, stop, bool(joined)) for start, stop, joined in spans]


def _assemble(
    run: TracedRun, inside: Mapping[Axis, set[Axis]], level: str, kinds: Mapping[Axis, str]
) -> PermutationSpec:
    """Numbers the atoms and writes down the blocks; ``kinds`` says in words what an atom is, where that is known."""
    numbers: dict[Axis, int] = {}
    blocks: dict[str, tuple[Block, ...]] = {}
    places: dict[Axis, list[tuple[str, int]]] = {}
    for name, dimensions in run.parameters.items():
        shape = tuple(run.tensors[name].shape)
        found = []
        for start, stop, _ in _spans(shape, dimensions, inside):
            row = [axis for each in dimensions[start:stop] for axis in each]
            moving = [atom for atom in atoms(row) if atom in inside]
            if moving:
                terms_ = [
                    Term(
                        offset,
                        tuple(
                            (numbers.setdefault(atom, len(numbers)), step) for atom, step in grid
                        ),
                    )
                    for offset, grid in grids(row)
                ]
                found.append(Block(start, stop, math.prod(shape[start:stop]), tuple(terms_)))
                for atom in moving:
                    places.setdefault(atom, []).append((name, start))
        if found:
            blocks[name] = tuple(found)
    outside = {each for atom, outer in inside.items() for each in outer if atom in places}
    names: dict[Axis, str] = {}
    used: Counter[str] = Counter()
    for atom, where in places.items():
        name = _name([name for name, _ in where], run.tensors, kinds.get(atom), atom in outside)
        used[name] += 1
        names[atom] = name if used[name] == 1 else f"{name} ({used[name]})"
    for atom in [each for outer in inside.values() for each in outer]:
        numbers.setdefault(atom, len(numbers))
    factors = tuple(
        Factor(
            names.get(atom, "fixed"),
            atom.size,
            tuple(sorted(numbers[outer] for outer in inside.get(atom, ()))),
            atom in inside,
        )
        for atom in numbers
    )
    unreached = [name for name in run.unreached() if name not in blocks]
    stay = {
        name: dimensions
        for name, dimensions in run.parameters.items()
        if name in run.parameter_names - set(blocks)
    }
    return PermutationSpec(
        factors=factors,
        blocks=blocks,
        shapes={name: tuple(run.tensors[name].shape) for name in blocks},
        buffers=tuple(name for name in blocks if name not in run.parameter_names),
        unmoved={
            name: tensor.numel()
            for name, tensor in run.tensors.items()
            if name in run.parameter_names and name not in blocks
        },
        aliases={name: tuple(run.aliases[name]) for name in blocks if name in run.aliases},
        unknown=dict(run.unknown),
        unreached=tuple(unreached),
        causes={
            name: "not reached" if name in unreached else _causes(dimensions)
            for name, dimensions in stay.items()
        },
        level=level,
    )


def _causes(dimensions: Dimensions) -> str:
    """Says why the axes of a tensor stay, each cause once."""
    given = {
        axis: list(
            dict.fromkeys(
                atom.cause or "a constant or an input" for atom in atoms(each) if atom.size > 1
            )
        )
        for axis, each in enumerate(dimensions)
    }
    return "; ".join(
        f"axis {axis}: {', '.join(causes)}" for axis, causes in given.items() if causes
    )


def _name(
    names: Sequence[str], tensors: Mapping[str, torch.Tensor], kind: str | None, has_inside: bool
) -> str:
    """Returns in plain words what is permuted, given the tensors that it moves and whether others are inside of it."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    place = ".".join(
        parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, levels)
    )
    if kind is None:
        kind = "channels" if tensors[names[0]].dim() > 2 else "units"
        name = f"{kind} of {names[0].rpartition('.')[0] or names[0]}"
    else:
        whole = "" if kind == "residual stream" else " of the network"
        name = kind + (f" of {place}" if place else whole)
    return f"groups in {name}" if has_inside and kind != "heads" else name
