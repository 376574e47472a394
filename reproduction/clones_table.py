r"""Reproduces the row "Clones" in Table 1 of Liew and Takahashi's shuffle Gaussian mechanism.

The paper (SG) is its ICLR 2023 text.

The paper does not say how the row was computed. These steps give 0.18623 … 1.43138 for 1 … 7 rounds
(σ = 9.48, n = 60000, δ = 1/n): ε0 = 2·sqrt(2·ln(1.25/δ0))/σ, the classical Gaussian mechanism at
sensitivity *2* (the text says 1; its "(1, 1/n)-LDP" is this formula at δ0 = 1/n, hence σ = 9.476);
the closed form of Feldman, McMillan and Talwar's Theorem 3.1 at δ = δ0; their Theorem 3.8 for the
total; δ0 = 1e-10, halved until rounds × total ≤ 1/n; and rounds × ε, the linear branch of Kairouz
et al., the least one up to 31 rounds. σ = 9.476 reproduces all seven values to every digit; the
printed 9.48 reproduces them to 0.06 %. The row is therefore for *replacement*, whereas "Ours" in
the same table is for zero-out adjacency.

>>> round(table_epsilon(noise_multiplier=9.476, num_users=60_000, delta=1 / 60_000, rounds=7), 5)
1.43138
"""

from __future__ import annotations

import math

from clones import MARGIN, SMALLEST_DELTA

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.validation import (
    finite_number,
    integer,
    noise_level,
    open_unit_interval,
    positive,
)


def closed_form_epsilon(*, local_epsilon: float, num_users: int, delta: float) -> float:
    """Returns ε of Feldman, McMillan and Talwar's Theorem 3.1 as printed.

    This ε is several times that of ``clones.compute_epsilon``.

    Their released program has 1 + e^(−ε0)/(1 + s) instead of the theorem's 1 + e^(−ε0), with s the
    theorem's large bracket. For ε0 = 4, n = 100,000 and δ = 1e-6 it returns 0.5378 instead of
    0.5346.

    Args:
        local_epsilon: ε0 > 0 of one report.
        num_users: n ≥ 1, the reports shuffled together.
        delta: δ in (0, 1).

    Returns:
        ε ≥ 0, rounded up; never above ``local_epsilon``.

    Raises:
        ValueError: If an argument is out of range, or ε0 is above the theorem's condition ln(n/(16
            ln(2/δ))).

    Formal Guarantees:
        Proved for every data set, replacement adjacency.
    """
    local_epsilon, delta = (
        positive("local_epsilon", local_epsilon),
        open_unit_interval("delta", delta),
    )
    num_users = integer("num_users", num_users)
    if num_users == 1:
        return local_epsilon
    limit = math.log(num_users / (16 * (math.log(2) - math.log(delta))))
    if local_epsilon > limit:
        raise ValueError(
            f"local_epsilon must be at most ln(num_users / (16 ln(2/delta))) = {limit:.6g} for the "
            f"closed form of Theorem 3.1, got {local_epsilon!r}; use clones.compute_epsilon, which "
            "has no such limit"
        )
    growth = math.exp(local_epsilon) / num_users
    bracket = math.sqrt(growth * (math.log(4) - math.log(delta))) + growth
    return min(math.log1p(math.tanh(local_epsilon / 2) * 8 * bracket) * (1 + MARGIN), local_epsilon)


def strong_composition_epsilon(
    *, epsilon: float, delta: float, rounds: int, delta_slack: float = 0.0
) -> tuple[float, float]:
    """Returns (ε, δ) of several adaptive rounds, each (ε, δ)-DP.

    Args:
        epsilon: ε ≥ 0 of one round.
        delta: δ in [0, 1) of one round.
        rounds: k ≥ 1.
        delta_slack: δ̃ in [0, 1), spent on the composition itself. If it is 0, or for few rounds,
        the result is kε.

    Returns:
        The least of kε, m + ε·sqrt(2k·ln(1/δ̃)) and m + ε·sqrt(2k·ln(e + ε·sqrt(k)/δ̃)), m =
        kε·(e^ε − 1)/(e^ε + 1), and its δ: 1 − (1 − δ)^k, with the factor (1 − δ̃) in the product if
        kε is not the least. Both are rounded up; δ is at most 1.

    Raises:
        ValueError: If an argument is out of range or ε overflows.

    Formal Guarantees:
        Proved for adaptively chosen rounds. For Gaussian rounds the library's accountants return a
        far smaller ε.

    Source:
        Kairouz, Oh, Viswanath, "The composition theorem for differential privacy" (ICML 2015),
        Theorem 3.4, arXiv 1311.0776; its second branch improves the advanced composition of Dwork,
        Rothblum, Vadhan (FOCS 2010).
    """
    if finite_number("epsilon", epsilon) < 0:
        raise ValueError(f"epsilon must be at least 0, got {epsilon!r}")
    for name, value in (("delta", delta), ("delta_slack", delta_slack)):
        if not 0 <= finite_number(name, value) < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {value!r}; pass 0 for none")
    rounds = integer("rounds", rounds)
    linear, log_rest = rounds * float(epsilon), rounds * math.log1p(-delta)
    if not math.isfinite(linear):
        raise ValueError(
            f"epsilon times rounds must be finite, got {epsilon!r} and {rounds}; pass a smaller "
            "epsilon"
        )
    composed = linear
    if delta_slack > 0:
        ratio = epsilon * math.sqrt(rounds) / delta_slack
        log_term = min(-math.log(delta_slack), math.log(math.e + ratio))
        composed = min(
            linear, linear * math.tanh(epsilon / 2) + epsilon * math.sqrt(2 * rounds * log_term)
        )
    if composed < linear:
        log_rest += math.log1p(-delta_slack)
    return math.nextafter(composed * (1 + 1e-14), math.inf) if composed else 0.0, min(
        -math.expm1(log_rest) * (1 + 1e-14), 1.0
    )


def table_epsilon(
    *,
    noise_multiplier: float,
    num_users: int,
    delta: float,
    rounds: int = 1,
    scan_start: float = 1e-10,
) -> float:
    """Returns the row's ε, as SG's authors must have computed it: replacement adjacency.

    Args:
        noise_multiplier: σ of one report over the clipping norm; 9.476 for their table.
        num_users: n ≥ 1, the reports shuffled together in one round.
        delta: δ in (0, 1) of all rounds together.
        rounds: The number of rounds.
        scan_start: The largest δ0 tried; it is halved repeatedly. The authors' value is 1e-10; a
        good value is about δ/(3·n·rounds).

    Returns:
        ε after ``rounds`` rounds: rounds × the closed form's, or strong composition's with half of
        δ for its slack.

    Raises:
        ValueError: If an argument is out of range, or ε0 is too large for the closed form at every
            δ0.

    Formal Guarantees:
        Proved for every data set. The classical Gaussian formula is proved only for ε0 ≤ 1 (theirs
        is 1.4 to 1.5). The function therefore uses the ε0 of the exact curve if it is larger, which
        does not occur in their table.

    Source:
        SG section 5.1, Table 1; Feldman, McMillan, Talwar, "Hiding among the clones", Theorems 3.1
        and 3.8, arXiv 2012.12803; Kairouz et al., Theorem 3.4, arXiv 1311.0776.
    """
    sigma = noise_level("noise_multiplier", noise_multiplier)
    num_users, rounds = integer("num_users", num_users), integer("rounds", rounds)
    delta, scan_start = (
        open_unit_interval("delta", delta),
        open_unit_interval("scan_start", scan_start),
    )

    def composed(budget: float, slack: float) -> float:
        share = scan_start
        while share > SMALLEST_DELTA:
            classical = 2 * math.sqrt(2 * math.log(1.25 / share)) / sigma
            local = max(classical, gaussian.compute_epsilon(mu=2 / sigma, delta=share))
            try:
                epsilon = closed_form_epsilon(local_epsilon=local, num_users=num_users, delta=share)
            except ValueError:
                break  # beyond the condition of Theorem 3.1, and so at every smaller δ0
            total = share + (1 + math.exp(epsilon)) * (1 + math.exp(-local) / 2) * num_users * share
            if rounds * total <= budget:
                return strong_composition_epsilon(
                    epsilon=epsilon, delta=total, rounds=rounds, delta_slack=slack
                )[0]
            share /= 2
        return math.inf

    best = min(composed(delta, 0.0), composed(delta / 2, delta / 2))
    if best == math.inf:
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r} is too small for the closed form with "
            f"num_users={num_users}, delta={delta!r} and rounds={rounds}; raise it, or use "
            "clones.gaussian_epsilon, which falls back to the unshuffled bound"
        )
    return best
