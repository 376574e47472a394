r"""Computes ε of epochs in which each record is in one batch, drawn at random and in secret.

A trusted server releases the noised sum of every batch. If one record's gradients become zero,
the likelihood ratio of a whole epoch of t batches is at most, in convex order, the mean of t
independent copies of X = exp(z/σ − 1/2σ²): the ratio of a round of t shuffled Gaussian reports,
σ each. If one record is replaced by any other, the worst case is that its gradients change sign.
Proofs: docs/proofs/11_random_allocation.md.

>>> lower, upper = zero_out_epsilon([(epoch(1.0, 1000), 1)], delta=1e-5)
>>> round(lower, 4), round(upper, 4)
(0.1388, 0.139)
>>> round(replacement_epsilon([(epoch(1.0, 1000), 1)], delta=1e-5), 3)
0.228
"""

from __future__ import annotations

import dataclasses
import functools

from opacus_shuffle.analysis import privacy_loss
from opacus_shuffle.analysis.merge import merge
from opacus_shuffle.analysis.opposite_reports import opposite_reports
from opacus_shuffle.analysis.privacy_loss import GridDistribution, Mixture
from opacus_shuffle.analysis.ratio_distribution import mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import (
    Merged,
    Rounds,
    ShuffledRound,
    coarsen,
    pair_epsilon,
    tail_for,
    unshuffled_epsilon,
)
from opacus_shuffle.core.validation import open_unit_interval

NEGLIGIBLE = 1e-4
"""The share of δ below which probabilities need no accuracy."""


def epoch(noise_multiplier: float, num_batches: int) -> ShuffledRound:
    """Returns the round of shuffled reports that is as private as an epoch.

    Args:
        noise_multiplier: σ of the sum of a batch over the clipping norm.
        num_batches: t, the number of batches of an epoch.
    """
    return ShuffledRound(noise_multiplier=noise_multiplier, num_users=num_batches)


def zero_out_epsilon(epochs: Rounds, *, delta: float) -> tuple[float, float]:
    """Returns a lower and an upper value of ε ≥ 0 at δ if one record's gradients become zero.

    Args:
        epochs: Of :func:`epoch`, each with its number of repetitions, at least 1.
        delta: δ in (0, 1).

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        The upper value covers every data set and every adaptive choice of gradients (Theorem 11.1).
        A record whose clipped gradient is one fixed vector of the clipping norm costs no less than
        the lower one if all others are zero.
    """
    return pair_epsilon(epochs, delta=delta)


def zero_out_losses(
    epochs: Rounds, *, step: float, clipped: float
) -> list[tuple[tuple[GridDistribution, GridDistribution], int]]:
    """Returns losses on a grid that bound one epoch of each kind, with the number of such epochs.

    Args:
        epochs: As for :func:`zero_out_epsilon`; many different ones become a few that cost more.
        step: Of the grid.
        clipped: What :func:`opacus_shuffle.analysis.privacy_loss.losses_above` may move.

    Raises:
        ValueError: If σ is below about 0.05, or the grid is too fine.

    Formal Guarantees:
        The first of two losses is that of the record's own gradients against zero ones, the second
        the reverse; what :func:`zero_out_epsilon` says of its upper value holds of both.
    """
    return [
        (
            privacy_loss.losses_above(
                Mixture.of(mean_distribution(**dataclasses.asdict(round_))),
                step=step,
                clipped=clipped,
            ),
            count,
        )
        for round_, count in coarsen(merge(epochs), "upper")
    ]


def replacement_epsilon(epochs: Rounds, *, delta: float) -> float:
    """Returns ε ≥ 0 at δ, rounded up, if one record becomes any other one.

    The arguments are those of :func:`zero_out_epsilon`. The grids of page 9 add to it: next to
    nothing up to ε = 3, a few percent at 6, and most of ε beyond 10, where the noise multiplier is
    below 0.4.

    Formal Guarantees:
        For every data set and every adaptive choice of gradients (Theorem 11.4).
    """
    return _replacement_epsilon(merge(epochs), open_unit_interval("delta", delta))


@functools.lru_cache(maxsize=512)
def _replacement_epsilon(epochs: Merged, delta: float) -> float:
    most = unshuffled_epsilon(epochs, delta=delta, distance=2.0)
    tail = tail_for(epochs, delta)
    if most == 0 or tail is None:
        return most
    negligible = NEGLIGIBLE * delta / sum(count for _, count in epochs)
    mixtures = []
    for round_, count in coarsen(epochs, "upper"):
        ratio = opposite_reports(
            noise_multiplier=round_.noise_multiplier,
            num_users=round_.num_users,
            tail=tail,
            negligible=negligible,
        )
        mixtures.append((Mixture.of(ratio), count))
    return min(most, privacy_loss.compute_epsilon(mixtures, delta=delta))
