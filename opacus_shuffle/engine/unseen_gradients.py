"""Refuses, for ghost clipping, parameters that a network uses beside their layers: nobody clips those gradients.

Opacus computes norms where a layer is called. ``F.linear(x, self.embedding.weight)`` calls none, so with ghost clipping that
part of the gradient is in the sum, but not in the norm. (With other modes it is not in the sum either.)

>>> class Tied(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.up = nn.Linear(3, 3)
...     def forward(self, x):
...         return torch.nn.functional.linear(self.up(x), self.up.weight)
>>> refuse_unseen_gradients(Tied(), ((torch.randn(2, 3),), {}))
Traceback (most recent call last):
    ...
ValueError: module uses up.weight beside the layer that it belongs to ...
"""

from __future__ import annotations

from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from torch import nn

from opacus_shuffle.engine.mixed_records import untouched
from opacus_shuffle.permutation.network import results
from opacus_shuffle.permutation.sample_input import Call


def refuse_unseen_gradients(network: nn.Module, call: Call, *, batch_first: bool = True) -> None:
    """Refuses a network with parameters whose gradients arise outside of the layer that owns them.

    Args:
        network: As it trains; left without a trace. Nothing is looked at where it does not run.
        call: Its arguments.
        batch_first: As of Opacus.

    Raises:
        ValueError: There are some; the message names the parameters.
    """
    try:
        pairs = _gradients(network, call, batch_first)
    except Exception:
        return
    scale = sum(float(whole.norm()) for whole, _ in pairs.values())
    unseen = [
        name
        for name, (whole, seen) in pairs.items()
        if float((whole - seen).norm()) > max(1e-2 * float(whole.norm() + seen.norm()), 1e-5 * scale)
    ]
    if unseen:
        raise ValueError(
            f"module uses {', '.join(unseen)} beside the layer that it belongs to (or under torch.utils.checkpoint), where "
            "grad_sample_mode='ghost' does not see its gradient and would not clip it; call the layer, use "
            "grad_sample_mode='hooks', or freeze it"
        )


def _gradients(network: nn.Module, call: Call, batch_first: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns by parameter the whole gradient of a random sum of outputs, and the part of it that layers see."""
    if hasattr(network, "autograd_grad_sample_hooks"):
        return {}
    named = {name: each for name, each in network.named_parameters() if each.requires_grad}
    with untouched(network), torch.enable_grad():
        watched: Any = GradSampleModule(network, batch_first=batch_first, loss_reduction="sum", strict=False)
        try:
            outputs = [each for each in results(network(*call[0], **call[1])) if each.requires_grad]
            weights = torch.Generator().manual_seed(0)
            total = torch.stack([(each * torch.randn(each.shape, generator=weights).to(each)).sum() for each in outputs]).sum()
            found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
            pairs = {}
            for (name, parameter), whole in zip(named.items(), found, strict=True):
                sample: torch.Tensor | None = vars(parameter).get("grad_sample")
                seen = torch.zeros_like(parameter) if sample is None else sample.detach().sum(0)
                layer = network.get_submodule(name.rpartition(".")[0])
                if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                    seen[layer.padding_idx] = 0  # where PyTorch has no gradient
                pairs[name] = (torch.zeros_like(parameter) if whole is None else whole, seen)
        finally:
            watched.cleanup()
    return pairs
