r"""Computes Liew and Takahashi's (SG) bounds for subsampled shuffling and shuffled check-in.

These are ICLR Theorems 2 and 3 as printed.

They carry a term 2γ^j·C(λ, j) for j ≥ 3 that does not vanish as n grows; :mod:`.mean_ratio` has the
exact value of the same pair, often a hundred times smaller. They are here because
``bound="published"`` means what the paper prints: this file follows the ICLR text (arXiv Eq. 17–18
and Theorem 3 combine logarithms of ε's without exponentials). Eq. 11 and 13 keep the rate γ given
that k users came, where it is k/n; Theorem 3's "if Eq. 12 decreases with n" always holds (5.5 of
docs/proofs/).

>>> from opacus_shuffle.analysis import mean_ratio, subsampling
>>> users = dict(num_users=60_000, sample_rate=0.001, sampling="fixed_size")
>>> setting = dict(noise_multiplier=0.86, orders=2, **users)
>>> # Theorem 2 over the exact value:
>>> round(subsampling.compute_rdp(**setting) / mean_ratio.compute_rdp(**setting), 2)
4.0
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from scipy.special import gammaln

from opacus_shuffle.analysis import mean_ratio
from opacus_shuffle.analysis.mean_ratio import (
    MAX_ORDER,
    Vector,
    check_round,
    log_expm1,
    log_moments,
    logsumexp,
)
from opacus_shuffle.core.validation import one_of, renyi_orders


def compute_rdp(
    *,
    noise_multiplier: float,
    num_users: int,
    sample_rate: float,
    orders: float | Iterable[float],
    sampling: Literal["fixed_size", "poisson"],
) -> Any:
    """Returns the RDP of one round by SG ICLR Theorem 2 (``"fixed_size"``) or 3.

    Theorem 3 is that of ``"poisson"``.

    Args:
        noise_multiplier: Local σ: one report's noise over the clipping norm.
        num_users: n, the whole population.
        sample_rate: γ in (0, 1]. Without replacement, m = round(γ·n) users take part and γ is m/n.
        orders: One order or several, each in (1, 16384]. The theorems hold at integers; between two
            of them log E[R^λ] is bounded by the chord of its bounds.
        sampling: ``"fixed_size"`` or ``"poisson"``. Theorem 3 holds for every Δ in [0, 1]: each
            order takes the best of 32 values from min(½, 1/√(nγ)) to 1, 8 beyond order 512.

    Returns:
        The RDP: a float for one order, else an array of shape ``(len(orders),)``.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        Theorem 2: an upper bound for one pair of data sets (everyone at zero against one record at
        norm C), none over all data sets. Theorem 3 as printed can fall below the exact value of its
        own pair where n·γ < 1 (docs/errata.rst); the accountants take the larger of the two.

    Source: SG ICLR Theorem 2 (Eq. 10, from Wang et al. 2019, Theorem 9) and Theorem 3 (Eq. 13).
    """
    vector = renyi_orders(orders, maximum=MAX_ORDER)
    one_of("sampling", sampling, ("fixed_size", "poisson"))
    sigma, users, rate = check_round(noise_multiplier, num_users, sample_rate, sampling)
    max_order = max(2, int(np.ceil(vector.max())))
    if sampling == "fixed_size":
        bounds = _theorem_2(sigma, round(rate * users), rate, max_order)
    else:
        bounds = _theorem_3(sigma, users, rate, max_order)
    rdp = mean_ratio.rdp_from_log_moments(bounds, vector)
    return rdp if isinstance(orders, Iterable) else float(rdp[0])


@functools.lru_cache(maxsize=1024)
def _theorem_2(sigma: float, reports: int, rate: float, max_order: int) -> Vector:
    """Returns Eq. 10 before its factor 1/(λ − 1).

    They are bounds on log E[R^λ] for λ = 0, …, ``max_order``.
    """
    shuffled = log_moments(sigma, reports, max_order)
    powers = np.arange(max_order + 1)
    factorials = gammaln(powers + 1.0)
    # j = 2 has its own factor, min{4(e^ε − 1), 2e^ε}, and E[R²] = e^{ε(2)}.
    terms = powers * np.log(rate) + np.log(2.0) + shuffled - factorials
    second = min(np.log(4.0) + log_expm1(shuffled[2]), np.log(2.0) + shuffled[2])
    terms[2] = 2 * np.log(rate) + second - factorials[2]
    bounds = np.zeros(max_order + 1)
    for order in range(2, max_order + 1):
        total = logsumexp(terms[2 : order + 1] - factorials[order - 2 :: -1]) + factorials[order]
        bounds[order] = np.logaddexp(0.0, total)
    bounds.setflags(write=False)
    return bounds


def _theorem_3(sigma: float, users: int, rate: float, max_order: int) -> Vector:
    """Returns Eq. 13 before its factor 1/(λ − 1), at each order for its best Δ."""
    reports = users * rate
    one = _theorem_2(sigma, 1, rate, max_order)
    bounds = np.full(max_order + 1, np.inf)
    # Below 1/√(nγ) the Chernoff factor e^{−Δ²nγ/2} is worth nothing.
    slacks = np.geomspace(min(0.5, 1 / np.sqrt(reports)), 1.0, 32 if max_order <= 512 else 8)
    largest = {int((1 - slack) * reports): slack for slack in slacks}  # Δ for each count
    for fewer, slack in largest.items():
        # Rounded down where the paper assumes an integer: the Chernoff term already covers every
        # count up to (1 − Δ)nγ.
        many = _theorem_2(sigma, fewer + 1, rate, max_order)
        bounds = np.minimum(bounds, np.logaddexp(one - slack**2 * users * rate / 2, many))
    bounds[:2] = 0.0  # E[1] = E[R] = 1
    return bounds
