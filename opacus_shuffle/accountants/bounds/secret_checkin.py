"""The bounds of secret check-in, in which users who do not participate send noise.

Rounds may differ in σ, q or size.

>>> from opacus_shuffle.accountants.bounds.registry import ladder
>>> from opacus_shuffle.accountants.mechanisms import SecretCheckIn
>>> numbers = {"noise_multiplier": 0.75, "num_users": 4000, "sample_rate": 0.8}
>>> for report in ("gaussian", "linear"):
...     rounds = [(SecretCheckIn(**numbers, report=report), 10)]
...     print(report, {row.bound: round(row.epsilon, 2) for row in ladder(rounds, delta=1e-5)})
gaussian {'local': 22.62, 'certified': 0.85, 'central': 0.17}
linear {'local': 16.17, 'certified': 0.52, 'central': 0.17}
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from opacus_shuffle.accountants.bounds.registry import Answer, register_bound
from opacus_shuffle.accountants.mechanisms import SecretCheckIn
from opacus_shuffle.analysis import secret_checkin, shuffled_rounds
from opacus_shuffle.analysis.secret_checkin import SecretRound
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound
from opacus_shuffle.core.guarantees import Adjacency, Guarantee

Rounds = Sequence[tuple[SecretCheckIn, int]]


def secret_rounds(rounds: Rounds) -> list[tuple[SecretRound, int]]:
    """Returns the rounds of the honest users as records of :mod:`opacus_shuffle.analysis`."""
    return [
        (
            SecretRound(
                noise_multiplier=mechanism.noise_multiplier,
                num_users=mechanism.honest_users,
                sample_rate=mechanism.sample_rate,
                report=mechanism.report,
            ),
            count,
        )
        for mechanism, count in rounds
    ]


def _estimate(rounds: Rounds, *, delta: float, adjacency: Adjacency) -> float:
    return secret_checkin.estimate_epsilon(
        secret_rounds(rounds), delta=delta, distance=adjacency.distance
    )


@register_bound(
    SecretCheckIn,
    "certified",
    estimate=_estimate,
    meaning="the reports of all users are seen in random order; for all other records, the reports "
    "of users who do not participate hide the others",
    cites="docs/proofs, page 12",
    guarantee=Guarantee.PROVED,
)
def _certified(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    honest_rounds = secret_rounds(rounds)
    if adjacency is Adjacency.REPLACE:
        return Answer(secret_checkin.replacement_epsilon(honest_rounds, delta=delta))
    lower, upper = secret_checkin.zero_out_epsilon(honest_rounds, delta=delta)
    return Answer(upper, lower)


_baseline = functools.partial(
    register_bound, SecretCheckIn, baseline=True, guarantee=Guarantee.PROVED
)


@_baseline(
    "local",
    meaning="no shuffler: who sends which report is seen, but not who takes part",
    legend="no shuffler",
    trusted="nobody",
    adversary="sees who sends which report",
)
def _local(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    honest_rounds = secret_rounds(rounds)
    return Answer(
        secret_checkin.unshuffled(honest_rounds, delta=delta, distance=adjacency.distance)
    )


@_baseline(
    "central",
    meaning="a trusted server picks the participants in secret and adds the noise of all users to "
    "their sum",
    legend="trusted server",
    trusted="the server",
    adversary="sees the noised sum of every round, but neither who takes part nor how many",
    zero_out_only=True,
)
def _central(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    server = [
        (
            ShuffledRound(
                noise_multiplier=mechanism.noise_of_sum,
                num_users=1,
                sample_rate=mechanism.sample_rate,
                sampling="poisson",
            ),
            count,
        )
        for mechanism, count in rounds
    ]
    return Answer(shuffled_rounds.sampled_gaussian_epsilon(server, delta=delta))
