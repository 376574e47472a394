"""The bounds of multi-message shuffled sums, all of them proved for every data set and for both adjacencies.

``published``  The round's own ε, composed as SCO Algorithm 5 does: of δ each of T rounds and the composition get 1/(T + 1).
               A round's ε at its share is SCO Theorem A.6 at the protocol's noise where the protocol has the paper's
               constants, else the Gaussian mechanism that covers it. Nothing is gained from sampling.
``certified``  The covering Gaussian mechanisms (:mod:`opacus_shuffle.analysis.binomial_sums`) composed exactly: the smallest of
               everyone in every round, of seeing in which rounds a record takes part, and of secret samples of fixed size
               (:mod:`opacus_shuffle.analysis.sampled_sums`). Under replacement, one pair's lower value stands beside it.

A record that becomes zero moves the sum half as far as one that becomes any other. Sampling's gain is about replacement also
then: the record that takes its place in the sample may be any other.

>>> from opacus_shuffle.accountants.bounds.registry import compute_bound
>>> from opacus_shuffle.accountants.mechanisms import ShuffledSums
>>> sums = ShuffledSums(noise_multiplier=8.5, num_users=50_000, sample_rate=0.01, dimension=1000, granularity=90,
...                     noise_trials=600_000, lost=1e-12, epsilon=1.0, delta=1e-6)
>>> for name in ("published", "certified"):
...     print(name, round(compute_bound([(sums, 100)], delta=1e-5, bound=name).epsilon, 3))
published 110.824
certified 0.079
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from opacus_shuffle.accountants.bounds.registry import BoundValue, Guarantee, NotCovered, Rounds, register_bound
from opacus_shuffle.accountants.bounds.shuffle_gaussian import EVERY, refuse_orders
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledSums
from opacus_shuffle.analysis import advanced_composition, binomial_sums, gaussian, sampled_sums
from opacus_shuffle.analysis.binomial_sums import BinomialNoise, SumRound
from opacus_shuffle.analysis.sampled_sums import SampledRound
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, unshuffled_epsilon
from opacus_shuffle.core.rounding import round_up

MESSAGES = "sees every shuffled message of every round (bits with their coordinate)"
SERVER = "the server"
_DISTANCE = {"zero_out": 1.0, "replace": 2.0}
_LARGEST_PAPER_EPSILON = 15.0
_SECRET, _SEEN = "secret samples of fixed size, under replacement", "samples that are seen"


def sums(mechanism: Mechanism) -> ShuffledSums:
    """The mechanism as what it is."""
    if not isinstance(mechanism, ShuffledSums):
        raise TypeError(f"no shuffled sums in {mechanism!r}")
    return mechanism


def round_epsilon(each: ShuffledSums, delta: float) -> float:
    """ε of one round at δ, everyone in it.

    Theorem A.6's noise for (ε, δ) in d coordinates is proportional to ln(2(d+1)/δ)·ln((d+1)/δ)/ε², so the noise that there is
    has an ε at every δ below ½, as far as the theorem goes: up to 15, with drop-outs up to one over the honest share.
    """
    if each.calibration == "published" and delta == each.delta:
        return each.epsilon
    if each.calibration == "published" and delta < 0.5:
        asked, made = (delta / (each.dimension + 1), each.delta / (each.dimension + 1))
        ratio = math.log(2 / asked) * math.log(asked) / (math.log(2 / made) * math.log(made))
        epsilon = each.epsilon * math.sqrt(ratio) * (1 + 1e-12)
        largest = _LARGEST_PAPER_EPSILON if each.honest_fraction == 1 else 1 / each.honest_fraction
        if epsilon <= largest * (1 + 1e-9):
            return epsilon
    if delta <= each.lost:
        raise NotCovered(
            f"bound='published' shares delta among the rounds, and each round's share ({delta:.3g}) is below what its binomial "
            f"tails take ({each.lost:.3g}): use bound='certified', or a larger delta"
        )
    return gaussian.compute_epsilon(mu=each.mu, delta=delta - each.lost)


def _paper(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """Advanced composition."""
    refuse_orders("published", orders)
    total = sum(count for _, count in rounds)
    if total == 1:
        epsilon = round_epsilon(sums(rounds[0][0]), delta)
    else:
        share = delta / (total + 1)
        epsilon = advanced_composition.compose(
            [(round_epsilon(sums(each), share), count) for each, count in rounds], slack=share
        )
    printed = all(sums(each).calibration == "published" for each, _ in rounds)
    by = "SCO Theorem A.6" if printed else "the covering Gaussian mechanism"
    meaning = (
        f"every round's own epsilon by {by}, composed by advanced composition as in SCO Algorithm 5, replacement (so zeroing "
        "too); takes nothing off for sampling"
    )
    return BoundValue(epsilon, Guarantee.PROVED, EVERY, adversary=MESSAGES, meaning=meaning)


def _certified(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """Exact composition of what covers the rounds."""
    refuse_orders("certified", orders)
    covering = [(SampledRound(mu=sums(e).mu, sample_rate=e.sample_rate, lost=sums(e).lost), count) for e, count in rounds]
    found = gaussian_epsilons(covering, delta=delta, adjacency=adjacency)
    epsilon = min(found.values())
    meaning = "Gaussian mechanisms that cover the binomial noise, composed exactly"
    if _SECRET in found:
        seen = max(found[_SEEN], epsilon) if _SEEN in found else math.inf
        meaning += (
            f"; counts on the shuffler to draw and hide who takes part in each round (if that is seen: {round_up(seen)})"
            if epsilon < seen < math.inf
            else "; holds even if it is seen who takes part in each round"
        )
    meaning += f"; a record sends {max(sums(each).bits_per_report for each, _ in rounds):,} bits a round"
    lower = _lower(rounds, delta) if adjacency == "replace" else None
    return BoundValue(epsilon, Guarantee.PROVED, EVERY, lower, adversary=MESSAGES, meaning=meaning)


def _lower(rounds: Rounds, delta: float) -> float | None:
    """One record at −C along a coordinate becomes +C, all others stay at −C; None for drop-outs or samples of several sizes."""
    rates = {each.sample_rate for each, _ in rounds}
    if len(rates) > 1 or any(sums(each).honest_fraction < 1 for each, _ in rounds):
        return None
    return _pair_lower(tuple((sums(each), count) for each, count in rounds), delta)


@functools.lru_cache(maxsize=256)
def _pair_lower(rounds: tuple[tuple[ShuffledSums, int], ...], delta: float) -> float:
    """See :func:`_lower`."""
    summed = [
        (
            SumRound(
                noise=BinomialNoise(trials=each.noise_trials, probability=each.bit_probability),
                shift=each.granularity,
                dimension=each.dimension,
            ),
            count,
        )
        for each, count in rounds
    ]
    return binomial_sums.lower_epsilon(summed, delta=delta, sample_rate=rounds[0][0].sample_rate)


def _central(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """DP-SGD with Gaussian noise of the same standard deviation on the same samples."""
    server = [(SampledRound(mu=2 / sums(each).noise_std, sample_rate=each.sample_rate), count) for each, count in rounds]
    epsilon = min(gaussian_epsilons(server, delta=delta, adjacency=adjacency).values())
    meaning = "a trusted server draws the same samples and adds Gaussian noise of the same size to the sum"
    return BoundValue(
        epsilon, Guarantee.PROVED, EVERY, trusted=SERVER, adversary="sees the noised sum of every round", meaning=meaning
    )


def gaussian_epsilons(rounds: list[tuple[SampledRound, int]], *, delta: float, adjacency: str = "replace") -> dict[str, float]:
    """ε of rounds of the Gaussian mechanism on samples of fixed size, by what is known of the samples; at least one is finite.

    Raises:
        ValueError: If what the rounds lose leaves nothing of δ.
    """
    lost = math.fsum(each.lost * count for each, count in rounds)
    everyone = all(each.sample_rate == 1 for each, _ in rounds)
    found: dict[str, float] = {}
    if not everyone:
        found[_SECRET] = sampled_sums.compute_epsilon(rounds, delta=delta)
    if lost < delta:
        seen = [  # a record is in each independent sample with probability γ: its own coin, as far as it is concerned
            (ShuffledRound(noise_multiplier=2 / each.mu, num_users=1, sample_rate=each.sample_rate, sampling="poisson"), count)
            for each, count in rounds
        ]
        found[_SEEN] = unshuffled_epsilon(seen, delta=delta - lost, distance=_DISTANCE[adjacency])
    if not found or not math.isfinite(min(found.values())):
        raise _nothing_left(delta, lost)
    return found


def _nothing_left(delta: float, lost: float) -> ValueError:
    """δ is too small for these rounds."""
    return ValueError(
        f"delta must exceed what the rounds' binomial tails take, {lost:.3g}, got {delta!r}: ask for a larger delta, or build "
        "the ShuffleVectorSum with a smaller one"
    )


register_bound(ShuffledSums, "published")(_paper)
register_bound(ShuffledSums, "certified")(_certified)
register_bound(ShuffledSums, "central", baseline=True)(_central)
