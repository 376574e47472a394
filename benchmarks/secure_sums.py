r"""Our sums beside the distributed discrete Gaussian and Skellam mechanisms, at the same ε.

Run ``python benchmarks/secure_sums.py``, some 15 seconds; nothing is trained or drawn. A secure
aggregation shows the server no more than the sum of all clients' whole numbers modulo 2^bits. Sums
of shuffled bits show one count per coordinate, so :class:`~opacus_shuffle.ShuffleVectorSum` keeps
its ε where each client hands in its counts. Every round has the same n clients, vectors have norm c
at most, and a vector becomes zero; the papers say added or removed, which moves the sum as far, by
c.

*Distributed discrete Gaussian* (Kairouz, Liu and Steinke, ICML 2021, arXiv 2102.06387): each client
rotates its vector at random, rounds it to a grid of step γ, again until its norm is at most √(c² +
γ²d/4 + √(2 ln(1/β))·γ(c + γ√d/2)) or c + γ√d (Proposition 22), and adds discrete Gaussian noise of
scale σ. Theorem 1 (5 in the proceedings) with Proposition 14, Δ being the lesser norm: at every
order α > 1 the sum has a Rényi divergence of at most min(αΔ²/2nσ² + τd, ½α·(Δ/(√n·σ) + τ√d)²), with
τ = 10·Σ_{k<n} exp(−2π²·(σ/γ)²·k/(k + 1)).

*Skellam* (Agarwal, Kairouz and Liu, NeurIPS 2021, arXiv 2110.04995): the same, but the noise is the
difference of two Poisson numbers. Theorem 3.5, Corollary 3.6: at every whole order α > 1 the
divergence is at most αΔ₂²/2μ + min(((2α − 1)Δ₂² + 6Δ₁)/4μ², 3Δ₁/2μ), with μ the noise's variance,
Δ₂ = Δ and Δ₁ = min(√d·Δ₂, Δ₂²), all in grid steps.

Both take β = e^{−1/2} and the γ at which 2^bits is 2k = 8 standard deviations of a coordinate:
γ·2^bits = 2k·√(c²n²/d + n(γ²/4 + σ²)), the first term for n equal vectors, rotated (Section 4). No
rotation pads d here, which favours them. ε follows from the divergences by the tight conversion
(Canonne, Kamath and Steinke 2020, arXiv 2004.00010, Proposition 12). That is what the authors'
program does (``distributed_dp/accounting_utils.py`` of google-research/federated): at ε = 4, δ =
1e-5, k = 2, n = 1000 and 12 bits for 250 coordinates, padded to 256, it chooses 3.191 and 2.326
times the central Gaussian's variance. A plot in that folder's first version
(``dme-n1000-k2-linear.png``) has the discrete Gaussian with 18 bits at 1.1 to 1.25 times, ε from 1
to 5; with 12 and 14 bits it lies above what the program gives.

>>> check = Setting(clients=1000, dimension=256, rounds=1, epsilon=4.0)
>>> few = {"bits": 12, "deviations": 2}
>>> [round((1 + excess(way, check, **few)) ** 2, 2) for way in (discrete_gaussian, skellam)]
[3.19, 2.33]
>>> two = dataclasses.replace(check, epsilon=2.0)
>>> round((1 + excess(discrete_gaussian, two, bits=18, deviations=2)) ** 2, 2)
1.16

Excess is the standard deviation of a coordinate of the sum, noise and rounding at its worst, over
that of a trusted server's Gaussian mechanism. It leaves out what wraps around (6e-5 of the
coordinates, if they are normal) and the bias of rounding again. It shows what is *proved*, not how
good a noise is: the papers count rounding as a longer vector, we as noise, so that their steps must
be far below 2c/√d; and the conversion by itself costs them this, whatever the bits:

>>> settings = [dataclasses.replace(check, epsilon=epsilon) for epsilon in (1.0, 4.0)]
>>> [round(100 * excess(skellam, setting, bits=40), 1) for setting in settings]
[8.4, 7.1]

Our ε is that of :func:`opacus_shuffle.compute_epsilon`. "At 0.3, 0.1, 0.04" are bits for these
``rounding_share``; a cell is the best that fits of them and 0.01. No proof, ours or theirs, needs
the rotation, but this modulus does: without it one has to know how large a coordinate of the sum
gets. "Noise" is the modulus for noise and rounding alone; "never" has room for all the n(g + b) + 1
values that the sum of counts can have, so that nothing ever wraps around, rotated or not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

import opacus_shuffle
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.binomial_sums import LOST_SHARE

DELTA, BETA, DEVIATIONS = 1e-5, math.exp(-0.5), 4.0
BITS, SHARES = (8, 10, 12, 14, 16, 18, 20), (0.3, 0.1, 0.04, 0.01)
ORDERS = 1 + np.geomspace(1e-2, 1e5, 3000)
WHOLE_ORDERS = np.unique(np.geomspace(2, 1e5, 3000).round())


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared: n clients in each of T rounds, d coordinates, (ε, δ) of all rounds.

    Lengths are in units of c.
    """

    clients: int
    dimension: int
    rounds: int
    epsilon: float

    @property
    def central(self) -> float:
        """The noise of the Gaussian mechanism, exactly calibrated, T rounds together."""
        return math.sqrt(self.rounds) / gaussian.largest_mu(epsilon=self.epsilon, delta=DELTA)


Divergences = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
Mechanism = Callable[[float, float, Setting], Divergences]


def rounded_norm(step: float, dimension: int) -> float:
    """Δ: the longest that a vector of norm 1 gets when it is rounded until it is short enough."""
    root = math.sqrt(dimension)
    often = (
        1 + (step * root / 2) ** 2 + math.sqrt(-2 * math.log(BETA)) * step * (1 + step * root / 2)
    )
    return min(math.sqrt(often), 1 + step * root)


def discrete_gaussian(noise: float, step: float, setting: Setting) -> Divergences:
    """Returns orders and one round's divergences at this standard deviation of the sum's noise."""
    terms, local = np.arange(1, setting.clients), noise / math.sqrt(setting.clients) / step
    tau = 10 * float(np.exp(-2 * (math.pi * local) ** 2 * terms / (terms + 1)).sum())
    move = rounded_norm(step, setting.dimension) / noise
    apart = ORDERS / 2 * move**2 + tau * setting.dimension
    return ORDERS, np.minimum(apart, ORDERS / 2 * (move + tau * math.sqrt(setting.dimension)) ** 2)


def skellam(noise: float, step: float, setting: Setting) -> Divergences:
    """The same for Skellam noise."""
    move, variance = rounded_norm(step, setting.dimension) / step, (noise / step) ** 2
    total = move * min(math.sqrt(setting.dimension), move)
    more = ((2 * WHOLE_ORDERS - 1) * move**2 + 6 * total) / (4 * variance**2)
    return WHOLE_ORDERS, WHOLE_ORDERS * move**2 / (2 * variance) + np.minimum(
        more, 3 * total / (2 * variance)
    )


def epsilon_of(divergences: Divergences, rounds: int) -> float:
    """ε at δ of so many rounds.

    >>> round(epsilon_of((ORDERS, ORDERS / 2), 1), 3)  # a multiplier of 1; the truth is 4.377
    4.728
    """
    orders, each = divergences
    return float(
        (rounds * each - np.log(orders * DELTA) / (orders - 1) + np.log1p(-1 / orders)).min()
    )


def calibrated(mechanism: Mechanism, step: float, setting: Setting) -> float:
    """The least noise of the sum with which all rounds are (ε, δ)-DP."""

    def too_much(log_noise: float) -> float:
        return (
            epsilon_of(mechanism(math.exp(log_noise), step, setting), setting.rounds)
            - setting.epsilon
        )

    scale = math.log(
        setting.central * rounded_norm(step, setting.dimension)
    )  # a Gaussian's, for that norm
    return math.exp(float(brentq(too_much, scale - 3, scale + 7, xtol=1e-12)))


def excess(
    mechanism: Mechanism, setting: Setting, *, bits: float, deviations: float = DEVIATIONS
) -> float:
    """Returns by what share a coordinate's deviation exceeds the central Gaussian's.

    It is infinite where no step fits the modulus.
    """

    def deviation(step: float) -> float:
        return math.hypot(
            calibrated(mechanism, step, setting), step / 2 * math.sqrt(setting.clients)
        )

    def missing(log_step: float) -> float:
        step, signal = math.exp(log_step), setting.clients / math.sqrt(setting.dimension)
        return math.log2(2 * deviations * math.hypot(signal, deviation(step)) / step) - bits

    coarse = math.log(1e-12)
    while missing(coarse) > 0:
        coarse += 1.0
        if coarse > math.log(100):
            return math.inf
    return (
        deviation(math.exp(float(brentq(missing, coarse - 1, coarse, xtol=1e-10))))
        / setting.central
        - 1
    )


@dataclasses.dataclass(frozen=True)
class Ours:
    """Describes our sums: bits of three moduli, the excess, and the proved ε.

    The moduli are ours, that for noise alone, and one that is never exceeded.
    """

    bits: int
    noise_bits: int
    never_bits: int
    excess: float
    epsilon: float


def ours(setting: Setting, share: float) -> Ours:
    """Our sums with this ``rounding_share``, for as much noise as ε asks for.

    >>> ours(Setting(clients=1000, dimension=26_010, rounds=1, epsilon=1.0), 0.1).bits
    11
    """
    protocol = opacus_shuffle.ShuffleVectorSum.with_noise_multiplier(
        setting.clients,
        setting.dimension,
        1.0,
        math.sqrt(setting.rounds)
        / gaussian.largest_mu(epsilon=setting.epsilon, delta=DELTA * (1 - LOST_SHARE)),
        delta=DELTA,
        rounds=setting.rounds,
        rounding_share=share,
    )
    one_round = opacus_shuffle.ShuffledSums.of_protocol(protocol, sample_rate=1.0)
    steps, deviation = protocol.granularity / 2, math.sqrt(protocol.variance)  # c is so many steps
    signal = setting.clients / math.sqrt(setting.dimension)
    return Ours(
        bits=math.ceil(math.log2(2 * DEVIATIONS * steps * math.hypot(signal, deviation))),
        noise_bits=math.ceil(math.log2(2 * DEVIATIONS * steps * deviation)),
        never_bits=(setting.clients * (protocol.granularity + protocol.noise_bits)).bit_length(),
        excess=deviation / setting.central - 1,
        epsilon=opacus_shuffle.compute_epsilon(one_round, steps=setting.rounds, delta=DELTA),
    )


def show(cells: list[float]) -> str:
    """Excesses as percentages, a dash for 1000 and more."""
    return "".join(
        f"{'–' if each >= 10 else f'{100 * each:.{0 if each >= 1 else 1}f}':>5}" for each in cells
    )


def main() -> None:
    """Prints the table."""
    heads = f"{'by bits of the modulus':>39}{'at 0.3, 0.1, 0.04: bits':>30}{'noise':>7}{'never':>8}"
    print(f"excess in %, delta = {DELTA:g}{heads}")
    print(f"{'n':>6}{'d':>8}{'T':>4}{'eps':>4} {'':17}" + "".join(f"{each:>5}" for each in BITS))
    ratios = []
    runs = [(26_010, 1, 1.0), (26_010, 1, 4.0), (26_010, 100, 4.0), (10**6, 100, 4.0)]
    for setting in (Setting(clients, *run) for clients in (100, 1000, 10_000) for run in runs):
        print(
            f"{setting.clients:>6}{setting.dimension:>8}{setting.rounds:>4}{setting.epsilon:>4g} ",
            end="",
        )
        print(
            f"{'discrete Gaussian':17}"
            f"{show([excess(discrete_gaussian, setting, bits=bits) for bits in BITS])}"
        )
        print(
            f"{'Skellam':>30}{'':10}{show([excess(skellam, setting, bits=each) for each in BITS])}"
        )
        rows = [ours(setting, share) for share in SHARES]
        best = [
            min((row.excess for row in rows if row.bits <= each), default=math.inf) for each in BITS
        ]
        columns = (
            [getattr(row, name) for row in rows[:3]]
            for name in ("bits", "noise_bits", "never_bits")
        )
        print(
            f"{'ours':>27}{'':13}{show(best)} "
            + " ".join("".join(f"{each:>3}" for each in column) for column in columns)
        )
        ratios += [row.epsilon / setting.epsilon for row in rows]
    print(
        f"Our epsilon is {min(ratios):.3f} to {max(ratios):.4f} of what is asked for, the others' "
        "that itself."
    )


if __name__ == "__main__":
    main()
