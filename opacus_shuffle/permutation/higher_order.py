"""Seeing into operations that are given functions: ``torch.cond``, ``torch.while_loop``, ``scan``, ``flex_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.scan import generic_scan
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

SPELLED_OUT = ("while_loop", "map_impl", "associative_scan", "flex_attention")
"""Operations of which PyTorch has an implementation that calls their functions, one plain operation after another."""


class OpaqueOperationError(ValueError):
    """Raised where a network uses an operation that nobody can look into."""


class InsightMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that meets operations which are given functions as what these functions do, operation by operation."""

    supports_higher_order_operators = True
    _inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self._inside += 1
            try:
                with self:
                    return self._spelled_out(func, *args, **kwargs)
            finally:
                self._inside -= 1
        if self._inside and func._can_decompose():  # elsewhere PyTorch has taken it apart before it comes here
            with self, torch._C.DisableTorchFunction():  # whose modes would have it start anew
                return func.decompose(*args, **kwargs)
        return self.meet(func, args, kwargs)

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what an operation of ATen returns."""
        raise NotImplementedError

    def where(self, operation: str) -> str:
        """Returns an operation's name, with its place in the code if that is known."""
        return operation

    def _spelled_out(self, func: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
        name = func.name()  # type: ignore[no-untyped-call]
        if name == "cond":
            condition, yes, no, operands = args
            return (yes if condition else no)(*operands)
        if name == "scan":
            step, start, rows, more = args
            return generic_scan(step, start, rows, additional_inputs=more)  # type: ignore[no-untyped-call]
        if name in SPELLED_OUT:
            return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        raise OpaqueOperationError(
            f"nobody can look into {self.where(name)}, an operation that is given functions: write it as plain operations of "
            "PyTorch"
        )
