"""The accountants that plain numbers describe, with histories of their own, for the tests that all of them pass."""

from __future__ import annotations

import pytest

from helpers.toy import ONE_NOISE
from opacus_shuffle.accountants import ShuffleAccountant, bounds_of
from opacus_shuffle.accountants.mechanisms import MECHANISMS, ShuffledWeights

DELTA = 1e-5
WEIGHTS = {"dimension": 1000, "batch_clip": 50.0}
"""What is permuted, and a clipping of sums with which WS's estimate is positive up to σ = 2: it says 0 where σ² exceeds c′."""

# shuffled_sums is described by its protocol (tests/accountants/test_shuffled_sums_accountant.py),
# the others by plain numbers.
KINDS = [MECHANISMS[name] for name in ONE_NOISE]
# The reports of this family are shuffled, so n and a report's own noise matter; shuffled_fw
# shuffles weights, and the server adds the noise. What is about reports is asked of the family
# alone.
FAMILY = [kind for kind in KINDS if kind is not ShuffledWeights]
every_accountant = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
every_shuffler_of_reports = pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.name)


def every_bound_named(beginning):
    return pytest.mark.parametrize(
        ("kind", "bound"),
        [(c, b) for c in KINDS for b in bounds_of(c) if b.startswith(beginning)],
        ids=lambda value: value if isinstance(value, str) else value.name,
    )


every_bound = every_bound_named("")


def weights_of(kind):
    """What only shuffled_fw needs to know."""
    return WEIGHTS if kind is ShuffledWeights else {}


def accountant_of(kind, history=(), *, num_users=1000, local_noise=None, **options):
    """An accountant that knows what it needs, with local noise if it has any."""
    local_noise = kind in FAMILY if local_noise is None else local_noise
    options = weights_of(kind) | options
    accountant = ShuffleAccountant(kind, num_users=num_users, local_noise=local_noise, **options)
    accountant.history = list(history)
    return accountant


def spent(
    kind, history, *, delta=DELTA, bound="certified", num_users=1000, local_noise=None, **options
):
    accountant = accountant_of(kind, history, num_users=num_users, local_noise=local_noise)
    return accountant.get_epsilon(delta, bound=bound, **options)
