"""Leaving out the expensive part of a run that is only watched: labels follow shapes, so products may be zeros of their shape.

That holds as long as nothing asks for a value that comes of them. What does so ends the run, which is then done in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from opacus_shuffle.permutation.finding.paths import LEAVING

PRODUCTS = frozenset(
    getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "matmul")
)

ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Result = TypeVar("Result")


class ValuesMatterError(Exception):
    """Raised where a run asks for a value that was not computed."""


class Frugal:
    """Runs a network without its products as long as nobody asks for values that come of them, and in full from then on.

    Args:
        network: On a graphics processor it runs in full: that is fast, and an index that makes no sense would be fatal there.
    """

    def __init__(self, network: nn.Module) -> None:
        self._possible = all(each.device.type == "cpu" for each in (*network.parameters(), *network.buffers()))

    def __call__(self, run: Callable[[], Result]) -> Result:
        """Returns what a run gives, of which nothing but shapes may matter; a run that fails is done in full."""
        if self._possible:
            try:
                with cheap_products():
                    return run()
            except ValuesMatterError:
                self._possible = False
            except Exception:  # zeros may be the reason
                return run()
        return run()


@contextmanager
def cheap_products() -> Iterator[None]:
    """Has products inside give zeros, until somebody asks for a value that comes of them.

    Raises:
        ValuesMatterError: From the operation that asks; or in the end, if it was caught on its way.
    """
    zeros = _Zeros()
    with _Leaving(zeros), zeros:
        yield
    if zeros.asked:
        raise zeros.asked


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows which tensors come of products that were left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: ValuesMatterError | None = None
        self._unknown: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        product = func.overloadpacket in PRODUCTS
        if product or any(map(self.is_unknown, tree_leaves((args, kwargs)))):
            if ASKING & set(func.tags) or "assert" in str(func):
                self.ask(func)
            result = _zeros(func, args, kwargs) if product else func(*args, **kwargs)
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._unknown[leaf] = True
                    if leaf._base is not None:  # written to through a view
                        self._unknown[leaf._base] = True
            return result
        return func(*args, **kwargs)

    def ask(self, func: Any) -> NoReturn:
        """Ends the run."""
        self.asked = ValuesMatterError(str(func))
        raise self.asked

    def is_unknown(self, value: Any) -> bool:
        """Returns whether a tensor's values come of a product that was left out."""
        return isinstance(value, torch.Tensor) and (value in self._unknown or value._base in self._unknown)


def _zeros(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Returns zeros where a product would lie."""
    shaped: torch.Tensor = func(*tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), args), **kwargs)
    return torch.empty_strided(shaped.shape, shaped.stride(), dtype=shaped.dtype).zero_()


class _Leaving(TorchFunctionMode):
    def __init__(self, zeros: _Zeros) -> None:
        super().__init__()
        self._zeros = zeros

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVING and self._zeros.is_unknown(args[0]):
            self._zeros.ask(func)
        return func(*args, **(kwargs or {}))
