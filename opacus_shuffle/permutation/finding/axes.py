"""The algebra of axes: which coordinates of different tensors are the same.

An axis is an *atom*, a product of axes (a view split it, major factor first) or a sum of axes (a
concatenation). Atoms that an operation combines become one. An atom whose coordinates an operation
distinguishes by position is *fixed*. Atoms that are free at the end may be permuted.

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
def fixing_cause(cause: str | Callable[[], str]) -> Iterator[None]:
    """Sets the cause of all axes that are fixed inside; a function is called only if one is."""
    before = _CAUSE.set(cause if callable(cause) else lambda: cause)
    try:
        yield
    finally:
        _CAUSE.reset(before)


def current_cause() -> str:
    """Returns the current cause of fixing, in words."""
    return _CAUSE.get()()


Factors = list["Axis"]
"""One axis of a tensor as a row of factors, major first; empty for size 1."""

Axes = list[Factors]
"""The axes of a tensor, in order."""


@dataclasses.dataclass(eq=False, slots=True)
class Axis:
    """An axis, or a factor or summand of one.

    Attributes:
        size: Its number of coordinates.
        fixed: Of an atom, whether an operation distinguishes its coordinates by position.
        form: ``"atom"``, ``"product"`` or ``"sum"``.
        components: The factors of a product, or the summands of a sum.
        cause: Why it is fixed, in words; empty for inputs and constants.
        mixed: Whether it is the result of an operation that mixes positions, such as a reversal.
            Then its position i is unrelated to position i of any other fixed axis.
        order: Serial number; older axes have smaller ones.
    """

    size: int
    fixed: bool = False
    form: str = "atom"
    components: list[Axis] = dataclasses.field(default_factory=list)
    cause: str = ""
    mixed: bool = False
    order: int = dataclasses.field(default_factory=itertools.count().__next__, init=False)
    _same_as: Axis | None = dataclasses.field(default=None, init=False)

    @property
    def root(self) -> Axis:
        """The representative of all axes that were unified with this one."""
        node = self
        while node._same_as is not None:
            node = node._same_as
        if self is not node:
            self._same_as = node
        return node

    def split(self, form: str, sizes: Iterable[int]) -> list[Axis]:
        """Turns an atom into a product or a sum of axes of these sizes, fixed if it was fixed."""
        self.form = form
        self.components = [
            Axis(size, fixed=self.fixed, cause=self.cause, mixed=self.mixed) for size in sizes
        ]
        return self.components


class IncompatibleError(Exception):
    """Raised for an operation that the algebra cannot express; its axes must be fixed."""


def fixed_factors(size: int) -> Factors:
    """Returns the factors of a fixed axis that an operation created by position."""
    return [Axis(size, fixed=True, mixed=True)] if size > 1 else []


def fixed_axes(sizes: Iterable[int]) -> Axes:
    """Returns the axes of a tensor that must not be permuted."""
    return [fixed_factors(size) for size in sizes]


def constant_axes(sizes: Iterable[int]) -> Axes:
    """Returns the axes of an input or a constant: fixed, with comparable positions."""
    return [[Axis(size, fixed=True)] if size > 1 else [] for size in sizes]


def free_factors(size: int) -> Factors:
    """Returns the factors of an axis along which all entries are alike."""
    return [Axis(size)] if size > 1 else []


def fix_all(*rows: Iterable[Axis], cause: str = "") -> None:
    """Fixes all atoms of these axes."""
    for row in rows:
        for atom in atoms(row):
            if not atom.fixed:
                atom.fixed, atom.cause = True, cause or current_cause()


def atoms(axes: Iterable[Axis]) -> list[Axis]:
    """Returns the atoms of these axes, in order."""
    result: list[Axis] = []
    for axis in axes:
        axis = axis.root
        result += [axis] if axis.form == "atom" else atoms(axis.components)
    return result


def factors(axes: Iterable[Axis]) -> Factors:
    """Returns a row of axes with products expanded, and axes of size 1 dropped."""
    result: Factors = []
    for axis in axes:
        axis = axis.root
        if axis.form == "product":
            result += factors(axis.components)
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
    """Returns the product of a row of factors; an axis of size 1 for an empty row."""
    axes = factors(axes) or [Axis(1)]
    if len(axes) == 1:
        return axes[0]
    return Axis(size_of(axes), form="product", components=axes)


def summands(axis: Axis) -> list[Axis]:
    """Returns the summands of an axis, with nested sums expanded."""
    axis = axis.root
    if axis.form != "sum":
        return [axis]
    return [summand for part in axis.components for summand in summands(part)]


def concatenation(parts: Sequence[Axis]) -> Axis:
    """Returns the sum of several axes."""
    if len(parts) == 1:
        return parts[0]
    return Axis(sum(part.size for part in parts), form="sum", components=list(parts))


def split_concatenation(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Splits an axis as a concatenation; returns one part for each size."""
    axis = axis.root
    if len(sizes) == 1:
        return [axis]
    if axis.form == "atom":
        return axis.split("sum", sizes)
    if axis.form == "product":
        fix_all([axis])
        return [Axis(size, fixed=True) for size in sizes]
    waiting = deque(summands(axis))
    result = []
    for size in sizes:
        taken: list[Axis] = []
        while (missing := size - sum(part.size for part in taken)) > 0:
            part = waiting.popleft()
            if part.size > missing:
                part, rest_of_it = split_concatenation(part, [missing, part.size - missing])
                waiting.appendleft(rest_of_it)
            taken.append(part)
        result.append(concatenation(taken))
    axis.components = list(result)
    return result


def regroup(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Factors]:
    """Regroups a row of factors to other sizes, as ``view`` does; returns the factors of each size.

    Atoms are split where needed. Factors whose sizes do not divide are fixed, and no others.
    """
    result: list[Factors] = []
    waiting = deque(factors(axes))
    remaining = deque(sizes)
    while remaining:
        # The shortest stretch between two boundaries that are both old and new.
        inside: Factors = []
        outside = [remaining.popleft()]
        while (have := size_of(inside)) != (want := math.prod(outside)):
            if have < want:
                inside.append(waiting.popleft())
            else:
                outside.append(remaining.popleft())
        try:
            # Most stretches are a whole axis, which needs no other grouping.
            one = len(outside) == 1
            result += [factors(inside)] if one else _regroup_stretch(inside, outside)
        except IncompatibleError:
            fix_all(inside)
            result += fixed_axes(outside)
    return result


def _regroup_stretch(inside: Factors, outside: Sequence[int]) -> list[Factors]:
    waiting = deque(inside)
    result = []
    for size in outside:
        taken: Factors = []
        remaining_size = size
        while remaining_size > 1:
            axis = waiting.popleft().root
            if axis.form == "product":
                waiting.extendleft(reversed(factors(axis.components)))
            elif remaining_size % axis.size == 0:
                taken.append(axis)
                remaining_size //= axis.size
            elif axis.size % remaining_size == 0 and axis.form == "atom":
                major, minor = axis.split("product", (remaining_size, axis.size // remaining_size))
                taken.append(major)
                waiting.appendleft(minor)
                remaining_size = 1
            else:
                raise IncompatibleError
        result.append(taken)
    return result


def unify(one: Axis, other: Axis) -> None:
    """Makes two axes the same, so that one permutation moves both."""
    one, other = one.root, other.root
    if one is other:
        return
    if one.size != other.size:
        raise IncompatibleError
    both = atoms([one, other])
    if any(atom.mixed for atom in both) and all(atom.fixed for atom in both):
        return  # both are fixed, and their positions are unrelated
    if other.form != "atom" and one.form == "atom":
        one, other = other, one
    if other.form == "atom":
        if other.fixed:
            fix_all([one], cause=other.cause)
            for atom in atoms([one]):
                atom.mixed |= other.mixed
                atom.cause = atom.cause or other.cause
        elif one.form == "atom" and one.fixed:
            one.cause = one.cause or current_cause()
        elif one.form == "atom" and other.order < one.order:
            one, other = other, one  # the older one remains: names and nesting depend on it
        other._same_as = one
    elif one.form == other.form == "product":
        unify_all(one.components, other.components)
    else:
        one, other = (one, other) if one.form == "sum" else (other, one)
        parts = summands(one)
        for part, match in zip(
            parts, split_concatenation(other, [part.size for part in parts]), strict=True
        ):
            unify(part, match)


def unify_all(ones: Iterable[Axis], others: Iterable[Axis]) -> None:
    """Unifies two rows of factors of the same size, after splitting both into common factors."""
    left, right = factors(ones), factors(others)
    if left == right:
        return
    if size_of(left) != size_of(right):
        fix_all(left, right)
        return
    for row, other in zip(regroup(left, [axis.size for axis in right]), right, strict=True):
        unify(product(row), other)


def unify_axes(ones: Iterable[Factors], others: Iterable[Factors]) -> None:
    """Unifies the axes of two tensors of equal shape."""
    for one, other in zip(ones, others, strict=True):
        unify_all(one, other)


def cut_in_groups(row: Factors, step: int) -> None:
    """Splits an axis that was normalized in groups of ``step`` neighbours.

    The groups may be permuted, and the channels of a group. Parts of a concatenation that neither
    consist of whole groups nor lie in one are fixed.
    """
    start = 0
    for part in summands(product(row)):
        inside = start % step
        if inside == 0 and part.size % step == 0:
            regroup([part], [part.size // step, step])
        elif inside + part.size > step:
            fix_all([part], cause="normalized in groups that span parts of a concatenation")
        start += part.size


Grid = tuple[int, tuple[tuple[Axis, int], ...]]
"""An offset and the stride of each atom: the entry (i, j) lies at offset + i·s + j·t."""


def grids(axes: Sequence[Axis], form: str = "product") -> list[Grid]:
    """Returns the positions of the entries of a product or a sum of axes, as grids.

    A product of atoms is one grid. A sum has the grids of all its parts.
    """
    result: list[Grid] = [] if form == "sum" else [(0, ())]
    start, stride = 0, size_of(axes)
    for axis in (axis.root for axis in axes):
        inside: list[Grid] = (
            [(0, ((axis, 1),))] if axis.form == "atom" else grids(axis.components, axis.form)
        )
        if form == "sum":
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
    """Returns the alternatives of an axis, each a product of atoms: one for each part of a sum."""
    return [tuple(atom for atom, _ in grid) for _, grid in grids(axes)]
