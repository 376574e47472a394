"""Exports a run to ``dp_accounting``, where it composes with other releases.

``dp_accounting`` is the accountant of Google's differential-privacy libraries; the extra
``dp-accounting`` installs it. It has neither shuffled reports nor random allocation::

    from dp_accounting.pld.privacy_loss_distribution import from_laplace_mechanism

    run = to_dp_accounting(engine.accountant.rounds)
    epsilon = run.compose(from_laplace_mechanism(20.0)).get_epsilon_for_delta(1e-6)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opacus_shuffle.accountants.bounds.random_allocation import epochs_of
from opacus_shuffle.accountants.bounds.registry import Rounds, compute_bound, mechanism_type
from opacus_shuffle.accountants.mechanisms import RandomAllocation
from opacus_shuffle.analysis.random_allocation import zero_out_losses
from opacus_shuffle.core import imports
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import integer, positive

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

CLIPPED = 1e-17
"""The probability of an epoch's tails that counts as lost.

It is less than the 1e-15 that a composition in ``dp_accounting`` adds.
"""

LEAST_DELTA, DELTA_RATIO = 1e-12, 1.3
"""The least δ at which ε is computed, and the ratio of neighbouring δ."""

LARGEST_LOSS = 2**20
"""The largest loss in multiples of the interval."""


def to_dp_accounting(
    rounds: Rounds, *, adjacency: str = "zero_out", value_discretization_interval: float = 1e-4
) -> PrivacyLossDistribution:
    """Returns a run as a privacy loss distribution of ``dp_accounting``.

    What it is composed with must be about the same records, have the same interval and a
    pessimistic estimate, and be about add/remove neighbours, or about replaced records where
    ``adjacency="replace"`` is.

    Random allocation with zero-out adjacency takes a second or two. Its own distribution is
    exported in both directions ("remove" is the one in which the record trains), and its ε in
    ``dp_accounting`` is exact to half a percent after any number of compositions. All other runs
    take as long as ninety values of ε, because ``certified`` is computed at that many δ. Their ε in
    ``dp_accounting`` is the certified one to one percent. (Copies of such a run may have a smaller
    ε together than all their rounds are certified to have.)

    Args:
        rounds: Mechanisms of one class, each with its number of rounds; at least one.
        adjacency: Between which data sets.
        value_discretization_interval: The losses are its multiples. A hundredth of ε is enough.

    Returns:
        The composition of all rounds, accurate at δ of at least 1e-11 for up to 10,000 epochs.

    Raises:
        ValueError: If an argument is out of range, or the interval is too fine for the large losses
            of little noise.
        ImportError: If ``dp_accounting`` is not installed.

    Formal Guarantees:
        At every ε and in both directions its δ is at least that of the run, and the same holds of
        its compositions with other such distributions, for every data set and every adaptive choice
        (docs/proofs, 6.9 and 6.10). ``dp_accounting`` composes by FFT in double precision, which
        leaves an error in δ of about 1e-16 for every copy that is composed.
    """
    interval = positive("value_discretization_interval", value_discretization_interval)
    for _, count in rounds:
        integer("number of rounds", count)
    if mechanism_type(rounds) is RandomAllocation and Adjacency(adjacency) is Adjacency.ZERO_OUT:
        return _of_losses(rounds, interval)
    return _of_epsilons(rounds, adjacency, interval)


def _of_losses(rounds: Sequence[tuple[Any, int]], interval: float) -> PrivacyLossDistribution:
    """Returns random allocation by the losses of each epoch, composed by ``dp_accounting``."""
    pld_pmf, distributions = _dp_accounting()
    epochs = []
    for losses, count in zero_out_losses(epochs_of(rounds), step=interval, clipped=CLIPPED):
        remove, add = (
            pld_pmf.DensePLDPmf(interval, loss.first, loss.masses, loss.infinite, True)
            for loss in losses
        )
        epochs.append(distributions.PrivacyLossDistribution(remove, add).self_compose(count))
    return functools.reduce(lambda composed, epoch: composed.compose(epoch), epochs)


def _of_epsilons(rounds: Rounds, adjacency: str, interval: float) -> PrivacyLossDistribution:
    """Returns a pair of distributions with the certified δ at some ε, and a larger one between.

    One pair serves both directions, because the certified δ covers both.
    """
    pld_pmf, distributions = _dp_accounting()
    deltas: dict[int, float] = {}  # by ε in multiples of the interval
    delta = LEAST_DELTA
    while delta < 1:
        epsilon = compute_bound(rounds, delta=delta, adjacency=adjacency).epsilon
        if epsilon == 0 and deltas:
            break  # the chord between the last ε and −ε is below this δ at 0
        if epsilon < math.inf:
            deltas.setdefault(math.ceil(epsilon / interval), delta)
        delta *= DELTA_RATIO
    deltas = deltas or {0: 1.0}  # no δ below 1 has a finite ε
    if max(deltas) > LARGEST_LOSS:
        raise ValueError(
            f"value_discretization_interval={interval!r} is too fine for an epsilon of "
            f"{max(deltas) * interval:.3g}: use {max(deltas) * interval / LARGEST_LOSS:.1g} or more"
        )
    # Below 0, δ(−ε) of one direction is 1 − e^−ε + e^−ε·δ(ε) of the other.
    for index, delta_at in list(deltas.items()):
        loss = index * interval
        deltas.setdefault(-index, math.exp(-loss) * delta_at - math.expm1(-loss))
    indices = sorted(deltas)
    deltas_at = np.minimum.accumulate([deltas[index] for index in indices])
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots(interval, indices, deltas_at)
    return distributions.PrivacyLossDistribution(pmf)


def _dp_accounting() -> tuple[Any, Any]:
    """Returns the two modules of ``dp_accounting``, or raises an error that names the extra."""
    try:
        from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    except ImportError as error:
        message = imports.missing_extra("to_dp_accounting", "dp-accounting", "dp-accounting")
        raise ImportError(message) from error
    return pld_pmf, privacy_loss_distribution
