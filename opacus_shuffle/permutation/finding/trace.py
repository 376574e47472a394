"""Following a network operation by operation: the tracer has every ATen operation of the forward labelled by its rule."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_shuffle.permutation.finding import rules_indexing, rules_layers, rules_shapes  # noqa: F401  (they register their rules)
from opacus_shuffle.permutation.finding.rules import find_rule
from opacus_shuffle.permutation.finding.traced_run import TracedRun, bind
from opacus_shuffle.permutation.network import plain_attention

RESTRIDE = (torch.ops.aten.as_strided, torch.ops.aten.as_strided_)


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a traced run every operation of a network."""

    def __init__(self, network: nn.Module, run: TracedRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self._paused = False
        # Fused kernels would make of a recurrent layer one operation that nobody can look into.
        self._recurrent = any(isinstance(each, nn.RNNBase) for each in network.modules())

    def trace(self, forward: Callable[[], Any]) -> Any:
        """Runs the forward, traced and without gradients."""
        with (
            warnings.catch_warnings(),
            torch.no_grad(),
            plain_attention(),
            torch.backends.mkldnn.flags(enabled=not self._recurrent),
            torch.backends.cudnn.flags(enabled=not self._recurrent),
            _Leaving(self.run),
            self,
        ):
            warnings.simplefilter("ignore")
            return forward()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves untraced what runs inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        strides = args[0].stride() if func.overloadpacket in RESTRIDE else None
        result = func(*args, **kwargs)
        if strides is not None and _same_entries(args, strides):
            if result is not args[0]:
                self.run.copy_labels(result, args[0])
        elif not self._paused:
            call = bind(func, args, kwargs, result)
            self.run.label(call, find_rule(call))
        return result


class _Leaving(TorchFunctionMode):
    """Notices tensors that become arrays or lists."""

    WAYS = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__)

    def __init__(self, run: TracedRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.WAYS and isinstance(args[0], torch.Tensor):
            self._run.leaves(args[0], f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _same_entries(args: Sequence[Any], strides: Sequence[int]) -> bool:
    """Returns whether ``as_strided`` of a tensor of these strides changed nothing but the memory order of axes of size 1."""
    source, size, stride = args[:3]
    offset = args[3] if len(args) > 3 and args[3] is not None else source.storage_offset()
    return (
        tuple(size) == tuple(source.shape)
        and offset == source.storage_offset()
        and all(stride[dim] == strides[dim] for dim, each in enumerate(size) if each > 1 and dim < len(strides))
    )
