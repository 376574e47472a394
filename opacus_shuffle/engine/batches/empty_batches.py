"""Prepares loaders and networks for batches of no records, which Poisson sampling draws.

Opacus learns the form of batches from the first one that has records. If an empty batch is drawn
before, Opacus yields a list of zeros instead. If batches contain text or named tuples, it fails in
the middle of an epoch.

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
from opacus_shuffle.engine.batches.samplers import SamplingPlan
from opacus_shuffle.networks.running import random_states_kept
from opacus_shuffle.networks.sample_input import first_records

NEVER = 1e-9
"""Empty batches are ignored if an epoch has one with a lower probability."""


class CollateText(CollateFnWithEmpty):
    """Opacus's collate function, extended to empty batches with text and named tuples."""

    def __call__(self, batch: list[Any]) -> Any:
        """Returns the records as a batch; an empty one has the form of the first batch."""
        if batch or self.first_batch is None or self.rand_on_empty:
            return super().__call__(batch)
        return without_records(self.first_batch, 0 if self.batch_first else 1)


def without_records(batch: Any, axis: int, path: str = "") -> Any:
    """Returns a batch of the same form without records.

    Args:
        batch: Tensors and lists of text, in mappings, lists, tuples and named tuples.
        axis: The axis of records; for tensors with fewer axes the last one.
        path: The path to this entry of the batch, for the error.

    Raises:
        ValueError: An entry cannot be emptied. The message is its type and path.
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
    # Packed sequences are named tuples, too, but cannot be empty.
    if isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence):
        entries = [
            without_records(entry, axis, f"{path}[{index}]") for index, entry in enumerate(batch)
        ]
        return getattr(batch, "_make", type(batch))(entries)
    raise ValueError(f"a {type(batch).__name__} at a batch{path}")


def prepare_empty_batches(loader: DataLoader, original: DataLoader, sampling: SamplingPlan) -> None:
    """Sets the first batch of a loader of Poisson batches, from which it makes empty ones.

    Args:
        loader: A loader of Opacus's; others are not changed.
        original: The user's loader.
        sampling: How batches are drawn.

    Raises:
        ValueError: Batches cannot be emptied, and some will be empty.
    """
    collate: Any = loader.collate_fn
    if not isinstance(collate, CollateFnWithEmpty) or collate.first_batch is not None:
        return
    collate.__class__ = CollateText
    try:
        collate.first_batch = first_records(original)
    except Exception:  # the first batch of training sets it
        return
    absent = sampling.num_users * math.log1p(-min(sampling.sample_rate, 1 - 1e-16))
    chance = sampling.steps_per_epoch * math.exp(absent)
    try:
        with random_states_kept():  # a random record of rand_on_empty is drawn
            collate([])
    except Exception as error:
        if chance > NEVER:
            raise ValueError(
                f"data_loader yields batches with {error}, which cannot be made for a batch of no "
                f"records, and Poisson sampling draws such batches (about {chance:.2g} per epoch): "
                "let collate_fn return tensors and lists of text only, in tuples, lists and "
                "dictionaries, or use a larger batch_size"
            ) from error


def let_layers_be_empty(wrapped: Any, network: nn.Module) -> None:
    """Lets a private network run on batches of no records.

    Args:
        wrapped: Opacus's wrapper or hooks. PyTorch's expanded weights refuse such batches.
        network: The network inside. Functional gradients of embeddings would fail.
    """
    if isinstance(wrapped, GradSampleModuleExpandedWeights):
        # Bound to the instance: a deep copy must call the copied weights.
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


_forward.__name__ = "forward"  # so that an unpickled copy has Opacus's method of this name


def _unless_empty(
    compute: Any, parameters: Any, activations: torch.Tensor, backprops: torch.Tensor
) -> Any:
    """Computes each record's gradients of a layer's parameters, also of no records."""
    if len(activations):
        return compute(parameters, activations, backprops)
    return [parameter.new_zeros((0, *parameter.shape)) for parameter in parameters]
