"""The other rungs of the ladder: the same noise without a shuffler, under secure aggregation, and at a trusted server.

``local``               nobody is trusted: the adversary sees who sends what.
``secure_aggregation``  a protocol reveals the sum of the round's reports, and who takes part, but no single report.
``central``             a trusted server chooses the participants in secret and adds the whole noise, √B·σ, to the sum.

>>> from opacus_shuffle.accountants.bounds.registry import compute_baseline
>>> from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn
>>> rounds = [(ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1), 5540)]
>>> for name in ("local", "secure_aggregation", "central"):
...     print(name, round(compute_baseline(rounds, delta=1 / 60_000, baseline=name).epsilon, 3))
local 30.183
secure_aggregation 0.19
central 0.053
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from opacus_shuffle.accountants.bounds.registry import BoundValue, Guarantee, NotCovered, Rounds, register_bound
from opacus_shuffle.accountants.bounds.shuffle_gaussian import EVERY, FAMILY, shuffled
from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn, SubsampledShuffle
from opacus_shuffle.analysis.shuffled_rounds import sampled_gaussian_epsilon, unshuffled_epsilon

_DISTANCE = {"zero_out": 1.0, "replace": 2.0}


def _local(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """The reports as they are sent."""
    epsilon = unshuffled_epsilon(shuffled(rounds), delta=delta, distance=_DISTANCE[adjacency])
    return BoundValue(epsilon, Guarantee.PROVED, EVERY, trusted="nobody", adversary="sees who sends which report")


def _secure_aggregation(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """The sum of a round's reports carries the noise of all of them."""
    summed = [(each.with_noise(_noise_of_sum(each.noise_multiplier, each.reports)), count) for each, count in shuffled(rounds)]
    epsilon = unshuffled_epsilon(summed, delta=delta, distance=_DISTANCE[adjacency])
    random_size = any(isinstance(mechanism, ShuffledCheckIn) and mechanism.sample_rate < 1 for mechanism, _ in rounds)
    return BoundValue(
        epsilon,
        Guarantee.ESTIMATE if random_size else Guarantee.PROVED,
        f"{EVERY}, at the expected number of reports" if random_size else EVERY,
        trusted="the aggregation",
        adversary="sees the sum of every round's reports, and who takes part",
    )


def _central(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """DP-SGD: the sampled Gaussian mechanism with the noise of the sum."""
    if adjacency != "zero_out" and any(mechanism.sample_rate < 1 for mechanism, _ in rounds):
        raise NotCovered(f"baseline='central' with sampling is about adjacency='zero_out', got {adjacency!r}")
    summed = [(each.with_noise(_noise_of_sum(each.noise_multiplier, each.reports)), count) for each, count in shuffled(rounds)]
    if adjacency == "zero_out":
        epsilon = sampled_gaussian_epsilon(summed, delta=delta)
    else:
        epsilon = unshuffled_epsilon(summed, delta=delta, distance=_DISTANCE[adjacency])
    fixed_size = any(isinstance(mechanism, SubsampledShuffle) and mechanism.sample_rate < 1 for mechanism, _ in rounds)
    return BoundValue(
        epsilon,
        Guarantee.ESTIMATE if fixed_size else Guarantee.PROVED,
        f"{EVERY}, as if each user took part by its own coin" if fixed_size else EVERY,
        trusted="the server",
        adversary="sees the noised sum of every round",
    )


def _noise_of_sum(sigma: float, reports: float) -> float:
    """√B·σ."""
    return min(math.sqrt(max(reports, 1.0)) * sigma, 1e12)  # the most that any mechanism takes


for _mechanism in FAMILY:
    register_bound(_mechanism, "local", baseline=True)(_local)
    register_bound(_mechanism, "secure_aggregation", baseline=True)(_secure_aggregation)
    register_bound(_mechanism, "central", baseline=True)(_central)
