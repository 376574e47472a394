"""What leaves by ``copy`` and ``pickle``: permuted copies of the run's tensors, with hooks of the network that do nothing.

Averages of weights are the exception. ``torch.optim.swa_utils.AveragedModel`` copies the network and goes on reading its
parameters, so its copy stays as the run is, and follows it.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from opacus_shuffle.engine.weights.averages import becomes_average


@dataclasses.dataclass(eq=False)
class PartHook:
    """A hook of one module of the network; copies of it do nothing, unless they are of an average.

    Attributes:
        act: Called with the module, or a shallow copy of it, and what its hook gets; None for nothing.
        part: The module.
        when_averaged: Called with the module's copy in an average; returns the hook of that one.
        before_sharing: Called when another process is about to get the module's memory.
    """

    act: Callable[..., None] | None = None
    part: weakref.ref[nn.Module] | None = None
    when_averaged: Callable[[nn.Module], PartHook] | None = None
    before_sharing: Callable[[], None] | None = None

    def __call__(self, *arguments: Any) -> None:
        """Acts, if there is anything to do."""
        if self.act is not None:
            self.act(*arguments)

    def forget(self) -> None:
        """From now on does nothing."""
        self.act = self.when_averaged = self.before_sharing = None

    def __deepcopy__(self, memo: dict[Any, Any]) -> PartHook:
        copied = None if self.part is None else memo.get(id(self.part()))
        if self.when_averaged is None or copied is None or not becomes_average(memo):
            return PartHook()
        return self.when_averaged(copied)

    def __reduce__(self) -> Any:
        return PartHook, ()


def _share(hook: PartHook) -> Any:
    """Reduces a hook for another process, which gets the memory of tensors, not copies."""
    if hook.before_sharing is not None:
        hook.before_sharing()
    return PartHook, ()


ForkingPickler.register(PartHook, _share)


@dataclasses.dataclass(eq=False)
class CopyHook:
    """What ``copy`` and ``pickle`` call for a module of the run, as an attribute of that module.

    Attributes:
        part: The module.
        before: Called with it before each copy.
    """

    part: weakref.ref[nn.Module]
    before: Callable[[nn.Module], None]

    def watch(self) -> None:
        """From now on is called."""
        vars(self.part())["__reduce_ex__"] = self

    @staticmethod
    def forget(part: nn.Module) -> None:
        """Undoes :meth:`watch`."""
        vars(part).pop("__reduce_ex__", None)

    def __call__(self, protocol: Any) -> Any:
        """Returns how the module is copied, without this attribute."""
        part: Any = self.part()
        self.before(part)
        CopyHook.forget(part)
        try:
            kind: Any = type(part)
            maker, arguments, *rest = kind.__reduce_ex__(part, protocol)
            return maker, arguments, *(dict(each) if each is vars(part) else each for each in rest)
        finally:
            self.watch()

    def __deepcopy__(self, memo: dict[Any, Any]) -> None:
        """Leaves no hook in copies that a module's own method makes of its attributes, as that of ``torch.fx`` does."""


TENSOR_ATTRIBUTES = ("__deepcopy__", "__reduce_ex__", "view")


@dataclasses.dataclass(eq=False)
class TensorHook:
    """What ``copy``, ``pickle`` and ``parameters_to_vector`` call for a tensor of the run, as attributes of that tensor.

    Attributes:
        tensor: The tensor.
        permute: Moves a copy as what leaves now.
        warn: Says that the tensor itself is read.
    """

    tensor: weakref.ref[torch.Tensor]
    permute: Callable[[torch.Tensor], None]
    warn: Callable[[], None]

    def watch(self) -> None:
        """From now on has copies and pickles of the tensor permuted."""
        vars(self._found()).update(zip(TENSOR_ATTRIBUTES, (self.deep_copy, self.reduce, self.view), strict=True))

    @staticmethod
    def watches(tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is watched."""
        return TENSOR_ATTRIBUTES[0] in vars(tensor)

    @staticmethod
    def forget(tensor: torch.Tensor) -> None:
        """Undoes :meth:`watch`."""
        for name in TENSOR_ATTRIBUTES:
            vars(tensor).pop(name, None)

    def deep_copy(self, memo: dict[Any, Any]) -> torch.Tensor:
        """Returns the copy, which knows nothing of the run, or that of an average."""
        tensor = self._found()
        if id(tensor) not in memo:
            copied = self._copy(memo)
            if becomes_average(memo):
                dataclasses.replace(self, tensor=weakref.ref(copied)).watch()
            else:
                self.permute(copied)
        return memo[id(tensor)]  # type: ignore[no-any-return]

    def reduce(self, protocol: Any) -> Any:
        """Returns how a permuted copy is pickled."""
        tensor, copied = self._found(), self._copy({})
        self.permute(copied)
        TensorHook.forget(tensor)  # its other attributes are pickled with it
        try:
            vars(copied).update(vars(tensor))
            return type(copied).__reduce_ex__(copied, protocol)  # type: ignore[no-untyped-call]
        finally:
            self.watch()

    def view(self, *shape: Any, **keywords: Any) -> torch.Tensor:
        """Returns the tensor's own view: what is written back must be what was read."""
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code is parameters_to_vector.__code__:
            self.warn()
        return torch.Tensor.view(self._found(), *shape, **keywords)

    def _found(self) -> torch.Tensor:
        tensor = self.tensor()
        assert tensor is not None  # whose attribute this is
        return tensor

    def _copy(self, memo: dict[Any, Any]) -> torch.Tensor:
        tensor = self._found()
        copied: torch.Tensor = type(tensor).__deepcopy__(tensor, memo)  # type: ignore[attr-defined, no-untyped-call]
        TensorHook.forget(copied)  # attributes of a buffer are copied with it
        return copied

    def __deepcopy__(self, memo: dict[Any, Any]) -> TensorHook:
        return self
