"""The true shuffled mechanism for a few users, by enumeration of cells, without our bounds.

Cutting the line into cells and looking at the cells only is post-processing, so δ of the shuffled
*cells* is at most the true δ. It is a finite sum.
"""

import functools
import itertools
import math
from collections import Counter

import numpy as np
from scipy.special import ndtr

from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound

SAMPLINGS = (None, "poisson", "fixed_size")

# Sums of at most 2²⁰ terms that add up to 1: rounding is below 2²⁰·2⁻⁵³ even if it never cancels.
ROUNDING = 2.0**-33


def one_round(sigma, users, rate=1.0, sampling=None, repetitions=1):
    return [
        (
            ShuffledRound(
                noise_multiplier=sigma, num_users=users, sample_rate=rate, sampling=sampling
            ),
            repetitions,
        )
    ]


def cell_masses(cuts, mean, sigma):
    """Probabilities of the cells between the cuts, and beyond them, under N(mean, σ²)."""
    z = (np.concatenate([[-np.inf], cuts, [np.inf]]) - mean) / sigma
    low, high = z[:-1], z[1:]
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


def shuffled_cells(records, sigma):
    """The distribution of the shuffled cells of all records' reports, one axis per report."""
    cells = {0: 1, 1: 400, 2: 400, 3: 64}[len(records)]
    cuts = np.linspace(-1 - 8 * sigma, 1 + 8 * sigma, cells - 1)
    distributions = {record: cell_masses(cuts, record, sigma) for record in records}
    orders = Counter(itertools.permutations(records))
    total = np.zeros((cells,) * len(records))
    for order, times in orders.items():
        total += times * functools.reduce(
            np.multiply.outer, [distributions[record] for record in order], np.ones(())
        )
    return total / sum(orders.values())


def view_cells(records, sigma, rate, sampling):
    """As ``shuffled_cells``, flat, for random participants: the number of reports is seen, too."""
    users = len(records)
    if sampling is None:
        chances = {users: 1.0}
    elif sampling == "fixed_size":
        chosen = round(rate * users)
        chances = {chosen: 1 / math.comb(users, chosen)}
    else:
        chances = {k: rate**k * (1 - rate) ** (users - k) for k in range(users + 1)}
    return np.concatenate(
        [
            chance
            * sum(
                shuffled_cells(chosen, sigma).ravel()
                for chosen in itertools.combinations(records, count)
            )
            for count, chance in chances.items()
        ]
    )


def merged_cells(moved, still, count=300):
    """Both distributions with cells of like ratios merged, which is post-processing, too."""
    ratios = np.log(np.maximum(moved, 1e-300) / np.maximum(still, 1e-300))
    order = np.argsort(ratios)
    filled = np.cumsum((moved + still)[order]) / 2
    places = np.minimum((count * filled).astype(int), count - 1)
    return [np.bincount(places, masses[order], count) for masses in (moved, still)]
