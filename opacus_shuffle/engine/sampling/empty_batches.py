"""Prepares loaders and networks for batches of no records, which Poisson sampling draws.

Opacus learns the form of batches from the first that has records. Where an empty one comes before
it, a list of zeros takes its place, whatever the form is; and where batches hold more than tensors,
it fails in the middle of an epoch.

>>> loader = DataLoader([{"x": torch.ones(3)}] * 40, batch_size=4)
>>> from opacus.data_loader import DPDataLoader
>>> private = DPDataLoader.from_data_loader(loader)
>>> prepare_empty_batches(private, loader, SamplingPlan("poisson", 40, 10, 4, 0.1))
>>> private.collate_fn([])["x"].shape
torch.Size([0, 3])
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import torch
from opacus.data_loader import CollateFnWithEmpty
from opacus.grad_sample import GradSampleModuleExpandedWeights
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import wrapped_network
from opacus_shuffle.engine.sampling.samplers import SamplingPlan
from opacus_shuffle.networks.sample_input import first_records

NEVER = 1e-9
"""An empty batch that is less likely than that in an epoch is not waited for."""


def prepare_empty_batches(loader: DataLoader, original: DataLoader, sampling: SamplingPlan) -> None:
    """Shows a loader of Poisson batches one batch, so that it can make empty ones.

    Args:
        loader: Of Opacus; any other is left alone.
        original: The user's.
        sampling: How batches are drawn.

    Raises:
        ValueError: Batches hold what cannot be emptied, and some will be empty.
    """
    collate = loader.collate_fn
    if not isinstance(collate, CollateFnWithEmpty) or collate.first_batch is not None:
        return
    try:
        collate.first_batch = first_records(original)
    except Exception:  # the first batch will tell
        return
    absent = sampling.num_users * math.log1p(-min(sampling.sample_rate, 1 - 1e-16))
    chance = sampling.steps_per_epoch * math.exp(absent)
    leaves, _ = tree_flatten_with_path(collate.first_batch, is_leaf=_is_closed)
    odd = [
        f"a {type(leaf).__name__} at a batch{keystr(path)}"
        for path, leaf in leaves
        if not (isinstance(leaf, torch.Tensor) and leaf.dim())
    ]
    if odd and chance > NEVER:
        raise ValueError(
            f"data_loader yields batches with {odd[0]}, of which Opacus cannot make one for a "
            f"batch of no records, and Poisson sampling draws such batches (about {chance:.2g} per "
            "epoch): let collate_fn return tensors in tuples, lists and dictionaries only, or use "
            "a larger batch_size"
        )


def _is_closed(value: Any) -> bool:
    """Tells whether a value is a named tuple, which Opacus cannot rebuild."""
    return isinstance(value, tuple) and type(value) is not tuple


def let_layers_be_empty(wrapped: Any, network: nn.Module) -> None:
    """Lets a private network run on batches of no records.

    Args:
        wrapped: Opacus's wrapper or hooks. PyTorch refuses such batches where it holds expanded
            weights.
        network: What it wraps. Embeddings would fail where functorch computes their gradients.
    """
    if isinstance(wrapped, GradSampleModuleExpandedWeights):
        # Bound to the instance, so that deep copies call their own weights.
        wrapped.forward = types.MethodType(_forward, wrapped)
    for layer in network.modules():
        compute = vars(layer).get("ft_compute_sample_grad")
        if compute is not None and not isinstance(compute, functools.partial):
            layer.__dict__["ft_compute_sample_grad"] = functools.partial(_unless_empty, compute)


def _forward(module: GradSampleModuleExpandedWeights, *args: Any, **keywords: Any) -> Any:
    """Runs the network; a batch of no records runs without expanded weights."""
    if not args:
        raise ValueError(
            "grad_sample_mode='ew' needs the records as first positional argument of the network, "
            f"got {', '.join(keywords)} by keyword: call model(x, ...), or use "
            "grad_sample_mode='hooks'"
        )
    if len(args[0]):
        return type(module).forward(module, *args, **keywords)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
    return wrapped_network(module)(*args, **keywords)


_forward.__name__ = "forward"  # under which a copy that is pickled finds Opacus's own


def _unless_empty(
    compute: Any, parameters: Any, activations: torch.Tensor, backprops: torch.Tensor
) -> Any:
    """Computes each record's gradients of a layer's parameters, also of no records."""
    if len(activations):
        return compute(parameters, activations, backprops)
    return [parameter.new_zeros((0, *parameter.shape)) for parameter in parameters]
