"""One record that cannot be clipped costs its own report; half precision lets no report exceed the norm."""

from __future__ import annotations

import contextlib
import copy
import math

import opacus
import pytest
import torch
from helpers.toy import make_toy
from torch import nn

from opacus_shuffle import PrivacyEngine

MODES = [
    ("hooks", "flat"),
    ("functorch", "flat"),
    ("ew", "flat"),
    ("ghost", "flat"),
    ("hooks", "per_layer"),
    ("ew", "per_layer"),
]
BAD = {"nan": math.nan, "infinity": math.inf, "overflow": 3e38}


def private(
    accountant, *, mode="hooks", clipping="flat", engine=None, sigma=1.0, module=None, **changes
):
    """What make_private returns for 8 records in one batch, and the engine."""
    torch.manual_seed(0)
    toy = make_toy(records=8, batch_size=8)
    if module is not None:
        toy |= {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=1.0)}
    count = sum(1 for _ in toy["module"].parameters())
    toy["max_grad_norm"] = [0.5] * count if clipping == "per_layer" else 1.0
    if mode == "ghost":
        toy["criterion"] = nn.CrossEntropyLoss(reduction="sum")
    engine = engine or PrivacyEngine(accountant=accountant)
    made = engine.make_private(
        **toy | changes,
        noise_multiplier=sigma,
        clipping=clipping,
        grad_sample_mode=mode,
        loss_reduction="sum",
    )
    return (
        made[0],
        made[1],
        made[2] if mode == "ghost" else nn.CrossEntropyLoss(reduction="sum"),
        made[-1],
        engine,
    )


def step(made, spoil=None, skip=None):
    """One batch of eight; the sums that were noised, by parameter."""
    model, optimizer, criterion, loader, _ = made
    x, y = next(iter(loader))
    if spoil is not None:
        x[2] = spoil
    if skip is not None:
        keep = [i for i in range(len(x)) if i != skip]
        x, y = x[keep], y[keep]
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    return [each.summed_grad.clone() for each in optimizer.params]


@pytest.mark.parametrize(
    ("accountant", "mode", "clipping", "what"),
    [
        ("subsampled_shuffle" if mode[0] in ("hooks", "ghost") else "rdp", *mode, "nan")
        for mode in MODES
    ]
    + [("rdp", "ghost", "flat", "infinity"), ("subsampled_shuffle", "hooks", "flat", "overflow")]
    + [
        pytest.param(accountant, *mode, what, marks=pytest.mark.slow)
        for accountant in ("subsampled_shuffle", "rdp")
        for mode in MODES
        for what in BAD
    ],
)
def test_a_record_that_is_not_finite_reports_zero_and_the_others_as_ever(
    accountant, mode, clipping, what
):
    options = {"poisson_sampling": False} if accountant == "rdp" else {}
    made = private(accountant, mode=mode, clipping=clipping, **options)
    x, y = made[3].dataset.tensors
    x[2] = BAD[what]
    found = step(made)
    assert all(torch.isfinite(parameter).all() for parameter in made[1].params)
    reference = private("rdp", mode="hooks", clipping=clipping, poisson_sampling=False)
    reference[3].dataset.tensors[0][2] = 0
    alone = copy.deepcopy(reference[3].dataset.tensors)
    expected = step(reference, skip=2)
    assert torch.equal(alone[1], y)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "clipping"), MODES)
def test_sums_of_finite_records_are_opacus_s_bit_for_bit(mode, clipping):
    options = {"mode": mode, "clipping": clipping, "poisson_sampling": False}
    ours = step(private("rdp", **options))
    stock = step(private("rdp", engine=opacus.PrivacyEngine(accountant="rdp"), **options))
    assert all(torch.equal(one, other) for one, other in zip(ours, stock, strict=True))


def test_one_bad_record_in_a_second_physical_batch_leaves_the_first_one_s_sum():
    made = private("rdp", poisson_sampling=False)
    model, optimizer, criterion, loader, _ = made
    x, y = loader.dataset.tensors
    sums = []
    for bad in (False, True):
        optimizer.zero_grad()
        optimizer.signal_skip_step(True)
        criterion(model(x[:4]), y[:4]).backward()
        optimizer.step()
        sums.append([each.summed_grad.clone() for each in optimizer.params])
        optimizer.zero_grad()
        if bad:
            optimizer.signal_skip_step(False)
            criterion(model(torch.full((1, 5), math.nan)), y[:1]).backward()
            optimizer.step()
            sums.append([each.summed_grad.clone() for each in optimizer.params])
        else:
            optimizer._step_skip_queue.clear()
            optimizer._is_last_step_skipped = False
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(sums[0], sums[-1], strict=True))


def test_adaptive_clipping_counts_a_bad_record_once():
    adaptive = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.1,
    }
    made = private(
        "rdp", clipping="adaptive", poisson_sampling=False, unclipped_num_std=1.0, **adaptive
    )
    made[3].dataset.tensors[0][2] = math.nan
    step(made)
    assert made[1].sample_size == 8
    assert all(torch.isfinite(parameter).all() for parameter in made[1].params)


def test_adaptive_clipping_counts_a_batch_that_is_tried_again_once():
    adaptive = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.1,
    }
    model, optimizer, criterion, loader, engine = private(
        "rdp", clipping="adaptive", unclipped_num_std=1.0, **adaptive
    )
    x, y = next(batch for batch in loader if len(batch[0]) > 1)

    def fail(_):
        raise MemoryError

    for account in (fail, fail, lambda _: None):
        optimizer.account_with(engine.accountant, account, optimizer.tickets)
        criterion(model(x), y).backward()
        with pytest.raises(MemoryError) if account is fail else contextlib.nullcontext():
            optimizer.step()
    assert optimizer.sample_size == len(x)


def test_adaptive_clipping_takes_batches_of_no_records_and_moves_its_norm_by_noise_alone():
    adaptive = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 1e6,
        "min_clipbound": 1e-6,
    }
    model, optimizer, criterion, _, engine = private(
        "rdp", clipping="adaptive", poisson_sampling=False, unclipped_num_std=1.0, **adaptive
    )
    for records in (0, 3, 0):
        optimizer.zero_grad()
        before = optimizer.max_grad_norm
        criterion(model(torch.randn(records, 5)), torch.zeros(records, dtype=torch.long)).backward()
        optimizer.step()
        assert math.exp(-2) < float(optimizer.max_grad_norm) / before < math.exp(2)
    assert engine.accountant.history == [(1.0, 1.0, 3)]
    assert all(torch.isfinite(parameter).all() for parameter in optimizer.params)


@pytest.mark.parametrize(
    ("mode", "clipping"),
    [("hooks", "flat"), ("hooks", "per_layer"), ("ghost", "flat"), ("functorch", "flat")],
)
@pytest.mark.parametrize("half", ["bfloat16", "autocast"])
def test_no_record_exceeds_the_norm_in_half_precision(mode, clipping, half):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))
    for parameter in network.parameters():
        parameter.data.mul_(20)
    if half == "bfloat16":
        network = network.bfloat16()
    made = private("subsampled_shuffle", mode=mode, clipping=clipping, module=network)
    model, optimizer, criterion, loader, _ = made
    worst = 0.0
    for x, y in zip(*loader.dataset.tensors, strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half == "autocast"):
            loss = criterion(model((3 * x[None]).to(next(network.parameters()).dtype)), y[None])
        loss.backward()
        optimizer.clipping.clip(optimizer)
        worst = max(
            worst,
            math.hypot(*(float(each.summed_grad.double().norm()) for each in optimizer.params)),
        )
        optimizer.zero_grad()
    assert 0.98 < worst <= 1.0


def test_a_network_in_half_precision_takes_the_accounted_noise():
    made = private("subsampled_shuffle", sigma=3.0, module=nn.Linear(5, 3000).bfloat16())
    model, optimizer, _, loader, engine = made
    x, _ = next(iter(loader))
    (0 * model(x.bfloat16())).sum().backward()
    optimizer.step()
    noise = torch.cat([each.grad.float().flatten() for each in optimizer.params])
    assert abs(float(noise.std()) / 3 - 1) < 0.05  # the deviation of 18,000 draws is 0.005
    assert len(engine.accountant) == 1
