"""Following a network operation by operation.

The tracer sees every ATen operation of the forward, whoever wrote it, and has it labelled by its rule.

>>> layer = torch.nn.Linear(3, 5, bias=False)
>>> tracer = Tracer(layer, run := TracedRun(layer))
>>> activations = tracer.trace(lambda: torch.relu(layer(torch.ones(2, 3))))
>>> run.dimensions(activations)[1][0].root is run.parameters["weight"][0][0].root
True
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opacus_shuffle.permutation.finding import rules_indexing, rules_layers, rules_shapes  # noqa: F401  (they register their rules)
from opacus_shuffle.permutation.finding.operation import RESTRIDE, bind, same_entries
from opacus_shuffle.permutation.finding.rules import find_rule
from opacus_shuffle.permutation.finding.traced_run import TracedRun


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a traced run every operation of a network.

    Args:
        network: The network.
        run: What is known of its tensors, and learns more.
    """

    def __init__(self, network: nn.Module, run: TracedRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self._paused = False
        # Fused kernels would make of a recurrent layer one operation that nobody can look into.
        self._recurrent = any(isinstance(each, nn.RNNBase) for each in network.modules())

    def trace(self, forward: Callable[[], Any]) -> Any:
        """Runs the forward traced: without gradients, and attention as the plain operations it consists of."""
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                torch.no_grad(),
                _quiet(),
                sdpa_kernel(SDPBackend.MATH),
                torch.backends.mkldnn.flags(enabled=not self._recurrent),
                torch.backends.cudnn.flags(enabled=not self._recurrent),
                _Leaving(self.run),
                self,
            ):
                return forward()
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Looks away from what runs inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, then labels what it returned."""
        kwargs = kwargs or {}
        strides = args[0].stride() if func.overloadpacket in RESTRIDE else None
        result = func(*args, **kwargs)
        if strides is not None and same_entries(result, args, strides):
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
        """Fixes them, and goes on."""
        if func in self.WAYS and isinstance(args[0], torch.Tensor):
            self._run.leaves(args[0], f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
