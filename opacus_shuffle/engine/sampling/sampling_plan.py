"""How many batches of how many records, decided before anything is touched, in exact integers.

Stock Opacus divides floats: ``int(1 / (1 / L))`` is L − 1 for L = 93, and ``int(n * (1 / L))`` is 0
for n = 49, B = 1. Here the number of steps is the loader's own length and the averaging batch size
is ``round(n / L)``.

>>> import torch
>>> from torch.utils.data import DataLoader, TensorDataset
>>> loader = DataLoader(TensorDataset(torch.zeros(930, 1)), batch_size=10)
>>> plan = plan_sampling("shuffled_checkin", loader, "poisson")
>>> plan.kind, plan.steps_per_epoch, plan.batch_size, plan.sample_rate == 1 / 93
('poisson', 93, 10, True)
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from opacus_shuffle.core.opacus_compat import POISSON_SAMPLERS
from opacus_shuffle.engine.sampling.samplers import FixedSizeSampler

Kind = Literal["poisson", "fixed_size", "own"]


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """How batches are drawn: ``"own"`` keeps the user's loader."""

    kind: Kind
    num_users: int
    steps_per_epoch: int
    batch_size: int
    sample_rate: float


def plan_sampling(
    accountant: str,
    data_loader: DataLoader,
    kind: Kind,
    *,
    expected: bool = False,
    distributed: bool = False,
) -> SamplingPlan:
    """Plans the batches of an epoch from this loader's data.

    Args:
        accountant: Its name, for messages.
        data_loader: A map-style loader with a batch size, in sequential or shuffled order.
        kind: How batches are drawn. With ``"own"`` the loader's batches must all have one size.
        expected: Opacus's own accountants take the expected size of a batch, whatever the sampler.
        distributed: A ``DistributedSampler`` may be there, too; it is replaced, as every one is.

    Raises:
        ValueError: If kind and sampler do not match, or the loader has no fixed length.
    """
    if isinstance(data_loader.dataset, IterableDataset) or not hasattr(
        data_loader.dataset, "__len__"
    ):
        raise ValueError(
            "data_loader must be over a data set with a length, got "
            f"{type(data_loader.dataset).__name__}"
        )
    users = len(data_loader.dataset)
    steps = len(data_loader)
    if users < 1 or steps < 1:
        raise ValueError(
            f"data_loader yields no batch: {users} records, batch_size={data_loader.batch_size}"
        )
    if not (expected and kind == "own"):
        _check_sampler(accountant, kind, data_loader, distributed=expected or distributed)
    if kind == "poisson" or expected:
        return SamplingPlan(kind, users, steps, max(1, round(users / steps)), 1 / steps)
    if data_loader.batch_size is not None:
        batch = min(data_loader.batch_size, users)
    elif isinstance(data_loader.batch_sampler, FixedSizeSampler):
        batch = data_loader.batch_sampler.batch_size
    else:
        raise ValueError(
            f"{accountant} needs batches of one size, got a loader with a "
            f"{type(data_loader.batch_sampler).__name__}: pass a "
            "plain DataLoader with a batch_size"
        )
    if kind == "own" and users % batch and not data_loader.drop_last:
        raise ValueError(
            f"{accountant} needs batches of one size, but {users} records in batches of {batch} "
            "end in a smaller one: pass "
            "drop_last=True, or leave out poisson_sampling=False"
        )
    return SamplingPlan(kind, users, steps, batch, batch / users)


def _check_sampler(
    accountant: str, kind: Kind, data_loader: DataLoader, *, distributed: bool
) -> None:
    """Refuses samplers that would be dropped in silence, as stock Opacus drops a ``WeightedRandomSampler``."""
    if data_loader.batch_size is None:  # a batch sampler of its own
        sampler: object = data_loader.batch_sampler
        fits = isinstance(sampler, POISSON_SAMPLERS if kind == "poisson" else (FixedSizeSampler,))
    else:
        sampler = data_loader.sampler
        fits = isinstance(sampler, SequentialSampler) or (
            isinstance(sampler, RandomSampler)
            and not sampler.replacement
            and sampler.num_samples == len(data_loader.dataset)  # type: ignore[arg-type]
        )
        fits = fits or (isinstance(sampler, DistributedSampler) and distributed)
    if not fits:
        raise ValueError(
            f"{accountant} cannot account for batches drawn by a {type(sampler).__name__}: pass a "
            "DataLoader with a "
            "batch_size and shuffle=True or False (select records with torch.utils.data.Subset)"
        )
