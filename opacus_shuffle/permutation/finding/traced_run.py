"""What is known of the tensors of one run of a network: which coordinates of which are the same, and what they came from.

:mod:`~opacus_shuffle.permutation.finding.trace` tells it every operation, and the rules of the
operations say here what they do to the labels. An operation without a rule *fixes* every axis that
it touches: nothing is permuted on a guess.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from opacus_shuffle.permutation.finding.labels import (
    CAUSE,
    Axis,
    Dimensions,
    Factors,
    IncompatibleError,
    atoms,
    factors,
    fix_all,
    fixed_dimensions,
    free_factors,
    only,
    product,
    size_of,
    summands,
    unify_dimensions,
)
from opacus_shuffle.permutation.finding.packings import Packing, Packings, Stacked, first_labels
from opacus_shuffle.permutation.network import movable_tensors, storage, tensors_in

VIEWS = (
    *(
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
    ),
    *(
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
        "_to_copy",
        "_unsafe_view",
        "unsafe_split",
    ),
)
"""Operations whose results have equal entries if their input has."""

SHAPES_ONLY = frozenset(
    f"aten.{name}_like" for name in ("zeros", "ones", "full", "empty")
) | frozenset(f"aten.new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided"))
"""Operations that ask a tensor for its shape alone."""

UNFIT = (
    IncompatibleError,
    LookupError,
    ArithmeticError,
    ValueError,
    AttributeError,
    TypeError,
    AssertionError,
)
"""What a rule raises that does not fit the operation."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation: its arguments by their names in the operator's schema, and what came out."""

    name: str
    arguments: dict[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: list[torch.Tensor]
    pointwise: bool

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def views(self) -> torch.Tensor | None:
        """The tensor whose entries came out, as they were or arranged in another way."""
        return self.inputs[0] if self.inputs and self.name.removeprefix("aten.") in VIEWS else None

    @property
    def out(self) -> torch.Tensor:
        """The first tensor that came out."""
        return self.outputs[0]


def bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Call:
    """Returns the call of an ATen operator, defaults filled in."""
    name, defaults, mutable = _schema_of(func)
    arguments = defaults | dict(zip(defaults, args, strict=False)) | kwargs
    written = tensors_in([arguments[argument] for argument in mutable])
    inputs = [] if name in SHAPES_ONLY else tensors_in((args, kwargs))
    return Call(
        name, arguments, inputs, tensors_in(result), written, torch.Tag.pointwise in func.tags
    )


@functools.cache
def _schema_of(func: Any) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Returns an operator's name, what its arguments are by default (None without one), and which of them it writes to."""
    schema = func._schema.arguments
    return (
        str(func.overloadpacket),
        {
            argument.name: argument.default_value if argument.has_default_value() else None
            for argument in schema
        },
        tuple(
            argument.name
            for argument in schema
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


class TracedRun:
    """What is known of all parameters, buffers and activations of a network while it runs: the labels of their axes.

    Args:
        module: The network; its parameters' and moving buffers' axes begin as free atoms.
        packings: Axes to begin as packed parts instead, keyed by (tensor name, axis).
        written: Which constants of equal entries, by what made them and where, are written to
            later. All others have no axes to speak of. None: any may be.
    """

    def __init__(
        self,
        module: nn.Module,
        packings: Packings | None = None,
        written: Iterable[str] | None = (),
    ) -> None:
        # Parameters and persistent buffers that are not integers, by name (tied ones once).
        self.tensors: dict[str, torch.Tensor] = {}
        self.parameter_names = {name for name, _ in module.named_parameters()}
        self.aliases: dict[str, list[str]] = {}  # other names of tied tensors, by the first one
        self.occurrences: list[
            Dimensions
        ] = []  # labels of every activation, and of every reduced tensor inside an operation
        self.streams: list[
            Axis
        ] = []  # axes along which results of different layers were added (skip connections)
        self.heads: list[Axis] = []  # batch axes of products of two activations (attention heads)
        self.contracted: list[
            Axis
        ] = []  # axes contracted in such products (query and key dimensions)
        self.unknown: Counter[str] = (
            Counter()
        )  # operations without a rule, with their numbers of calls
        self.new_packings: dict[
            tuple[str, int], set[Packing]
        ] = {}  # axes met that are packed and were not known to be
        # Constants of equal entries that were written to and not known to be; the labels are
        # worthless then.
        self.newly_written: set[str] = set()
        self.used: set[str] = (
            set()
        )  # parameters and buffers that went, entire or a part of them, into something not empty
        self._written = None if written is None else frozenset(written)
        # Constants without axes to speak of, with what made them.
        self._equal_entries: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        self._labels: MutableMapping[torch.Tensor, Dimensions | Stacked] = WeakIdKeyDictionary()
        # Which contractions a tensor was computed from, entry by entry.
        self._origins: MutableMapping[torch.Tensor, frozenset[int]] = WeakIdKeyDictionary()
        # Of parameters and buffers.
        self._names: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        # Which of them a tensor is a view or a copy of.
        self._shown: MutableMapping[torch.Tensor, frozenset[str]] = WeakIdKeyDictionary()
        # Axes whose order a tensor tells, as places of sorted entries do.
        self._fixed_if_read: MutableMapping[torch.Tensor, tuple[Factors, str]] = (
            WeakIdKeyDictionary()
        )
        self._contractions = 0
        for name, tensor in movable_tensors(module):
            if tensor in self._names:
                self.aliases.setdefault(self._names[tensor], []).append(name)
                continue
            self._names[tensor] = name
            self.tensors[name] = tensor
            self._labels[tensor] = first_labels(name, tuple(tensor.shape), packings or {})
            self._shown[tensor] = frozenset([name])

    @property
    def parameters(self) -> dict[str, Dimensions]:
        """The labels of all that moves."""
        return {name: self.dimensions(tensor) for name, tensor in self.tensors.items()}

    def atoms(self) -> list[Axis]:
        """Returns the atoms of all parameters and moving buffers."""
        return [atom for tensor in self.tensors.values() for atom in self._atoms(tensor)]

    def label(self, call: Call, rule: Callable[[TracedRun, Call], None] | None) -> None:
        """Labels what an operation returned by its rule; without one, fixes all that it touches."""
        if memories := {storage(tensor) for tensor in call.written} - {
            0
        }:  # of views, too, that have labels of their own
            known = self._equal_entries.items()
            self.newly_written.update(made for tensor, made in known if storage(tensor) in memories)
        if not call.outputs:  # it writes to lists of tensors, compares two, or reads a number
            if len(call.inputs) < 2 and not call.written:
                return
            rule = None
        if call.views is not None and call.views in self._equal_entries:
            for tensor in call.outputs:
                self._equal_entries[tensor] = self._equal_entries[call.views]
            return
        if (
            not call.inputs and call.name == "aten._to_copy"
        ):  # a number, which ``torch.vmap`` made a tensor
            rule = None
        if rule is None and not all(self.is_constant(tensor) for tensor in call.inputs):
            self.unknown[call.name] += 1
            self.fix_everything(call)
            return
        self._read(call.inputs)
        contractions = self._contractions
        try:
            if rule is None:
                for tensor in call.outputs:
                    self.set(tensor, fixed_dimensions(tensor.shape))
            else:
                rule(self, call)
        except UNFIT as error:
            self.unknown[f"{call.name} ({type(error).__name__})"] += 1
            self.fix_everything(call)
        if any(
            tensor not in self._labels and tensor not in self._equal_entries
            for tensor in call.outputs
        ):
            self.fix_everything(call)
        self._note_what_is_carried(call)
        if self._contractions == contractions:
            origins = frozenset[int]().union(*[self.origins(tensor) for tensor in call.inputs])
            for tensor in call.outputs:
                self._origins[tensor] = origins

    def dimensions(self, tensor: torch.Tensor) -> Dimensions:
        """Returns the tensor's labels; slices that were different things become the same thing."""
        labels = self.labels(tensor)
        if isinstance(labels, Stacked):
            first, *rest = labels.alternatives
            for other in rest:
                unify_dimensions(first, other)
            self._labels[tensor] = labels = first
        return labels

    def labels(self, tensor: torch.Tensor) -> Dimensions | Stacked:
        """Returns the tensor's labels as they are; a tensor never met before is a constant, so fixed."""
        if tensor in self._equal_entries:
            return [free_factors(size) for size in tensor.shape]
        if tensor not in self._labels:
            self._labels[tensor] = self._adopt(tensor)
        return self._labels[tensor]

    def leaves(self, tensor: torch.Tensor, way: str) -> None:
        """Fixes a tensor whose values leave PyTorch, so that nobody knows what becomes of them; notes by which call."""
        if not self.is_constant(tensor):
            self.unknown[way] += 1
            self.stay([tensor])

    def set(self, tensor: torch.Tensor, labels: Dimensions | Stacked) -> None:
        """Labels a result; if it has labels already (an in-place operation), both must agree."""
        for dimensions in labels.alternatives if isinstance(labels, Stacked) else [labels]:
            if len(dimensions) != tensor.dim() or any(
                size_of(each) != max(n, 1) for each, n in zip(dimensions, tensor.shape, strict=True)
            ):
                raise IncompatibleError
            self.occurrences.append(dimensions)
        if tensor in self._labels:
            for dimensions in labels.alternatives if isinstance(labels, Stacked) else [labels]:
                unify_dimensions(self.dimensions(tensor), dimensions)
        else:
            self._labels[tensor] = labels

    def equal_entries(self, tensor: torch.Tensor) -> None:
        """Labels a new constant whose entries are all equal, or independent and alike."""
        made = CAUSE.get()
        if self._written is None or made in self._written:
            self.set(tensor, [free_factors(size) for size in tensor.shape])
        else:
            self._equal_entries[tensor] = made

    def copy_labels(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Labels a tensor as another one, whose entries it shows in the same order."""
        self._labels[tensor], self._origins[tensor] = self.labels(source), self.origins(source)
        self.use([source])

    def stay(self, tensors: Iterable[torch.Tensor]) -> None:
        """Labels draws that are the same in every run: constants, and no noise."""
        for tensor in tensors:
            if tensor in self._equal_entries:
                del self._equal_entries[tensor]
                self._labels[tensor] = fixed_dimensions(tensor.shape)
            self.fix([tensor])
            self.occurrences.append(self.dimensions(tensor))

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes that parameters or buffers, or views of them, were used."""
        self.used.update(*(self._shown[tensor] for tensor in tensors if tensor in self._shown))

    def fix_if_read(self, tensors: Iterable[torch.Tensor], axes: Factors) -> None:
        """Fixes axes as soon as something reads one of these tensors, which tell the order along them."""
        for tensor in tensors:
            self._fixed_if_read[tensor] = (axes, CAUSE.get())

    def _read(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor in self._fixed_if_read:
                axes, cause = self._fixed_if_read.pop(tensor)
                fix_all(axes, cause=cause)

    def fix_survivors(self, spared: Iterable[torch.Tensor]) -> None:
        """Fixes every tensor that is still there, but for parameters, buffers and those to be ``spared``."""
        known = {id(tensor) for tensor in (*self.tensors.values(), *spared)}
        self.stay(
            tensor for tensor in [*self._labels, *self._equal_entries] if id(tensor) not in known
        )

    def show(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Labels a tensor that was given the memory of another one (``tensor.data = source``)."""
        if tensor.shape == source.shape:
            unify_dimensions(self.dimensions(tensor), self.dimensions(source))
        else:
            self.fix([tensor, source])
        self.use([source])

    def unreached(self) -> list[str]:
        """Returns the parameters, and buffers of numbers, that the run has not reached: nobody knows what they do."""
        return [
            name
            for name, tensor in self.tensors.items()
            if name not in self.used and tensor.dtype != torch.bool
        ]

    def forget(self, tensor: torch.Tensor) -> None:
        """Forgets a tensor's labels: it is to be labelled anew."""
        self._labels.pop(tensor, None)

    def reduced(self, dimensions: Dimensions, gone: Sequence[int]) -> Dimensions:
        """Notes that an operation has an intermediate result without these dimensions (a sum over them), and returns it."""
        drop = {dim % len(dimensions) for dim in gone}
        self.occurrences.append([[] if i in drop else each for i, each in enumerate(dimensions)])
        return self.occurrences[-1]

    def fix(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lets nothing permute these tensors."""
        for tensor in tensors:
            self._read([tensor])
            fix_all(*self.dimensions(tensor))
            self.use([tensor])

    def fix_everything(self, call: Call) -> None:
        """Lets nothing permute what an operation touches."""
        self.fix(touched := [*call.inputs, *call.outputs])
        self.occurrences += [self.dimensions(tensor) for tensor in touched]

    def _note_what_is_carried(self, call: Call) -> None:
        """Notes that no input knows the position along a fixed axis of the result that this input lacks.

        An operation that mixes positions (a reversal, a choice by indices) makes its axis anew,
        whatever axis that may turn out to be the same as later.
        """
        inputs = [set(self._atoms(tensor)) for tensor in call.inputs]
        for dimensions in itertools.chain.from_iterable(map(self._rows, call.outputs)):
            present = set(atoms(axis for each in dimensions for axis in each))
            fixed = {atom for atom in present if atom.fixed}
            for known in inputs if fixed and fixed != present else ():
                if not fixed <= known and not known & present <= fixed:
                    self.occurrences.append([only(each, known) for each in dimensions])

    def _atoms(self, tensor: torch.Tensor) -> list[Axis]:
        """Returns the atoms of a tensor, as often as they are there."""
        return atoms(axis for row in self._rows(tensor) for each in row for axis in each)

    def _rows(self, tensor: torch.Tensor) -> list[Dimensions]:
        """Returns the alternatives of a tensor's labels, none for a constant of equal entries."""
        labels = self.labels(tensor) if tensor in self._labels else []
        return labels.alternatives if isinstance(labels, Stacked) else [labels]

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Returns whether no axis of the tensor is free."""
        return all(atom.fixed for each in self.dimensions(tensor) for atom in atoms(each))

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor's values come from parameters or constants alone."""
        return not self.origins(tensor)

    def origins(self, tensor: torch.Tensor) -> frozenset[int]:
        """Returns which contractions the tensor was computed from by operations entry by entry."""
        return self._origins.get(tensor, frozenset())

    def contraction(self, *results: torch.Tensor) -> None:
        """Notes that these results were summed over an axis: a new origin."""
        self._contractions += 1
        for tensor in results:
            self._origins[tensor] = frozenset([self._contractions])

    def note_packing(self, axis: Axis) -> None:
        """Notes that a free factor of a parameter's axis is taken apart by position: its parts are different things."""
        axis = axis.root
        if axis.kind != "atom" or axis.fixed or axis.size > 16:
            return
        axes = (
            (name, number, each)
            for name, tensor in self.tensors.items()
            for row in self._rows(tensor)
            for number, each in enumerate(row)
        )
        for name, number, each in axes:
            offset = 0
            for piece in summands(each[0]) if len(each) == 1 else [product(each)] if each else []:
                row = factors([piece])
                if axis in row and len(row) > 1 and all(factor.kind == "atom" for factor in row):
                    place = row.index(axis)
                    major, minor = size_of(row[:place]), size_of(row[place + 1 :])
                    if minor > 1:
                        self.new_packings.setdefault((name, number), set()).add(
                            (offset, major, axis.size, minor)
                        )
                offset += piece.size

    def follow(self, call: Call) -> None:
        """Notes which parameters an operation uses, or shows."""
        if call.views is not None:
            for tensor in call.outputs if call.views in self._shown else ():
                self._shown[tensor] = self._shown[call.views]
        elif any(tensor.numel() for tensor in call.outputs):
            self.use(call.inputs)

    def _adopt(self, tensor: torch.Tensor) -> Dimensions:
        """Labels a tensor made out of sight: a constant, unless it is the memory of a known one."""
        pointer = storage(tensor)
        shape = (tensor.shape, tensor.stride(), tensor.storage_offset())
        for known in list(self._labels) if pointer else ():
            if storage(known) == pointer:  # as ``.data`` makes it
                if (known.shape, known.stride(), known.storage_offset()) == shape:
                    self.use([known])
                    return self.dimensions(known)
                self.fix([known])
        return fixed_dimensions(tensor.shape)
