"""Compares sums by secret check-in with two published protocols at their users and rounds.

Run ``python benchmarks/peers.py``, about two minutes. Noise is the standard deviation on one
coordinate of a round's sum, divided by the clipping norm. (If all users report, it is scaled to the
number of records of the other protocols.) Bits are the number that a reporting user sends for each
coordinate.

*Skellam mixture mechanism* (Bao et al., PVLDB 2022): every user rounds its scaled gradient x at
random to whole numbers, with the sum of x² + p − p² (p is the fractional part) clipped to c, and
adds the difference of two Poisson variables of mean m. One round of n users has a Rényi divergence
of c·(1.2α + 1)/(4nm) at order α; sampling and composition are as usual for Poisson samples. The
formula and the setting are those of the authors' program ``smm_analysis.py``.

*Camel* (Xu, Zheng and Hua, CCS 2024) perturbs every report separately and shuffles the reports with
three servers. Its bound is omitted, because its formula was not available to us. The table has our
proved values in its setting (ε = 2, 1000 rounds of 12,800 records).

>>> round(skellam_mixture_epsilon(SKELLAM), 3)
2.999
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import gammaln, logsumexp

import opacus_shuffle

DELTA = 1e-5


@dataclasses.dataclass(frozen=True)
class SkellamMixture:
    """The setting of the paper's example.

    ``clipping`` is c, in units of 1/``scale`` squared; ``poisson_mean`` is m.
    """

    num_users: int = 60_000
    sampled: int = 240
    steps: int = 1000
    dimension: int = 63_610
    clipping: float = 4096.0
    scale: float = 64.0
    poisson_mean: float = 5.95
    bits: int = 8

    @property
    def noise(self) -> float:
        """Returns the sum's noise including the largest rounding error, without wrap-around."""
        return math.sqrt(self.sampled * (2 * self.poisson_mean + 0.25) / self.clipping)


SKELLAM = SkellamMixture()


def skellam_mixture_epsilon(run: SkellamMixture) -> float:
    """Returns ε at δ = 1e-5 by the authors' formula with orders 2 to 99."""
    rate, best = run.sampled / run.num_users, math.inf
    for order in range(2, 100):
        terms = np.arange(2, order + 1)
        chosen = gammaln(order + 1) - gammaln(terms + 1) - gammaln(order - terms + 1)
        divergence = run.clipping * (1.2 * terms + 1) / (4 * run.sampled * run.poisson_mean)
        logs = (
            chosen
            + (order - terms) * math.log1p(-rate)
            + terms * math.log(rate)
            + (terms - 1) * divergence
        )
        first = (order - 1) * math.log1p(-rate) + math.log(order * rate - rate + 1)
        one_round = logsumexp(np.append(logs, first)) / (order - 1)
        lost = (math.log(1 / DELTA) + (order - 1) * math.log1p(-1 / order) - math.log(order)) / (
            order - 1
        )
        best = min(best, run.steps * one_round + lost)
    return float(best)


def ours(*, num_users: int, sampled: int, steps: int, dimension: int, epsilon: float) -> None:
    """Prints what this package proves at the same ε."""
    rows = opacus_shuffle.plan(
        num_users=num_users,
        steps=steps,
        sample_rate=sampled / num_users,
        target_epsilon=epsilon,
        target_delta=DELTA,
        dimension=dimension,
    ).rows
    for row in rows:
        if row.trusted in ("the shuffler", "the server"):
            bits, noise = row.round.bits_per_coordinate, row.noise_of_mean * sampled
            show(
                row.mechanism if row is not rows[-1] else "DP-SGD",
                noise,
                f"{bits:,.0f}",
                row.trusted,
            )


def show(name: str, noise: float, bits: str, trusted: str) -> None:
    """Prints one row."""
    print(f"{name:28} {noise:>8.3f} {bits:>12}   {trusted}")


def main() -> None:
    """Prints both tables."""
    head = f"{'':28} {'noise':>8} {'bits':>12}   trusted"
    epsilon = skellam_mixture_epsilon(SKELLAM)
    print(
        f"epsilon = {epsilon:.4f}, 1000 rounds, 240 of 60,000 users expected, 63,610 "
        f"parameters\n{head}"
    )
    show(
        "Skellam mixture",
        SKELLAM.noise,
        str(SKELLAM.bits),
        "secure aggregation that hides who is sampled",
    )
    ours(
        num_users=SKELLAM.num_users,
        sampled=SKELLAM.sampled,
        steps=SKELLAM.steps,
        dimension=SKELLAM.dimension,
        epsilon=epsilon,
    )
    print(f"\nepsilon = 2, 1000 rounds, 12,800 of 60,000 users expected, 26,010 parameters\n{head}")
    ours(num_users=60_000, sampled=12_800, steps=1000, dimension=26_010, epsilon=2.0)


if __name__ == "__main__":
    main()
