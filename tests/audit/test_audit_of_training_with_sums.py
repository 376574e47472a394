"""Training with sums of bits is audited by eighty canaries at once; broken runs are detected.

Every record has a coordinate of its own, in which its gradient is as long as clipping lets it be,
or zero: these are the data sets with the record, and with its report zeroed. Loader, coins,
rounding, noise bits and decoding are those of the engine. The loss is linear, so gradients do not
depend on the weights, and a coordinate's noise and coin depend on no other's: trials are
independent, and a finding is above the truth in one run of a million, had the seed not been fixed.
"""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.audit.lower_bounds import audit_scores
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

USERS, DELTA, CONFIDENCE = 160, 1e-2, 1 - 1e-6


def trained(*, steps, rate=0.5, noise_multiplier=0.5, seed=0, sampling="poisson"):
    """Trains, and returns the released sums, the participation, the noise and the engine.

    The first two have shape (steps, users).
    """
    rows, engine = torch.eye(USERS), PrivacyEngine(accountant="shuffled_sums", seed=seed)
    rows[USERS // 2 :] = 0.0
    model = nn.Linear(USERS, 1, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run with a seed is not private
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(
                TensorDataset(rows, torch.arange(USERS)), batch_size=round(rate * USERS)
            ),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            sampling=sampling,
        )
    weights, sums, seen = next(model.parameters()), [], []
    while len(sums) < steps:
        for x, user in loader:
            optimizer.zero_grad()
            before = weights.detach().clone()
            model(x).sum().backward()
            optimizer.step()
            sums.append((before - weights.detach())[0] / 0.1 * optimizer.expected_batch_size)
            seen.append(torch.isin(torch.arange(USERS), user))
    released, coins = (torch.stack(found[:steps]).double().numpy() for found in (sums, seen))
    return released, coins.astype(bool), optimizer.noise_multiplier, engine


def finding(evidence, together):
    """Returns the bound that an adversary shows who adds up the evidence of several steps.

    The second half of the users are the runs without the record.
    """
    scores = evidence.reshape(-1, together, USERS).sum(1)
    without, with_it = scores[:, USERS // 2 :].ravel(), scores[:, : USERS // 2].ravel()
    return audit_scores(without, with_it, delta=DELTA, confidence=CONFIDENCE).epsilon


def evidence_of(released, noise, rate):
    """Returns the log likelihood ratio of a record with this rate, for Gaussian noise."""
    return np.log1p(rate * np.expm1(released / noise**2 - 0.5 / noise**2))


def certified(engine, steps):
    (mechanism, _), *_ = engine.accountant.rounds
    return compute_bound([(mechanism, steps)], delta=DELTA).epsilon


@pytest.mark.parametrize(
    ("steps", "together"), [pytest.param(60, 1, marks=pytest.mark.zoo), (120, 4)]
)
def test_an_audit_of_a_run_is_large_and_below_the_certified_bound(steps, together):
    released, _, noise, engine = trained(steps=steps)
    found = finding(evidence_of(released, noise, 0.5), together)
    assert 1 < found <= certified(engine, together)


def test_an_audit_of_whole_epochs_is_large_and_below_the_certified_bound():
    """Each record is in one of the two rounds of an epoch."""
    released, _, noise, engine = trained(steps=120, sampling="random_allocation")
    ratios = np.exp(evidence_of(released, noise, 1.0)).reshape(-1, 2, USERS).mean(1)
    assert 1 < finding(np.log(ratios), 1) <= certified(engine, 2)


def test_noise_bits_of_only_one_user_are_detected(monkeypatch):
    drawn = ShuffleVectorSum.draw_noise

    def of_one(self, num_reports, generator=None):
        others = round((num_reports - 1) * self.noise_bits * self.bit_probability)
        monkeypatch.setattr(self, "check_reports", lambda reports: reports)
        return drawn(self, 1, generator) + others

    monkeypatch.setattr(ShuffleVectorSum, "draw_noise", of_one)
    released, _, noise, engine = trained(steps=60, noise_multiplier=1.0)
    alone = noise / math.sqrt(USERS)
    assert finding(evidence_of(released, alone, 0.5), 1) > certified(engine, 1)


def test_a_coin_that_the_adversary_sees_is_detected():
    """An adversary with the coins uses only the steps in which the record could participate."""
    released, coins, noise, engine = trained(steps=300, rate=0.05)
    hidden = finding(evidence_of(released, noise, 0.05), 1)
    seen = finding(np.where(coins, evidence_of(released, noise, 1.0), 0.0), 1)
    assert hidden <= certified(engine, 1) < seen
