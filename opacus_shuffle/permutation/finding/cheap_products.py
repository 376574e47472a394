"""Leaving out the expensive part of a run that is only watched: labels follow shapes, so products may be zeros of their shape.

That holds as long as nothing asks for a value that comes of them. What does so ends the run, which is then done in full.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef as _StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from opacus_shuffle.permutation.finding.paths import LEAVING
from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.network import tensors_in
from opacus_shuffle.permutation.operators import operator_of
from opacus_shuffle.permutation.tensor_dict import TensorDict

PRODUCTS = frozenset(getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))

ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Result = TypeVar("Result")
StorageWeakRef: Any = _StorageWeakRef


class ValuesMatterError(Exception):
    """Raised where a run reads a value that depends on a product that was replaced by zeros."""


class Frugal:
    """Runs a network without its products as long as nobody asks for values that come of them, and in full from then on.

    Args:
        network: On a graphics processor it runs in full: that is fast, and an index that makes no sense would be fatal there.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._possible = all(each.device.type == "cpu" for each in (*network.parameters(), *network.buffers()))

    def __call__(self, run: Callable[[], Result]) -> Result:
        """Returns what a run gives, of which nothing but shapes may matter; a run that fails is done in full."""
        if self._possible:
            try:
                with cheap_products(LeftOutProducts(self._network.parameters())):
                    return run()
            except ValuesMatterError:
                self._possible = False
            except Exception:  # zeros may be the reason
                return run()
        return run()


@contextlib.contextmanager
def cheap_products(zeros: LeftOutProducts | None = None, mode: InsightMode | None = None) -> Iterator[None]:
    """A block in which matrix products and convolutions return zeros of their shape, until a value of them is read.

    Args:
        zeros: What leaves them out; new if not given.
        mode: Meets the operations before.

    Raises:
        ValuesMatterError: From the operation that asks; or in the end, if it was caught on its way.
    """
    zeros = zeros or LeftOutProducts()
    with _Leaving(zeros), zeros, mode or contextlib.nullcontext():
        yield
    if zeros.asked:
        raise zeros.asked


class LeftOutProducts(InsightMode):
    """A dispatch mode that returns zeros for matrix products and convolutions, and follows what depends on them.

    Args:
        weights: Products without any are computed: a table that Python keeps for a length is right afterwards. None: all are
            left out.
    """

    def __init__(self, weights: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: ValuesMatterError | None = None
        self._all = weights is None
        # Whether what comes of weights comes of a product that was left out; by tensor for what has no memory of its own.
        self._memories: dict[StorageWeakRef, bool] = {}
        self._tensors: TensorDict[bool] = TensorDict()
        for each in weights or ():
            self._note(each, left_out=False)

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Performs an operation, or returns zeros in its place if it is such a product."""
        operands = tensors_in((args, kwargs))
        known = {self._look_up(each) for each in operands} - {None}
        product = _zeros(func, args) if known or self._all else None
        if product is None and not known:
            return self.go_on(func, args, kwargs)
        operator = operator_of(func)
        unknown = product is not None or True in known
        if unknown and (operator.asks or operator.counts or operator.asserts):
            self.ask(func)
        result = self.go_on(func, args, kwargs) if product is None else product
        for tensor in [*tensors_in(result), *(operands if operator.written else ())]:
            self._note(tensor, left_out=unknown)
        return result

    def ask(self, func: Any) -> NoReturn:
        """Ends the run by :class:`ValuesMatterError`, as this operation reads a value that was not computed."""
        self.asked = ValuesMatterError(str(func))
        raise self.asked

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor's values come of a product that was left out."""
        return bool(self._look_up(tensor))

    def _look_up(self, tensor: torch.Tensor) -> bool | None:
        """Returns whether a tensor depends on a product that was left out, None if on no weights either."""
        memory = _memory(tensor)
        return self._tensors.get(tensor) if memory is None else self._memories.get(memory)

    def _note(self, tensor: torch.Tensor, *, left_out: bool) -> None:
        memory = _memory(tensor)
        if memory is None:
            self._tensors[tensor] = left_out or bool(self._tensors.get(tensor))
        else:
            self._memories[memory] = left_out or self._memories.get(memory, False)


def _memory(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Returns what stands for a tensor's memory, as for that of views and of a parameter made of it; None if it has none."""
    with contextlib.suppress(RuntimeError), torch._C.DisableTorchFunction():
        return StorageWeakRef(tensor.untyped_storage())
    return None


def _zeros(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """Returns zeros where a product would lie; None for other operations, and for products that are not possible."""
    if func.overloadpacket not in PRODUCTS:
        return None
    if func.overloadpacket is torch.ops.aten.convolution:
        source, kernel, bias, *_, transposed, _, groups = args
        channels = [kernel.shape[0], kernel.shape[1] * groups]
        leaving, entering = reversed(channels) if transposed else channels
        if {each.dtype for each in args[:3] if each is not None} != {source.dtype} or source.shape[1] != entering:
            return None
        if bias is not None and bias.shape != (leaving,):
            return None
        shaped: torch.Tensor = func(*tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), args))
        return torch.empty_strided(shaped.shape, shaped.stride(), dtype=shaped.dtype).zero_()
    bias, left, right = args if len(args) == 3 else (None, *args)
    shape = (*left.shape[:-1], right.shape[-1])
    possible = left.dtype == right.dtype and left.shape[-1] == right.shape[-2] and left.shape[:-2] == right.shape[:-2]
    if not possible or (bias is not None and (bias.dtype != left.dtype or bias.shape not in (shape, shape[-1:]))):
        return None
    return torch.zeros(shape, dtype=left.dtype)


class _Leaving(TorchFunctionMode):
    def __init__(self, zeros: LeftOutProducts) -> None:
        super().__init__()
        self._zeros = zeros

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVING and self._zeros.is_unknown(args[0]):
            self._zeros.ask(func)
        return func(*args, **(kwargs or {}))
