r"""Computes ε of the Gaussian mechanism without a shuffler.

Every record has this guarantee for every value of the other records.

T adaptive rounds with local multipliers σ_1, …, σ_T are exactly one Gaussian mechanism with μ =
Δ·sqrt(Σ 1/σ_t²), whose curve is δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ). Shuffling the reports is
post-processing. Sampling the users is not used here.

>>> from opacus_shuffle.analysis import gaussian
>>> # One round at sigma = 9.48, zero-out:
>>> round(gaussian.compute_epsilon(mu=1 / 9.48, delta=1 / 60_000), 4)
0.3469
>>> # Replacement; SG's "(1, 1/n)-LDP" is a looser formula:
>>> round(gaussian.compute_epsilon(mu=2 / 9.48, delta=1 / 60_000), 4)
0.7418
"""

from __future__ import annotations

import math

from scipy.special import erfcx, log_ndtr

from opacus_shuffle.core.solve import safe_root
from opacus_shuffle.core.validation import finite_number, not_negative, open_unit_interval

_SMALL, _LARGE, _LARGEST = 1e-4, 1e7, 1e150
RELATIVE_ERROR = 1e-8
"""Every ε is enlarged by this fraction.

That is above what the difference of two normal tails loses, at δ down to 1e-300.
"""


def log_delta(*, mu: float, epsilon: float) -> float:
    """Returns log δ(ε) of the Gaussian mechanism with mean shift μ > 0, in standard deviations.

    For small μ the two terms cancel. There δ = e^{ε/2}·(G(μ/2) − G(−μ/2)) with G(s) = e^{xs}Φ(x +
    s), x = −ε/μ, is e^{ε/2}·μ·(xΦ(x) + φ(x)) up to a relative error of μ²/24 times ``|G‴/G′| = |x²
    − φ/(xΦ + φ)|`` < 3.
    """
    finite_number("epsilon", epsilon)
    if not_negative("mu", mu) == 0:
        return -math.inf if epsilon >= 0 else math.log(-math.expm1(epsilon))
    return _log_delta(mu, epsilon)


def _log_delta(mu: float, epsilon: float) -> float:
    """Returns log δ(ε) for μ > 0 without checks, because searches call it a thousand times."""
    if mu < _SMALL and epsilon >= 0:
        x = epsilon / mu
        # xΦ + φ at −x, over φ(x): 1 less x times Mills' ratio.
        rest = 1 - x * math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))
        if x < 1e4 and rest > 0:
            return (
                epsilon / 2 + math.log(mu) - x * x / 2 - math.log(2 * math.pi) / 2 + math.log(rest)
            )
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    if second < first:
        return first + math.log1p(-math.exp(second - first))
    return min(
        first, math.log(max(mu / math.sqrt(2 * math.pi), math.ulp(0.0)))
    )  # the two agree to every digit: δ ≤ first and δ ≤ δ(0) ≤ μ·φ(0)


def compute_epsilon(*, mu: float, delta: float) -> float:
    """Returns the smallest ε ≥ 0 with δ(ε) ≤ ``delta``, rounded up.

    Args:
        mu: Mean shift over standard deviation, Δ·sqrt(Σ 1/σ²), ≥ 0; Δ = 1 for zero-out and 2 for
            replacement adjacency.
        delta: δ in (0, 1).

    Raises:
        ValueError: If an argument is out of range, or μ above 1e150, where ε leaves double
            precision.

    Formal Guarantees:
        Proved for every data set and exact for the worst one (Balle & Wang 2018, Theorem 8).
    """
    open_unit_interval("delta", delta)
    if not_negative("mu", mu) == 0 or log_delta(mu=mu, epsilon=0.0) <= math.log(delta):
        return 0.0
    if mu > _LARGEST:
        raise ValueError(
            f"mu must be at most {_LARGEST:g}, got {mu!r}: its ε, about mu²/2, is no number; use "
            "more noise"
        )

    # Φ(μ/2 − ε/μ) ≤ δ/2 holds at this end. For a large μ it exceeds the root by about 1/μ only,
    # which is within rounding.
    epsilon = high = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))
    if mu < _LARGE:
        epsilon = safe_root(
            lambda e: max(_log_delta(mu, e), -1e6) - math.log(delta),
            unsafe=0.0,
            safe=high,
            tolerance=1e-13 * high,
            step=1e-12 * high,
        )
    return math.nextafter(epsilon * (1 + RELATIVE_ERROR), math.inf)


def largest_mu(*, epsilon: float, delta: float) -> float:
    """Returns the μ, rounded down, of the Gaussian mechanism that is just (ε, δ)-DP."""

    def excess(log_mu: float) -> float:
        return max(_log_delta(math.exp(log_mu), epsilon), -1e6) - math.log(delta)

    log_mu = safe_root(
        excess, unsafe=math.log(1e3), safe=math.log(1e-40), tolerance=1e-12, step=1e-10
    )
    return math.exp(log_mu) * (1 - 1e-8)
