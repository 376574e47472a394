"""Prepares loaders and networks for batches of no records, which Poisson sampling draws.

Opacus learns the form of batches from the first that has records. Where an empty one comes before
it, a list of zeros takes its place, whatever the form is; and where batches hold text or named
tuples, it fails in the middle of an epoch.

>>> loader = DataLoader([{"x": torch.ones(3), "text": "a record"}] * 40, batch_size=4)
>>> from opacus.data_loader import DPDataLoader
>>> private = DPDataLoader.from_data_loader(loader)
>>> prepare_empty_batches(private, loader, SamplingPlan("poisson", 40, 10, 4, 0.1))
>>> empty = private.collate_fn([])
>>> empty["x"].shape, empty["text"]
(torch.Size([0, 3]), [])
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from typing import Any

import torch
from opacus.data_loader import CollateFnWithEmpty
from opacus.grad_sample import GradSampleModuleExpandedWeights
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import wrapped_network
from opacus_shuffle.engine.sampling.samplers import SamplingPlan
from opacus_shuffle.networks.running import random_states_kept
from opacus_shuffle.networks.sample_input import first_records

NEVER = 1e-9
"""An empty batch that is less likely than that in an epoch is not waited for."""


class CollateText(CollateFnWithEmpty):
    """Opacus's collate function, whose empty batches may hold text and named tuples, too."""

    def __call__(self, batch: list[Any]) -> Any:
        """Returns the records as a batch; of no records, one of the form of the first batch."""
        if batch or self.first_batch is None or self.rand_on_empty:
            return super().__call__(batch)
        return without_records(self.first_batch, 0 if self.batch_first else 1)


def without_records(batch: Any, axis: int, path: str = "") -> Any:
    """Returns a batch of the same form that holds no records.

    Args:
        batch: Tensors and lists of text, in mappings, lists, tuples and named tuples.
        axis: Along which tensors hold records; the last one where they have fewer axes.
        path: Where the batch is in a larger one, for the error.

    Raises:
        ValueError: Something in it cannot be emptied. The message names it, and no more.
    """
    if isinstance(batch, torch.Tensor) and batch.dim():
        shape = list(batch.shape)
        shape[min(axis, batch.dim() - 1)] = 0
        return batch.new_empty(shape)
    if isinstance(batch, Mapping):
        return {
            name: without_records(entry, axis, f"{path}[{name!r}]") for name, entry in batch.items()
        }
    if type(batch) in (list, tuple) and all(isinstance(entry, str) for entry in batch):
        return type(batch)()
    # Packed sequences are named tuples, too, but none of them is empty.
    if isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence):
        entries = [
            without_records(entry, axis, f"{path}[{place}]") for place, entry in enumerate(batch)
        ]
        return getattr(batch, "_make", type(batch))(entries)
    raise ValueError(f"a {type(batch).__name__} at a batch{path}")


def prepare_empty_batches(loader: DataLoader, original: DataLoader, sampling: SamplingPlan) -> None:
    """Shows a loader of Poisson batches one batch, so that it can make empty ones.

    Args:
        loader: Of Opacus; any other is left alone.
        original: The user's.
        sampling: How batches are drawn.

    Raises:
        ValueError: Batches hold what cannot be emptied, and some will be empty.
    """
    collate: Any = loader.collate_fn
    if not isinstance(collate, CollateFnWithEmpty) or collate.first_batch is not None:
        return
    collate.__class__ = CollateText
    try:
        collate.first_batch = first_records(original)
    except Exception:  # the first batch will tell
        return
    absent = sampling.num_users * math.log1p(-min(sampling.sample_rate, 1 - 1e-16))
    chance = sampling.steps_per_epoch * math.exp(absent)
    try:
        with random_states_kept():  # a random record of rand_on_empty is drawn
            collate([])
    except Exception as error:
        if chance > NEVER:
            raise ValueError(
                f"data_loader yields batches with {error}, of which none can be made for a batch "
                f"of no records, and Poisson sampling draws such batches (about {chance:.2g} per "
                "epoch): let collate_fn return tensors and lists of text only, in tuples, lists "
                "and dictionaries, or use a larger batch_size"
            ) from error


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
