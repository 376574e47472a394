r"""Implements the constants that SCO prints for its sums, for comparison with this library.

SCO is Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation: Theorem A.6 and Lemma 3.1,
and with drop-outs Corollary A.9 and Claim A.8. The constants are proved. Their variance is some 10⁵
times that of the package's own calibration at the same (ε, δ).

>>> from opacus_shuffle import ShuffleVectorSum
>>> from opacus_shuffle.core.rounding import round_up
>>> published = published_vector_sum(1000, 100, max_norm=1.0, epsilon=1.0, delta=1e-6)
>>> ours = ShuffleVectorSum(1000, 100, max_norm=1.0, epsilon=1.0, delta=1e-6)
>>> [round_up(protocol.exact_epsilon()[1]) for protocol in (published, ours)]
['0.001088', '0.9993']
>>> f"{published.variance / ours.variance:.2g}"
'2.8e+05'
>>> f"{published.bits_per_user / ours.bits_per_user:.2g}"
'1.4e+05'
"""

from __future__ import annotations

import math
from typing import TypeVar

from step_budgets import step_budget

from opacus_shuffle.analysis.binomial_sums import MOST_TRIALS
from opacus_shuffle.protocols.calibration import GridPlan, honest_users
from opacus_shuffle.protocols.grid_sum import GridSum
from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

Protocol = TypeVar("Protocol", bound=GridSum)


def published_vector_sum(
    num_users: int,
    dimension: int,
    max_norm: float,
    epsilon: float,
    delta: float,
    honest_fraction: float = 1.0,
    *,
    rounds: int = 1,
) -> ShuffleVectorSum:
    """Returns the protocol of SCO Theorem A.6.

    Each of T rounds gets the share of ε and δ that SCO Algorithm 5 prints (:func:`round_budget`).

    Formal Guarantees:
        (ε, δ)-DP of all the shuffled bits, for every data set, replacement adjacency.

    Raises:
        ValueError: If ε exceeds 15, or there are drop-outs and ε·γ > 1 in a round.
    """
    round_epsilon, round_delta = round_budget(_up_to_15(epsilon), delta, rounds)
    plan = published_vector_plan(
        num_users=num_users,
        dimension=dimension,
        max_norm=max_norm,
        epsilon=round_epsilon,
        delta=round_delta,
        honest_fraction=honest_fraction,
    )
    protocol = ShuffleVectorSum(
        num_users,
        dimension,
        max_norm,
        epsilon,
        delta,
        honest_fraction=honest_fraction,
        rounds=rounds,
    )
    return with_plan(protocol, plan)


def published_scalar_sum(
    num_users: int,
    max_value: float,
    epsilon: float,
    delta: float,
    honest_fraction: float = 1.0,
) -> ShuffleScalarSum:
    """Returns the protocol of SCO Lemma 3.1, with :func:`published_vector_sum`'s guarantee."""
    protocol = ShuffleScalarSum(
        num_users, max_value, _up_to_15(epsilon), delta, honest_fraction=honest_fraction
    )
    plan = published_scalar_plan(
        num_users=num_users,
        max_value=max_value,
        epsilon=epsilon,
        delta=delta,
        honest_fraction=honest_fraction,
    )
    return with_plan(protocol, plan)


def with_plan(protocol: Protocol, plan: GridPlan) -> Protocol:
    """Replaces the grid and the noise bits of a protocol in place."""
    sizes = protocol.num_users, protocol.dimension
    GridSum.__init__(
        protocol, *sizes, protocol._budget, plan, low=protocol._low, span=protocol._span
    )
    return protocol


def round_budget(epsilon: float, delta: float, rounds: int) -> tuple[float, float]:
    """Returns (ε, δ) of each of T rounds with the same users, as SCO Algorithm 5 prints it.

    The share is ε/(2√(2T·ln(1/δ))) and δ/(T + 1). In some cases this is too much, because the
    printed ln(1/δ) stands for ln((T+1)/δ) and a term in ε² is missing: if T > 1/δ, or if ε is large
    and δ near ½. The function then returns the largest share that advanced composition allows at
    the same δ. A single round gets the whole budget.
    """
    if rounds == 1:
        return epsilon, delta
    printed = epsilon / (2 * math.sqrt(2 * rounds * -math.log(delta)))
    allowed, _ = step_budget(
        epsilon=epsilon, delta=delta, steps=rounds, delta_split=rounds / (rounds + 1)
    )
    return min(printed, allowed), delta / (rounds + 1)


def published_noise_variance(
    *, dimension: int, max_norm: float, epsilon: float, delta: float
) -> float:
    """Returns the limit of each coordinate's variance for many users, in ``max_norm``'s unit²."""
    share = delta / (dimension + 1)
    noise = 45 * math.log(2 / share) * 18**2 * -math.log(share) / epsilon**2
    return (2 * max_norm) ** 2 * noise


def published_vector_plan(
    *,
    num_users: int,
    dimension: int,
    max_norm: float,
    epsilon: float,
    delta: float,
    honest_fraction: float,
) -> GridPlan:
    """Returns the grid of SCO Theorem A.6, or with drop-outs of Corollary A.9, whose ε/γ is our ε.

    ``granularity`` is max(2Δ₂√n, √d, 4) as printed: it depends on the unit in which ``max_norm`` is
    measured.
    """
    share = delta / (dimension + 1)
    return _published_plan(
        granularity=max(2 * max_norm * math.sqrt(num_users), math.sqrt(dimension), 4.0),
        epsilon=epsilon,
        split=18 * math.sqrt(-math.log(share)),
        delta=share,
        num_users=num_users,
        honest_fraction=honest_fraction,
    )


def published_scalar_plan(
    *, num_users: int, max_value: float, epsilon: float, delta: float, honest_fraction: float
) -> GridPlan:
    """Returns the grid of SCO Lemma 3.1, or with drop-outs of Claim A.8.

    Lemma 3.1 only requires g ≥ Δ√n, but its proof uses ln((1+α)/(1−α)) ≤ 3α for "small" α = ε/(3g).
    This needs α ≤ 0.858, and therefore also g ≥ ε/2.57 (at n = 1, Δ = 1, ε = 15 the printed g = 1
    gives α = 5).
    """
    least = max(epsilon * honest_fraction / 2.57, 3.0 if honest_fraction < 1 else 1.0)
    return _published_plan(
        granularity=max(max_value * math.sqrt(num_users), least),
        epsilon=epsilon,
        split=1.0,
        delta=delta,
        num_users=num_users,
        honest_fraction=honest_fraction,
    )


def _published_plan(
    *,
    granularity: float,
    epsilon: float,
    split: float,
    delta: float,
    num_users: int,
    honest_fraction: float,
) -> GridPlan:
    """Chooses the smallest b above 180g²ln(2/δ)/(ε²n), and p = 90g²ln(2/δ)/(bε²n).

    Here ε is that of one coordinate, ε·γ/``split``.
    """
    # Claim A.8 requires ε ≤ 1 of the protocol in which all users are honest.
    if honest_fraction < 1 and epsilon * honest_fraction > 1:
        raise ValueError(
            f"the published calibration with honest_fraction={honest_fraction!r} needs epsilon * "
            f"honest_fraction <= 1 in each round (SCO Corollary A.9), got epsilon={epsilon!r}: use "
            "the package's calibration or a smaller epsilon"
        )
    if granularity > 2**40:
        raise ValueError(
            f"the paper's grid would have {granularity:.3g} steps: express values in a larger unit"
        )
    g = math.ceil(granularity - 1e-9)
    local = epsilon * honest_fraction / split
    half = 90 * g**2 * math.log(2 / delta) / (local**2 * num_users)
    if 2 * half * num_users > MOST_TRIALS:
        raise ValueError(
            f"the published calibration would send {2 * half:.3g} noise bits per user and "
            "coordinate: choose a larger epsilon"
        )
    b = math.floor(2 * half) + 1
    return GridPlan(g, b, half / b, honest_users(num_users, honest_fraction))


def _up_to_15(epsilon: float) -> float:
    """Raises an error for an ε that the paper does not cover."""
    if epsilon > 15:
        raise ValueError(f"epsilon must not exceed 15 (SCO Theorem 3.2), got {epsilon!r}")
    return epsilon
