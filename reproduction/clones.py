r"""Computes Feldman, McMillan and Talwar's amplification by shuffling ("hiding among the clones").

It is a baseline beside ours.

They know of a report only that it is (ε0, δ0)-LDP, hold for every data set, and are usually far
above what the Gaussian's own distribution gives (:mod:`opacus_shuffle.analysis.gaussian_clones`).
``gaussian_epsilon`` is the best they can do for it.

>>> round(compute_epsilon(local_epsilon=4.0, num_users=100_000, delta=1e-6), 4)
0.1182

A Gaussian report is (ε0, δ0)-LDP for *any* two records, which are 2C apart, so Theorem 3.8 with
sensitivity 1 proves nothing, not even for zero-out adjacency
(docs/proofs/07_clones_of_any_report.md). At small σ only the unshuffled bound is left.

>>> round(gaussian_epsilon(noise_multiplier=9.48, num_users=60_000, delta=1 / 60_000), 3)
0.022
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import expit

from opacus_shuffle.analysis import gaussian, ldp_clones
from opacus_shuffle.analysis.ldp_clones import (
    BINS,
    LARGEST_LOCAL_EPSILON,
    SMALLEST_DELTA,
    pair_epsilon,
)
from opacus_shuffle.core.validation import (
    finite_number,
    integer,
    noise_level,
    one_of,
    open_unit_interval,
    positive,
)

COARSE_BINS = 192


def _lost(*, local_epsilon: float, local_delta: float, num_users: int, conversion: str) -> float:
    """Returns what (1 + e^ε) multiplies in the final δ."""
    if conversion == "theorem_3_8":
        return (1 + math.exp(-local_epsilon) / 2) * num_users * local_delta
    own = local_delta * float(expit(-local_epsilon))
    return own + (num_users - 1) * math.exp(-local_epsilon) * (local_delta + own)


def _falls_to_zero(function: Callable[[float], float], end: float) -> float:
    """Returns where a decreasing function crosses zero on [0, ``end``], or an end.

    Any ε0 is sound, so nothing is rounded.
    """
    if function(0.0) <= 0:
        return 0.0
    return end if function(end) >= 0 else float(brentq(function, 0.0, end, xtol=1e-12 * end))


def compute_epsilon(
    *,
    local_epsilon: float,
    num_users: int,
    delta: float,
    local_delta: float = 0.0,
    conversion: str = "proved",
) -> float:
    """Returns ε after shuffling n reports of (ε0, δ0)-LDP.

    Args:
        local_epsilon: ε0 > 0 of one report.
        num_users: n ≥ 1, the reports shuffled together.
        delta: The whole δ in (0, 1).
        local_delta: δ0 in [0, 1) of one report; it enters δ about n·e^(−ε0) or n times, so it must
            be far below δ/n.
            Without it clones are more likely, 2/(e^ε0 + 1) in place of e^(−ε0).
        conversion: ``"proved"``: δ = δ_clones + (1 + e^ε)·(t + (n − 1)·e^(−ε0)·(δ0 + t)) with t =
            δ0/(1 + e^ε0); ``"theorem_3_8"``: δ = δ_clones + (1 + e^ε)·(1 + e^(−ε0)/2)·n·δ0, never
            less.

    Returns:
        ε ≥ 0, rounded up; never above ``local_epsilon`` if ``local_delta`` ≤ ``delta``. The tails
        of the clone count go into δ, and of a bin of counts the smallest is taken, which costs a
        few 1e-4 of ε at most.

    Raises:
        ValueError: If an argument is out of range, or δ0 too large for any ε.

    Formal Guarantees:
        Proved for every data set, replacement adjacency: Theorem 7.3 of
        docs/proofs/07_clones_of_any_report.md where ``local_delta`` is 0, else 7.1
        (``"proved"``). All users draw from the same randomiser, each on its own.

    Source:
        Feldman, McMillan, Talwar, "Hiding among the clones" (FOCS 2021), Theorems 3.2 and 3.8,
        arXiv 2012.12803; ``"proved"`` is ours.
    """
    local_epsilon = positive("local_epsilon", local_epsilon)
    if not 0 <= finite_number("local_delta", local_delta) < 1:
        raise ValueError(f"local_delta must lie in [0, 1), got {local_delta!r}; pass 0 for none")
    num_users = integer("num_users", num_users)
    delta = open_unit_interval("delta", delta)
    one_of("conversion", conversion, ("proved", "theorem_3_8"))
    if local_delta == 0:
        return ldp_clones.compute_epsilon(
            local_epsilon=local_epsilon, num_users=num_users, delta=delta
        )
    if num_users == 1 and local_delta <= delta:
        return local_epsilon  # nobody to hide among
    lost = _lost(
        local_epsilon=local_epsilon,
        local_delta=local_delta,
        num_users=num_users,
        conversion=conversion,
    )
    chance = math.exp(-local_epsilon)
    epsilon = pair_epsilon(
        local_epsilon=local_epsilon, probability=chance, num_users=num_users, delta=delta, lost=lost
    )
    if epsilon is not None:
        return epsilon
    if local_delta <= delta:
        return local_epsilon  # shuffling is post-processing
    raise ValueError(
        f"local_delta={local_delta!r} leaves nothing of delta={delta!r} after {num_users} reports; "
        "pass a far smaller local_delta (for a Gaussian: with a larger local_epsilon, or call "
        "gaussian_epsilon, which looks for the best)"
    )


def gaussian_epsilon(
    *,
    noise_multiplier: float,
    num_users: int,
    delta: float,
    adjacency: str = "replace",
    conversion: str = "proved",
) -> float:
    """Returns the best ε that clones give for one round of shuffled Gaussian reports.

    It is the best over all (ε0, δ0) of their exact curve.

    Args:
        noise_multiplier: σ of one report over the clipping norm.
        num_users: n ≥ 1, the reports shuffled together.
        delta: δ in (0, 1).
        adjacency: ``"replace"`` (user 1's two reports are up to 2C apart) or ``"zero_out"`` (up to
            C).
        conversion: As in ``compute_epsilon``. For zero-out adjacency Theorem 3.8 answers for
            replacement, which includes it.

    Returns:
        ε ≥ 0, rounded up; never above the unshuffled ``gaussian.compute_epsilon``, which it is when
        n is too small for σ.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        Proved for every data set; zero-out is Theorem 7.2 of
        docs/proofs/07_clones_of_any_report.md.

    Source:
        Feldman, McMillan, Talwar, "Hiding among the clones", Theorems 3.2 and 3.8, arXiv
        2012.12803; Balle and Wang 2018, arXiv 1805.06530, Theorem 8, for the curve; the zero-out
        bound is ours.
    """
    sigma = noise_level("noise_multiplier", noise_multiplier)
    num_users = integer("num_users", num_users)
    delta = open_unit_interval("delta", delta)
    one_of("adjacency", adjacency, ("replace", "zero_out"))
    one_of("conversion", conversion, ("proved", "theorem_3_8"))
    zero_out = adjacency == "zero_out"
    unshuffled = gaussian.compute_epsilon(mu=(1 if zero_out else 2) / sigma, delta=delta)
    if unshuffled == 0 or num_users == 1 or delta < SMALLEST_DELTA:
        return unshuffled

    def curve(local_epsilon: float, distance: float) -> float:
        return math.exp(gaussian.log_delta(mu=distance / sigma, epsilon=local_epsilon))

    def view(clone_epsilon: float) -> tuple[float, float]:
        """Returns the loss with clones of probability e^(−``clone_epsilon``).

        Beside it stands the mass mended in user 1's reports.
        """
        local_delta = curve(clone_epsilon, 2.0)
        if zero_out and conversion == "proved":
            mended = (curve(clone_epsilon, 1.0) + local_delta) / 2
            return mended + (num_users - 1) * math.exp(-clone_epsilon) * 2 * mended, mended
        return _lost(
            local_epsilon=clone_epsilon,
            local_delta=local_delta,
            num_users=num_users,
            conversion=conversion,
        ), 0.0

    # From half of δ lost down to a 1e-8th part of it: no better ε0 lies outside.
    most = gaussian.compute_epsilon(
        mu=2 / sigma, delta=max(1e-8 * delta / (3 * num_users), SMALLEST_DELTA)
    )
    start = _falls_to_zero(lambda e: math.log(max(view(e)[0], 1e-320) * 2 / delta), most)
    if start > min(math.log(num_users) + 5, LARGEST_LOCAL_EPSILON):
        return unshuffled  # hardly a clone among so few

    def best(clone_epsilon: float, bins: int) -> float:
        lost, mended = view(clone_epsilon)
        own = clone_epsilon
        if mended > 0:  # ε_a where t = δ_b
            own = _falls_to_zero(
                lambda e: (
                    gaussian.log_delta(mu=1 / sigma, epsilon=e)
                    - math.log(mended * (1 + math.exp(e)))
                ),
                own,
            )
        chance = math.exp(-clone_epsilon)
        epsilon = pair_epsilon(
            local_epsilon=own,
            probability=chance,
            num_users=num_users,
            delta=delta,
            lost=lost,
            bins=bins,
        )
        return unshuffled if epsilon is None else min(epsilon, unshuffled)

    grid = np.linspace(start, most, 26)
    middle = 1 + int(np.argmin([best(float(point), COARSE_BINS) for point in grid[1:]]))
    bounds = (grid[middle - 1], grid[min(middle + 1, 25)])
    refined = minimize_scalar(
        lambda e: best(float(e), COARSE_BINS),
        bounds=bounds,
        method="bounded",
        options={"maxiter": 20},
    )
    return min(best(float(refined.x), BINS), best(float(grid[middle]), BINS))
