"""The accountants that plain numbers describe, for tests that all of them pass."""

import pytest

from helpers.toy import ONE_NOISE
from opacus_shuffle.accountants import ShuffleAccountant, bounds_of
from opacus_shuffle.accountants.bounds.registry import entries_of, evaluate_bound, mechanism_type
from opacus_shuffle.accountants.mechanisms import MECHANISMS, ShuffledWeights

DELTA = 1e-5
WEIGHTS = {"dimension": 1000, "batch_clip": 50.0}
"""What is permuted, and a clipping with which WS's estimate is positive up to σ = 2."""

# shuffled_sums is described by its protocol (tests/accountants/test_shuffled_sums_accountant.py),
# the others by plain numbers.
KINDS = [MECHANISMS[name] for name in ONE_NOISE]
# The reports of this family are shuffled, so n and a report's own noise matter; shuffled_fw
# shuffles weights, and the server adds the noise. What is about reports is asked of the family
# alone.
FAMILY = [kind for kind in KINDS if kind is not ShuffledWeights]
every_accountant = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
every_shuffler_of_reports = pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.name)


every_bound = pytest.mark.parametrize(
    ("kind", "bound"),
    [(kind, bound) for kind in KINDS for bound in bounds_of(kind)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)


def weights_of(kind):
    """What only shuffled_fw needs to know."""
    return WEIGHTS if kind is ShuffledWeights else {}


def accountant_of(kind, history=(), *, num_users=1000, local_noise=None, **weights):
    """An accountant that knows what it needs, with local noise if it has any."""
    local_noise = kind in FAMILY if local_noise is None else local_noise
    batch_size = weights.pop("batch_size", None)
    accountant = ShuffleAccountant(
        kind, num_users=num_users, batch_size=batch_size, local_noise=local_noise
    )
    if fields := weights_of(kind) | weights:
        accountant.plan(kind(noise_multiplier=1.0, num_users=num_users, sample_rate=1e-6, **fields))
    accountant.history = list(history)
    return accountant


def spent(
    kind, history, *, delta=DELTA, bound="certified", num_users=1000, local_noise=None, **options
):
    accountant = accountant_of(kind, history, num_users=num_users, local_noise=local_noise)
    return accountant.get_epsilon(delta, bound=bound, **options)


def compute_baseline(rounds, *, baseline, **asked):
    """What a report says of the same noise under another trust model."""
    (entry,) = (entry for entry in entries_of(mechanism_type(rounds)) if entry.name == baseline)
    return evaluate_bound(entry, rounds, **asked)
