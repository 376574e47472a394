"""Labels of axes, which say what coordinates of different tensors are one and the same.

An axis is an *atom*, a product of axes (a view split it, major factor first) or a sum of axes (a
concatenation). Atoms that meet in one operation become one; an atom that an operation tells apart
by position is *fixed*. What is left free at the end may be permuted.

>>> units = Axis(6)
>>> heads, width = regroup([units], [2, 3])
>>> unify_all(heads, [Axis(2, fixed=True)])
>>> [atom.fixed for atom in atoms([units])]
[True, False]
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar

CAUSE: ContextVar[str] = ContextVar("CAUSE", default="")
"""What is being labelled, in words: the cause of what is fixed meanwhile."""


@contextlib.contextmanager
def because(cause: str) -> Iterator[None]:
    """Says what the cause of all that is fixed inside is."""
    before = CAUSE.set(cause)
    try:
        yield
    finally:
        CAUSE.reset(before)


Factors = list["Axis"]
"""One dimension of a tensor: its factors, major first; empty for size 1."""

Dimensions = list[Factors]
"""One entry per dimension of a tensor."""


@dataclasses.dataclass(eq=False, slots=True)
class Axis:
    """An axis or a part of one: an atom, a product or a sum, as ``kind`` says."""

    size: int
    fixed: bool = False
    kind: str = "atom"
    parts: list[Axis] = dataclasses.field(default_factory=list)
    cause: str = ""  # of its being fixed
    order: int = dataclasses.field(default_factory=itertools.count().__next__, init=False)
    _same_as: Axis | None = dataclasses.field(default=None, init=False)

    @property
    def root(self) -> Axis:
        """The axis that stands for all that were found to be the same."""
        node = self
        while node._same_as is not None:
            node = node._same_as
        if self is not node:
            self._same_as = node
        return node


class IncompatibleError(Exception):
    """An operation that the algebra cannot express; whoever catches it fixes what the operation touched."""


def fixed_factors(size: int) -> Factors:
    """Returns the factors of a dimension that nothing may permute."""
    return [Axis(size, fixed=True)] if size > 1 else []


def fixed_dimensions(sizes: Iterable[int]) -> Dimensions:
    """Returns the labels of a tensor that nothing may permute."""
    return [fixed_factors(size) for size in sizes]


def free_factors(size: int) -> Factors:
    """Returns the factors of a dimension along which everything is equal, so that any permutation changes nothing."""
    return [Axis(size)] if size > 1 else []


def fix_all(*dimensions: Iterable[Axis], cause: str = "") -> None:
    """Lets nothing permute these dimensions, nor any part of them: for this cause, or for :data:`CAUSE`."""
    for axes in dimensions:
        for atom in atoms(axes):
            atom.fixed, atom.cause = True, atom.cause or cause or CAUSE.get()


def atoms(axes: Iterable[Axis]) -> list[Axis]:
    """Returns the atoms that these axes are made of, in order."""
    found: list[Axis] = []
    for axis in axes:
        axis = axis.root
        found += [axis] if axis.kind == "atom" else atoms(axis.parts)
    return found


def only(axes: Iterable[Axis], kept: Collection[Axis]) -> Factors:
    """Returns what is left of these axes if only some atoms are looked at."""
    found: Factors = []
    for axis in (each.root for each in axes):
        if axis.kind == "sum":
            found.append(concatenation([product(only([part], kept)) for part in axis.parts]))
        elif axis.kind == "product":
            found += only(axis.parts, kept)
        elif axis in kept:
            found.append(axis)
    return found


def factors(axes: Iterable[Axis]) -> Factors:
    """Opens products and drops sizes of one."""
    found: Factors = []
    for axis in axes:
        axis = axis.root
        if axis.kind == "product":
            found += factors(axis.parts)
        elif axis.size > 1:
            found.append(axis)
    return found


def size_of(axes: Iterable[Axis]) -> int:
    """Returns the size of these axes side by side."""
    return math.prod(axis.root.size for axis in axes)


def product(axes: Sequence[Axis]) -> Axis:
    """Returns one axis for a sequence of factors."""
    axes = factors(axes)
    if len(axes) == 1:
        return axes[0]
    return Axis(math.prod(axis.size for axis in axes), kind="product", parts=axes)


def summands(axis: Axis) -> list[Axis]:
    """Opens a sum."""
    axis = axis.root
    return (
        [summand for part in axis.parts for summand in summands(part)]
        if axis.kind == "sum"
        else [axis]
    )


def concatenation(parts: Sequence[Axis]) -> Axis:
    """Returns one axis for several laid end to end."""
    if len(parts) == 1:
        return parts[0]
    return Axis(sum(part.size for part in parts), kind="sum", parts=list(parts))


def split_sum(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Sees the axis as a concatenation, one part per size."""
    axis = axis.root
    if axis.kind != "sum" and len(sizes) == 1:
        return [axis]
    if axis.kind == "atom":
        axis.kind, axis.parts = (
            "sum",
            [Axis(size, fixed=axis.fixed, cause=axis.cause) for size in sizes],
        )
        return axis.parts
    if axis.kind == "product":
        fix_all([axis])
        return [Axis(size, fixed=True) for size in sizes]
    waiting = deque(summands(axis))
    found = []
    for size in sizes:
        taken: list[Axis] = []
        while (missing := size - sum(part.size for part in taken)) > 0:
            part = waiting.popleft()
            if part.size <= missing:
                taken.append(part)
            else:
                first, rest = split_sum(part, [missing, part.size - missing])
                taken.append(first)
                waiting.appendleft(rest)
        found.append(concatenation(taken))
    axis.parts = list(found)
    return found


def regroup(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Factors]:
    """Sees a row of factors with other sizes, as ``view`` does; returns the factors of each size, atoms split where needed.

    Where sizes do not divide, the factors concerned are fixed, and only they.
    """
    result: list[Factors] = []
    waiting = deque(factors(axes))
    remaining = deque(sizes)
    while remaining:
        inside: Factors = []
        outside = [remaining.popleft()]
        while (have := math.prod(axis.size for axis in inside)) != (want := math.prod(outside)):
            if have < want:
                inside.append(waiting.popleft())
            else:
                outside.append(remaining.popleft())
        try:
            result += _regroup_block(inside, outside)
        except IncompatibleError:
            fix_all(inside)
            result += [fixed_factors(size) for size in outside]
    return result


def _regroup_block(inside: Factors, outside: Sequence[int]) -> list[Factors]:
    """Regroups factors between two places where old and new boundaries coincide."""
    waiting = deque(inside)
    result = []
    for size in outside:
        taken: Factors = []
        left = size
        while left > 1:
            axis = waiting.popleft().root
            if axis.kind == "product":
                waiting.extendleft(reversed(factors(axis.parts)))
            elif left % axis.size == 0:
                taken.append(axis)
                left //= axis.size
            elif axis.size % left == 0 and axis.kind == "atom":
                sizes = (left, axis.size // left)
                axis.kind, axis.parts = (
                    "product",
                    [Axis(size, fixed=axis.fixed, cause=axis.cause) for size in sizes],
                )
                taken.append(axis.parts[0])
                waiting.appendleft(axis.parts[1])
                left = 1
            else:
                raise IncompatibleError
        result.append(taken)
    return result


def unify(one: Axis, other: Axis) -> None:
    """Makes the coordinates of two axes the same: whatever permutes one permutes the other."""
    one, other = one.root, other.root
    if one is other:
        return
    if one.size != other.size:
        raise IncompatibleError
    if other.kind != "atom" and one.kind == "atom":
        one, other = other, one
    if other.kind == "atom":
        if other.fixed:
            fix_all([one], cause=other.cause)
        elif one.fixed:
            one.cause = one.cause or CAUSE.get()
        elif one.kind == "atom" and other.order < one.order and not one.fixed:
            one, other = other, one  # the older one stays: names and nesting follow it
        other._same_as = one
    elif one.kind == other.kind == "product":
        unify_all(one.parts, other.parts)
    elif one.kind == other.kind == "sum":
        parts = summands(one)
        for part, match in zip(parts, split_sum(other, [part.size for part in parts]), strict=True):
            unify(part, match)
    else:
        fix_all([one, other])


def unify_all(ones: Iterable[Axis], others: Iterable[Axis]) -> None:
    """Makes two rows of factors of the same total size the same, refining both to common factors."""
    left, right = factors(ones), factors(others)
    if math.prod(axis.size for axis in left) != math.prod(axis.size for axis in right):
        fix_all(left, right)
        return
    for row, other in zip(regroup(left, [axis.size for axis in right]), right, strict=True):
        unify(product(row), other)


def unify_dimensions(ones: Iterable[Factors], others: Iterable[Factors]) -> None:
    """Makes the dimensions of two tensors of equal shape the same."""
    for one, other in zip(ones, others, strict=True):
        unify_all(one, other)


def grids(
    axes: Sequence[Axis], kind: str = "product"
) -> list[tuple[int, tuple[tuple[Axis, int], ...]]]:
    """Returns where the entries of a product or a sum of axes lie: grids, each its offset and the stride of every atom.

    The entry of a grid at place i of one atom, j of the next is number offset + i·stride +
    j·stride′. A product of atoms is one grid; a sum has those of each of its parts.
    """
    found: list[tuple[int, tuple[tuple[Axis, int], ...]]] = [] if kind == "sum" else [(0, ())]
    start, stride = 0, math.prod(axis.root.size for axis in axes)
    for axis in (each.root for each in axes):
        inside = [(0, ((axis, 1),))] if axis.kind == "atom" else grids(axis.parts, axis.kind)
        if kind == "sum":
            found += [(start + offset, grid) for offset, grid in inside]
            start += axis.size
        else:
            stride //= axis.size
            found = [
                (offset + more * stride, (*grid, *[(atom, step * stride) for atom, step in tail]))
                for offset, grid in found
                for more, tail in inside
            ]
    return found


def terms(axes: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """Returns the alternatives of a dimension, each a product of atoms: a sum is one of its parts at a time."""
    return [tuple(atom for atom, _ in grid) for _, grid in grids(axes)]
