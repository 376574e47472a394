"""Records the axes of all tensors of a network while it runs, and which of them are the same.

:mod:`~opacus_shuffle.permutation.finding.trace` reports every operation, and the rules of the
operations record here what they do to axes. An operation without a rule *fixes* every axis that it
touches. Nothing is permuted on a guess.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from opacus_shuffle.permutation.finding.axes import (
    Axes,
    Axis,
    Factors,
    IncompatibleError,
    atoms,
    concatenation,
    constant_axes,
    current_cause,
    factors,
    fix_all,
    fixed_axes,
    free_factors,
    product,
    size_of,
    summands,
    unify_axes,
)
from opacus_shuffle.permutation.network import movable_tensors, storage, tensors_in

VIEWS = frozenset(
    "aten." + name
    for name in [
        "alias",
        "clone",
        "detach",
        "expand",
        "permute",
        "repeat",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "_to_copy",
        "_unsafe_view",
        "unsafe_split",
    ]
)
"""Operations whose results consist of entries of their input, so are uniform if it is."""

SHAPES_ONLY = frozenset(
    [f"aten.{name}_like" for name in ("zeros", "ones", "full", "empty")]
    + [f"aten.new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided")]
)
"""Operations that read only the shape of their input."""

REPLACING = frozenset(["aten.set_", "aten.resize_", "aten.resize_as_"])
"""Operations that give a tensor other memory and another shape, so its record is void."""

RULE_ERRORS = (
    IncompatibleError,
    LookupError,
    ArithmeticError,
    ValueError,
    AttributeError,
    TypeError,
)
"""Errors that a rule raises if it does not fit the operation."""

MAX_FUSED = 16
"""Largest number of parts of an axis. An LSTM has four gates, attention three projections."""


FusedParts = tuple[int, int, int, int]
"""Parts of an axis as (offset, repetitions, parts, size of a part).

Queries, keys and values in one matrix of 3d rows are (0, 1, 3, d); three for each of 12 heads of
width 64 are (0, 12, 3, 64).
"""


@dataclasses.dataclass
class Slices:
    """Axes of a tensor with slices of different meaning, such as queries, keys and values.

    Attributes:
        marker: The axis along which the slices lie; it is fixed.
        of_each: The axes of the tensor at each slice, including the marker.
    """

    marker: Axis
    of_each: list[Axes]


def first_factors(size: int, fused: Collection[FusedParts]) -> Factors:
    """Returns an axis of a parameter before a run: an atom, or the parts found by earlier runs."""
    if size < 2:
        return []
    pieces: list[Axis] = []
    place = 0
    for offset, repetitions, count, part in sorted(fused):
        if offset < place:  # runs found different parts that overlap: the first ones are used
            continue
        parts = concatenation([Axis(part) for _ in range(count)])
        pieces += [Axis(offset - place)] if offset > place else []
        pieces.append(product([Axis(repetitions), parts]) if repetitions > 1 else parts)
        place = offset + repetitions * count * part
    return [concatenation([*pieces, Axis(size - place)] if size > place else pieces)]


@dataclasses.dataclass(slots=True)
class Call:
    """One call of an operation.

    Attributes:
        name: Such as ``"aten.add_"``.
        arguments: By their names in the operator's schema, defaults filled in.
        inputs, outputs: The tensors among its arguments and results.
        written: The inputs that it writes to.
        pointwise: Whether PyTorch marks it as working entry by entry.
    """

    name: str
    arguments: dict[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: list[torch.Tensor]
    pointwise: bool

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def out(self) -> torch.Tensor:
        """The first result."""
        return self.outputs[0]


def bind(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> Call:
    """Returns the call of an ATen operator with these tensors among its arguments and results."""
    name, defaults, mutable, pointwise = _schema_of(func)
    arguments = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    written = tensors_in(*[arguments[argument] for argument in mutable])
    return Call(name, arguments, [] if name in SHAPES_ONLY else inputs, outputs, written, pointwise)


@functools.cache
def _schema_of(func: Any) -> tuple[str, dict[str, Any], list[str], bool]:
    """Returns an operator's name, defaults, what it writes to, and whether it is pointwise."""
    arguments = func._schema.arguments
    defaults = {
        argument.name: argument.default_value if argument.has_default_value() else None
        for argument in arguments
    }
    mutable = [
        argument.name
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return str(func.overloadpacket), defaults, mutable, torch.Tag.pointwise in func.tags


@dataclasses.dataclass
class Findings:
    """Facts found by earlier runs that a run needs from its start.

    Attributes:
        fused: Axes that consist of several parts, by tensor and axis.
        written: Operations and lines that created uniform constants which are written to later.
    """

    fused: dict[tuple[str, int], set[FusedParts]] = dataclasses.field(default_factory=dict)
    written: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True)
class _TensorRecord:
    """The record of one tensor.

    Attributes:
        tensor: A weak reference, which shows whether the tensor is kept after the pass.
        axes: Its axes; None before their first use.
        uniform_cause: The operation and line that created it, if it is a constant of equal entries
            that nothing writes to. Each use gives it new free axes. Empty for other tensors.
        origins: The contractions from which it was computed, entry by entry.
        sources: The parameters and buffers of which it is a view or a copy.
    """

    tensor: weakref.ref[torch.Tensor]
    axes: Axes | Slices | None = None
    uniform_cause: str = ""
    origins: frozenset[int] = frozenset()
    sources: frozenset[str] = frozenset()


class TracedRun:
    """The record of all parameters, buffers and activations of a network, in one or several runs.

    Args:
        network: The network. Axes of its parameters and movable buffers begin as free atoms.
        findings: Facts found by earlier runs. This run adds its own.

    Attributes:
        tensors: Parameters, and persistent buffers that are not integers, by name (tied ones once).
        parameter_names: The names of the parameters among them.
        aliases: Other names of tied parameters, by the first one.
        occurrences: The axes of every activation, and of reduced tensors inside of operations.
        groups: Axes that were normalized in groups, each with the size of a group.
        streams: Axes along which results of different layers were added (skip connections).
        heads: Batch axes of products of two activations.
        contracted: Axes contracted in such products: query and key dimensions.
        unknown: Operations without a rule, with their numbers of calls.
        used: Parameters and buffers from which a result that is not empty was computed.
        outdated: Whether the run has found a fact that it needed from its start.
    """

    def __init__(self, network: nn.Module, findings: Findings | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.parameter_names = {name for name, _ in network.named_parameters()}
        self.aliases: dict[str, list[str]] = {}
        self.occurrences: dict[tuple[tuple[Axis, ...], ...], None] = {}
        self.groups: list[tuple[Factors, int]] = []
        self.streams: list[Axis] = []
        self.heads: list[Axis] = []
        self.contracted: list[Axis] = []
        self.unknown = Counter[str]()
        self.used: set[str] = set()
        self.outdated = False
        self._findings = Findings() if findings is None else findings
        self._by_id: dict[int, _TensorRecord] = {}
        self._uniform: list[_TensorRecord] = []  # constants of equal entries
        self._contractions = 0
        first_names: dict[int, str] = {}
        for name, tensor in movable_tensors(network):
            first = first_names.setdefault(id(tensor), name)
            if first != name:
                self.aliases.setdefault(first, []).append(name)
                continue
            self.tensors[name] = tensor
            record = self._record(tensor)
            record.sources = frozenset([name])
            record.axes = [
                first_factors(size, self._findings.fused.get((name, axis), ()))
                for axis, size in enumerate(tensor.shape)
            ]

    def axes_of_all(self) -> dict[str, Axes]:
        """Returns the axes of all parameters and moving buffers, by name."""
        return {name: self.axes(tensor) for name, tensor in self.tensors.items()}

    def atoms(self) -> list[Axis]:
        """Returns the atoms of which all parameters and movable buffers consist now."""
        return atoms(axis for _, row in self._rows() for axis in row)

    def apply(self, call: Call, rule: Callable[[TracedRun, Call], None] | None) -> None:
        """Applies the operation's rule; without one, fixes all axes that it touches."""
        if call.written:
            self._note_written(call.written)
        touched = [*call.inputs, *call.outputs]
        if call.name in REPLACING:
            self.forget(call.out)
        if not call.outputs:  # it reads a number, compares tensors, or writes to a list of them
            if len(call.inputs) > 1 or call.written:
                self.fix_unknown(touched, call.name)
            return
        operands = [self._record(tensor) for tensor in call.inputs]
        is_view = bool(operands) and call.name in VIEWS
        if is_view and operands[0].uniform_cause:
            for tensor in call.outputs:
                self._mark_uniform(tensor, operands[0].uniform_cause)
            return
        if is_view:
            for tensor in call.outputs:
                self._record(tensor).sources |= operands[0].sources
        elif any(tensor.numel() for tensor in call.outputs):
            self.used.update(*[record.sources for record in operands])
        contractions = self._contractions
        if rule is not None:
            try:
                rule(self, call)
            except RULE_ERRORS as error:
                self.fix_unknown(touched, f"{call.name} ({type(error).__name__})")
        elif all(self.is_constant(tensor) for tensor in call.inputs):
            for tensor in call.outputs:
                self.set(tensor, constant_axes(tensor.shape))
        else:
            self.fix_unknown(touched, call.name)
        results = [self._record(tensor) for tensor in call.outputs]
        if any(record.axes is None and not record.uniform_cause for record in results):
            self.fix_unknown(touched, call.name)
        if self._contractions == contractions:
            origins = frozenset[int]().union(*[record.origins for record in operands])
            for record in results:
                record.origins = origins

    def axes(self, tensor: torch.Tensor) -> Axes:
        """Returns a tensor's axes; slices of different meaning are unified."""
        axes = self.axes_or_slices(tensor)
        if isinstance(axes, Slices):
            first, *rest = axes.of_each
            for other in rest:
                unify_axes(first, other)
            self._record(tensor).axes = axes = first
        return axes

    def axes_or_slices(self, tensor: torch.Tensor) -> Axes | Slices:
        """Returns a tensor's axes; those of a tensor without a record are fixed constants."""
        record = self._record(tensor)
        if record.uniform_cause:
            return [free_factors(size) for size in tensor.shape]
        if record.axes is None:
            record.axes = self._adopt(tensor)
        return record.axes

    def set(self, tensor: torch.Tensor, axes: Axes | Slices) -> None:
        """Sets a result's axes; unifies them with earlier ones if it was written in place."""
        rows = axes.of_each if isinstance(axes, Slices) else [axes]
        for row in rows:
            if [size_of(factors_) for factors_ in row] != [max(size, 1) for size in tensor.shape]:
                raise IncompatibleError
            self.occur(row)
        record = self._record(tensor)
        if record.axes is None:
            record.axes = axes
        else:
            for row in rows:
                unify_axes(self.axes(tensor), row)

    def occur(self, axes: Axes) -> None:
        """Records that a tensor has these axes and no others."""
        self.occurrences[tuple(map(tuple, axes))] = None

    def reduced(self, axes: Axes, gone: Iterable[int]) -> Axes:
        """Records an intermediate result of an operation that lacks some axes, and returns it."""
        dropped = {dim % len(axes) for dim in gone}
        left: Axes = [[] if dim in dropped else row for dim, row in enumerate(axes)]
        self.occur(left)
        return left

    def mark_uniform(self, tensor: torch.Tensor) -> None:
        """Records a constant of equal entries, or of independent draws from one distribution."""
        uniform_cause = current_cause()
        if uniform_cause in self._findings.written:
            self.set(tensor, [free_factors(size) for size in tensor.shape])
        else:
            self._mark_uniform(tensor, uniform_cause)

    def fix(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fixes all axes of these tensors."""
        for tensor in tensors:
            fix_all(*self.axes(tensor))
            self.used |= self._record(tensor).sources

    def fix_unknown(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Fixes the tensors of an operation without a rule, and counts the operation."""
        self.unknown[name] += 1
        self.stay(tensors)

    def stay(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fixes tensors that exist in every run, including uniform constants."""
        for tensor in tensors:
            record = self._record(tensor)
            if record.uniform_cause:
                record.uniform_cause, record.axes = "", fixed_axes(tensor.shape)
            self.fix([tensor])
            self.occur(self.axes(tensor))

    def fix_kept_activations(self, spared: Iterable[torch.Tensor]) -> None:
        """Fixes every tensor that still exists, except parameters and the ``spared`` ones."""
        others = {id(tensor) for tensor in (*self.tensors.values(), *spared)}
        met = [
            record
            for record in self._by_id.values()
            if record.axes is not None or record.uniform_cause
        ]
        alive = [record.tensor() for record in met]
        self.stay(tensor for tensor in alive if tensor is not None and id(tensor) not in others)

    def forget(self, tensor: torch.Tensor) -> None:
        """Deletes a tensor's axes, because it has other ones now."""
        self._record(tensor).axes = None

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Returns whether no axis of the tensor is free."""
        return all(atom.fixed for row in self.axes(tensor) for atom in atoms(row))

    def origins(self, tensor: torch.Tensor) -> frozenset[int]:
        """Returns the contractions from which a tensor was computed; none for weights alone."""
        return self._record(tensor).origins

    def contraction(self, *results: torch.Tensor) -> None:
        """Records a sum over an axis, which is a new origin of its results."""
        self._contractions += 1
        for tensor in results:
            self._record(tensor).origins = frozenset([self._contractions])

    def unreached(self) -> list[str]:
        """Returns the parameters, and buffers of numbers, that no run has reached."""
        return [
            name
            for name, tensor in self.tensors.items()
            if name not in self.used and tensor.dtype != torch.bool
        ]

    def note_fused(self, axis: Axis) -> None:
        """Records that an axis of a parameter is split along this factor into different parts."""
        axis = axis.root
        if axis.form != "atom" or axis.fixed or axis.size > MAX_FUSED:
            return
        for place, row in self._rows():
            offset = 0
            for piece in summands(product(row)):
                parts = factors([piece])
                if axis in parts and len(parts) > 1 and all(part.form == "atom" for part in parts):
                    at = parts.index(axis)
                    before, behind = size_of(parts[:at]), size_of(parts[at + 1 :])
                    fused = self._findings.fused.setdefault(place, set())
                    seen = (offset, before, axis.size, behind)
                    self.outdated |= behind > 1 and seen not in fused
                    fused |= {seen} if behind > 1 else set()
                offset += piece.size

    def _rows(self) -> Iterator[tuple[tuple[str, int], Factors]]:
        """Yields every axis of every parameter, with the name of the tensor and its dimension."""
        for name, tensor in self.tensors.items():
            axes = self._record(tensor).axes
            for row in axes.of_each if isinstance(axes, Slices) else [axes or []]:
                for number, factors_ in enumerate(row):
                    yield (name, number), factors_

    def _note_written(self, written: Sequence[torch.Tensor]) -> None:
        """Finds uniform constants that are written to and have views."""
        for tensor in written:
            memory = storage(tensor)
            alike = {
                id(other): record
                for record in (self._uniform if memory else ())
                if record.uniform_cause
                and (other := record.tensor()) is not None
                and storage(other) == memory
            }
            if alike.keys() == {id(tensor)}:
                record = self._record(tensor)
                record.uniform_cause, record.axes = (
                    "",
                    [free_factors(size) for size in tensor.shape],
                )
                continue
            uniform_cause = {record.uniform_cause for record in alike.values()}
            self.outdated |= not uniform_cause <= self._findings.written
            self._findings.written |= uniform_cause

    def _mark_uniform(self, tensor: torch.Tensor, uniform_cause: str) -> None:
        record = self._record(tensor)
        record.uniform_cause = uniform_cause
        self._uniform.append(record)

    def _record(self, tensor: torch.Tensor) -> _TensorRecord:
        record = self._by_id.get(id(tensor))
        if record is None or record.tensor() is not tensor:
            record = self._by_id[id(tensor)] = _TensorRecord(weakref.ref(tensor))
        return record

    def _adopt(self, tensor: torch.Tensor) -> Axes:
        """Returns the axes of a tensor without a record: those of its memory, or of a constant."""
        pointer = storage(tensor)
        shape = (tensor.shape, tensor.stride(), tensor.storage_offset()) if pointer else None
        for record in list(self._by_id.values()) if pointer else ():
            other = record.tensor()
            if other is None or other is tensor or record.axes is None or storage(other) != pointer:
                continue
            if (other.shape, other.stride(), other.storage_offset()) == shape:  # as ``.data`` is
                self.used |= record.sources
                return self.axes(other)
            self.fix([other])
        return constant_axes(tensor.shape)
