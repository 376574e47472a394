"""Axes that hold different things side by side: queries, keys and values in one matrix, or the matrices of several experts.

What a run has met of them is known to the next one, which labels them apart from the start.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from opacus_shuffle.permutation.finding.labels import Axis, Dimensions, Factors, atoms, concatenation, factors, product, terms

Packing = tuple[int, int, int, int]
"""A piece of an axis laid out as (offset, majors, packed parts, size of a part): query, key and value in one matrix of 3d rows
are (0, 1, 3, d)."""

LARGEST_JOINT_AXIS = 2**24
"""The largest size at which several axes are seen as one: their index vector needs 8 bytes for each entry."""

MOST_SLICES = 64
"""The largest number of slices along an axis that get labels of their own."""

Packings = Mapping[tuple[str, int], Collection[Packing]]
"""What is packed, by tensor and axis."""


@dataclasses.dataclass
class Stacked:
    """Labels of a tensor whose slices along one dimension are different things, as query, key and value after ``view``."""

    marker: Axis  # the dimension's own atom, fixed
    alternatives: list[Dimensions]  # the labels of each slice, of full rank, with the marker in place of the dimension


def slices(count: int) -> Packing:
    """Returns the packing of an axis whose slices are different things."""
    return 0, 1, count, 1


def first_labels(name: str, shape: tuple[int, ...], packings: Packings) -> Dimensions | Stacked:
    """Returns the labels that a tensor's axes begin with: free atoms, packed parts, or slices each with its own."""

    def labels() -> Dimensions:
        return [_first_label(size, packings.get((name, axis), ())) for axis, size in enumerate(shape)]

    sliced = [axis for axis, size in enumerate(shape) if slices(size) in packings.get((name, axis), ())]
    if not sliced:
        return labels()
    axis = sliced[0]
    marker = Axis(shape[axis], fixed=True, cause="its slices are used one by one")
    return Stacked(marker, [[*own[:axis], [marker], *own[axis + 1 :]] for own in (labels() for _ in range(shape[axis]))])


def _first_label(size: int, packings: Collection[Packing]) -> Factors:
    """Returns the label that an axis begins with: a free atom, or packed parts."""
    if size < 2:
        return []
    pieces: list[Axis] = []
    place = 0
    for offset, major, count, minor in sorted(set(packings) - {slices(size)}):
        if offset < place:  # two runs saw it differently: what came first holds
            continue
        parts = concatenation([Axis(minor) for _ in range(count)])
        pieces += [Axis(offset - place)] if offset > place else []
        pieces.append(product([Axis(major), parts]) if major > 1 else parts)
        place = offset + major * count * minor
    return [concatenation([*pieces, Axis(size - place)] if size > place else pieces)]


def end_to_end(labels: Stacked) -> Dimensions | None:
    """Returns the labels of slices end to end along the last dimension in which they differ; the others have none.

    None if they differ in a dimension before the one that they are slices of, if that would be more entries than
    :data:`LARGEST_JOINT_AXIS`, or if one atom would be there twice.
    """
    first, *rest = labels.alternatives
    place = first.index([labels.marker])
    differ = [i for i, each in enumerate(first) if any(atoms(each) != atoms(other[i]) for other in rest)]
    if not differ:
        return first
    stop = differ[-1] + 1
    rows = [factors([axis for each in slice_[place + 1 : stop] for axis in each]) for slice_ in labels.alternatives]
    size = labels.marker.size * math.prod(axis.size for axis in rows[0])
    if differ[0] < place or size > LARGEST_JOINT_AXIS or any(len(set(term)) < len(term) for row in rows for term in terms(row)):
        return None
    empty: Dimensions = [[] for _ in range(place, stop - 1)]
    return [*first[:place], *empty, [concatenation([product(row) for row in rows])], *first[stop:]]
