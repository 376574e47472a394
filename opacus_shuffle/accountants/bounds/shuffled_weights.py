"""The bounds of Yang, Ji and Xiang's weight shuffling (WS), DP-SGD with permuted weights.

Steps may differ in σ or γ. No ε smaller than DP-SGD's holds for every data set, because a gradient
with equal entries is the same after any permutation. An adversary who sees the weights before and
after a step can undo its permutation; ``published`` and ``pair`` assume one who sees each permuted
noised gradient by itself. Clipping the sum to c′ is a projection on a ball, which moves no two
points further apart, so it costs no ε. Parameters that are not permuted have noise of at least σ.

>>> from opacus_shuffle.accountants.bounds.registry import compute_bound
>>> from opacus_shuffle.accountants.mechanisms import ShuffledWeights
>>> vit = ShuffledWeights(noise_multiplier=0.27372, sample_rate=0.02, dimension=85_800_000)
>>> for name in ("published", "pair", "certified"):
...     print(name, round(compute_bound([(vit, 500)], delta=5e-6, bound=name).epsilon, 1))
published 0.5
pair 1.9
certified 107.9
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from opacus_shuffle.accountants.bounds.registry import Answer, register_bound
from opacus_shuffle.accountants.bounds.shuffle_gaussian import shuffled
from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.analysis import advanced_composition, fenton_wilkinson, gaussian
from opacus_shuffle.analysis.permuted_gaussian import pair_epsilon
from opacus_shuffle.analysis.shuffled_rounds import (
    ShuffledRound,
    sampled_gaussian_epsilon,
    unshuffled_epsilon,
)
from opacus_shuffle.core.guarantees import EVERY_DATA_SET, Adjacency, Guarantee
from opacus_shuffle.core.solve import safe_root

Rounds = Sequence[tuple[ShuffledWeights, int]]
SERVER = "the server"
ALONE = (
    "sees each step's permuted, noised gradient by itself, never two releases that it could match"
)
ALL = "sees all weights and noised gradients of every step, but not how many records a batch has"
_ESTIMATE = (
    "WS Theorem 6 with WS Theorems 1 and 2: an approximation of a lower bound on delta, taken for "
    "the truth; for an adversary who sees each step's permuted gradient by itself"
)
_PAIR = (
    "one pair of data sets: the other gradients sum to zero, one record's gradient is a single "
    "coordinate as large as both clippings let it"
)
_HALF = "half of delta for the steps"


def step_epsilon(mechanism: ShuffledWeights, delta: float) -> float:
    """Returns ε of one step before sampling by WS Theorem 6.

    Parameters that are not permuted count as a Gaussian mechanism.
    """
    if mechanism.layers == (1,):
        return gaussian.compute_epsilon(mu=1 / mechanism.noise_multiplier, delta=delta)
    permuted = fenton_wilkinson.compute_epsilon(
        noise_std=mechanism.noise_multiplier * mechanism.clip,
        delta=delta,
        dimension=mechanism.layers,
        clip=mechanism.clip,
        batch_clip=mechanism.clip if mechanism.batch_clip is None else mechanism.batch_clip,
    )
    if mechanism.unshuffled_noise_multiplier is None:
        return permuted
    return max(
        permuted,
        gaussian.compute_epsilon(mu=1 / mechanism.unshuffled_noise_multiplier, delta=delta),
    )


_of_single_steps = functools.partial(
    register_bound, ShuffledWeights, trusted=SERVER, adversary=ALONE, zero_out_only=True
)


@_of_single_steps(
    "published",
    meaning=f"{_ESTIMATE}; {_HALF}",
    legend="an estimate, as printed",
    guarantee=Guarantee.ESTIMATE,
    covers="no data set for certain: it approximates a lower bound on delta (WS Theorem 6)",
)
def _published(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    """Composes WS Theorem 6 over the steps by WS Theorems 2 and 1."""
    steps = [
        (functools.partial(step_epsilon, mechanism), mechanism.sample_rate, count)
        for mechanism, count in rounds
    ]
    epsilon = advanced_composition.compute_epsilon(steps, delta=delta)
    if any(mechanism.layers != (1,) for mechanism, _ in rounds):
        return Answer(epsilon)
    plain = f"nothing is permuted (dimension 1): DP-SGD by WS Theorems 1 and 2, {_HALF}"
    return Answer(
        epsilon, guarantee=Guarantee.PROVED, covers=EVERY_DATA_SET, adversary=ALL, meaning=plain
    )


@_of_single_steps(
    "pair",
    meaning="the exact value for one pair of data sets",
    legend="one pair, exact",
    guarantee=Guarantee.PAIR,
    covers=_PAIR,
)
def _pair(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    """Computes ε of one record's gradient in a single coordinate, with the others at zero."""
    largest = 1e12  # the most noise that has a distribution
    steps = [
        (
            ShuffledRound(
                noise_multiplier=min(mechanism.noise_multiplier / mechanism.record_norm, largest),
                num_users=mechanism.orbit or min(mechanism.layers),
                sample_rate=mechanism.sample_rate,
                sampling="poisson",
            ),
            count,
        )
        for mechanism, count in rounds
    ]
    lower, upper = pair_epsilon(steps, delta=delta)
    places = min(step.num_users for step, _ in steps)
    mixed = f"it may be in any of {places:,} places" if places > 1 else "it stays where it is"
    meaning = (
        f"the exact value, from above, for {_PAIR}, which becomes zero; {mixed}; for the same "
        "adversary as published"
    )
    return Answer(upper, lower, meaning=meaning)


@register_bound(
    ShuffledWeights,
    "certified",
    meaning="DP-SGD at the same noise (its privacy loss composed numerically); weight shuffling "
    "takes nothing off it",
    trusted=SERVER,
    adversary=ALL,
    cites="docs/proofs, page 6",
    guarantee=Guarantee.PROVED,
)
def _certified(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    """Computes ε of DP-SGD: permuting is post-processing, and clipping the sum a contraction."""
    sampled = shuffled(rounds)
    if adjacency is Adjacency.ZERO_OUT:
        return Answer(sampled_gaussian_epsilon(sampled, delta=delta))
    return Answer(
        min(_chained(sampled, delta), unshuffled_epsilon(sampled, delta=delta, distance=2.0))
    )


def _chained(sampled: Sequence[tuple[ShuffledRound, int]], delta: float) -> float:
    """Returns ε of a replacement as two zero-outs in a row: (2ε, δ′ + e^ε·δ′)."""

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
