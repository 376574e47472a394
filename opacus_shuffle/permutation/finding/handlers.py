"""Declaring by hand the axes of a module that tracing cannot see into: ``register_permutation``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from opacus_shuffle.permutation.finding.labels import (
    Axis,
    Dimensions,
    Factors,
    IncompatibleError,
    because,
    fixed_factors,
    unify_all,
)
from opacus_shuffle.permutation.finding.trace import Tracer
from opacus_shuffle.permutation.finding.traced_run import TracedRun


@dataclasses.dataclass(frozen=True)
class ModuleAxes:
    """Which axes of a module's tensors are the same.

    A pattern names the axes of one tensor, separated by spaces: equal names are permuted together;
    ``_`` stays in place; an axis made of several is written in parentheses, major first, such as
    ``(gate unit)``; a leading ``...`` stands for all axes before. An axis named in ``inputs`` or
    ``outputs`` takes part in the rest of the network.

    Attributes:
        parameters: Patterns of the module's own parameters and buffers by name; those not named
            stay in place.
        inputs: Pattern of the first tensor argument, or one for each.
        outputs: Pattern of the first tensor returned, or one for each; ``...`` means the same axes
            as in the first input.
        sizes: Of axes inside parentheses, all but one of each.
        fixed: Names of axes that stay in place though they have a name.
    """

    parameters: Mapping[str, str]
    inputs: str | tuple[str, ...] = "..."
    outputs: str | tuple[str, ...] = "..."
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind, values in (
            ("parameters", str, "patterns"),
            ("sizes", numbers.Integral, "whole numbers"),
        ):
            given = getattr(self, name)
            if not isinstance(given, Mapping) or not all(
                isinstance(each, kind) for each in given.values()
            ):
                raise ValueError(f"{name} must be a dict from names to {values}, got {given!r}")
        for name in ("inputs", "outputs", "fixed"):
            given = getattr(self, name)
            words = (given,) if isinstance(given, str) and name != "fixed" else given
            if not isinstance(words, tuple) or not all(isinstance(each, str) for each in words):
                raise ValueError(
                    f"{name} must be a tuple of strings{', or one' * (name != 'fixed')}, got "
                    f"{given!r}"
                )


class HandlerError(ValueError):
    """Raised where a handler's declaration does not fit its module."""


Handler = Callable[[Any], "ModuleAxes | None"]
_HANDLERS: dict[type[nn.Module], Handler] = {}
_AXIS = re.compile(r"([^\s()]+)|\(([^()]*)\)")


def register_permutation(kind: type[nn.Module]) -> Callable[[Handler], Handler]:
    """Registers what the axes of all modules of a class are, in place of tracing their inside.

    The handler gets the module and returns :class:`ModuleAxes`, or None to have this one traced
    after all. It is trusted, and then checked numerically with everything else. Subclasses need
    their own.

    Example::

        @register_permutation(GatedUnits)  # its forward calls a kernel of yours with self.gate, of shape (units,)
        def axes(module):
            return ModuleAxes(parameters={"gate": "unit"}, inputs="... unit", outputs="... unit")

    Args:
        kind: A class of modules.

    Raises:
        ValueError: If it is not one.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(
            f"kind must be a class of modules, got {kind!r}: pass nn.Bilinear, not nn.Bilinear(...)"
        )

    def register(handler: Handler) -> Handler:
        if not callable(handler):
            raise ValueError(
                f"handler must be a function from a module to ModuleAxes or None, got {handler!r}"
            )
        _HANDLERS[kind] = handler
        return handler

    return register


@contextlib.contextmanager
def declared_axes(network: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Labels modules that have a handler as it declares, in place of tracing them, while inside."""
    replaced = []
    names = {id(tensor): name for name, tensor in tracer.run.tensors.items()}
    try:
        for module in network.modules():
            handler = _HANDLERS.get(type(module))
            axes = handler(module) if handler is not None else None
            if axes is None:
                continue
            if not isinstance(axes, ModuleAxes):
                kind = type(module).__name__
                raise ValueError(
                    f"the handler of {kind} must return ModuleAxes or None, got "
                    f"{type(axes).__name__}"
                )
            replaced.append((module, vars(module).get("forward")))
            module.forward = _labelled_forward(module, axes, tracer, names)  # type: ignore[method-assign]
        yield
    finally:
        for module, own in replaced:
            del module.forward
            if own is not None:
                module.forward = own


def _labelled_forward(
    module: nn.Module, axes: ModuleAxes, tracer: Tracer, names: Mapping[int, str]
) -> Callable[..., Any]:
    """Returns a forward that is labelled by the declaration and not traced inside."""
    forward = module.forward

    def labelled(*args: Any, **kwargs: Any) -> Any:
        with tracer.paused():
            result = forward(*args, **kwargs)

        try:
            with because(f"the handler of {type(module).__name__}"):
                _declare_call(tracer.run, module, axes, names, (args, kwargs), result)
        except (ValueError, IncompatibleError) as error:
            raise HandlerError(
                f"the handler of {type(module).__name__} does not fit: {error}"
            ) from error
        return result

    return labelled


def _declare_call(
    run: TracedRun,
    module: nn.Module,
    axes: ModuleAxes,
    names: Mapping[int, str],
    arguments: Any,
    result: Any,
) -> None:
    """Labels a module's own tensors, its inputs and its outputs as declared."""
    shared: dict[str, Axis] = {}
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    for name in set(axes.parameters) - set(own):
        raise ValueError(f"it names {name!r}, which is none of {sorted(own)}")
    for name, tensor in own.items():
        if id(tensor) in names:
            run.use([tensor])
            _declare(run, tensor, axes.parameters.get(name, _in_place(tensor)), axes, shared)
    leading: Dimensions = []
    for tensor, pattern in _patterns(axes.inputs, arguments):
        count = _declare(run, tensor, pattern, axes, shared)
        leading = leading or run.dimensions(tensor)[:count]
    outputs = _patterns(axes.outputs, result)
    for tensor, pattern in outputs:
        found = [
            _factors(part, tensor.shape[dim], axes, shared)
            for dim, part in _places(pattern, tensor)
        ]
        run.set(tensor, [*leading, *found] if pattern.startswith("...") else found)
    # Inside, an axis may occur by itself: no permutation of its own for each position along another
    # one.
    run.occurrences += [[[axis]] for axis in shared.values()]
    run.contraction(*[tensor for tensor, _ in outputs])


def _in_place(tensor: torch.Tensor) -> str:
    """Returns the pattern of a tensor that stays in place."""
    return " ".join("_" * tensor.dim())


def _patterns(declared: str | tuple[str, ...], values: Any) -> list[tuple[torch.Tensor, str]]:
    """Returns the tensors in a nest of values, each with its pattern; those without one stay in place."""
    patterns = (declared,) if isinstance(declared, str) else declared
    return [
        (each, patterns[i] if i < len(patterns) else _in_place(each))
        for i, each in enumerate(_tensors(values))
    ]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _declare(
    run: TracedRun, tensor: torch.Tensor, pattern: str, axes: ModuleAxes, shared: dict[str, Axis]
) -> int:
    """Makes a tensor's labels agree with its pattern; returns how many leading axes ``...`` stands for."""
    dims = run.dimensions(tensor)
    places = _places(pattern, tensor)
    for dim, part in places:
        unify_all(_factors(part, tensor.shape[dim], axes, shared), dims[dim])
    return tensor.dim() - len(places)


def _places(pattern: str, tensor: torch.Tensor) -> list[tuple[int, list[str]]]:
    """Returns the names of each axis that the pattern speaks of, with its number from the end."""
    parts = _parse(pattern)
    open_ended = parts[:1] == [["..."]]
    parts = parts[1:] if open_ended else parts
    if (
        len(parts) > tensor.dim()
        or (len(parts) < tensor.dim() and not open_ended)
        or ["..."] in parts
    ):
        raise ValueError(
            f"pattern {pattern!r} does not fit a tensor of shape {tuple(tensor.shape)}"
        )
    return [(index - len(parts), part) for index, part in enumerate(parts)]


def _parse(pattern: str) -> list[list[str]]:
    """Returns the names in a pattern, one list per axis."""
    if left := _AXIS.sub("", pattern).strip():
        raise ValueError(
            f"pattern {pattern!r} has {left[0]!r} without its other parenthesis, or inside of "
            "another pair"
        )
    return [[word] if word else several.split() for word, several in _AXIS.findall(pattern)]


def _factors(names: list[str], size: int, axes: ModuleAxes, shared: dict[str, Axis]) -> Factors:
    """Returns the factors of one axis, made or found by name."""
    if len(set(names)) < len(names):
        raise ValueError(f"axis {' '.join(names)!r} names a part of itself twice")
    sizes = {name: axis.size for name, axis in shared.items()} | dict(axes.sizes)
    rest = size // max(math.prod(sizes.get(name, 1) for name in names), 1)
    found: Factors = []
    for name in names:
        each = sizes.get(name, rest)
        if each == 1:
            continue
        if name == "_":
            found += fixed_factors(each)
        else:
            found.append(shared.setdefault(name, Axis(each, fixed=name in axes.fixed)))
    if (total := math.prod(axis.size for axis in found)) != size:
        raise ValueError(
            f"axis {' '.join(names)!r} of size {size} does not fit what was said before: its "
            f"factors make {total}"
        )
    return found
