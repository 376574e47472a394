"""The three bounds of the shuffle-Gaussian family, for rounds that may differ in σ, γ or size.

``paper``      SG Theorems 1, 2, 3 as printed, RDP over all useful orders: one pair of data sets.
``tight``      the exact RDP of the same pair, without the slack of Theorems 2 and 3: one pair of data sets.
``certified``  the reports without the shuffler, an exact Gaussian: every data set.

The pair: every other record reports zero and one record at the clipping norm becomes zero. SG takes it without loss of
generality; it is not the worst case (with the others at −1, n = 2, σ = 0.86, order 2 gives 1.3228, not 0.8890), so its ε is no
guarantee for every data set. SG's text says "replacement", but its pair is the zero-out adjacency.

>>> from opacus_shuffle.accountants.bounds import compute_bound
>>> from opacus_shuffle.mechanisms import ShuffledCheckIn
>>> rounds = [(ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1), 5540)]
>>> for name in ("paper", "tight", "certified"):
...     print(name, round(compute_bound(rounds, delta=1 / 60_000, bound=name).epsilon, 4))
paper 9.6175
tight 0.0608
certified 171.6878
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import numpy as np

from opacus_shuffle.accountants.bounds import BoundValue, Guarantee, Rounds, register_bound
from opacus_shuffle.analysis import composition, gaussian, mean_ratio, subsampling
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.mechanisms import Mechanism, ShuffledCheckIn, ShuffleGauss, SubsampledShuffle

FAMILY: tuple[type[Mechanism], ...] = (ShuffleGauss, SubsampledShuffle, ShuffledCheckIn)
PAIR = (
    "one pair of data sets: all other records report zero, one record at the clipping norm becomes zero; "
    "one direction, D(moved || zero)"
)


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


def _pair_bound(
    rdp: Callable[[Mechanism, Vector], Vector],
    name: str,
    rounds: Rounds,
    *,
    delta: float,
    adjacency: str,
    orders: Iterable[float] | None,
) -> BoundValue:
    """ε of the pair from the rounds' RDP, which adds up."""
    if adjacency != "zero_out":
        raise ValueError(
            f"bound={name!r} is about the zero-out pair, got adjacency={adjacency!r}: use bound='certified', which covers "
            "both adjacencies"
        )

    def composed(vector: Vector) -> Vector:
        return np.sum([count * rdp(mechanism, vector) for mechanism, count in rounds], axis=0)

    epsilon, _ = composition.epsilon_from_rdp(composed, delta=delta, orders=orders)
    return BoundValue(epsilon, Guarantee.PAIR, PAIR)


def _unshuffled_bound(rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
    """ε with no shuffler: shuffling and sampling are post-processing and mixing, so it covers every data set."""
    if orders is not None:
        raise ValueError(f"bound='certified' uses no Rényi orders, got orders={orders!r}: leave them out")
    distance = {"zero_out": 1.0, "replace": 2.0}[adjacency]
    mu = distance * math.sqrt(sum(count / mechanism.noise_multiplier**2 for mechanism, count in rounds))
    return BoundValue(
        gaussian.compute_epsilon(mu=mu, delta=delta),
        Guarantee.PROVED,
        "every data set, computed as if there were no shuffler, which can only help",
    )


for _mechanism in FAMILY:
    register_bound(_mechanism, "paper")(functools.partial(_pair_bound, printed_rdp, "paper"))
    register_bound(_mechanism, "tight")(functools.partial(_pair_bound, exact_rdp, "tight"))
    register_bound(_mechanism, "certified")(_unshuffled_bound)
