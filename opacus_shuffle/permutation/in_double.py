"""Running a network in double precision on weights of its own that are kept in single precision: the check of permutations.

Twice the bytes of all weights would be the largest part of the memory that attaching takes. So a weight in single precision
passes for one in double precision, and is widened, exactly, by each operation that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.networks.rollback import rolled_back
from opacus_shuffle.networks.running import results, seed_draws, without_graph
from opacus_shuffle.networks.sample_input import Call
from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.network import plain_attention

NOISE = {"bernoulli": 1.0, "bernoulli_": 1.0} | dict.fromkeys(
    (
        *("rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_", "exponential_", "cauchy_", "geometric_"),
        *("log_normal_", "poisson", "binomial", "_standard_gamma"),
    ),
    0.5,
)
"""What draws of noise are replaced by: it treats entries alike, so what it does to the function is a matter of distribution."""

NARROW = (torch.float32, torch.float16, torch.bfloat16)


class PerturbedWeights:
    """A copy of a network's parameters and buffers, moved away from values that hide mistakes.

    Args:
        network: It is not changed.
        generator: Of the noise.
        buffers: Whether buffers are perturbed, too.

    Attributes:
        stored: By name; tied ones are the same tensor.
    """

    def __init__(self, network: nn.Module, generator: torch.Generator, *, buffers: bool) -> None:
        tensors: dict[str, torch.Tensor] = dict(network.named_parameters(remove_duplicate=False))
        tensors |= dict(network.named_buffers(remove_duplicate=False))
        self._network = network
        self._buffers = {name for name, _ in network.named_buffers(remove_duplicate=False)}
        self.stored = _each_once(tensors, lambda tensor: _perturbed(tensor, generator, buffers=buffers))

    def run(self, call: Call, *, training: bool) -> list[torch.Tensor]:
        """Returns what the network computes with these weights in double precision; its own buffers are left as they are."""
        enter_phase("checking")
        try:
            return _outputs(self._network, self._presented(), call, training)
        except Exception:
            if not self.widen():
                raise
        return _outputs(self._network, self._presented(), call, training)  # it writes to weights, or reads their memory

    def run_rounded_otherwise(self, call: Call, generator: torch.Generator, *, training: bool) -> list[torch.Tensor]:
        """Returns what it computes with weights that have other last digits."""
        self.widen()
        kept = self.stored
        try:
            self.stored = _each_once(kept, lambda tensor: _rounded_otherwise(tensor, generator))
            return self.run(call, training=training)
        finally:
            self.stored = kept

    def widen(self) -> bool:
        """Keeps all weights in double precision from now on; returns whether some were not."""
        narrow = any(tensor.dtype in NARROW for tensor in self.stored.values())
        self.stored = _each_once(self.stored, _widen)
        return narrow

    def _presented(self) -> dict[str, torch.Tensor]:
        own = _each_once(self.stored, lambda tensor: _Wide(tensor) if tensor.dtype in NARROW else tensor)
        return {name: tensor.clone() if name in self._buffers else tensor for name, tensor in own.items()}


class _Wide(torch.Tensor):
    """A tensor that passes for one of double precision."""

    stored: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> _Wide:
        passed: _Wide = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            stored.shape,
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=torch.float64,
            device=stored.device,
        )
        passed.stored = stored
        return passed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_widen, args), **tree_map(_widen, kwargs or {}))


class _InDouble(InsightMode):  # type: ignore[no-untyped-call]
    """Keeps a network that rounds inside (norms, rotary embeddings) in double precision, and its draws of noise constant."""

    def meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what an operation returns in double precision."""
        kwargs = dict(kwargs)
        name = func.overloadpacket.__name__
        given = kwargs.get("dtype") or (torch.get_default_dtype() if _is_made_of_floats(name, args) else None)
        if given in NARROW:
            kwargs["dtype"] = torch.float64
        if func._schema.is_mutable:
            if any(isinstance(leaf, _Wide) for leaf in tree_leaves((args, kwargs))):
                raise TypeError("a weight that is widened where it is read cannot be written to")
        elif args and isinstance(args[0], _Wide) and func.is_view:
            return tree_map(_Wide, self.go_on(func, (args[0].stored, *args[1:]), kwargs))
        elif args and isinstance(args[0], _Wide) and func.overloadpacket is torch.ops.aten.embedding:
            return self.go_on(func, (args[0].stored, *args[1:]), kwargs).double()  # chosen rows only
        else:
            args, kwargs = tree_map(_widen, args), tree_map(_widen, kwargs)
        if name in ("native_dropout", "_fused_dropout"):
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name.startswith("rrelu_with_noise"):
            args = (*args[:4], False)
        if name == "_grouped_mm" and len(args) > 2 and args[0].dim() == 2 and args[1].dim() == 3:
            return _grouped_product(*args[:3])
        result = self.go_on(func, args, kwargs)
        if name in NOISE:
            for tensor in tree_leaves(result):
                tensor.fill_(NOISE[name])
        return result


def _is_made_of_floats(name: str, args: Any) -> bool:
    """Returns whether an operation makes a tensor that is of the default type unless another is asked for."""
    return name in ("zeros", "ones", "empty") or (name == "full" and isinstance(args[1], float))


def _grouped_product(rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiplies the rows up to each offset by a matrix of their own, which PyTorch does in low precision only."""
    result = rows.new_zeros(len(rows), matrices.shape[-1])
    start = 0
    for stop, matrix in zip(offsets.tolist(), matrices, strict=True):
        result[start:stop] = rows[start:stop] @ matrix
        start = stop
    return result


def _outputs(network: nn.Module, tensors: Mapping[str, torch.Tensor], call: Call, training: bool) -> list[torch.Tensor]:
    """Runs the network on these tensors, of which it may change buffers, and returns its results."""
    args, kwargs = call
    # cuDNN draws dropout inside of a recurrent layer.
    fused = not any(isinstance(part, nn.RNNBase) for part in network.modules())

    def run() -> list[torch.Tensor]:
        with (
            rolled_back(network),
            plain_attention(),
            torch.backends.cudnn.flags(enabled=fused),
            _InDouble(),  # type: ignore[no-untyped-call]
        ):
            seed_draws(0)
            network.train(training)
            own = dict(tensors)
            if torch.is_grad_enabled():
                trained = {name: own[name] for name, _ in network.named_parameters(remove_duplicate=False)}
                own |= _each_once(trained, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))
            outputs = torch.func.functional_call(network, own, tree_map(_widen, args), tree_map(_widen, dict(kwargs)))
            return [leaf.detach().clone() if isinstance(leaf, _Wide) else leaf.detach() for leaf in results(outputs)]

    found = without_graph(run)
    found = [leaf.double() if not leaf.is_complex() else torch.view_as_real(leaf).double() for leaf in found]
    if not any(leaf.numel() for leaf in found):
        raise ValueError(f"{type(network).__name__} returns no tensor on the sample input, so nothing can be checked")
    if any(bool(torch.isnan(leaf).any()) for leaf in found):
        raise ValueError(f"{type(network).__name__} gives undefined outputs on the sample input: give another")
    return found


def _each_once(tensors: Mapping[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors changed, tied ones still tied."""
    changed: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
    return {name: changed[id(tensor)] for name, tensor in tensors.items()}


def _rounded_otherwise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns the tensor with other last digits."""
    if tensor.layout != torch.strided or tensor.dtype != torch.float64:
        return tensor
    return tensor * (1 + 1e-14 * torch.randn(tensor.shape, generator=generator).to(tensor))


def _widen(value: Any) -> Any:
    """Returns a floating-point tensor in double precision, and anything else as it is."""
    if isinstance(value, _Wide):
        return value.stored.double()
    if isinstance(value, torch.Tensor) and value.dtype in NARROW:
        return value.double()
    return value.to(torch.complex128) if isinstance(value, torch.Tensor) and value.dtype == torch.complex64 else value


def _perturbed(tensor: torch.Tensor, generator: torch.Generator, *, buffers: bool) -> torch.Tensor:
    """Copies a parameter in single or a buffer in double precision, at least, moved away from values that hide mistakes."""
    if tensor.layout != torch.strided:
        return tensor
    single = isinstance(tensor, nn.Parameter) and tensor.dtype in NARROW
    copy = tensor.detach().to(torch.float32) if single else _widen(tensor.detach())
    copy = copy.clone(memory_format=torch.contiguous_format)
    if not copy.is_floating_point():
        return copy
    noise = torch.randn(copy.shape, generator=generator).to(copy)
    if isinstance(tensor, nn.Parameter):
        spread = 0.2 if copy.dim() < 2 else 0.5 * max(float(copy.std()) if copy.numel() > 1 else 0.0, 1e-2)
        return copy.add_(noise, alpha=spread)
    if buffers and bool(torch.isfinite(copy).all()):  # a variance stays positive
        return torch.where(copy == 0, 0.1 * noise, copy * torch.exp(0.2 * noise))
    return copy
