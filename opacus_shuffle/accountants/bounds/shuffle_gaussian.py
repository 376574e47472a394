"""The bounds of the shuffle-Gaussian family, for rounds that may differ in σ, γ or size.

``published``            SG Theorems 1, 2, 3 as printed, RDP over all useful orders: one pair of data sets, one direction.
``pair``             the same pair, exactly: numerical composition of its privacy loss, both directions; with a lower value.
``certified``        Gaussian clones: every data set, both adjacencies.
``certified_sharp``  the smaller of that and what a longer proof gives (truncated clones, in
                     :mod:`opacus_shuffle.analysis.gaussian_clones`): every data set, both adjacencies.

The pair: every other record reports zero and one record at the clipping norm becomes zero. SG takes it without loss of
generality; it is not the worst case (with the others at −1, n = 2, σ = 0.86, order 2 gives 1.3228, not 0.8890), so its ε is no
guarantee for every data set. SG's text says "replacement", but its pair is the zero-out adjacency.

>>> from opacus_shuffle.accountants.bounds.registry import compute_bound
>>> from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn
>>> rounds = [(ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1), 5540)]
>>> for name in ("published", "certified", "certified_sharp", "pair"):
...     print(name, round(compute_bound(rounds, delta=1 / 60_000, bound=name).epsilon, 3))
published 9.617
certified 0.124
certified_sharp 0.113
pair 0.054
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from opacus_shuffle.accountants.bounds.registry import BoundValue, Guarantee, NotCovered, Rounds, register_bound
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledCheckIn, ShuffleGauss, SubsampledShuffle
from opacus_shuffle.analysis import composition, gaussian_clones, mean_ratio, shuffled_rounds, subsampling
from opacus_shuffle.analysis.gaussian_clones import Clones
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound

FAMILY: tuple[type[Mechanism], ...] = (ShuffleGauss, SubsampledShuffle, ShuffledCheckIn)
PAIR = "one pair of data sets: all other records report zero, one record at the clipping norm becomes zero"
EVERY = "every data set"


def exact_rdp(mechanism: Mechanism, orders: Vector) -> Vector:
    """Exact RDP of the pair, one round."""
    return mean_ratio.compute_rdp(
        noise_multiplier=mechanism.noise_multiplier,
        num_users=mechanism.num_users,
        orders=orders,
        sample_rate=mechanism.sample_rate,
        sampling=mechanism.sampling,
    )


def printed_rdp(mechanism: Mechanism, orders: Vector) -> Vector:
    """RDP by the papers' formulas, one round; Theorem 1, for a round of everyone, is exact already.

    Never below the exact value: Theorem 3 as printed would be, for fewer than one expected report.
    """
    exact = exact_rdp(mechanism, orders)
    if mechanism.sampling is None:
        return exact
    printed = subsampling.compute_rdp(
        noise_multiplier=mechanism.noise_multiplier,
        num_users=mechanism.num_users,
        orders=orders,
        sample_rate=mechanism.sample_rate,
        sampling=mechanism.sampling,
    )
    return np.maximum(printed, exact)


def shuffled(rounds: Rounds) -> shuffled_rounds.Rounds:
    """The rounds as :mod:`opacus_shuffle.analysis` knows them."""
    return [
        (
            ShuffledRound(
                noise_multiplier=mechanism.noise_multiplier,
                num_users=mechanism.num_users,
                sample_rate=mechanism.sample_rate,
                sampling=mechanism.sampling,
            ),
            count,
        )
        for mechanism, count in rounds
    ]


def _paper(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """ε of the pair from the rounds' RDP, which adds up."""
    _refuse_replacement("published", adjacency)

    def composed(vector: Vector) -> Vector:
        return np.sum([count * printed_rdp(mechanism, vector) for mechanism, count in rounds], axis=0)

    epsilon, _ = composition.epsilon_from_rdp(composed, delta=delta, orders=orders)
    return BoundValue(epsilon, Guarantee.PAIR, f"{PAIR}; one direction, D(moved || zero)")


def _tight(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """ε of the pair from the distribution of its privacy loss."""
    _refuse_replacement("pair", adjacency)
    refuse_orders("pair", orders)
    lower, upper = shuffled_rounds.pair_epsilon(shuffled(rounds), delta=delta)
    return BoundValue(upper, Guarantee.PAIR, f"{PAIR}; both directions", lower)


def _certified(
    clones: tuple[Clones, ...], name: str, rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None
) -> BoundValue:
    """ε for every data set, by Gaussian clones of the kinds that are trusted."""
    refuse_orders(name, orders)
    ran = shuffled(rounds)
    epsilon = min(gaussian_clones.compute_epsilon(ran, delta=delta, adjacency=adjacency, clones=kind) for kind in clones)
    return BoundValue(epsilon, Guarantee.PROVED, EVERY)


def _refuse_replacement(bound: str, adjacency: str) -> None:
    """The papers' pair is a zero-out pair."""
    if adjacency != "zero_out":
        raise NotCovered(
            f"bound={bound!r} is about the zero-out pair, got adjacency={adjacency!r}: use bound='certified', which covers "
            "both adjacencies"
        )


def refuse_orders(bound: str, orders: Iterable[float] | None) -> None:
    """Only the papers' bound goes by Rényi orders."""
    if orders is not None:
        raise ValueError(f"bound={bound!r} uses no Rényi orders, got orders={orders!r}: leave them out")


for _mechanism in FAMILY:
    register_bound(_mechanism, "published")(_paper)
    register_bound(_mechanism, "pair")(_tight)
    register_bound(_mechanism, "certified")(functools.partial(_certified, ("mended",), "certified"))
    register_bound(_mechanism, "certified_sharp")(functools.partial(_certified, ("mended", "truncated"), "certified_sharp"))
