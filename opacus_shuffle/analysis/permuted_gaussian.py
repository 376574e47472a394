r"""Computes ε of one pair of gradients under weight shuffling.

In this pair the other gradients are zero, and one record's gradient is in a single coordinate.

Yang, Ji and Xiang's weight shuffling (WS) releases P(f) + z, P a uniform permutation of d
coordinates. With f = 0 and f′ = c·e₁ that is the shuffle Gaussian of d users, one of them moved to
norm 1 (:mod:`opacus_shuffle.analysis.ratio_distribution`). It meets every condition of WS Theorem
6, so the *lower* value proves that no formula for these conditions may give less:

>>> step = ShuffledRound(
...     noise_multiplier=0.27372, num_users=85_800_000, sample_rate=0.02, sampling="poisson"
... )
>>> # WS Theorem 6 with its Theorems 1 and 2 says 0.5:
>>> lower, upper = pair_epsilon([(step, 500)], delta=5e-6)
>>> round(lower, 2), round(upper, 2)
(1.9, 1.93)
"""

from __future__ import annotations

from opacus_shuffle.analysis.merge import merge
from opacus_shuffle.analysis.ratio_distribution import RatioDistribution, Side, mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import (
    Rounds,
    ShuffledRound,
    epsilon_bracket,
    sampled_gaussian_epsilon,
)
from opacus_shuffle.core.validation import open_unit_interval


def pair_epsilon(steps: Rounds, *, delta: float) -> tuple[float, float]:
    """Returns a lower and an upper value of the pair's ε at δ, in the larger direction.

    It is the ε after all steps.

    Args:
        steps: Kinds of steps, each with its number of repetitions, at least 1: ``noise_multiplier``
            is that of the **sum** in units of the record's norm, ``num_users`` the d coordinates
            that are permuted among themselves, ``sample_rate`` the probability with which the
            record enters the step (Poisson sampling).
        delta: δ in (0, 1).

    Returns:
        ``(lower, upper)``: the smallest ε with δ(ε) ≤ ``delta`` lies between them, some percent
        apart at worst. Where σ is too small to compute with (below about 0.05), 0 and DP-SGD's own
        ε.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        For one pair of gradients, d coordinates permuted uniformly, an adversary who sees the
        permuted noised gradients alone. No guarantee for every data set: a gradient with equal
        entries keeps DP-SGD's ε.
    """
    return epsilon_bracket(
        merge(steps), open_unit_interval("delta", delta), _distribution, sampled_gaussian_epsilon
    )


def _distribution(step: ShuffledRound, side: Side, tail: float) -> RatioDistribution:
    """Returns the distribution of R of one step.

    The whole vector is sampled, not its coordinates.
    """
    whole = mean_distribution(
        noise_multiplier=step.noise_multiplier, num_users=step.num_users, side=side, tail=tail
    )
    return whole.scaled(step.sample_rate)
