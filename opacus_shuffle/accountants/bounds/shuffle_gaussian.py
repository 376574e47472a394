"""The bounds of Liew and Takahashi's shuffle Gaussian mechanisms (SG).

Rounds may differ in σ, γ or size.

``docs/guarantees.rst`` explains them. ``docs/errata.rst`` explains why the pair of SG Theorems 1, 2
and 3 is neither the worst one nor about replacement.

>>> from opacus_shuffle.accountants.bounds.registry import ladder
>>> from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn
>>> rounds = [(ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1), 5540)]
>>> for bound in ladder(rounds, delta=1 / 60_000):
...     print(bound.bound, round(bound.epsilon, 3))
local 30.183
certified 0.108
published 9.617
pair 0.054
secure_aggregation 0.198
central 0.053
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np

from opacus_shuffle.accountants.bounds.registry import Answer, Rounds, register_bound
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn, ShuffleGauss, SubsampledShuffle
from opacus_shuffle.analysis import (
    binomial,
    composition,
    gaussian_clones,
    mean_ratio,
    shuffled_rounds,
    subsampling,
)
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.analysis.merge import merge
from opacus_shuffle.analysis.shuffled_rounds import (
    ShuffledRound,
    sampled_gaussian_epsilon,
    unshuffled_epsilon,
)
from opacus_shuffle.core.guarantees import EVERY_DATA_SET, Adjacency, Guarantee, NotCovered
from opacus_shuffle.core.validation import renyi_orders

FAMILY: tuple[type[Mechanism], ...] = (ShuffleGauss, SubsampledShuffle, ShuffledCheckIn)
PAIR = (
    "one pair of data sets: all other records report zero, one record at the clipping norm becomes "
    "zero"
)
PUBLISHED = f"the published formula, for {PAIR}; other pairs can be worse"
FEW = 0.01
"""The share of δ that ``secure_aggregation`` spends on rounds by coins with very few reports."""


def printed_rdp(round_: ShuffledRound, orders: Vector) -> Vector:
    """Returns the RDP of one round by the paper's formulas, never below the pair's exact value.

    Theorem 1, for a round of everyone, is exact. Theorem 3 as printed can be below the exact value
    for fewer than one expected report.
    """
    exact = mean_ratio.compute_rdp(orders=orders, **dataclasses.asdict(round_))
    if round_.sampling is None:
        return exact
    return np.maximum(subsampling.compute_rdp(orders=orders, **dataclasses.asdict(round_)), exact)


def shuffled(rounds: Rounds) -> shuffled_rounds.Rounds:
    """Returns the rounds as records of :mod:`opacus_shuffle.analysis`."""
    names = [field.name for field in dataclasses.fields(ShuffledRound)]
    return [
        (ShuffledRound(**{name: getattr(mechanism, name) for name in names}), count)
        for mechanism, count in rounds
    ]


def _estimate_certified(rounds: Rounds, *, delta: float, adjacency: Adjacency) -> float:
    return min(
        gaussian_clones.estimate_epsilon(
            shuffled(rounds), delta=delta, adjacency=adjacency.value, clones=clones
        )
        for clones in gaussian_clones.CLONE_TYPES
    )


def _estimate_pair(rounds: Rounds, *, delta: float, adjacency: Adjacency) -> float:
    return shuffled_rounds.estimate_pair_epsilon(shuffled(rounds), delta=delta)


@register_bound(
    FAMILY,
    "certified",
    estimate=_estimate_certified,
    meaning="the reports are seen in random order; whatever the other records are (by Gaussian "
    "clones)",
    cites="docs/proofs, pages 1, 6, 9 and 10",
    guarantee=Guarantee.PROVED,
)
def _certified(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    epsilon, clones = gaussian_clones.smallest_epsilon(
        shuffled(rounds), delta=delta, adjacency=adjacency.value
    )
    proof = "no gain from shuffling" if clones is None else f"{clones} clones"
    return Answer(epsilon, proof=proof)


@register_bound(
    FAMILY,
    "published",
    meaning=PUBLISHED,
    legend="one pair, as printed",
    guarantee=Guarantee.PAIR,
    covers=f"{PAIR}; one direction, D(moved || zero)",
    zero_out_only=True,
    uses_orders=True,
)
def _published(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    different = shuffled_rounds.coarsen(
        merge(shuffled(rounds)), "upper", most=shuffled_rounds.MOST_TYPES
    )

    def composed(vector: Vector) -> Vector:
        return np.sum([count * printed_rdp(round_, vector) for round_, count in different], axis=0)

    if orders is None:
        return Answer(composition.epsilon_from_rdp(composed, delta=delta)[0])
    orders = renyi_orders(orders, maximum=mean_ratio.MAX_ORDER)
    chosen = (
        f"{PUBLISHED}; over the {orders.size} Rényi orders from {orders.min():g} to "
        f"{orders.max():g} that were asked for"
    )
    return Answer(
        composition.epsilon_from_rdp(composed, delta=delta, orders=orders)[0], meaning=chosen
    )


@register_bound(
    FAMILY,
    "pair",
    meaning="the exact value for the published formula's pair of data sets, from above",
    legend="one pair, exact",
    guarantee=Guarantee.PAIR,
    covers=f"{PAIR}; both directions",
    zero_out_only=True,
    estimate=_estimate_pair,
)
def _pair(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    lower, upper = shuffled_rounds.pair_epsilon(shuffled(rounds), delta=delta)
    return Answer(upper, lower)


_baseline = functools.partial(register_bound, FAMILY, baseline=True, guarantee=Guarantee.PROVED)


@_baseline(
    "local",
    meaning="no shuffler: who sends which noised report is seen",
    legend="no shuffler",
    trusted="nobody",
    adversary="sees who sends which report",
)
def _local(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    return Answer(unshuffled_epsilon(shuffled(rounds), delta=delta, distance=adjacency.distance))


@_baseline(
    "secure_aggregation",
    meaning="only the sum of a round's reports is seen, and who took part, which no bound of the "
    "shuffler's gives away: where users are sampled, it may exceed them",
    legend="sums alone are seen",
    trusted="the aggregation",
    adversary="sees the sum of every round's reports, and who takes part",
)
def _secure_aggregation(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    """Computes ε of sums, which carry the noise of all reports of a round.

    A round by coins has at least the assumed number of reports, except with a small share of δ.
    """
    ran = merge(shuffled(rounds))
    sampled = any(round_.sample_rate < 1 for round_, _ in ran)
    by_coins = any(round_.sample_rate < 1 and round_.sampling == "poisson" for round_, _ in ran)
    few = FEW * delta if by_coins else 0.0
    share = few / sum(count for _, count in ran)
    noised = [(_of_sum(round_, fewest_reports(round_, share)), count) for round_, count in ran]
    epsilon = unshuffled_epsilon(noised, delta=delta - few, distance=adjacency.distance)
    if by_coins:  # a sum reveals no more than its reports
        epsilon = min(epsilon, unshuffled_epsilon(ran, delta=delta, distance=adjacency.distance))
    return Answer(epsilon, covers=f"{EVERY_DATA_SET}, sample seen" if sampled else None)


@functools.lru_cache(maxsize=256)
def fewest_reports(round_: ShuffledRound, probability: float) -> float:
    """Returns k such that a record's round has fewer than k reports with at most this probability.

    A participating record makes one report. By coins the others make a binomial number, whose tail
    is rounded down.
    """
    if round_.sampling != "poisson" or round_.sample_rate == 1:
        return round_.num_users * round_.sample_rate
    tail = min(probability / round_.sample_rate * (1 - 1e-6), 0.5)
    return 1 + int(binomial.fewest(round_.num_users - 1, round_.sample_rate, tail))


@_baseline(
    "central",
    meaning="a trusted server picks the participants in secret and adds the noise of the expected "
    "number of reports to their sum, however many take part",
    legend="trusted server",
    trusted="the server",
    adversary="sees the noised sum of every round",
)
def _central(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    """Computes ε of DP-SGD: the sampled Gaussian mechanism with the noise of the sum, √B·σ."""
    server = [
        (_of_sum(round_, round_.num_users * round_.sample_rate), count)
        for round_, count in shuffled(rounds)
    ]
    if adjacency is Adjacency.ZERO_OUT:
        epsilon = sampled_gaussian_epsilon(server, delta=delta)
    elif any(mechanism.sample_rate < 1 for mechanism, _ in rounds):
        raise NotCovered(
            "baseline='central' with sampling is about adjacency='zero_out', got "
            f"{adjacency.value!r}"
        )
    else:
        epsilon = unshuffled_epsilon(server, delta=delta, distance=adjacency.distance)
    if not any(
        mechanism.sampling == "fixed_size" and mechanism.sample_rate < 1 for mechanism, _ in rounds
    ):
        return Answer(epsilon)
    return Answer(
        epsilon,
        guarantee=Guarantee.ESTIMATE,
        covers=f"{EVERY_DATA_SET}, as if each user took part by its own coin",
    )


def _of_sum(round_: ShuffledRound, reports: float) -> ShuffledRound:
    """Returns the round with √reports times the noise, that of a sum of so many reports."""
    largest = 1e12  # that any mechanism takes
    return round_.with_noise(min(math.sqrt(max(reports, 1.0)) * round_.noise_multiplier, largest))
