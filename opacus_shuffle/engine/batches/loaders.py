"""Data loaders that issue a ticket with every batch that they yield, and batches of no records.

The ticket is issued when the batch is yielded, because workers may have drawn it long before.

Poisson sampling draws batches of no records. Opacus learns the form of batches from the first one
that has records. If an empty batch is drawn before, Opacus yields a list of zeros instead. If
batches contain text or named tuples, it fails in the middle of an epoch.

>>> import torch
>>> from torch.utils.data import TensorDataset
>>> from opacus_shuffle.engine.batches.samplers import FixedSizeSampler
>>> plain = DataLoader(TensorDataset(torch.zeros(10, 1)), batch_size=4)
>>> sampler = FixedSizeSampler(num_samples=10, batch_size=4, steps=3)
>>> loader = with_batch_sampler(plain, sampler, TicketBook())
>>> [loader.tickets.fresh().size for _ in loader]
[4, 4, 4]
>>> loader = DataLoader([{"x": torch.ones(3), "text": "a record"}] * 40, batch_size=4)
>>> private = copy.copy(loader)
>>> prepare_empty_batches(private, loader, SamplingPlan("poisson", 40, 10, 4, 0.1))
>>> empty = private.collate_fn([])
>>> empty["x"].shape, empty["text"]
(torch.Size([0, 3]), [])
"""

from __future__ import annotations

import copy
import functools
import math
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from opacus.data_loader import CollateFnWithEmpty, DPDataLoader
from opacus.grad_sample import GradSampleModuleExpandedWeights
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, RandomSampler

from opacus_shuffle.core.opacus_compat import build_physical_loaders_with, wrapped_network
from opacus_shuffle.core.randomness import for_pytorch
from opacus_shuffle.engine.batches.samplers import (
    OwnBatches,
    SamplingPlan,
    SplitBatches,
    TicketedSampler,
)
from opacus_shuffle.engine.batches.tickets import Ticket, TicketBook
from opacus_shuffle.engine.guards.raw_gradients import names_of
from opacus_shuffle.networks.running import random_states_kept
from opacus_shuffle.networks.sample_input import first_records

NEVER = 1e-9
"""Empty batches are ignored if an epoch has one with a lower probability."""


class TicketedLoader(DataLoader):
    """A loader that issues the tickets of the batches that its sampler draws.

    Attributes:
        tickets: Where they are issued. Deep copies and pickles get another book, which no
            optimizer knows.
    """

    tickets: TicketBook

    def __iter__(self) -> Any:
        # PyTorch draws the workers' seed on the default device, which need not be the device of the
        # loader's generator.
        with torch.device("cpu"):
            batches: Any = super().__iter__()  # has the sampler begin to note what it draws
        return _with_tickets(self, batches, getattr(self.batch_sampler, "drawn", None))


class TicketedDPDataLoader(TicketedLoader, DPDataLoader):
    """Opacus's Poisson loader, with tickets."""


def _with_tickets(
    loader: TicketedLoader, batches: Iterator[Any], drawn: deque[Ticket] | None
) -> Iterator[Any]:
    """Yields a loader's batches, each with its ticket, in the order in which they were drawn.

    A pass ends with its first error, because with workers a batch may have been lost by it.
    """
    tickets: Any = loader.tickets
    while True:
        if changed := tickets.changed_without_step():
            raise ValueError(
                f"{names_of(changed)} changed on the last batch without optimizer.step(): updates "
                "by hand, such as p -= lr * p.grad, are neither clipped, noised nor accounted; "
                "call step() of the optimizer that make_private returned, and change weights "
                "otherwise only between a step and the next batch"
            )
        sampler: Any = loader.batch_sampler
        if loader.persistent_workers and getattr(sampler, "drawn", None) is not drawn:
            tickets.issue(None)
            raise ValueError(
                "this pass over the data loader ended when a later one began, as "
                "persistent_workers=True gives both the same workers: end one pass before the "
                "next, or leave out persistent_workers=True"
            )
        try:
            content = next(batches)
        except StopIteration:
            tickets.end_pass()
            return
        except BaseException:
            tickets.issue(None)
            raise
        ticket = drawn.popleft() if drawn else None
        tickets.issue(ticket, content)
        try:
            yield content
        except GeneratorExit:  # the loop was left, by a break or by next(iter(loader))
            if ticket is not None:
                ticket.epoch.end = "left"
            raise


def with_batch_sampler(
    data_loader: DataLoader,
    sampler: TicketedSampler,
    tickets: TicketBook,
    loader_class: type[TicketedLoader] = TicketedLoader,
) -> DataLoader:
    """Returns a copy of a loader with another batch sampler and with tickets."""
    loader: Any = copy.copy(data_loader)
    # The sampler draws the order. The loader's generator draws only the workers' seeds, which need
    # not be secret.
    # DataLoader itself forbids to set some attributes after its creation.
    vars(loader).update(
        _iterator=None,
        in_order=True,
        tickets=tickets,
        batch_sampler=sampler,
        generator=for_pytorch(loader.generator),
    )
    loader.__class__, tickets.loader = loader_class, weakref.ref(loader)
    return loader  # type: ignore[no-any-return]


def ticketed_copy(data_loader: DataLoader, tickets: TicketBook) -> DataLoader:
    """Returns a copy of the user's loader, with the same batches and with tickets.

    Raises:
        ValueError: If it yields batches in another way than a plain ``DataLoader``.
    """
    if type(data_loader) not in (DataLoader, TicketedLoader):
        raise ValueError(
            "poisson_sampling=False needs a plain torch DataLoader, got a "
            f"{type(data_loader).__name__}: what another class yields is unknown"
        )
    return with_batch_sampler(data_loader, OwnBatches(data_loader.batch_sampler), tickets)  # type: ignore[arg-type]


def seeded_copy(data_loader: DataLoader, generator: torch.Generator) -> DataLoader:
    """Returns a copy of a loader that draws order and workers' seeds from this generator."""
    loader: Any = copy.copy(data_loader)
    vars(loader).update(_iterator=None, generator=for_pytorch(loader.generator or generator))
    order = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(order, RandomSampler) and order.generator is None:
        order, batches = copy.copy(order), copy.copy(loader.batch_sampler)
        order.generator, batches.sampler = for_pytorch(generator), order
        vars(loader)["batch_sampler"] = batches
    return loader  # type: ignore[no-any-return]


def _physical_loader(
    dataset: Any, *, batch_sampler: BatchSplittingSampler, **keywords: Any
) -> DataLoader:
    """Builds the loader of physical batches that ``BatchMemoryManager`` iterates over."""
    tickets: TicketBook | None = getattr(batch_sampler.optimizer, "tickets", None)
    if tickets is None or not isinstance(batch_sampler.sampler, TicketedSampler):
        return DataLoader(dataset, batch_sampler=batch_sampler, **keywords)
    whole = tickets.loader()
    if (
        whole is None
        or batch_sampler.sampler is not whole.batch_sampler
        or dataset is not whole.dataset
    ):
        raise ValueError(
            "data_loader is not the one that make_private returned with this optimizer, or is "
            "split already, so that its batches are not those that are accounted: pass loader and "
            "optimizer of the same call to BatchMemoryManager"
        )
    split = SplitBatches(
        sampler=batch_sampler.sampler,
        max_batch_size=batch_sampler.max_batch_size,
        optimizer=batch_sampler.optimizer,
    )
    loader = TicketedLoader(dataset, batch_sampler=split, **keywords)
    loader.tickets = tickets
    return loader


build_physical_loaders_with(_physical_loader)


# ---- batches of no records ---------------------------------------------------------------------


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


def prepare_empty_batches(
    loader: DataLoader,
    original: DataLoader,
    sampling: SamplingPlan,
    *,
    batch_first: bool = True,
    rand_on_empty: bool = False,
) -> None:
    """Lets a loader of Poisson batches collate batches of no records, as Opacus's loader does.

    Opacus's own constructor would read each record as a sequence.

    Args:
        loader: A copy of the user's loader, which is changed.
        original: The user's loader, whose first batch gives empty ones their form.
        sampling: How batches are drawn.
        batch_first: Whether the first axis of a batch is that of its records.
        rand_on_empty: Whether an empty batch is replaced by random numbers.

    Raises:
        ValueError: Batches cannot be emptied, and some will be empty.
    """
    # A loader of an earlier call has such a collate function already.
    collate_records = getattr(original.collate_fn, "wrapped_collator_fn", original.collate_fn)
    collate = CollateText(collate_records, batch_first, rand_on_empty)
    vars(loader).update(  # as Opacus's loader has them
        collate_fn=collate, batch_size=None, drop_last=False, sample_rate=1 / len(original)
    )
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
