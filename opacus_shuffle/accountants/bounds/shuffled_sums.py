"""The bounds of Cheu, Joseph, Mao and Peng's shuffled sums (SCO).

All of them are proved for every data set and both adjacencies.

``certified``
    The covering Gaussian mechanisms (:mod:`opacus_shuffle.analysis.binomial_sums`), composed
    exactly. It is the smallest of three values: for everyone in every round, for samples that are
    seen, and for secret coins or samples of fixed size
    (:mod:`opacus_shuffle.analysis.sampled_sums`). If known, a lower value of one pair is reported
    with it. Random allocation costs the same as at a trusted server
    (:mod:`opacus_shuffle.accountants.bounds.random_allocation`) with the covering Gaussian's noise.

A record that becomes zero moves the sum half as far as one that becomes any other. With secret
coins the same holds, and a round is one of DP-SGD, for both adjacencies. A sample of fixed size
contains another record instead, so its ε holds for both adjacencies, as its meaning states.

>>> from opacus_shuffle.accountants.bounds.registry import compute_bound
>>> from opacus_shuffle.accountants.mechanisms import ShuffledSums
>>> for sampling in ("poisson", "fixed_size", "random_allocation"):
...     sums = ShuffledSums.build(
...         noise_multiplier=1.1,
...         num_users=5000,
...         sample_rate=0.1,
...         dimension=1000,
...         sampling=sampling,
...     )
...     print(sampling, round(compute_bound([(sums, 100)], delta=1e-5).epsilon, 2))
poisson 5.89
fixed_size 20.02
random_allocation 5.14
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from opacus_shuffle.accountants.bounds.random_allocation import epochs_of
from opacus_shuffle.accountants.bounds.registry import Answer, compute_bound, register_bound
from opacus_shuffle.accountants.mechanisms import RandomAllocation, ShuffledSums
from opacus_shuffle.analysis import binomial_sums, sampled_sums
from opacus_shuffle.analysis.binomial_sums import BinomialSum
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.analysis.shuffled_rounds import MOST_TYPES, ShuffledRound, unshuffled_epsilon
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, NotCovered
from opacus_shuffle.core.rounding import round_up

MESSAGES = "sees every shuffled message of every round (bits with their coordinate)"
Rounds = Sequence[tuple[ShuffledSums, int]]
_COINS, _SAMPLES = "secret coins", "secret samples of fixed size, under replacement"
_BATCHES = "one secret batch of each epoch"
_SEEN = "samples that are seen"
_EVERYONE = "everyone in every round"


@register_bound(
    ShuffledSums,
    "certified",
    meaning="Gaussian mechanisms that cover the binomial noise, composed exactly",
    legend="exact composition",
    adversary=MESSAGES,
    cites="docs/proofs, pages 2, 3, 8 and 11",
    guarantee=Guarantee.PROVED,
)
def _certified(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    if _allocated(rounds):
        lost = math.fsum(mechanism.lost * count for mechanism, count in rounds)
        epsilons = _allocated_epsilons(
            rounds, "noise_multiplier", lost=lost, delta=delta, adjacency=adjacency
        )
    else:
        covering = [(mechanism.sampled_sum(mechanism.mu), count) for mechanism, count in rounds]
        epsilons = gaussian_epsilons(covering, delta=delta, adjacency=adjacency)
    proof, epsilon = min(epsilons.items(), key=lambda row: row[1])
    meaning = "Gaussian mechanisms that cover the binomial noise, composed exactly"
    if proof in (_COINS, _SAMPLES, _BATCHES):
        seen = epsilons.get(_SEEN, math.inf)
        if epsilon < seen < math.inf:
            meaning += (
                f"; counts on {'the shuffler' if proof == _SAMPLES else 'every user'} to draw and "
                f"hide who takes part in each round (if that is seen: {round_up(seen)})"
            )
        if adjacency is Adjacency.ZERO_OUT and proof == _SAMPLES:
            meaning += "; the same epsilon holds if the record is replaced by any other"
    elif proof == _SEEN:
        meaning += "; holds even if it is seen who takes part in each round"
    return Answer(epsilon, _lower(tuple(rounds), delta, adjacency), proof, meaning=meaning)


@functools.lru_cache(maxsize=256)
def _lower(
    rounds: tuple[tuple[ShuffledSums, int], ...], delta: float, adjacency: Adjacency
) -> float | None:
    """Returns a lower bound on every valid ε by one pair of data sets, or None.

    It is None for drop-outs, samples of several sizes, random allocation, or odd grids.

    By coins: one record at the end of a coordinate's grid becomes zero, as all others are. With
    samples of fixed size: it moves from one end to the other, where all others are. Of very many
    different rounds only those that reveal most are used, which only lowers the value.
    """
    samplings = {
        (mechanism.sampling if mechanism.sample_rate < 1 else None, mechanism.sample_rate)
        for mechanism, _ in rounds
    }
    if len(samplings) > 1 or any(mechanism.honest_fraction < 1 for mechanism, _ in rounds):
        return None
    sampling, rate = samplings.pop()
    if sampling == "random_allocation":
        return None
    zeroed = sampling == "poisson" or adjacency is Adjacency.ZERO_OUT
    if zeroed and (
        sampling == "fixed_size" or any(mechanism.granularity % 2 for mechanism, _ in rounds)
    ):
        return None
    summed = [
        (
            BinomialSum(
                noise=mechanism.noise,
                shift=mechanism.granularity // (2 if zeroed else 1),
                dimension=mechanism.dimension,
            ),
            count,
        )
        for mechanism, count in sorted(rounds, key=lambda entry: -entry[1] * entry[0].mu ** 2)[
            :MOST_TYPES
        ]
    ]
    return binomial_sums.lower_epsilon(summed, delta=delta, sample_rate=rate)


@register_bound(
    ShuffledSums,
    "central",
    meaning="a trusted server draws the same samples and adds Gaussian noise of the same size to "
    "the sum",
    legend="trusted server",
    baseline=True,
    trusted="the server",
    adversary="sees the noised sum of every round",
    guarantee=Guarantee.PROVED,
)
def _central(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    if _allocated(rounds):
        epsilons = _allocated_epsilons(
            rounds, "noise_std", lost=0.0, delta=delta, adjacency=adjacency
        )
    else:
        server = [
            (dataclasses.replace(mechanism.sampled_sum(2 / mechanism.noise_std), lost=0.0), count)
            for mechanism, count in rounds
        ]
        epsilons = gaussian_epsilons(server, delta=delta, adjacency=adjacency)
    return Answer(min(epsilons.values()))


def _allocated(rounds: Rounds) -> bool:
    """Tells whether the rounds are random allocation; refuses a mixture with other rounds."""
    allocated = {mechanism.sampling == "random_allocation" for mechanism, _ in rounds}
    if len(allocated) > 1:
        raise NotCovered(
            "rounds with sampling='random_allocation' form epochs, which other rounds would "
            "interrupt: account for the two apart (epsilons and deltas add up)"
        )
    return allocated.pop()


def _allocated_epsilons(
    rounds: Rounds, noise: str, *, lost: float, delta: float, adjacency: Adjacency
) -> dict[str, float]:
    """Returns ε of epochs of random allocation, by the adversary's knowledge of the batches.

    A trusted server's Gaussian noise covers the binomial noise, round by round (Theorem 11.9).

    Args:
        rounds: With random allocation, in the order in which they ran.
        noise: The attribute with the server's noise multiplier.
        lost: The loss of δ in all rounds.
        delta: δ.
        adjacency: Between which data sets.

    Raises:
        ValueError: If the loss uses up δ.
    """
    if lost >= delta:
        raise _delta_exhausted(lost, rounds, delta)
    server = [
        (
            RandomAllocation(
                noise_multiplier=getattr(mechanism, noise), num_batches=mechanism.num_batches
            ),
            count,
        )
        for mechanism, count in rounds
    ]
    remaining = delta - lost
    seen = unshuffled_epsilon(epochs_of(server), delta=remaining, distance=adjacency.distance)
    secret = compute_bound(server, delta=remaining, adjacency=adjacency.value).epsilon
    return {_SEEN: seen, _BATCHES: secret}


def gaussian_epsilons(
    rounds: list[tuple[SampledSum, int]], *, delta: float, adjacency: Adjacency = Adjacency.REPLACE
) -> dict[str, float]:
    """Returns ε of Gaussian rounds on samples, by the adversary's knowledge of the samples.

    Raises:
        ValueError: If the losses use up δ, so no value is finite.
    """
    lost = math.fsum(sampled_sum.lost * count for sampled_sum, count in rounds)
    everyone = all(sampled_sum.sample_rate == 1 for sampled_sum, _ in rounds)
    epsilons: dict[str, float] = {}
    if not everyone:
        coins = all(sampled_sum.sampling == "poisson" for sampled_sum, _ in rounds)
        zeroed = coins and adjacency is Adjacency.ZERO_OUT
        epsilons[_COINS if coins else _SAMPLES] = sampled_sums.compute_epsilon(
            rounds, delta=delta, zeroed=zeroed
        )
    if lost < delta:
        # Each sample contains a given record with probability γ, as if by its own coin.
        seen = [
            (
                ShuffledRound(
                    noise_multiplier=2 / sampled_sum.mu,
                    num_users=1,
                    sample_rate=sampled_sum.sample_rate,
                    sampling="poisson",
                ),
                count,
            )
            for sampled_sum, count in rounds
        ]
        epsilon = unshuffled_epsilon(seen, delta=delta - lost, distance=adjacency.distance)
        epsilons[_EVERYONE if everyone else _SEEN] = epsilon
    if not epsilons or not math.isfinite(min(epsilons.values())):
        raise _delta_exhausted(lost, rounds, delta)
    return epsilons


def _delta_exhausted(lost: float, rounds: Sequence[tuple[object, int]], delta: float) -> ValueError:
    """Returns the error for tails that use up δ."""
    return ValueError(
        f"delta must exceed the loss in binomial tails, {lost:.3g} in "
        f"{sum(count for _, count in rounds)} steps, got {delta!r}: ask for a larger delta or "
        "fewer steps, or build the protocol with a smaller delta"
    )
