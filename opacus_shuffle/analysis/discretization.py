"""Discretizes distributions into cells of the real line, and averages independent ones.

A cell has a mass and a first moment. Moving a cell's mass to its two ends, with the mean kept,
gives a distribution above in convex order; sums of independent ones keep that order
(docs/proofs/06_distributions_on_grids.md, 6.2 and 6.3).

>>> masses, moments = np.array([0.5, 0.5]), np.array([0.25, 1.0])
>>> atoms, infinite = atoms_above(masses, moments, cuts=np.array([0.0, 1.0]))
>>> atoms.tolist(), infinite
([0.25, 0.75], 0.5)
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from opacus_shuffle.analysis.mean_ratio import Vector

_PAIRS_AT_A_TIME = 2**14
"""Pairs of atoms that fit into a processor's cache. All pairs at once take twice the time."""


def normal_masses(z: Vector) -> Vector:
    """Returns standard normal probabilities between neighbours, accurate in both tails."""
    low, high = z[:-1], z[1:]
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


def lognormal_moments(z: Vector, root: float) -> Vector:
    """Returns E[X − 1; z in a cell] for X = e^{root·z − root²/2}; ``root`` may be negative."""
    if abs(root) >= 0.05:
        return normal_masses(z - root) - normal_masses(z)
    # The plain difference would cancel: X − 1 = Σ root^k He_k(z)/k! and ∫ He_k φ = −He_{k−1} φ.
    finite = np.where(np.isfinite(z), z, 0.0)
    density = np.where(np.isfinite(z), np.exp(-(finite**2) / 2) / math.sqrt(2 * math.pi), 0.0)
    previous, polynomial = np.zeros_like(finite), np.ones_like(finite)
    coefficient, total = 1.0, np.zeros_like(finite)
    for k in range(1, 40):
        coefficient *= root / k
        total += coefficient * polynomial
        previous, polynomial = polynomial, finite * polynomial - (k - 1) * previous
    return -np.diff(total * density)


def growing_grid(unit: float, low: float, high: float, step: float) -> Vector:
    """Returns a grid over [low, high], 0 among its points.

    Its steps are ``step`` near 0 and grow beyond ``unit``.
    """
    relative = step / unit
    first = math.floor(math.asinh(low / unit) / relative)
    last = math.ceil(math.asinh(high / unit) / relative)
    return unit * np.sinh(np.arange(first, last + 1) * relative)


Atoms = tuple[Vector, Vector]
"""Places, increasing, and their masses."""


def mean_of_atoms(
    first: Atoms, second: Atoms, *, weight: float, cuts: Vector, centre: float, negligible: float
) -> tuple[Vector, Vector, Vector]:
    """Returns masses, first moments and cuts of weight·Y₁ + (1 − weight)·Y₂, Y₁ and Y₂ independent.

    Args:
        first: Y₁'s atoms and their masses.
        second: Those of Y₂; the same object as ``first`` saves half of the work.
        weight: Of Y₁; 1/2 if ``first`` is ``second``.
        cuts: Where the cells begin; the last one has no end.
        centre: Tails are measured in Y₁ + ``centre`` where it is positive.
        negligible: Outermost cells with tails below this are merged, which preserves the order and
            shortens the arrays.
    """
    masses, moments = np.zeros(len(cuts)), np.zeros(len(cuts))
    first_terms, second_terms = first[0] * weight, second[0] * (1 - weight)
    rows, passed = max(1, _PAIRS_AT_A_TIME // len(second_terms)), np.arange(1.0, len(cuts))
    for start in range(0, len(first_terms), rows):
        after = start if first is second else 0
        sums = np.add.outer(first_terms[start : start + rows], second_terms[after:])
        products = np.multiply.outer(first[1][start : start + rows], second[1][after:])
        if first is second:
            products[:, rows:] *= 2  # a pair with an atom after these rows, in both orders
        # The number of cuts that are not above, as by np.searchsorted. np.interp takes half of the
        # time, because it starts each search where the last one ended, and neighbouring sums are
        # close.
        at = np.interp(sums.ravel(), cuts[1:], passed, left=0.0).astype(np.int64)
        masses += np.bincount(at, products.ravel(), len(cuts))
        moments += np.bincount(at, (products * sums).ravel(), len(cuts))
    total = masses.sum()  # 1 except for rounding errors, which would double with every level
    masses, moments = masses / total, moments / total
    above = np.cumsum(np.maximum(moments + centre * masses, 0.0)[::-1])[::-1]
    end = max(1, int(np.searchsorted(-above, -negligible)))
    start = min(int(np.searchsorted(np.cumsum(masses), negligible)), end - 1)
    if end < len(masses):
        masses, moments = (np.append(cells[:end], cells[end:].sum()) for cells in (masses, moments))
        cuts = cuts[: end + 1]
    if start > 1:
        masses, moments = (
            np.append(cells[:start].sum(), cells[start:]) for cells in (masses, moments)
        )
        cuts = np.append(cuts[0], cuts[start:])
    return masses, moments, cuts


def atoms_above(masses: Vector, moments: Vector, cuts: Vector) -> tuple[Vector, float]:
    """Returns atoms at the cuts, and the part of the mean that remains at infinity.

    The cells are [cuts₀, cuts₁), …, [cuts_k, ∞).

    Mass below cuts₀ is moved up to it. The result is above in increasing convex order, and in
    convex order if there is no such mass.
    """
    # Cells may underflow. The composition then finds a deviation of 0 and handles it.
    with np.errstate(divide="ignore", invalid="ignore"):
        upward = np.clip((moments[:-1] - masses[:-1] * cuts[:-1]) / np.diff(cuts), 0.0, masses[:-1])
    atoms = np.append(masses[:-1] - upward, masses[-1])
    atoms[1:] += upward
    return atoms, max(float(moments[-1] - masses[-1] * cuts[-1]), 0.0)
