"""The accountants that plain numbers describe, with histories of their own, for the tests that all of them pass."""

from __future__ import annotations

import pytest

import opacus_shuffle
from helpers.toy import ONE_NOISE
from opacus_shuffle.accountants import ShuffledWeightsAccountant, bounds_of

DELTA = 1e-5
WEIGHTS = {"dimension": 1000, "batch_clip": 50.0}
"""What is permuted, and a clipping of sums with which WS's estimate is positive up to σ = 2: it says 0 where σ² exceeds c′."""

# shuffled_sums is described by its protocol (tests/accountants/test_shuffled_sums_accountant.py), the others by plain numbers.
ACCOUNTANTS = [opacus_shuffle.accountants.ACCOUNTANTS[name] for name in ONE_NOISE]
# The reports of this family are shuffled, so n and a report's own noise matter; shuffled_fw shuffles weights, and the server
# adds the noise. What is about reports is asked of the family alone.
FAMILY = [accountant for accountant in ACCOUNTANTS if accountant is not ShuffledWeightsAccountant]
every_accountant = pytest.mark.parametrize("accountant_class", ACCOUNTANTS, ids=lambda c: c.mechanism())
every_shuffler_of_reports = pytest.mark.parametrize("accountant_class", FAMILY, ids=lambda c: c.mechanism())


def every_bound_named(beginning):
    return pytest.mark.parametrize(
        ("accountant_class", "bound"),
        [(c, b) for c in ACCOUNTANTS for b in bounds_of(c.mechanism_class) if b.startswith(beginning)],
        ids=lambda value: value if isinstance(value, str) else value.mechanism(),
    )


every_bound = every_bound_named("")


def weights_of(accountant_class):
    """What only shuffled_fw needs to know."""
    return WEIGHTS if accountant_class is ShuffledWeightsAccountant else {}


def accountant_of(accountant_class, history=(), *, num_users=1000, local_noise=None, **options):
    """An accountant that knows what it needs, with local noise if it has any."""
    local_noise = accountant_class in FAMILY if local_noise is None else local_noise
    options = weights_of(accountant_class) | options
    accountant = accountant_class(num_users=num_users, local_noise=local_noise, **options)
    accountant.history = list(history)
    return accountant


def spent(accountant_class, history, *, delta=DELTA, bound="certified", num_users=1000, local_noise=None, **options):
    accountant = accountant_of(accountant_class, history, num_users=num_users, local_noise=local_noise)
    return accountant.get_epsilon(delta, bound=bound, **options)
