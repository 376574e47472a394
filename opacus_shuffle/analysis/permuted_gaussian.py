r"""One pair of gradients under weight shuffling, exactly: nothing of others, and one record's gradient in one coordinate.

With f = 0 and f′ = c·e₁ the shuffled Gaussian P(f) + z over d coordinates is the shuffle Gaussian of d users, everyone at zero
and one of them moved to norm 1: its likelihood ratio is the mean of d independent copies of exp((2x − 1)/2σ²)
(:mod:`opacus_shuffle.analysis.ratio_distribution`). So this pair's ε, sampled and composed over T steps, both directions, is
computed exactly. The pair meets every condition of WS Theorem 6 (norms, and it is not the case of equal entries that WS sets
aside), which makes the *lower* value a proof that no formula for these conditions may give less:

>>> run = [(PermutedStep(noise_multiplier=0.27372, dimension=85_800_000, sample_rate=0.02), 500)]
>>> lower, upper = pair_epsilon(run, delta=5e-6)  # WS Theorem 6 with its Theorems 1 and 2 says 0.5
>>> round(lower, 2), round(upper, 2)
(1.9, 1.93)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from opacus_shuffle.analysis import privacy_loss
from opacus_shuffle.analysis.privacy_loss import Mixture
from opacus_shuffle.analysis.ratio_distribution import Side, mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, coarsen, merge, sampled_gaussian_epsilon, tail_for
from opacus_shuffle.core.validation import open_unit_interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class PermutedStep:
    """One step: noise on the sum in units of the record's norm, d coordinates permuted, Poisson sampling."""

    noise_multiplier: float
    dimension: int
    sample_rate: float = 1.0

    @property
    def as_round(self) -> ShuffledRound:
        """The same as a round of the shuffle Gaussian with one user per coordinate, checked."""
        return ShuffledRound(
            noise_multiplier=self.noise_multiplier,
            num_users=self.dimension,
            sample_rate=self.sample_rate,
            sampling="poisson",  # of the step, not of the d coordinates: only the rate is used
        )


def pair_epsilon(steps: Sequence[tuple[PermutedStep, int]], *, delta: float) -> tuple[float, float]:
    """A lower and an upper value of the pair's ε at δ, larger direction, after all steps.

    Args:
        steps: Kinds of steps, each with its number of repetitions, at least 1.
        delta: δ in (0, 1).

    Returns:
        ``(lower, upper)``: the smallest ε with δ(ε) ≤ ``delta`` lies between them, some percent apart at worst. Where σ is too
        small to compute with (below about 0.05), DP-SGD's own ε and 0.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        For one pair of gradients, d coordinates permuted uniformly, an adversary who sees the permuted noised gradients alone.
        No guarantee for every data set: a gradient with equal entries keeps DP-SGD's ε.
    """
    delta = open_unit_interval("delta", delta)
    merged = merge([(each.as_round, count) for each, count in steps])
    return _pair_epsilon(merged, delta) if merged else (0.0, 0.0)


@functools.lru_cache(maxsize=256)
def _pair_epsilon(rounds: tuple[tuple[ShuffledRound, int], ...], delta: float) -> tuple[float, float]:
    """See :func:`pair_epsilon`."""
    plain = sampled_gaussian_epsilon(rounds, delta=delta)
    tail = tail_for(rounds, delta)
    if tail is None or plain == 0:
        return 0.0, plain

    def composition(side: Side) -> list[tuple[Mixture, int]]:
        found = []
        for each, count in coarsen(rounds, side):
            distribution = mean_distribution(
                noise_multiplier=each.noise_multiplier, num_users=each.num_users, side=side, tail=tail
            )
            found.append((Mixture.of(distribution.scaled(each.sample_rate)), count))
        return found

    upper = min(privacy_loss.compute_epsilon(composition("upper"), delta=delta), plain)
    return min(privacy_loss.lower_epsilon(composition("lower"), delta=delta), upper), upper
