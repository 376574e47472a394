"""The algebra of axes, which says what coordinates of different tensors are one and the same.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar

_CAUSE: ContextVar[Callable[[], str]] = ContextVar("CAUSE", default=str)


@contextlib.contextmanager
def because(cause: str | Callable[[], str]) -> Iterator[None]:
    """Names the cause of all that is fixed inside; a function is asked only if something is."""
    before = _CAUSE.set(cause if callable(cause) else lambda: cause)
    try:
        yield
    finally:
        _CAUSE.reset(before)


def current_cause() -> str:
    """Returns what is being done now, in words."""
    return _CAUSE.get()()


Factors = list["Axis"]
"""One axis of a tensor as a row of factors, major first; empty for size 1."""

Axes = list[Factors]
"""The axes of a tensor, in order."""


@dataclasses.dataclass(eq=False, slots=True)
class Axis:
    """An axis or a part of one.

    Attributes:
        size: Its number of coordinates.
        fixed: Of an atom, whether something tells its coordinates apart by position.
        kind: ``"atom"``, ``"product"`` or ``"sum"``.
        parts: The factors of a product, the summands of a sum.
        cause: Why it is fixed, in words; empty for inputs and constants.
        mixed: Whether an operation that mixes positions has made it, such as a reversal. Then its
            position i says nothing about position i of any other fixed axis.
        order: Axes made earlier have smaller numbers.
    """

    size: int
    fixed: bool = False
    kind: str = "atom"
    parts: list[Axis] = dataclasses.field(default_factory=list)
    cause: str = ""
    mixed: bool = False
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

    def split(self, kind: str, sizes: Iterable[int]) -> list[Axis]:
        """Makes an atom a product or a sum of axes of these sizes, which are fixed if it was."""
        self.kind = kind
        self.parts = [
            Axis(size, fixed=self.fixed, cause=self.cause, mixed=self.mixed) for size in sizes
        ]
        return self.parts


class IncompatibleError(Exception):
    """An operation that the algebra cannot express; whoever catches it fixes what it touched."""


def fixed_factors(size: int) -> Factors:
    """Returns the factors of an axis that an operation has made by position: it is fixed."""
    return [Axis(size, fixed=True, mixed=True)] if size > 1 else []


def fixed_axes(sizes: Iterable[int]) -> Axes:
    """Returns the axes of a tensor that nothing may permute."""
    return [fixed_factors(size) for size in sizes]


def constant_axes(sizes: Iterable[int]) -> Axes:
    """Returns the axes of an input or a constant: fixed, and what meets them has their places."""
    return [[Axis(size, fixed=True)] if size > 1 else [] for size in sizes]


def free_factors(size: int) -> Factors:
    """Returns the factors of an axis along which all is equal, so any permutation will do."""
    return [Axis(size)] if size > 1 else []


def fix_all(*rows: Iterable[Axis], cause: str = "") -> None:
    """Lets nothing permute these axes, nor any part of them."""
    for row in rows:
        for atom in atoms(row):
            if not atom.fixed:
                atom.fixed, atom.cause = True, cause or current_cause()


def atoms(axes: Iterable[Axis]) -> list[Axis]:
    """Returns the atoms that these axes are made of, in order."""
    result: list[Axis] = []
    for axis in axes:
        axis = axis.root
        result += [axis] if axis.kind == "atom" else atoms(axis.parts)
    return result


def factors(axes: Iterable[Axis]) -> Factors:
    """Opens products and drops sizes of one."""
    result: Factors = []
    for axis in axes:
        axis = axis.root
        if axis.kind == "product":
            result += factors(axis.parts)
        elif axis.size > 1:
            result.append(axis)
    return result


def size_of(axes: Iterable[Axis]) -> int:
    """Returns the size of a product of axes."""
    size = 1
    for axis in axes:
        size *= axis.size
    return size


def product(axes: Sequence[Axis]) -> Axis:
    """Returns one axis for a row of factors; of size 1 for an empty row."""
    axes = factors(axes) or [Axis(1)]
    if len(axes) == 1:
        return axes[0]
    return Axis(size_of(axes), kind="product", parts=axes)


def summands(axis: Axis) -> list[Axis]:
    """Opens sums."""
    axis = axis.root
    if axis.kind != "sum":
        return [axis]
    return [summand for part in axis.parts for summand in summands(part)]


def concatenation(parts: Sequence[Axis]) -> Axis:
    """Returns one axis for several laid end to end."""
    if len(parts) == 1:
        return parts[0]
    return Axis(sum(part.size for part in parts), kind="sum", parts=list(parts))


def split_sum(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Sees the axis as a concatenation; returns one part per size."""
    axis = axis.root
    if len(sizes) == 1:
        return [axis]
    if axis.kind == "atom":
        return axis.split("sum", sizes)
    if axis.kind == "product":
        fix_all([axis])
        return [Axis(size, fixed=True) for size in sizes]
    waiting = deque(summands(axis))
    result = []
    for size in sizes:
        taken: list[Axis] = []
        while (missing := size - sum(part.size for part in taken)) > 0:
            part = waiting.popleft()
            if part.size > missing:
                part, rest_of_it = split_sum(part, [missing, part.size - missing])
                waiting.appendleft(rest_of_it)
            taken.append(part)
        result.append(concatenation(taken))
    axis.parts = list(result)
    return result


def regroup(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Factors]:
    """Sees a row of factors with other sizes, as ``view`` does; returns the factors of each size.

    Atoms are split where needed. Where sizes do not divide, the factors concerned are fixed, and
    only they.
    """
    result: list[Factors] = []
    waiting = deque(factors(axes))
    remaining = deque(sizes)
    while remaining:
        # The shortest stretch at whose ends old and new boundaries coincide.
        inside: Factors = []
        outside = [remaining.popleft()]
        while (have := size_of(inside)) != (want := math.prod(outside)):
            if have < want:
                inside.append(waiting.popleft())
            else:
                outside.append(remaining.popleft())
        try:
            result += _regroup_stretch(inside, outside)
        except IncompatibleError:
            fix_all(inside)
            result += fixed_axes(outside)
    return result


def _regroup_stretch(inside: Factors, outside: Sequence[int]) -> list[Factors]:
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
                major, minor = axis.split("product", (left, axis.size // left))
                taken.append(major)
                waiting.appendleft(minor)
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
    both = atoms([one, other])
    if any(atom.mixed for atom in both) and all(atom.fixed for atom in both):
        return  # both stay, and position i of one is not position i of the other
    if other.kind != "atom" and one.kind == "atom":
        one, other = other, one
    if other.kind == "atom":
        if other.fixed:
            fix_all([one], cause=other.cause)
            for atom in atoms([one]):
                atom.mixed |= other.mixed
                atom.cause = atom.cause or other.cause
        elif one.kind == "atom" and one.fixed:
            one.cause = one.cause or current_cause()
        elif one.kind == "atom" and other.order < one.order:
            one, other = other, one  # the older one stays: names and nesting follow it
        other._same_as = one
    elif one.kind == other.kind == "product":
        unify_all(one.parts, other.parts)
    else:
        one, other = (one, other) if one.kind == "sum" else (other, one)
        parts = summands(one)
        for part, match in zip(parts, split_sum(other, [part.size for part in parts]), strict=True):
            unify(part, match)


def unify_all(ones: Iterable[Axis], others: Iterable[Axis]) -> None:
    """Makes two rows of factors of the same size the same, refining both to common factors."""
    left, right = factors(ones), factors(others)
    if left == right:
        return
    if size_of(left) != size_of(right):
        fix_all(left, right)
        return
    for row, other in zip(regroup(left, [axis.size for axis in right]), right, strict=True):
        unify(product(row), other)


def unify_axes(ones: Iterable[Factors], others: Iterable[Factors]) -> None:
    """Makes the axes of two tensors of equal shape the same."""
    for one, other in zip(ones, others, strict=True):
        unify_all(one, other)


def cut_in_groups(row: Factors, step: int) -> None:
    """Cuts an axis whose neighbours were normalised together, in groups of a size.

    The groups change places, and so do the channels of one group. Of a concatenation the parts that
    do not consist of whole groups, and do not lie in one, stay.
    """
    start = 0
    for part in summands(product(row)):
        inside = start % step
        if inside == 0 and part.size % step == 0:
            regroup([part], [part.size // step, step])
        elif inside + part.size > step:
            fix_all([part], cause="normalised in groups that split what belongs together")
        start += part.size


Grid = tuple[int, tuple[tuple[Axis, int], ...]]
"""An offset and the stride of every atom: place i of one, j of the next is offset + i·s + j·t."""


def grids(axes: Sequence[Axis], kind: str = "product") -> list[Grid]:
    """Returns where the entries of a product or a sum of axes lie.

    A product of atoms is one grid; a sum has those of each of its parts.
    """
    result: list[Grid] = [] if kind == "sum" else [(0, ())]
    start, stride = 0, size_of(axes)
    for axis in (axis.root for axis in axes):
        inside: list[Grid] = (
            [(0, ((axis, 1),))] if axis.kind == "atom" else grids(axis.parts, axis.kind)
        )
        if kind == "sum":
            result += [(start + offset, grid) for offset, grid in inside]
            start += axis.size
        else:
            stride //= axis.size
            result = [
                (offset + more * stride, (*grid, *[(atom, step * stride) for atom, step in tail]))
                for offset, grid in result
                for more, tail in inside
            ]
    return result


def terms(axes: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """Returns the alternatives of an axis, each a product of atoms: a sum is one part at a time."""
    return [tuple(atom for atom, _ in grid) for _, grid in grids(axes)]
