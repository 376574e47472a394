"""A loss of the whole batch is trained if it is a sum or mean over records, and refused by name if it is not."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.toy import make_toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.networks.check import per_sample_check

REFUSED = "^module returns a loss of the batch that is not a sum or mean of one number per record: "


class Loss(nn.Module):
    """A network that returns what a function makes of its outputs and the labels."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 6), nn.Linear(6, 3), function

    def forward(self, x, y):
        return self.function(self.last(torch.tanh(self.first(x))), y)


def contrastive(h, y):
    near = F.normalize(h, dim=1)
    return F.cross_entropy(near @ near.T / 0.1, torch.arange(len(h)))


MIXED = {
    "contrastive": contrastive,
    "a root of the mean": lambda h, y: F.mse_loss(h, torch.zeros_like(h)).sqrt(),
    "perplexity": lambda h, y: F.cross_entropy(h, y).exp(),
    "balance of a batch": lambda h, y: (
        F.cross_entropy(h, y) + torch.softmax(h, 1).mean(0).square().sum()
    ),
    "a little balance of a batch": lambda h, y: (
        F.cross_entropy(h, y) + 1e-2 * torch.softmax(h, 1).mean(0).square().sum()
    ),
    "weights of classes": lambda h, y: F.cross_entropy(h, y, weight=torch.tensor([1.0, 5.0, 0.2])),
    "centred": lambda h, y: (h - h.mean(0)).square().mean(),
    "decorrelated": lambda h, y: (h.T @ h - torch.eye(3)).square().sum(),
    "the largest": lambda h, y: F.cross_entropy(h, y, reduction="none").logsumexp(0),
    "beside a sum": lambda h, y: (F.cross_entropy(h, y), h.var(0).sum()),
    "in a dictionary": lambda h, y: {"loss": h.std()},
}
SUMS = {
    "mean": F.cross_entropy,
    "sum": lambda h, y: F.cross_entropy(h, y, reduction="sum"),
    "smoothed": lambda h, y: F.cross_entropy(h, y, label_smoothing=0.1),
    "with a penalty of outputs": lambda h, y: F.cross_entropy(h, y) + 0.1 * h.square().mean(),
    "normed": lambda h, y: F.cross_entropy(F.layer_norm(h, (3,)), y),
    "dropout": lambda h, y: F.cross_entropy(F.dropout(h, 0.5), y),
    "accuracy beside it": lambda h, y: (F.cross_entropy(h, y), (h.argmax(1) == y).float().std()),
    "a statistic beside it": lambda h, y: (F.cross_entropy(h, y), h.detach().std()),
    "tokens end to end": lambda h, y: h.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1),
    "some not counted": lambda h, y: F.cross_entropy(
        h, torch.where(torch.arange(len(y)) == 2, -100, y)
    ),
    "large": lambda h, y: 1e6 + F.cross_entropy(h, y),
    "not finite": lambda h, y: F.cross_entropy(h, y) * torch.inf,
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def refuse(network, **keywords):
    x, y = torch.randn(6, 5), torch.tensor([2, 1, 0, 2, 1, 0])

    def call_of(records):
        rows = torch.arange(records) % 6
        return (x[rows], y[rows]), {}

    return per_sample_check(network.train(), call_of, **keywords)


@pytest.mark.parametrize("name", MIXED)
def test_losses_that_are_no_sum_over_records_are_refused(name):
    assert re.match(REFUSED, refuse(Loss(MIXED[name])).problem)


@pytest.mark.parametrize("name", SUMS)
def test_sums_and_means_over_records_are_not_refused(name):
    seen = refuse(Loss(SUMS[name]))
    assert seen.seen
    assert not seen.problem


def test_rows_of_records_are_left_to_the_comparison_of_records():
    assert not refuse(Loss(lambda h, y: (h, h.std()))).problem


def test_a_network_that_does_not_run_is_said_to_be_unseen():
    assert not refuse(Loss(lambda h, y: h @ h)).seen


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.integers(0, 10_000))
def test_no_sum_over_records_is_refused_whatever_its_terms_and_numbers_are(factors, seed):
    torch.manual_seed(seed)
    terms = [torch.Tensor.sin, torch.Tensor.exp, torch.Tensor.square]

    def total(h, y):
        return (
            sum(factor * term(h).sum() for factor, term in zip(factors, terms, strict=True))
            + h.sum() * 0
        )

    assert not refuse(Loss(total)).problem


def private(network, accountant="subsampled_shuffle"):
    toy = make_toy() | {
        "module": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
    }
    engine = PrivacyEngine(accountant=accountant)
    return engine, engine.make_private(noise_multiplier=1.0, **toy)


def labelled(function):
    """A network that makes up its labels, as a loader's first records are its inputs alone."""

    class Labelled(Loss):
        def forward(self, x):
            return super().forward(x, (x[:, 0] > 0).long())

    return Labelled(function)


@pytest.mark.parametrize("accountant", ["subsampled_shuffle", "rdp"])
def test_make_private_refuses_it(accountant):
    network = labelled(contrastive)
    with pytest.raises(ValueError, match=REFUSED):
        private(network, accountant)
    assert not hasattr(network, "autograd_grad_sample_hooks")


def test_make_private_trains_by_a_mean_loss():
    engine, (model, optimizer, loader) = private(labelled(F.cross_entropy))
    for x, _ in loader:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    assert len(engine.accountant) == 4
