"""The bounds of random allocation, in which each record trains once an epoch.

Steps may differ in σ. No bound covers a run that reveals the sizes of its batches, or whose batches
are not drawn anew for every epoch (docs/how_to/train_once_an_epoch.rst).

>>> from opacus_shuffle.accountants.bounds.registry import ladder
>>> from opacus_shuffle.accountants.mechanisms import RandomAllocation
>>> rounds = [(RandomAllocation(noise_multiplier=1.0, num_batches=1000), 1000)]
>>> for bound in ladder(rounds, delta=1e-5):
...     print(bound.bound, round(bound.epsilon, 3))
certified 0.139
shuffled_batches 4.377
poisson 0.149
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from opacus_shuffle.accountants.bounds.registry import Answer, register_bound
from opacus_shuffle.accountants.mechanisms import RandomAllocation
from opacus_shuffle.analysis import random_allocation, shuffled_rounds
from opacus_shuffle.analysis.random_allocation import epoch
from opacus_shuffle.core.guarantees import Adjacency, Guarantee

Rounds = Sequence[tuple[RandomAllocation, int]]
SERVER = "the server"
ADVERSARY = (
    "sees all weights and noised gradients of every step, but neither which records are in a "
    "batch nor how many"
)


def epochs_of(
    rounds: Rounds, noise_of_epoch: Callable[[float, float], float] = min
) -> shuffled_rounds.Rounds:
    """Returns the epochs of the steps, in order; a begun epoch counts in full.

    A run may end because of what an epoch shows. It then costs as much as the whole epoch
    (Corollary 11.3).

    Args:
        rounds: Steps with their numbers of repetitions.
        noise_of_epoch: Chooses between two noise multipliers of one epoch. The smaller one gives an
            upper bound.
    """
    epochs: list[tuple[shuffled_rounds.ShuffledRound, int]] = []
    batches = missing = 0  # missing: steps that the latest epoch has not run yet
    for mechanism, steps in rounds:
        sigma = mechanism.noise_multiplier
        missing *= mechanism.num_batches == batches
        batches, more = mechanism.num_batches, min(steps, missing)
        if more:
            sigma_so_far = epochs[-1][0].noise_multiplier
            epochs[-1] = epoch(noise_of_epoch(sigma_so_far, sigma), batches), 1
        whole, begun = divmod(steps - more, batches)
        epochs += [(epoch(sigma, batches), count) for count in (whole, min(begun, 1)) if count]
        missing = batches - begun if begun else missing - more
    return epochs


def _estimate(rounds: Rounds, *, delta: float, adjacency: Adjacency) -> float:
    return adjacency.distance * shuffled_rounds.estimate_pair_epsilon(
        epochs_of(rounds), delta=delta
    )


@register_bound(
    RandomAllocation,
    "certified",
    estimate=_estimate,
    meaning="each record falls into one batch of every epoch, by a secret draw of its own, and a "
    "begun epoch counts in full; whatever the others are",
    trusted=SERVER,
    adversary=ADVERSARY,
    cites="docs/proofs, page 11",
    guarantee=Guarantee.PROVED,
)
def _certified(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    epochs = epochs_of(rounds)
    if adjacency is Adjacency.REPLACE:
        return Answer(random_allocation.replacement_epsilon(epochs, delta=delta))
    lower, upper = random_allocation.zero_out_epsilon(epochs, delta=delta)
    # If the noise changes within an epoch, the least was used, which gives no lower bound.
    return Answer(upper, lower if epochs == epochs_of(rounds, max) else None)


_baseline = functools.partial(
    register_bound, RandomAllocation, baseline=True, trusted=SERVER, guarantee=Guarantee.PROVED
)


@_baseline(
    "shuffled_batches",
    meaning="what is proved of batches of one size from DataLoader(shuffle=True), with the same "
    "noise: nothing is gained from the order of the records",
    legend="batches of one size",
    adversary="sees all weights and noised gradients, and which records are in which batch",
)
def _shuffled_batches(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    """Computes ε of one batch per epoch for each record; the others' batches reveal nothing."""
    whole = [
        (epoch(round_.noise_multiplier, round_.num_users), count)
        for round_, count in epochs_of(rounds)
    ]
    return Answer(
        shuffled_rounds.unshuffled_epsilon(whole, delta=delta, distance=adjacency.distance)
    )


@_baseline(
    "poisson",
    meaning="the same noise, where every batch is a Poisson sample at rate 1/t",
    legend="Poisson samples",
    adversary=ADVERSARY,
    zero_out_only=True,
)
def _poisson(
    rounds: Rounds, *, delta: float, adjacency: Adjacency, orders: Iterable[float] | None
) -> Answer:
    steps = [
        (
            shuffled_rounds.ShuffledRound(
                noise_multiplier=mechanism.noise_multiplier,
                num_users=1,
                sample_rate=mechanism.sample_rate,
                sampling="poisson",
            ),
            count,
        )
        for mechanism, count in rounds
    ]
    return Answer(shuffled_rounds.sampled_gaussian_epsilon(steps, delta=delta))
