"""Seeing into operations that are given functions: ``torch.cond``, ``torch.while_loop``, ``scan``, ``flex_attention``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops.scan import generic_scan
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

SPELLED_OUT = ("while_loop", "map_impl", "associative_scan", "flex_attention")
"""Operations of which PyTorch has an implementation that calls their functions, one plain operation after another."""


class OpaqueOperationError(ValueError):
    """Raised where a network uses an operation that nobody can look into."""


class InsightMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that meets operations which are given functions as what these functions do, operation by operation.

    One that is entered right inside of another joins it: PyTorch, which spends longer on a mode than modes do on an operation,
    knows of the outer one alone, and that has the inner one meet each operation first. Outer ones meet what a ``meet`` does
    besides only where it asks for that, by :meth:`outside`.
    """

    supports_higher_order_operators = True
    _inside = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._joined: list[InsightMode] = []  # the innermost last
        self._joins: list[InsightMode | None] = []  # each time that it was entered
        self._outer: InsightMode | None = None

    def __enter__(self) -> Any:
        around = _get_current_dispatch_mode()  # type: ignore[no-untyped-call]
        self._joins.append(around if isinstance(around, InsightMode) else None)
        if not isinstance(around, InsightMode):
            return super().__enter__()  # type: ignore[no-untyped-call]
        self._outer = around._innermost()
        around._joined.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        around = self._joins.pop()
        if around is None:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        else:
            around._joined.pop()
            self._outer = None

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
        return self._innermost().meet(func, args, kwargs)

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what an operation of ATen returns, by :meth:`go_on` as a rule."""
        raise NotImplementedError

    def go_on(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Has the next outer mode meet an operation; the outermost one performs it."""
        return func(*args, **kwargs) if self._outer is None else self._outer.meet(func, args, kwargs)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Has outer modes meet what runs inside, as operations of the network are met; for use in a ``meet``."""
        if self._outer is None:
            yield
        else:
            with _Handing(self._outer):
                yield

    def _innermost(self) -> InsightMode:
        return self._joined[-1] if self._joined else self

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
        where = self._innermost().where(name)
        raise OpaqueOperationError(
            f"nobody can look into {where}, an operation that is given functions: write it as plain operations of PyTorch"
        )


class _Handing(InsightMode):  # type: ignore[no-untyped-call]
    """Hands operations to a mode that PyTorch does not know of, as it has joined another."""

    def __init__(self, to: InsightMode) -> None:
        super().__init__()
        self._to = to

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what the other mode returns."""
        return self._to.meet(func, args, kwargs)
