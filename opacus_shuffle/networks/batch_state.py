"""What a network keeps from one batch to the next: refused where later batches read it, named where they do not.

A step clips and hides what its own records do. What it reads of an earlier batch's, of a memory
bank, a queue or a running mean, is in none of its bounds, and nothing clips or noises a buffer that
records flow into: whoever gets the network gets it. So a few records are run through the network
after others, and once more after other ones than these; what comes out, and its gradients, may not
change. What is kept and never read (attention weights to look at, say) is warned of as soon as
training changes it. What is not seen: docs/pitfalls.rst.

>>> class Centred(nn.Linear):
...     mean = torch.zeros(3)
...     def forward(self, x):
...         before, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach().mean(0)
...         return super().forward(x - before)
>>> check_batch_state(nn.Sequential(nn.Tanh(), Centred(3, 2)), ["1.mean"], ((torch.randn(4, 3),), {}), 4)
Traceback (most recent call last):
    ...
ValueError: module carries records of one batch into later ones by 1.mean: ...
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.networks.rollback import rolled_back
from opacus_shuffle.networks.running import ATTRIBUTES, has_records, results, seed_draws
from opacus_shuffle.networks.sample_input import Call


def check_batch_state(
    network: nn.Module, changed: Collection[str], call: Call, records: int, *, axis: int = 0
) -> None:
    """Refuses a network whose results on one batch depend on the records of one of the two batches before.

    Args:
        network: As it trains; left without a trace.
        changed: The names of what a run leaves changed in it; if there are none, nothing is looked
            at.
        call: Arguments that it runs on.
        records: How many there are.
        axis: Where tensors have their records.

    Raises:
        ValueError: They do; the message names the parameters, buffers and attributes that a batch
            has changed.
    """
    if not changed:
        return
    plain, again = (_after(network, call, call) for _ in range(2))
    for change in _OTHERS:

        def changed_rows(value: torch.Tensor) -> torch.Tensor:
            return change(value) if has_records(value, records, axis) else value  # noqa: B023

        other = tree_map_only(torch.Tensor, changed_rows, call)
        try:
            found = _after(network, other, call)
        except Exception:  # what the network may not take, a probability above one, say
            continue
        if not _as_close(plain, found, again):
            raise ValueError(
                "module carries records of one batch into later ones by "
                f"{', '.join(sorted(set(changed)))}: a step then "
                "depends on records that it did not draw, which neither its clipping nor its noise "
                "accounts for; set it anew "
                "at the beginning of each forward pass, compute it from public data, or leave it "
                "out"
            )


def _scaled(factor: float, *, signed: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a change by which what is asked of records (is any above zero?) gets another answer."""

    def scale(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() or value.is_complex():
            return factor * (value if signed else value.abs())
        return torch.full_like(
            value, value.max().item() if factor > 0 else 0
        )  # no index beyond those that there are

    return scale


_OTHERS = (
    lambda value: value.flip(0),  # valid wherever the network's own records are
    *(_scaled(factor, signed=True) for factor in (1.5, -1e3)),
    *(_scaled(factor, signed=False) for factor in (0.0, 1e3, -1e3)),
)
"""Other records than those of a call: in another order, scaled, zeros, and large ones of one sign or of either."""


def _after(network: nn.Module, earlier: Call, call: Call) -> list[torch.Tensor]:
    """Returns what a network gives in each of the two batches after an earlier one, with gradients."""
    with rolled_back(network):
        _pass_both_ways(network, earlier, 0)
        # What is kept may be read two batches later alone.
        return [each.clone() for seed in (1, 2) for each in _pass_both_ways(network, call, seed)]


def _pass_both_ways(network: nn.Module, call: Call, seed: int) -> list[torch.Tensor]:
    """Runs a network forwards and backwards, and returns its outputs and gradients, as far as they can be had."""
    seed_draws(seed)
    # The gradients of a sine are other ones for other records, as those of losses are.
    with torch.enable_grad():
        outputs = results(network(*call[0], **call[1]))
        total = sum(output.sin().sum() for output in outputs if output.requires_grad)
        gradients: list[torch.Tensor | None] = []
        if isinstance(total, torch.Tensor):
            parameters = [
                parameter for parameter in network.parameters() if parameter.requires_grad
            ]
            with contextlib.suppress(RuntimeError, NotImplementedError):
                gradients = list(torch.autograd.grad(total, parameters, allow_unused=True))
    found = [*outputs, *(gradient for gradient in gradients if gradient is not None)]
    return [tensor.detach() for tensor in found if tensor.layout == torch.strided]


def _as_close(
    plain: list[torch.Tensor], found: list[torch.Tensor], again: list[torch.Tensor]
) -> bool:
    """Returns whether results differ by no more than those of the same run done again, as kernels that race may have it.

    These are the same computations on the same numbers, so that, but for such kernels, not even
    rounding may be another one: among a long queue's thousands of rows those of one batch count
    little.
    """
    shapes, others, same = (
        [tensor.shape for tensor in tensors] for tensors in (plain, found, again)
    )
    if shapes != others or shapes != same:
        return shapes != same
    return all(
        _distance(one, other) <= 10 * _distance(one, repeated)
        for one, other, repeated in zip(plain, found, again, strict=True)
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the largest difference of two tensors' entries, where NaN is as far from NaN as numbers from themselves."""
    differ = (one != other) & ~(one.isnan() & other.isnan())
    gap = (
        (one - other).abs()[differ]
        if one.is_floating_point() or one.is_complex()
        else differ[differ].float()
    )
    return float(gap.nan_to_num(torch.inf).max()) if gap.numel() else 0.0


class StateWatch:
    """Warns, by name, of buffers and other kept tensors that forward passes in training mode change, and when these leave.

    Args:
        network: The network itself, not a wrapper. An earlier watch of it ends.

    Attributes:
        changed: Their names.
    """

    def __init__(self, network: nn.Module) -> None:
        for hook in list(network._forward_pre_hooks.values()):
            if isinstance(earlier := getattr(hook, "__self__", None), StateWatch):
                earlier.end()
        self.changed: set[str] = set()
        self._before: dict[str, list[tuple[int, int]]] = {}
        self._handles: list[Any] = [
            network.register_forward_pre_hook(self._note),
            network.register_forward_hook(self._compare),
            network.register_state_dict_post_hook(self),  # type: ignore[no-untyped-call]
        ]

    def end(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()

    def _note(self, network: nn.Module, *_: Any) -> None:
        self._before = _kept(network) if network.training else {}

    def _compare(self, network: nn.Module, *_: Any) -> None:
        if not network.training:
            return
        for name, tensors in _kept(network).items():
            if name not in self.changed and self._before.get(name) != tensors:
                self.changed.add(name)
                _warn_of_changes([name])
        self._before = {}

    def __call__(self, network: nn.Module, *_: Any) -> None:
        """Warns again of buffers, as a hook of the state dict."""
        if leaving := [name for name, _ in network.named_buffers() if name in self.changed]:
            _warn_of_changes(leaving)


def _kept(network: nn.Module) -> dict[str, list[tuple[int, int]]]:
    """Returns which tensors lie in buffers and attributes, by name, and how often each was written to."""
    found = {}
    for place, module in network.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            if key not in ATTRIBUTES and (tensors := _tensors_of(value)):
                written = [
                    (id(tensor), 0 if tensor.is_inference() else tensor._version)
                    for tensor in tensors
                ]
                found[f"{place}.{key}" if place else key] = written
    return found


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that an attribute is, or that lie in it if it is a container."""
    held = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple | deque)
        else (value,)
    )
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]


def _warn_of_changes(names: list[str]) -> None:
    warnings.warn(
        f"buffer {', '.join(map(repr, names))} of the network changes in the forward pass: if it "
        "depends on the records, as a "
        "mean of the batch does, it is neither clipped nor noised, and whoever gets the network, "
        "its state_dict or a "
        "checkpoint, or weights of later steps that read it, gets what no epsilon covers; compute "
        "it from public data, or "
        "take it out of the network",
        PrivacyAssumptionWarning,
        stacklevel=2,
    )
