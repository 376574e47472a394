"""Axes that hold different things side by side: queries, keys and values in one matrix, or the matrices of several experts.

What a run has met of them is known to the next one, which labels them apart from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from opacus_shuffle.permutation.finding.labels import (
    Axis,
    Dimensions,
    Factors,
    concatenation,
    product,
)

Packing = tuple[int, int, int, int]
"""A piece of an axis laid out as (offset, majors, packed parts, size of a part): query, key and value in one matrix of 3d rows
are (0, 1, 3, d).
"""

LARGEST_JOINT_AXIS = 2**24
"""The largest size at which several axes are seen as one: their index vector needs 8 bytes for each entry."""

Packings = Mapping[tuple[str, int], Collection[Packing]]
"""What is packed, by tensor and axis."""


@dataclasses.dataclass
class Stacked:
    """Labels of a tensor whose slices along one dimension are different things, as query, key and value after ``view``."""

    marker: Axis  # the dimension's own atom, fixed
    alternatives: list[
        Dimensions
    ]  # the labels of each slice, of full rank, with the marker in place of the dimension


def first_labels(name: str, shape: tuple[int, ...], packings: Packings) -> Dimensions:
    """Returns the labels that a tensor's axes begin with: free atoms, or packed parts."""
    return [_first_label(size, packings.get((name, axis), ())) for axis, size in enumerate(shape)]


def _first_label(size: int, packings: Collection[Packing]) -> Factors:
    """Returns the label that an axis begins with: a free atom, or packed parts."""
    if size < 2:
        return []
    pieces: list[Axis] = []
    place = 0
    for offset, major, count, minor in sorted(packings):
        if offset < place:  # two runs saw it differently: what came first holds
            continue
        parts = concatenation([Axis(minor) for _ in range(count)])
        pieces += [Axis(offset - place)] if offset > place else []
        pieces.append(product([Axis(major), parts]) if major > 1 else parts)
        place = offset + major * count * minor
    return [concatenation([*pieces, Axis(size - place)] if size > place else pieces)]
