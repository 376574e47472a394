"""The bounds of DP-SGD with shuffled weights (WS Algorithm 1), for steps that may differ in σ or sampling rate.

``published``            WS Theorem 6 at each step, composed by WS Theorems 1 and 2, half of δ for the steps: an **estimate**.
``published_optimised``  the same with δ split so that ε is smallest.
``pair``            exact for one pair of gradients that meets Theorem 6's conditions: a value that the truth is not below.
``certified``        DP-SGD's own ε at the same noise, for every data set and for whoever sees all weights and gradients.

No ε smaller than DP-SGD's holds for every data set: a gradient with equal entries looks the same after any permutation. And
whoever sees the weights before and after a step can undo its permutation; ``published`` and ``pair`` are about an adversary who
sees each permuted noised gradient by itself. Clipping the sum to c′ is a projection on a ball, which brings no two points
further apart, so it costs no ε. Parameters that stay where they are have noise of at least the same σ.

>>> from opacus_shuffle.accountants.bounds.registry import compute_bound
>>> from opacus_shuffle.accountants.mechanisms import ShuffledWeights
>>> vit = ShuffledWeights(noise_multiplier=0.27372, num_users=50_000, sample_rate=0.02, dimension=85_800_000)
>>> for name in ("published", "pair", "certified"):
...     print(name, round(compute_bound([(vit, 500)], delta=5e-6, bound=name).epsilon, 1))
published 0.5
pair 1.9
certified 107.9
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from opacus_shuffle.accountants.bounds.registry import BoundValue, Guarantee, NotCovered, Rounds, register_bound
from opacus_shuffle.accountants.bounds.shuffle_gaussian import EVERY, refuse_orders
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledWeights
from opacus_shuffle.analysis import advanced_composition, fenton_wilkinson, gaussian
from opacus_shuffle.analysis.permuted_gaussian import pair_epsilon
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, sampled_gaussian_epsilon, unshuffled_epsilon
from opacus_shuffle.core.solve import safe_root

SERVER = "the server"
ALONE = "sees each step's permuted, noised gradient by itself, never two releases that it could match"
ALL = "sees all weights and noised gradients of every step"
_PAPER = (
    "WS Theorem 6 with WS Theorems 1 and 2: an approximation of a lower bound on delta, taken for the truth; for an adversary "
    "who sees each step's permuted gradient by itself"
)


def weights(mechanism: Mechanism) -> ShuffledWeights:
    """The mechanism as what it is."""
    if not isinstance(mechanism, ShuffledWeights):
        raise TypeError(f"no shuffled weights in {mechanism!r}")
    return mechanism


def step_epsilon(mechanism: ShuffledWeights, delta: float) -> float:
    """ε of one step before sampling by WS Theorem 6; parameters that stay count as the Gaussian mechanism they are."""
    if mechanism.layers == (1,):
        return gaussian.compute_epsilon(mu=1 / mechanism.noise_multiplier, delta=delta)
    shuffled = fenton_wilkinson.compute_epsilon(
        noise_std=mechanism.noise_multiplier * mechanism.clip,
        delta=delta,
        dimension=mechanism.layers,
        clip=mechanism.clip,
        batch_clip=mechanism.clip if mechanism.batch_clip is None else mechanism.batch_clip,
    )
    if mechanism.unshuffled_noise_multiplier is None:
        return shuffled
    return max(shuffled, gaussian.compute_epsilon(mu=1 / mechanism.unshuffled_noise_multiplier, delta=delta))


def _paper(
    delta_split: float | None, name: str, rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None
) -> BoundValue:
    """Theorem 6, 2 and 1."""
    refuse_orders(name, orders)
    _zero_out_only(name, adjacency)
    steps = [(functools.partial(step_epsilon, weights(each)), each.sample_rate, count) for each, count in rounds]
    epsilon = advanced_composition.compute_epsilon(steps, delta=delta, delta_split=delta_split)
    split = "half of delta for the steps" if delta_split == 0.5 else "delta split between steps and composition in the best way"
    if all(weights(each).layers == (1,) for each, _ in rounds):
        plain = f"nothing is permuted (dimension 1): DP-SGD by WS Theorems 1 and 2, {split}"
        return BoundValue(epsilon, Guarantee.PROVED, EVERY, trusted=SERVER, adversary=ALL, meaning=plain)
    covers = "no data set for certain: it approximates a lower bound on delta (WS Theorem 6)"
    meaning = f"{_PAPER if delta_split == 0.5 else 'as paper'}; {split}"
    return BoundValue(epsilon, Guarantee.ESTIMATE, covers, trusted=SERVER, adversary=ALONE, meaning=meaning)


def _tight(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """Nothing of others, one record's gradient in one of the smallest layer's coordinates."""
    refuse_orders("pair", orders)
    _zero_out_only("pair", adjacency)
    steps = [
        (
            ShuffledRound(
                noise_multiplier=min(
                    each.noise_multiplier / weights(each).record_norm, 1e12
                ),  # the most that has a distribution
                num_users=weights(each).orbit or min(weights(each).layers),
                sample_rate=each.sample_rate,
                sampling="poisson",
            ),
            count,
        )
        for each, count in rounds
    ]
    lower, upper = pair_epsilon(steps, delta=delta)
    covers = (
        "one pair of data sets: the other gradients sum to zero, one record's gradient is a single coordinate as large as both "
        "clippings let it"
    )
    places = min(step.num_users for step, _ in steps)
    mixed = f"it may be in any of {places:,} places" if places > 1 else "it stays where it is"
    meaning = f"the exact value, from above, for {covers}, which becomes zero; {mixed}; for the same adversary as paper"
    return BoundValue(upper, Guarantee.PAIR, covers, lower, trusted=SERVER, adversary=ALONE, meaning=meaning)


def _certified(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """DP-SGD's own: permuting is post-processing, clipping the sum a contraction."""
    refuse_orders("certified", orders)
    sampled = _as_sampled(rounds)
    epsilon = sampled_gaussian_epsilon(sampled, delta=delta)
    if adjacency == "replace":
        epsilon = min(_chained(sampled, delta), unshuffled_epsilon(sampled, delta=delta, distance=2.0))
    meaning = "DP-SGD at the same noise (its privacy loss composed numerically); weight shuffling takes nothing off it"
    return BoundValue(epsilon, Guarantee.PROVED, EVERY, trusted=SERVER, adversary=ALL, meaning=meaning)


def _composition(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """What WS compares with: plain DP-SGD at the same noise by the same composition."""
    _zero_out_only("composition", adjacency)
    steps = [(functools.partial(_gaussian_epsilon, each.noise_multiplier), each.sample_rate, count) for each, count in rounds]
    epsilon = advanced_composition.compute_epsilon(steps, delta=delta)
    meaning = "DP-SGD at the same noise, composed by WS Theorems 1 and 2 as 'published' is: proved, and looser than 'certified'"
    return BoundValue(epsilon, Guarantee.PROVED, EVERY, trusted=SERVER, adversary=ALL, meaning=meaning)


def _gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """One step before sampling."""
    return gaussian.compute_epsilon(mu=1 / noise_multiplier, delta=delta)


def _as_sampled(rounds: Rounds) -> list[tuple[ShuffledRound, int]]:
    """The steps as the sampled Gaussian mechanism."""
    return [
        (
            ShuffledRound(
                noise_multiplier=each.noise_multiplier,
                num_users=each.num_users,
                sample_rate=each.sample_rate,
                sampling="poisson",
            ),
            count,
        )
        for each, count in rounds
    ]


def _chained(sampled: list[tuple[ShuffledRound, int]], delta: float) -> float:
    """A replacement as two zero-outs, one after the other: (2ε, δ′ + e^ε·δ′)."""

    def excess(log_share: float) -> float:
        share = delta * math.exp(log_share)
        return log_share + float(np.logaddexp(0.0, sampled_gaussian_epsilon(sampled, delta=share)))

    low, lowest = -1.0, math.log(1e-300 / delta)
    while low < lowest or excess(low) > 0:
        if low <= lowest:
            return math.inf
        low = max(2 * low, lowest)
    root = safe_root(excess, unsafe=-math.log(2) / 2, safe=low, tolerance=1e-3, step=1e-3)
    return 2 * sampled_gaussian_epsilon(sampled, delta=delta * math.exp(root))


def _zero_out_only(bound: str, adjacency: str) -> None:
    """WS's neighbours differ by one clipped gradient."""
    if adjacency != "zero_out":
        raise NotCovered(
            f"{bound!r} is about leaving a record out, got adjacency={adjacency!r}: use bound='certified', which covers both"
        )


register_bound(ShuffledWeights, "published")(functools.partial(_paper, 0.5, "published"))
register_bound(ShuffledWeights, "published_optimised")(functools.partial(_paper, None, "published_optimised"))
register_bound(ShuffledWeights, "pair")(_tight)
register_bound(ShuffledWeights, "certified")(_certified)
register_bound(ShuffledWeights, "composition", baseline=True)(_composition)
