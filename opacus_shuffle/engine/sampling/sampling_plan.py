"""Which sampler goes with which accountant, decided before anything is touched, in exact integers.

Stock Opacus divides floats: ``int(1 / (1 / L))`` is L − 1 for L = 93, and ``int(n * (1 / L))`` is 0 for n = 49, B = 1. Here the
number of steps is the loader's own length and the averaging batch size is ``round(n / L)``.

>>> import torch
>>> from torch.utils.data import DataLoader, TensorDataset
>>> loader = DataLoader(TensorDataset(torch.zeros(930, 1)), batch_size=10)
>>> plan = plan_sampling("shuffled_checkin", loader)
>>> plan.kind, plan.steps_per_epoch, plan.batch_size, plan.sample_rate == 1 / 93
('poisson', 93, 10, True)
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.core.opacus_compat import POISSON_SAMPLERS
from opacus_shuffle.core.validation import boolean
from opacus_shuffle.engine.sampling.fixed_size_sampler import FixedSizeSampler

Kind = Literal["poisson", "fixed_size", "own"]


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """How batches are drawn: ``"own"`` keeps the user's loader."""

    kind: Kind
    num_users: int
    steps_per_epoch: int
    batch_size: int
    sample_rate: float


def plan_sampling(mechanism: str, data_loader: DataLoader, poisson_sampling: bool | None = None) -> SamplingPlan:
    """The sampling that ``mechanism`` accounts for, on this loader's data.

    Args:
        mechanism: The accountant's name. Ours choose their sampler; Opacus's own follow ``poisson_sampling``.
        data_loader: A map-style loader with a batch size, in sequential or shuffled order.
        poisson_sampling: ``None`` lets the accountant choose. ``False`` with ``shuffle_gauss`` keeps the loader, whose
            batches must then all have one size.

    Raises:
        ValueError: If accountant and sampler do not match, or the loader has no fixed length.
    """
    if isinstance(data_loader.dataset, IterableDataset) or not hasattr(data_loader.dataset, "__len__"):
        raise ValueError(f"data_loader must be over a data set with a length, got {type(data_loader.dataset).__name__}")
    users = len(data_loader.dataset)
    steps = len(data_loader)
    if users < 1 or steps < 1:
        raise ValueError(f"data_loader yields no batch: {users} records, batch_size={data_loader.batch_size}")
    if poisson_sampling is not None:
        boolean("poisson_sampling", poisson_sampling)
    kind = _kind(mechanism, poisson_sampling)
    _check_sampler(mechanism, kind, data_loader)
    if kind == "poisson" or mechanism not in MECHANISMS:
        return SamplingPlan(kind, users, steps, max(1, round(users / steps)), 1 / steps)
    if data_loader.batch_size is not None:
        batch = min(data_loader.batch_size, users)
    elif isinstance(data_loader.batch_sampler, FixedSizeSampler):
        batch = data_loader.batch_sampler.batch_size
    else:
        raise ValueError(
            f"{mechanism} needs batches of one size, got a loader with a {type(data_loader.batch_sampler).__name__}: pass a "
            "plain DataLoader with a batch_size"
        )
    if kind == "own" and users % batch and not data_loader.drop_last:
        raise ValueError(
            f"{mechanism} needs batches of one size, but {users} records in batches of {batch} end in a smaller one: pass "
            "drop_last=True, or leave out poisson_sampling=False"
        )
    return SamplingPlan(kind, users, steps, batch, batch / users)


def _kind(mechanism: str, poisson_sampling: bool | None) -> Kind:
    """The accountant's sampler, or a refusal of the one asked for."""
    if mechanism in ("shuffled_checkin", "shuffled_fw"):
        if poisson_sampling is False:
            instead = (
                ", or use accountant='subsampled_shuffle' for batches of one size" if mechanism == "shuffled_checkin" else ""
            )
            raise ValueError(f"{mechanism} accounts for Poisson batches, got poisson_sampling=False: leave it out{instead}")
        return "poisson"
    if mechanism in MECHANISMS:
        if poisson_sampling:
            raise ValueError(
                f"{mechanism} accounts for batches of one size, got poisson_sampling=True: leave it out (the engine "
                "installs a fixed-size sampler), or use accountant='shuffled_checkin'"
            )
        return "own" if mechanism == "shuffle_gauss" and poisson_sampling is False else "fixed_size"
    return "own" if poisson_sampling is False else "poisson"


def _check_sampler(mechanism: str, kind: Kind, data_loader: DataLoader) -> None:
    """Refuses samplers that would be dropped in silence, as stock Opacus drops a ``WeightedRandomSampler``."""
    if kind == "own" and mechanism not in MECHANISMS:
        return
    if data_loader.batch_size is None:  # a batch sampler of its own
        sampler: object = data_loader.batch_sampler
        matching: tuple[type, ...] = POISSON_SAMPLERS if kind == "poisson" else (FixedSizeSampler,)
        fits = isinstance(sampler, matching)
    else:
        sampler = data_loader.sampler
        fits = isinstance(sampler, SequentialSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(data_loader.dataset)  # type: ignore[arg-type]
        )
        fits = fits or (isinstance(sampler, DistributedSampler) and mechanism not in MECHANISMS)
    if not fits:
        raise ValueError(
            f"{mechanism} cannot account for batches drawn by a {type(sampler).__name__}: pass a DataLoader with a "
            "batch_size and shuffle=True or False (select records with torch.utils.data.Subset)"
        )
