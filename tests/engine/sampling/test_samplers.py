"""The engine's batches: each accountant has its sampler, no step or record is lost, and no other sampler is taken."""

from __future__ import annotations

import pytest
import torch
from helpers.toy import ONE_NOISE, make_toy, run_epoch, way_of
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.engine.sampling import samplers
from opacus_shuffle.engine.sampling.samplers import DistributedPoissonSampler, FixedSizeSampler

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
NAMES = ONE_NOISE
every_accountant = pytest.mark.parametrize("name", NAMES)


def test_each_accountant_gets_its_sampler():
    for name in NAMES:
        _, _, loader = PrivacyEngine(accountant=name).make_private(
            **make_toy(), noise_multiplier=2.0, **way_of(name)
        )
        kind = (
            UniformWithReplacementSampler
            if name in ("shuffled_checkin", "shuffled_fw")
            else FixedSizeSampler
        )
        assert isinstance(loader.batch_sampler, kind)
        assert loader.batch_sampler.generator is not None


@pytest.mark.parametrize(("records", "batch"), [(24, 6), (23, 7), (999, 10)])
@pytest.mark.parametrize("name", ["shuffled_checkin", "shuffled_sums"])
def test_every_record_s_coin_has_exactly_the_rate_that_is_accounted(
    name, records, batch, monkeypatch
):
    rates = []
    monkeypatch.setattr(
        samplers,
        "bernoulli_indices",
        lambda count, rate, generator: rates.append((count, rate)) or [0],
    )
    engine = PrivacyEngine(accountant=name)
    _, _, loader = engine.make_private(
        **make_toy(records=records, batch_size=batch), noise_multiplier=4.0
    )
    list(loader.batch_sampler)
    assert set(rates) == {(records, engine.accountant.planned.sample_rate)}
    assert len(rates) == len(loader.batch_sampler)


def test_the_fixed_size_sampler_draws_every_set_alike():
    sampler = FixedSizeSampler(
        num_samples=5, batch_size=2, steps=20_000, generator=torch.Generator().manual_seed(0)
    )
    counts = {}
    for batch in sampler:
        assert len(set(batch)) == 2
        counts[frozenset(batch)] = counts.get(frozenset(batch), 0) + 1
    assert len(counts) == 10
    # chi-square with 9 degrees of freedom exceeds 39 with probability 1e-5
    assert sum((count - 2000) ** 2 / 2000 for count in counts.values()) < 39


LENGTHS = [(930, 10), (98, 2), (49, 1), (99, 1), (75, 1), (100, 30), (7, 100)]


@pytest.mark.parametrize(
    ("name", "records", "batch"),
    # Of Poisson and of fixed-size batches, all lengths for one accountant each.
    [(name, *LENGTHS[0]) for name in NAMES]
    + [
        (name, *length)
        for name in ("shuffled_checkin", "subsampled_shuffle")
        for length in LENGTHS[1:]
    ]
    + [
        pytest.param(name, *length, marks=pytest.mark.zoo)
        for name in NAMES
        if name not in ("shuffled_checkin", "subsampled_shuffle")
        for length in LENGTHS[1:]
    ],
)
def test_float_arithmetic_never_loses_a_step_or_a_record(name, records, batch):
    toy = make_toy(records=records, batch_size=batch)
    length = len(toy["data_loader"])
    engine = PrivacyEngine(accountant=name)
    model, optimizer, loader = engine.make_private(**toy, noise_multiplier=2.0, **way_of(name))
    assert len(loader) == length
    assert optimizer.expected_batch_size >= 1
    run_epoch(model, optimizer, loader)
    assert engine.accountant.num_users == records
    if name in ("shuffled_checkin", "shuffled_fw"):
        assert engine.accountant.history == [(2.0, 1 / length, length)]
        assert optimizer.expected_batch_size == max(1, round(records / length))
    else:
        reports = min(batch, records)
        assert engine.accountant.history == [(2.0, reports / records, length)]
        assert optimizer.expected_batch_size == reports
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@every_accountant
@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: {"sampler": WeightedRandomSampler(torch.ones(24), 24), "batch_size": 6},
        lambda data: {"sampler": RandomSampler(data, replacement=True), "batch_size": 6},
        lambda data: {"sampler": SubsetRandomSampler(range(12)), "batch_size": 6},
        lambda data: {"batch_sampler": [[0, 1], [2, 3]]},
    ],
)
def test_samplers_that_nobody_accounts_for_are_refused(name, sampler):
    toy = make_toy()
    data = toy["data_loader"].dataset
    toy["data_loader"] = DataLoader(data, **sampler(data))
    with pytest.raises(ValueError, match=r"cannot account|Sampler"):
        PrivacyEngine(accountant=name).make_private(**toy, noise_multiplier=1.0, **way_of(name))


def test_shuffle_gauss_keeps_a_loader_of_its_own_if_all_batches_have_one_size():
    toy = make_toy(records=25, batch_size=6, shuffle=True)
    options = {"noise_multiplier": 1.0, "local_noise": True, "poisson_sampling": False}
    with pytest.raises(ValueError, match="drop_last"):
        PrivacyEngine(accountant="shuffle_gauss").make_private(**toy, **options)
    toy["data_loader"] = DataLoader(
        toy["data_loader"].dataset, batch_size=6, shuffle=True, drop_last=True
    )
    engine = PrivacyEngine(accountant="shuffle_gauss")
    model, optimizer, loader = engine.make_private(**toy, **options)
    assert loader.sampler is toy["data_loader"].sampler
    run_epoch(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 6 / 25, 4)]
    assert engine.accountant.rounds[0][0].num_users == 6


def test_streams_and_empty_data_are_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

    for data in (Stream(), TensorDataset(torch.zeros(0, 5))):
        toy = make_toy()
        toy["data_loader"] = DataLoader(data, batch_size=2)
        with pytest.raises(ValueError, match="data_loader"):
            PrivacyEngine(accountant="shuffle_gauss").make_private(**toy, noise_multiplier=1.0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_draw_as_many_batches_whether_they_are_empty_or_not(monkeypatch, shuffle):
    """Opacus leaves out empty ones, so that ranks add up sums of different batches, and one waits for ever."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    drawn = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        arguments = {"total_size": 41, "sample_rate": 1 / 40, "shuffle": shuffle, "shuffle_seed": 3}
        ours, stock = (
            list(kind(**arguments, generator=torch.Generator().manual_seed(rank)))
            for kind in (DistributedPoissonSampler, DistributedUniformWithReplacementSampler)
        )
        assert len(ours) == 40
        assert [batch for batch in ours if batch] == [batch.tolist() for batch in stock]
        assert len(stock) < 40
        drawn.append({record for batch in ours for record in batch})
    assert not drawn[0] & drawn[1]
