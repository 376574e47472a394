"""Training by secret check-in: all users report shuffled sums, and secret coins decide whose gradients are in them."""

from __future__ import annotations

import math

import opacus
import pytest
import torch
from helpers.toy import make_toy, run_epoch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


def still(rows, *, batch_size, seed=None, **options):
    """A sum of weights, one for each column, that is trained privately on these rows and learns nothing."""
    model = nn.Linear(rows.shape[1], 1, bias=False)
    return PrivacyEngine(accountant="shuffled_sums", seed=seed).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(rows), batch_size=batch_size),
        **options,
    )


def test_by_default_everyone_reports_and_a_run_costs_what_dp_sgd_costs():
    engine, stock = PrivacyEngine(accountant="shuffled_sums"), opacus.accountants.PRVAccountant()
    model, optimizer, loader = engine.make_private(
        **make_toy(records=200, batch_size=20), noise_multiplier=1.1
    )
    run_epoch(model, optimizer, loader)
    (each, steps), *more = engine.accountant.rounds
    assert (each.sampling, each.sample_rate, each.reports, steps, more) == (
        "poisson",
        0.1,
        200,
        10,
        [],
    )
    stock.history = [(optimizer.noise_multiplier, 0.1, 10)]
    assert engine.get_epsilon(1e-5) == pytest.approx(stock.get_epsilon(1e-5), abs=0.02, rel=0.01)
    assert "secret coins" in str(engine.privacy_report(1e-5))


def test_what_the_server_gets_has_the_noise_of_all_users_whoever_is_in_the_batch():
    """2,000 coordinates of a gradient of zero, in batches of any size, none included: their standard deviation is the noise's.

    It is estimated to 1/sqrt(2·2000) = 1.6 %; five of these are allowed for. The mean is within
    five standard errors of zero.
    """
    model, optimizer, loader = still(
        torch.zeros(40, 2000), batch_size=4, noise_multiplier=1.0, max_grad_norm=0.5, seed=0
    )
    protocol, sizes = optimizer.aggregator, set()
    for _ in range(2):
        for (x,) in loader:
            sizes.add(len(x))
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            summed = next(model.parameters()).grad * optimizer.expected_batch_size
            noise = 2 * 0.5 / protocol.granularity * math.sqrt(protocol.sum_round.noise.variance)
            assert float(summed.std()) == pytest.approx(
                noise, rel=5 * 0.016
            )  # zero is on the grid: nothing is rounded
            assert abs(float(summed.mean())) <= 5 * noise / math.sqrt(2000)
    assert len(sizes) > 2


def test_a_gradient_that_is_in_is_summed_and_one_that_is_not_is_not():
    """Every record's gradient is 1 in its own coordinate: what is far above the noise of 0.1 are the records of the batch."""
    model, optimizer, loader = still(
        torch.eye(40), batch_size=10, noise_multiplier=0.1, max_grad_norm=1.0
    )
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        summed = next(model.parameters()).grad[0] * optimizer.expected_batch_size
        assert torch.equal(summed > 0.5, x.sum(0) > 0.5)


def test_a_protocol_of_your_own_is_for_everyone():
    engine = PrivacyEngine(accountant="shuffled_sums")
    entries = sum(each.numel() for each in make_toy()["module"].parameters())
    with pytest.raises(
        ValueError,
        match=r"all 24 records report in every round.*num_users=24, or pass poisson_sampling=False",
    ):
        engine.make_private(**make_toy(), aggregator=ShuffleVectorSum(6, entries, 1.0, 1.0, 1e-5))
    half = ShuffleVectorSum(24, entries, 1.0, 1.0, 1e-5, honest_fraction=0.5)
    model, optimizer, loader = engine.make_private(**make_toy(), aggregator=half)
    run_epoch(model, optimizer, loader)
    assert len(engine.accountant) == 4
    assert engine.accountant.rounds[0][0].honest_fraction == 0.5


def test_a_record_of_nobody_in_an_empty_batch_would_tell_that_nobody_was_in():
    engine = PrivacyEngine(accountant="shuffled_sums")
    options = {"noise_multiplier": 1.1, "rand_on_empty": True}
    with pytest.raises(ValueError, match=r"rand_on_empty.*tells that no coin put a record in"):
        engine.make_private(**make_toy(), **options)
    engine.make_private(
        **make_toy(), poisson_sampling=False, **options
    )  # a sample of fixed size is never empty
