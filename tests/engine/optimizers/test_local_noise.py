"""The noise on the sum of k reports is N(0, kσ²C²), with the k that was really in the batch, in every mode."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings

import pytest
import torch
from helpers.toy import make_toy, run_epoch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import nn

from opacus_shuffle import PrivacyEngine, compute_epsilon

SIGMA = 3.0
MODES = [
    ("hooks", "flat"),
    ("functorch", "flat"),
    ("ew", "flat"),
    ("ghost", "flat"),
    ("hooks", "per_layer"),
    ("functorch", "per_layer"),
    ("ew", "per_layer"),
]


def private(accountant, toy, *, mode="hooks", clipping="flat", seed=0, **options):
    """(model, optimizer, loader, criterion, engine) of a locally noised toy."""
    torch.manual_seed(seed)
    toy["max_grad_norm"] = [0.3, 0.4, 0.5, 0.6] if clipping == "per_layer" else 0.9
    engine = PrivacyEngine(accountant=accountant)
    result = engine.make_private(
        **toy,
        noise_multiplier=SIGMA,
        local_noise=True,
        grad_sample_mode=mode,
        clipping=clipping,
        loss_reduction="sum",
        noise_generator=torch.Generator().manual_seed(seed),
        **options,
    )
    criterion = result[2] if mode == "ghost" else nn.CrossEntropyLoss(reduction="sum")
    return result[0], result[1], result[-1], criterion, engine


def noises(model, optimizer, loader, criterion, *, epochs, physical=None):
    """(records, noise on the sum) of every logical batch."""
    found = []
    for _ in range(epochs):
        manager = (
            BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            )
            if physical
            else contextlib.nullcontext(loader)
        )
        with manager as batches:
            records = 0
            for x, y in batches:
                records += len(x)
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
                if not optimizer._is_last_step_skipped:
                    noise = torch.cat(
                        [(p.grad - p.summed_grad.view_as(p)).flatten() for p in optimizer.params]
                    )
                    found.append((records, noise.clone()))
                    records = 0
    return found


def assert_standard_normal(values):
    """Mean, variance and distribution of n standard normal draws, each to five standard errors (false alarm below 1e-5)."""
    count = len(values)
    assert abs(values.mean()) < 5 / math.sqrt(count)
    assert abs((values**2).mean() - 1) < 5 * math.sqrt(2 / count)
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-5


@pytest.mark.parametrize("physical", [None, 2], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("accountant", "mode", "clipping"),
    [("shuffled_checkin", *mode) for mode in MODES]
    + [
        pytest.param(accountant, *mode, marks=() if mode == MODES[0] else pytest.mark.zoo)
        for accountant in ("subsampled_shuffle", "shuffle_gauss")  # who only draw batches otherwise
        for mode in MODES
    ],
)
def test_noise_on_the_sum_is_root_k_sigma_c(accountant, mode, clipping, physical):
    model, optimizer, loader, criterion, engine = private(
        accountant, make_toy(), mode=mode, clipping=clipping
    )
    norm = optimizer.max_grad_norm
    assert norm == pytest.approx(
        math.sqrt(0.3**2 + 0.4**2 + 0.5**2 + 0.6**2) if clipping == "per_layer" else 0.9
    )
    found = noises(model, optimizer, loader, criterion, epochs=8, physical=physical)
    assert len(found) == len(engine.accountant) == 32
    if accountant == "shuffled_checkin":
        assert len({records for records, _ in found}) > 3
    else:
        assert {records for records, _ in found} == {6}
    values = torch.cat(
        [noise / (SIGMA * norm * math.sqrt(records)) for records, noise in found if records]
    )
    assert_standard_normal(values.double())


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_an_empty_batch_sends_nothing_and_is_accounted(mode):
    model, optimizer, loader, criterion, engine = private(
        "shuffled_checkin", make_toy(records=6, batch_size=1), mode=mode
    )
    found = noises(model, optimizer, loader, criterion, epochs=10)
    empty = [noise for records, noise in found if records == 0]
    assert empty
    assert all(torch.count_nonzero(noise) == 0 for noise in empty)
    assert len(engine.accountant) == len(found) == 60
    assert all(torch.isfinite(p).all() for p in optimizer.params)


def test_rounds_are_independent_of_each_other():
    model, optimizer, loader, criterion, _ = private("shuffle_gauss", make_toy())
    found = noises(model, optimizer, loader, criterion, epochs=8)
    rows = torch.stack([noise for _, noise in found]) / (SIGMA * 0.9 * math.sqrt(6))
    correlation = (rows @ rows.T / rows.shape[1]) - torch.eye(len(rows))
    # |normal| of variance 1/columns over all pairs: six standard errors is below 1e-6 over 500
    # pairs
    assert correlation.fill_diagonal_(0).abs().max() < 6 / math.sqrt(rows.shape[1])


def test_a_noise_scheduler_reaches_the_noise_and_the_history():
    model, optimizer, loader, criterion, engine = private("shuffle_gauss", make_toy())
    scheduler = ExponentialNoise(optimizer, gamma=0.5)
    scales = []
    for _ in range(2):
        found = noises(model, optimizer, loader, criterion, epochs=6)
        values = torch.cat([noise for _, noise in found]).double() / (
            optimizer.noise_multiplier * 0.9 * math.sqrt(6)
        )
        assert_standard_normal(values)
        scales.append(optimizer.noise_multiplier)
        scheduler.step()
    assert scales == [3.0, 1.5]
    assert engine.accountant.history == [(3.0, 0.25, 24), (1.5, 0.25, 24)]


def test_a_clipping_scheduler_reaches_flat_clipping_and_is_refused_elsewhere():
    model, optimizer, loader, criterion, _ = private("shuffle_gauss", make_toy())
    ExponentialGradClip(optimizer, gamma=0.5).step()
    assert optimizer.max_grad_norm == 0.45
    values = torch.cat(
        [noise for _, noise in noises(model, optimizer, loader, criterion, epochs=8)]
    )
    assert_standard_normal((values / (SIGMA * 0.45 * math.sqrt(6))).double())
    for mode, clipping in (("ghost", "flat"), ("hooks", "per_layer")):
        toy = make_toy()
        model, optimizer, loader, criterion, engine = private(
            "shuffle_gauss", toy, mode=mode, clipping=clipping
        )
        ExponentialGradClip(optimizer, gamma=0.5).step()
        weights = copy.deepcopy(toy["module"].state_dict())
        with pytest.raises(ValueError, match="max_grad_norm"):
            run_epoch(model, optimizer, loader, criterion)
        assert all(
            torch.equal(value, weights[name]) for name, value in toy["module"].state_dict().items()
        )
        assert len(engine.accountant) == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accountant", ["shuffled_checkin", "subsampled_shuffle", "shuffle_gauss"])
@pytest.mark.parametrize("before_step", [True, False])
def test_leaving_a_split_batch_early_carries_nothing_into_the_next_epoch(
    accountant, workers, before_step
):
    # Two physical batches of 5 never end a round: Bin(80, 1/2) ≤ 10 has probability 2e-12.
    toy = make_toy(records=80, batch_size=40, num_workers=workers)
    model, optimizer, loader, criterion, engine = private(accountant, toy, seed=3)
    for epoch in range(3):
        drawn, in_round, counted = [], 0, []
        optimizer.attach_step_hook(lambda o, counted=counted: counted.append(o.num_records))
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
        ) as batches:
            for number, (x, y) in enumerate(batches):
                in_round += len(x)
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                if epoch < 2 and number == 1 and before_step:
                    break
                optimizer.step()
                if not optimizer._is_last_step_skipped:
                    drawn.append(in_round)
                    in_round = 0
                if epoch < 2 and number == 1:
                    break
    assert counted == drawn
    assert len(drawn) == 2
    assert accountant == "shuffled_checkin" or drawn == [40, 40]
    assert len(engine.accountant) == 2


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_norm_that_changes_inside_a_batch_is_refused(mode):
    model, optimizer, loader, criterion, engine = private("shuffle_gauss", make_toy(), mode=mode)
    scheduler = ExponentialGradClip(optimizer, gamma=0.1)
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    with manager as batches, pytest.raises(ValueError, match="max_grad_norm"):  # noqa: PT012
        for x, y in batches:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("local_noise", [True, False])
def test_ghost_clipping_refuses_a_gradient_that_was_not_clipped(local_noise):
    toy = make_toy()
    engine = PrivacyEngine(accountant="shuffle_gauss")
    model, optimizer, criterion, loader = engine.make_private(
        **toy, noise_multiplier=1.0, local_noise=local_noise, grad_sample_mode="ghost"
    )
    run_epoch(model, optimizer, loader, criterion)
    steps = len(engine.accountant)
    x, y = next(iter(loader))
    optimizer.zero_grad()
    (1e6 * nn.functional.cross_entropy(model(x), y)).backward()
    with pytest.raises(ValueError, match="not clipped"):
        optimizer.step()
    assert len(engine.accountant) == steps


@pytest.mark.parametrize("accountant", ["shuffle_gauss", "subsampled_shuffle", "shuffled_checkin"])
def test_reports_whose_own_noise_makes_one_step_cost_more_than_ten_are_warned_of(accountant):
    for sigma in (0.1, 0.3, 0.6, 1.0, 3.0):
        engine = PrivacyEngine(accountant=accountant)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine.make_private(**make_toy(), noise_multiplier=sigma, local_noise=True)
        said = [
            str(each.message) for each in told if "is the noise of each report" in str(each.message)
        ]
        spent = compute_epsilon(engine.accountant.planned, steps=1, delta=1e-5)
        assert len(said) == (spent > 10)
        for sentence in said:
            assert f"noise_multiplier={sigma:g} with local_noise=True" in sentence
            assert float(re.search(r"epsilon = ([0-9.]+)", sentence)[1]) >= spent
            assert "accountant='shuffled_sums'" in sentence  # what to do
