"""Empty Poisson batches with expanded weights, which PyTorch refuses: they have no per-sample gradient, and that is all.

>>> import torch
>>> model = GradSampleModuleExpandedWeights(torch.nn.Linear(3, 1))
>>> allow_empty_batches(model)
>>> model(torch.zeros(0, 3)).sum().backward()
>>> [tuple(p.grad_sample.shape) for p in model.parameters()]
[(0, 1, 3), (0, 1)]
"""

from __future__ import annotations

import types
from typing import Any

import torch
from opacus.grad_sample import GradSampleModuleExpandedWeights


def _forward(module: GradSampleModuleExpandedWeights, x: torch.Tensor, *args: Any, **keywords: Any) -> Any:
    """The class's own forward, or the plain one with no per-sample gradients for a batch of no records."""
    if len(x):
        return type(module).forward(module, x, *args, **keywords)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
    return module._module(x, *args, **keywords)


def allow_empty_batches(module: GradSampleModuleExpandedWeights) -> None:
    """Let this module see empty batches. A bound method on the instance, so that deep copies call their own weights."""
    module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
