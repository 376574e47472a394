"""What is known of the tensors of a network while it runs: which axes of which are the same.

:mod:`~opacus_shuffle.permutation.finding.trace` tells it every operation, and the rules of the
operations say here what they do to axes. An operation without a rule *fixes* every axis that it
touches: nothing is permuted on a guess.
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
"""Operations whose results show entries of their input, so have equal ones if it has."""

SHAPES_ONLY = frozenset(
    [f"aten.{name}_like" for name in ("zeros", "ones", "full", "empty")]
    + [f"aten.new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided")]
)
"""Operations that ask a tensor for its shape alone."""

REPLACING = frozenset(["aten.set_", "aten.resize_", "aten.resize_as_"])
"""Operations that give a tensor another memory and shape, so what was known of it is void."""

UNFIT = (IncompatibleError, LookupError, ArithmeticError, ValueError, AttributeError, TypeError)
"""What a rule raises that does not fit the operation."""

MOST_FUSED = 16
"""The most parts that an axis may have: an LSTM has four gates, attention three projections."""


FusedParts = tuple[int, int, int, int]
"""Parts of an axis as (offset, repetitions, parts, size of a part).

Queries, keys and values in one matrix of 3d rows are (0, 1, 3, d); three for each of 12 heads of
width 64 are (0, 12, 3, 64).
"""


@dataclasses.dataclass
class Slices:
    """Axes of a tensor whose slices are different things, as queries, keys and values are.

    Attributes:
        marker: That axis, fixed.
        of_each: Axes of the tensor as they are at each slice, the marker among them.
    """

    marker: Axis
    of_each: list[Axes]


def first_factors(size: int, fused: Collection[FusedParts]) -> Factors:
    """Returns what an axis of a parameter is before a run: an atom, or parts known from before."""
    if size < 2:
        return []
    pieces: list[Axis] = []
    place = 0
    for offset, repetitions, count, part in sorted(fused):
        if offset < place:  # two runs saw it differently: what came first holds
            continue
        parts = concatenation([Axis(part) for _ in range(count)])
        pieces += [Axis(offset - place)] if offset > place else []
        pieces.append(product([Axis(repetitions), parts]) if repetitions > 1 else parts)
        place = offset + repetitions * count * part
    return [concatenation([*pieces, Axis(size - place)] if size > place else pieces)]


@dataclasses.dataclass(slots=True)
class Call:
    """One operation.

    Attributes:
        name: Such as ``"aten.add_"``.
        arguments: By their names in the operator's schema, defaults filled in.
        inputs, outputs: The tensors among its arguments and results.
        written: Those of its inputs that it writes to.
        pointwise: Whether PyTorch says that it works entry by entry.
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
        """The first tensor that came out."""
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
class Learned:
    """What earlier runs have found out that a run has to know from its start.

    Attributes:
        fused: Axes that hold different things side by side, by tensor and axis.
        written: What made constants of equal entries, and where, that are written to later.
    """

    fused: dict[tuple[str, int], set[FusedParts]] = dataclasses.field(default_factory=dict)
    written: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known of one tensor.

    Attributes:
        tensor: A weak reference, so that what dies with the pass can be told from what is kept.
        axes: Its axes; None if nobody has asked yet.
        made: By what, and where, if it is a constant of equal entries that nothing writes to: it
            has no axes to speak of, but new free ones whenever it is used.
        origins: The contractions that it was computed from, entry by entry.
        shows: The parameters and buffers of which it is a view or a copy.
    """

    tensor: weakref.ref[torch.Tensor]
    axes: Axes | Slices | None = None
    made: str = ""
    origins: frozenset[int] = frozenset()
    shows: frozenset[str] = frozenset()


class TracedRun:
    """What is known of all parameters, buffers and activations of a network, in one run or several.

    Args:
        network: Its parameters' and moving buffers' axes begin as free atoms.
        learned: What earlier runs have found out; what this one does is added.

    Attributes:
        tensors: Parameters, and persistent buffers that are not integers, by name (tied ones once).
        parameter_names: The names of those that are parameters.
        aliases: Other names of tied parameters, by the first one.
        occurrences: The axes of every activation, and of every reduced tensor inside an operation.
        groups: Axes that were normalised in groups, each with a group's size.
        streams: Axes along which results of different layers were added (skip connections).
        heads: Batch axes of products of two activations.
        contracted: Axes contracted in such products: query and key dimensions.
        unknown: Operations without a rule, with their numbers of calls.
        used: Parameters and buffers that went, as a whole or in part, into something not empty.
        outdated: Whether the run has learnt what it had to know from its start.
    """

    def __init__(self, network: nn.Module, learned: Learned | None = None) -> None:
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
        self._learned = Learned() if learned is None else learned
        self._by_id: dict[int, _Known] = {}
        self._equal: list[_Known] = []  # constants of equal entries
        self._contractions = 0
        first_names: dict[int, str] = {}
        for name, tensor in movable_tensors(network):
            first = first_names.setdefault(id(tensor), name)
            if first != name:
                self.aliases.setdefault(first, []).append(name)
                continue
            self.tensors[name] = tensor
            known = self._known(tensor)
            known.shows = frozenset([name])
            known.axes = [
                first_factors(size, self._learned.fused.get((name, axis), ()))
                for axis, size in enumerate(tensor.shape)
            ]

    def axes_of_all(self) -> dict[str, Axes]:
        """Returns the axes of all parameters and moving buffers, by name."""
        return {name: self.axes(tensor) for name, tensor in self.tensors.items()}

    def atoms(self) -> list[Axis]:
        """Returns what all parameters and moving buffers are made of now."""
        return atoms(axis for _, row in self._rows() for axis in row)

    def apply(self, call: Call, rule: Callable[[TracedRun, Call], None] | None) -> None:
        """Finds the axes of results by the operation's rule; without one, fixes all it touches."""
        if call.written:
            self._note_written(call.written)
        touched = [*call.inputs, *call.outputs]
        if call.name in REPLACING:
            self.forget(call.out)
        if not call.outputs:  # it reads a number, compares two tensors, or writes to lists of them
            if len(call.inputs) > 1 or call.written:
                self.fix_unknown(touched, call.name)
            return
        source = call.inputs[0] if call.inputs and call.name in VIEWS else None
        if source is not None and (made := self._known(source).made):
            for tensor in call.outputs:
                self._make_equal(tensor, made)
            return
        self._note_used(call, source)
        contractions = self._contractions
        if rule is not None:
            try:
                rule(self, call)
            except UNFIT as error:
                self.fix_unknown(touched, f"{call.name} ({type(error).__name__})")
        elif all(self.is_constant(tensor) for tensor in call.inputs):
            for tensor in call.outputs:
                self.set(tensor, constant_axes(tensor.shape))
        else:
            self.fix_unknown(touched, call.name)
        results = [self._known(tensor) for tensor in call.outputs]
        if any(known.axes is None and not known.made for known in results):
            self.fix_unknown(touched, call.name)
        if self._contractions == contractions:
            origins = frozenset[int]().union(*[self.origins(tensor) for tensor in call.inputs])
            for known in results:
                known.origins = origins

    def axes(self, tensor: torch.Tensor) -> Axes:
        """Returns a tensor's axes; slices that were different things become the same thing."""
        axes = self.axes_or_slices(tensor)
        if isinstance(axes, Slices):
            first, *rest = axes.of_each
            for other in rest:
                unify_axes(first, other)
            self._known(tensor).axes = axes = first
        return axes

    def axes_or_slices(self, tensor: torch.Tensor) -> Axes | Slices:
        """Returns a tensor's axes; one that was never met before is a constant, so fixed."""
        known = self._known(tensor)
        if known.made:
            return [free_factors(size) for size in tensor.shape]
        if known.axes is None:
            known.axes = self._adopt(tensor)
        return known.axes

    def set(self, tensor: torch.Tensor, axes: Axes | Slices) -> None:
        """Says what a result's axes are; if it has some already (in place), both are the same."""
        rows = axes.of_each if isinstance(axes, Slices) else [axes]
        for row in rows:
            if [size_of(factors_) for factors_ in row] != [max(size, 1) for size in tensor.shape]:
                raise IncompatibleError
            self.occur(row)
        known = self._known(tensor)
        if known.axes is None:
            known.axes = axes
        else:
            for row in rows:
                unify_axes(self.axes(tensor), row)

    def occur(self, axes: Axes) -> None:
        """Notes that these axes, and no others, are there side by side."""
        self.occurrences[tuple(map(tuple, axes))] = None

    def reduced(self, axes: Axes, gone: Iterable[int]) -> Axes:
        """Notes that an operation has an intermediate result without these axes, and returns it."""
        dropped = {dim % len(axes) for dim in gone}
        left: Axes = [[] if dim in dropped else row for dim, row in enumerate(axes)]
        self.occur(left)
        return left

    def equal_entries(self, tensor: torch.Tensor) -> None:
        """Notes a new constant whose entries are all equal, or independent and alike."""
        made = current_cause()
        if made in self._learned.written:
            self.set(tensor, [free_factors(size) for size in tensor.shape])
        else:
            self._make_equal(tensor, made)

    def fix(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lets nothing permute these tensors."""
        for tensor in tensors:
            fix_all(*self.axes(tensor))
            self.use([tensor])

    def fix_unknown(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Lets nothing permute what an operation without a rule touches, and counts it."""
        self.unknown[name] += 1
        self.stay(tensors)

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes that parameters or buffers, or views of them, were used."""
        for tensor in tensors:
            self.used |= self._known(tensor).shows

    def stay(self, tensors: Iterable[torch.Tensor]) -> None:
        """Fixes tensors that are there in every run, of equal entries or not."""
        for tensor in tensors:
            known = self._known(tensor)
            if known.made:
                known.made, known.axes = "", fixed_axes(tensor.shape)
            self.fix([tensor])
            self.occur(self.axes(tensor))

    def fix_survivors(self, spared: Iterable[torch.Tensor]) -> None:
        """Fixes every tensor that is still there, but for parameters and those to be ``spared``."""
        others = {id(tensor) for tensor in (*self.tensors.values(), *spared)}
        met = [known for known in self._by_id.values() if known.axes is not None or known.made]
        alive = [known.tensor() for known in met]
        self.stay(tensor for tensor in alive if tensor is not None and id(tensor) not in others)

    def forget(self, tensor: torch.Tensor) -> None:
        """Forgets a tensor's axes: it has other ones now."""
        self._known(tensor).axes = None

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Returns whether no axis of the tensor is free."""
        return all(atom.fixed for row in self.axes(tensor) for atom in atoms(row))

    def origins(self, tensor: torch.Tensor) -> frozenset[int]:
        """Returns the contractions that a tensor was computed from; none of weights alone."""
        return self._known(tensor).origins

    def contraction(self, *results: torch.Tensor) -> None:
        """Notes that these results were summed over an axis: a new origin."""
        self._contractions += 1
        for tensor in results:
            self._known(tensor).origins = frozenset([self._contractions])

    def unreached(self) -> list[str]:
        """Returns the parameters, and buffers of numbers, that no run has reached."""
        return [
            name
            for name, tensor in self.tensors.items()
            if name not in self.used and tensor.dtype != torch.bool
        ]

    def note_fused(self, axis: Axis) -> None:
        """Notes that an axis of parameters is cut along this factor: its parts are different."""
        axis = axis.root
        if axis.kind != "atom" or axis.fixed or axis.size > MOST_FUSED:
            return
        for place, row in self._rows():
            offset = 0
            for piece in summands(product(row)):
                parts = factors([piece])
                if axis in parts and len(parts) > 1 and all(part.kind == "atom" for part in parts):
                    at = parts.index(axis)
                    before, behind = size_of(parts[:at]), size_of(parts[at + 1 :])
                    fused = self._learned.fused.setdefault(place, set())
                    seen = (offset, before, axis.size, behind)
                    self.outdated |= behind > 1 and seen not in fused
                    fused |= {seen} if behind > 1 else set()
                offset += piece.size

    def _rows(self) -> Iterator[tuple[tuple[str, int], Factors]]:
        """Yields every axis of every parameter, with the tensor's name and the axis' number."""
        for name, tensor in self.tensors.items():
            axes = self._known(tensor).axes
            for row in axes.of_each if isinstance(axes, Slices) else [axes or []]:
                for number, factors_ in enumerate(row):
                    yield (name, number), factors_

    def _note_used(self, call: Call, source: torch.Tensor | None) -> None:
        """Notes which parameters an operation uses, or shows."""
        if source is not None:
            for tensor in call.outputs:
                self._known(tensor).shows |= self._known(source).shows
        elif any(tensor.numel() for tensor in call.outputs):
            self.use(call.inputs)

    def _note_written(self, written: Sequence[torch.Tensor]) -> None:
        """Learns which constants of equal entries are written to that have views."""
        for tensor in written:
            memory = storage(tensor)
            alike = {
                id(other): known
                for known in (self._equal if memory else ())
                if known.made and (other := known.tensor()) is not None and storage(other) == memory
            }
            if alike.keys() == {id(tensor)}:
                known = self._known(tensor)
                known.made, known.axes = "", [free_factors(size) for size in tensor.shape]
                continue
            made = {known.made for known in alike.values()}
            self.outdated |= not made <= self._learned.written
            self._learned.written |= made

    def _make_equal(self, tensor: torch.Tensor, made: str) -> None:
        known = self._known(tensor)
        known.made = made
        self._equal.append(known)

    def _known(self, tensor: torch.Tensor) -> _Known:
        known = self._by_id.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            known = self._by_id[id(tensor)] = _Known(weakref.ref(tensor))
        return known

    def _adopt(self, tensor: torch.Tensor) -> Axes:
        """Returns the axes of a tensor made out of sight: a constant, or those of its memory."""
        pointer = storage(tensor)
        shape = (tensor.shape, tensor.stride(), tensor.storage_offset()) if pointer else None
        for known in list(self._by_id.values()) if pointer else ():
            other = known.tensor()
            if other is None or other is tensor or known.axes is None or storage(other) != pointer:
                continue
            if (other.shape, other.stride(), other.storage_offset()) == shape:  # as ``.data`` is
                self.used |= known.shows
                return self.axes(other)
            self.fix([other])
        return constant_axes(tensor.shape)
