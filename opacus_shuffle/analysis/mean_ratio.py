r"""Computes exact Rényi moments of the mean ratio R of shuffled Gaussian reports.

R determines the privacy of Liew and Takahashi's shuffle Gaussian mechanism (SG).

A user's report has likelihood ratio X = exp((2x − 1)/2σ²), x ~ N(0, σ²), between "my record has
norm C" and "my record is zero". When n such reports are shuffled and the other records are all
zero, the view's likelihood ratio is the mean of n independent copies, R = (X₁ + … + Xₙ)/n, and
D_λ(moved ‖ all zero) = log E[R^λ] / (λ − 1). SG ICLR Theorem 1 writes E[R^λ] as a sum over the
integer partitions of λ, exponentially many; here all orders up to λ come from three passes of O(λ²)
time: cumulants of X, central moments of the mean, and moments. Every term is positive, so no digit
is lost to cancellation (docs/proofs/05_moments_of_the_mean_ratio.md, 5.1 to 5.4). More users never
cost more (5.5, SG's Conjecture 1).

>>> from opacus_shuffle.analysis.mean_ratio import compute_rdp
>>> rdp = compute_rdp(noise_multiplier=9.48, num_users=60_000, orders=[2, 24])
>>> [f"{value:.8e}" for value in rdp]
['1.86487833e-07', '2.23785402e-06']
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from opacus_shuffle.core.validation import integer, noise_level, one_of, renyi_orders, sampling_rate

Vector = npt.NDArray[np.float64]
Sampling = Literal["fixed_size", "poisson", "random_allocation"] | None

MAX_ORDER = 16_384
"""The largest Rényi order ever computed: a few seconds of work."""


def compute_rdp(
    *,
    noise_multiplier: float,
    num_users: int,
    orders: float | Iterable[float],
    sample_rate: float = 1.0,
    sampling: Sampling = None,
) -> Any:
    """Returns the exact RDP of one round of the shuffle Gaussian pair at the given orders.

    Integer orders are exact (relative error below 1e-10), also above n. Between two integers log
    E[R^λ] is replaced by its chord, which lies above it (moments are log-convex). No value exceeds
    the unshuffled λ/2σ², which n = 1 and γ = 1 have.

    Args:
        noise_multiplier: Local σ: one report's noise over the clipping norm; Opacus adds √B·σ to
            the sum of B reports.
        num_users: n, the whole population (for ``sampling=None``, the users of the round).
        orders: One order or several, each in (1, 16384].
        sample_rate: γ. Without replacement, m = round(γ·n) users take part and γ is m/n.
        sampling: ``None`` (everyone takes part, γ must be 1), ``"fixed_size"`` or ``"poisson"``
            (each user takes part with probability γ, the count is revealed).

    Returns:
        The RDP: a float for one order, else an array of shape ``(len(orders),)``.

    Raises:
        ValueError: If an argument is out of range, or γ < 1 comes without a ``sampling``.

    Formal Guarantees:
        Exact for one pair of data sets (everyone at zero against one record at norm C, zero-out
        adjacency) and one direction; the other was smaller wherever it was tried (5.6). Not an
        upper bound over all data sets.

    Source: SG ICLR Theorem 1; the recurrences, subsampling and check-in are this library's.
    """
    vector = renyi_orders(orders, maximum=MAX_ORDER)
    sigma, users, rate = check_round(noise_multiplier, num_users, sample_rate, sampling)
    moments = log_moments(sigma, users, int(np.ceil(vector.max())), rate, sampling)
    rdp = np.minimum(rdp_from_log_moments(moments, vector), vector / (2 * sigma**2))
    return rdp if isinstance(orders, Iterable) else float(rdp[0])


def rdp_from_log_moments(moments: Vector, orders: Vector) -> Vector:
    """Returns the RDP at real orders from log-moments at the integers 0, 1, ….

    The chord between two integers lies above.
    """
    return np.interp(orders, np.arange(len(moments)), moments) / (orders - 1)


def check_round(
    noise_multiplier: float, num_users: int, sample_rate: float, sampling: Sampling
) -> tuple[float, int, float]:
    """Returns σ, n and γ, checked; with a fixed size γ is m/n, m = round(γ·n)."""
    sigma = noise_level("noise_multiplier", noise_multiplier)
    users = integer("num_users", num_users)
    rate = sampling_rate("sample_rate", sample_rate)
    one_of("sampling", sampling, (None, "fixed_size", "poisson"))
    if sampling is None and rate != 1.0:
        raise ValueError(
            f"sample_rate={rate!r} needs sampling='fixed_size' or 'poisson', got sampling=None"
        )
    if sampling == "fixed_size":
        rate = integer("round(sample_rate * num_users)", round(rate * users)) / users
    return sigma, users, rate


@functools.lru_cache(maxsize=256)
def log_moments(
    sigma: float, users: int, max_order: int, rate: float = 1.0, sampling: Sampling = None
) -> Vector:
    """Returns log E[R^λ] for λ = 0, …, ``max_order``, read-only.

    Three passes: cumulants, central moments, moments (5.1 to 5.4 of the proofs). The arguments are
    those of :func:`compute_rdp`, checked.
    """
    cumulants = _log_scaled_cumulants(sigma**-2, max_order)
    powers = np.arange(max_order + 1)
    if sampling == "poisson" and rate < 1.0:
        single = _log_central_moments(cumulants)
        series = single + np.log(rate) - powers * np.log(users)
        series[0] = 0.0
        central = _log_power(series, users)
    else:
        reports = round(rate * users)
        central = _log_central_moments(
            cumulants - (powers - 1) * np.log(reports)
        ) + powers * np.log(rate)
    factorials = gammaln(powers + 1.0)
    excess = np.full(max_order + 1, -np.inf)
    for order in range(2, max_order + 1):
        excess[order] = logsumexp(
            factorials[order] - factorials[order - 2 :: -1] + central[2 : order + 1]
        )
    moments = np.logaddexp(0.0, excess)
    moments.setflags(write=False)
    return moments


def logsumexp(terms: Vector) -> float:
    """Returns log Σ e^x. SciPy's function has an overhead that would dominate these short loops."""
    top = terms.max()
    return float(top + np.log(np.exp(terms - top).sum())) if top > -np.inf else -np.inf


def log_expm1(x: Any) -> Any:
    """Returns log(eˣ − 1) for x ≥ 0, in whichever form is accurate."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(x < 1, np.log(np.expm1(x)), x + np.log1p(-np.exp(-np.maximum(x, 1))))


@functools.lru_cache(maxsize=64)
def _log_scaled_cumulants(inverse_variance: float, max_order: int) -> Vector:
    """Returns log s_k, s_k = k·κ_k/k! with κ_k the cumulants of X (5.1); index 0 is unused."""
    factors = log_expm1(np.arange(max_order + 1) * inverse_variance)
    scaled = np.full(max_order + 1, -np.inf)
    scaled[1:2] = 0.0
    weighted = scaled + factors
    for k in range(2, max_order + 1):
        scaled[k] = logsumexp(weighted[1:k] + scaled[k - 1 : 0 : -1]) - np.log(k - 1)
        weighted[k] = scaled[k] + factors[k]
    scaled.setflags(write=False)
    return scaled


def _log_central_moments(cumulants: Vector) -> Vector:
    """Returns log of E[(R − 1)^j]/j! from the logs of k·κ_k/k! (5.2).

    It is exp of the series without its first term.
    """
    central = np.full(len(cumulants), -np.inf)
    central[0] = 0.0
    for m in range(2, len(cumulants)):
        central[m] = logsumexp(cumulants[2 : m + 1] + central[m - 2 :: -1]) - np.log(m)
    return central


def _log_power(series: Vector, exponent: int) -> Vector:
    """Returns log-coefficients of (1 + Σ_{k≥2} d_k x^k)^exponent from those of the base.

    Every term is positive.
    """
    result = np.full(len(series), -np.inf)  # the series 1
    result[0] = 0.0
    if len(series) - 1 > 2 * exponent + 2:
        # With few users and high orders Miller's weights below could be negative: square instead.
        while exponent:
            if exponent % 2:
                result = _log_product(result, series)
            exponent //= 2
            if exponent:
                series = _log_product(series, series)
        return result
    k = np.arange(len(series), dtype=np.float64)
    for m in range(2, len(series)):
        with np.errstate(divide="ignore"):  # the weight is exactly 0 at k = 2, m = 2n + 2
            weights = np.log((exponent + 1.0) * k[2 : m + 1] - m)
        result[m] = logsumexp(weights + series[2 : m + 1] + result[m - 2 :: -1]) - np.log(m)
    return result


def _log_product(left: Vector, right: Vector) -> Vector:
    """Returns log-coefficients of a product of two power series, truncated."""
    return np.array([logsumexp(left[: m + 1] + right[m::-1]) for m in range(len(left))])
