"""The bounds of Gaussian noise on clipped updates, by a server or by the clients themselves.

They are exact and gain nothing from sampling (page 14 of the proofs). Their baselines are ε of the
same noise without a trusted server.

>>> from opacus_shuffle.accountants.bounds.registry import compute_bound
>>> rounds = [(ServerNoise(noise_multiplier=4.0, num_users=10), 20)]
>>> answer = compute_bound(rounds, delta=1e-5)
>>> round(answer.epsilon, 2), answer.trusted
(4.98, 'the server')
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from opacus_shuffle.accountants.bounds.registry import (
    Answer,
    Rounds,
    compute_bound,
    register_bound,
)
from opacus_shuffle.accountants.mechanisms import ShuffledSums, ShuffleGauss
from opacus_shuffle.accountants.mechanisms.noised_updates import ClientNoise, ServerNoise
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, NotCovered
from opacus_shuffle.protocols.calibration import SMALLEST_MULTIPLIER

CITES = "docs/proofs, page 14"
ASSUMED_DIMENSION = 1_000_000
"""The dimension of sums of bits, whose noise hardly depends on it."""


@register_bound(
    ServerNoise,
    "certified",
    meaning="the Gaussian mechanism, every round counted for every client, sampled or not",
    guarantee=Guarantee.PROVED,
    trusted="the server",
    adversary="sees the models of all rounds and who takes part, but no metrics of clients",
    cites=CITES,
)
@register_bound(
    ClientNoise,
    "certified",
    meaning="the Gaussian mechanism, every round counted for every client, sampled or not",
    guarantee=Guarantee.PROVED,
    trusted="nobody",
    adversary="sees every noised update and whose it is, but no metrics of clients",
    cites=CITES,
)
def _certified(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    """Computes Theorem 14.1: one Gaussian mechanism whose μ² is the sum of those of the rounds."""
    squared = sum(
        count * ((adjacency.distance / one.noise_multiplier) ** 2 + one.count_noise**-2)
        for one, count in rounds
        if isinstance(one, ServerNoise)
    )
    return Answer(gaussian.compute_epsilon(mu=math.sqrt(squared), delta=delta))


@register_bound(
    (ServerNoise, ClientNoise),
    "shuffled_gauss",
    baseline=True,
    meaning="the same noise on the sum, every client adding its share to its own report, if a "
    "shuffler stood before the server (shuffle_gauss)",
    guarantee=Guarantee.PROVED,
)
def _shuffled(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    sizes = [max(1, round(one.expected_reports)) for one, _ in rounds]
    reports = [
        (ShuffleGauss(noise_multiplier=one.noise_of_sum / math.sqrt(size), num_users=size), count)
        for size, (one, count) in zip(sizes, rounds, strict=True)
    ]
    return Answer(compute_bound(reports, delta=delta, adjacency=adjacency).epsilon)


@register_bound(
    (ServerNoise, ClientNoise),
    "sums_of_bits",
    baseline=True,
    meaning="the same noise on the sum, if all n clients sent bits to a shuffler or a secure "
    "aggregation, and a secret coin of each said whether its update is in them (shuffled_sums, at "
    "the least noise of any round)",
    guarantee=Guarantee.PROVED,
)
def _bits(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    noise = min(mechanism.noise_of_sum for mechanism, _ in rounds)
    if noise < SMALLEST_MULTIPLIER:
        raise NotCovered(f"no sums of bits have a noise multiplier of {noise!r}: add noise")
    bits = ShuffledSums.build(
        noise_multiplier=noise,
        num_users=max(mechanism.num_users for mechanism, _ in rounds),
        sample_rate=max(mechanism.sample_rate for mechanism, _ in rounds),
        dimension=ASSUMED_DIMENSION,
    )
    summed = [(bits, sum(count for _, count in rounds))]
    try:
        return Answer(compute_bound(summed, delta=delta, adjacency=adjacency).epsilon)
    except ValueError as error:  # the tails of all rounds use up delta
        raise NotCovered(str(error)) from None
