r"""The certificate: an ε of shuffled Gaussian reports that holds for **every** data set.

The idea. Whatever an other user's x, ‖x‖ ≤ 1, N(x, σ²I) ≥ α·N(0, σ²I) wherever ⟨y, x/‖x‖⟩ ≥ −tσ, with
α = e^{−(t/σ + 1/2σ²)}: with probability about α that user sends what a user at zero would send, a *clone* of zero. Among k
clones, user 1's report hides as in the papers' pair with k + 1 users (:mod:`opacus_shuffle.analysis.mean_ratio`), which is
thereby enough to know. Two ways to make "about" exact; in both, f₀ = N(0, σ²I), f₁ = N(x₁, σ²I), A_i is the half-space above
for user i, f₀(A_i) = Φ(t), and H_τ(P‖Q) = ∫(P − τQ)₊.

**Mended clones** (``"mended"``). f_{x_i} = α·f₀·1[A_i] + rest. Putting the missing mass αΦ(−t) back gives α·f₀ + (1 − α)·(…)
within total variation αΦ(−t). Let every other user flip Bern(α) and reveal who is no clone and what they sent: the shuffled
view is a function of that. Given k clones it is the pair with k + 1 users, whose X is largest in convex order at ‖x₁‖ = 1.
So δ(ε) ≤ E_k[δ_pair(ε; k + 1)] + (1 + e^ε)(n − 1)αΦ(−t), k ~ Bin(n − 1, α). T adaptive rounds: the pairs compose, and the
distances add up (given the past, the x_i of a round are fixed vectors). ∎

**Truncated clones** (``"truncated"``): no slack that grows with n. Take f_{x_i} = αΦ(t)·B_i + rest with B_i = f₀(· | A_i)
as it is. Given k clones (and all else revealed) let the adversary know every slot but which of the k + 1 holds user 1: a
transposition (1 I), I uniform, which a further shuffle turns into the true view. Let g have z₁ ~ f₀ and z_I ~ B_I in their
slots. The parts of P and Q that are continuous to it have densities Σ_I v_I X(z_I)/(k+1) and Σ_I v_I/(k+1), where
v₁ = 1 and v_I = 1[z₁ ∈ A_I]; what is singular to it, user 1's report in a slot I but outside A_I, has masses
s = mean_I f₁(A_I^c) ≤ Φ(1/σ − t) under P and m = Φ(−t)·k/(k+1) under Q. Let V be the slots with v_I = 1, and μ the measure with
density #(slots not in V)/(k+1), of mass m; then M = Q_cont + μ is a probability, P° = P_cont + μ has mass 1 − s + m, and
    ∫(P° − τM)₊ = (1/(k+1)) E_g(Σ_{I∈V} (X(z_I) − τ) + Σ_{I∉V} (1 − τ))₊
                ≤ Φ(t)^{−k} (1/(k+1)) E_{f₀}(same)₊              the integrand is ≥ 0, and f₀ gives all A_I at once Φ(t)^k
                ≤ Φ(t)^{−k} (1/(k+1)) E_{f₀}(Σ_I (X(z_I) − τ))₊   Jensen over the z_I with I ∉ V, as E X = 1
                = Φ(t)^{−k}·H_τ(pair with k + 1 users),
and likewise ∫(M − τP°)₊ against the pair's other direction. A factor c ≥ 1 on both hockey sticks is dominated by the ratio
1 + c·(R − 1), since c·E(R − τ)₊ ≤ E(1 + c(R − 1) − τ)₊ for τ ≥ 1 and c·E(τ − R)₊ ≤ E(τ − 1 − c(R − 1))₊ below 1, once the
difference |s − m| of the masses of P° and M is added as mass at infinity. P exceeds P° by s at most, Q exceeds M by m, M
exceeds Q by m and P° exceeds P by m: per round, δ(ε) grows by max(s, m) + e^ε·m ≤ Φ(1/σ − t) + e^ε·Φ(−t) in either direction,
instead of (1 + e^ε)(n − 1)αΦ(−t). (Over T rounds P° may have a mass of (1 + m)^T, a factor e^{TΦ(−t)} on the slack.) A smaller
t does, and α grows, where σ is above about 1. ∎

**Sampling.** Call the messages that are user 1's or a participating clone's the pool, j of them (α stands for the clones'
probability, above α or αΦ(t)). Given j and what is revealed (the participants that are no clones: who, how many, what they
sent), user 1 is in the pool with a probability π, the same in both data sets, and R = 1 − π + π·mean_j(X).
    * Without replacement, m of n: j is 1 + Bin(m − 1, α) if user 1 takes part, Bin(m, α) if not; the revealed are m − j either
      way and, given j, equally likely to be any of the others. π = γj / (γj + (1 − γ)mα), γ = m/n.
    * Check-in: let a be the number of absent users. Given j and a, π = j/(j + αa). **Given j alone its mean is**
      π_j = j(1 − γα) / (j(1 − γα) + (1 − γ)(n − j)α), j ~ γ·(1 + Bin(n − 1, γα)) + (1 − γ)·Bin(n − 1, γα); but a is known to
      this adversary and does depend, by one user, on whether user 1 is in. E(1 − π + πY − τ)₊ is convex in π, so π is replaced
      by a two-point distribution on its range (but for a negligible part of a's distribution, which counts as lost) with the
      mean π_j.
    * For truncated clones the two cases' pools differ: {f₀ or f₁, B_K} and U = {B_i, B_K}, |K| = j − 1, i uniform outside K.
      All is compared with (πP° + (1 − π)M, M), whose hockey sticks are the pair's damped by π. As U is within total variation
      Φ(−t) of {f₀, B_K}, which is within Φ(−t) of M, the slack is πΦ(1/σ − t) + 2(1 − π)Φ(−t) + e^ε(2 − π)Φ(−t) per round, at
      most Φ(1/σ − t) + Φ(−t) + 2e^ε·Φ(−t).
    * The slack of mended clones is (1 + e^ε)·αΦ(−t) per expected other participant, (n − 1)γ of them.

**Mixtures.** The pair's hockey sticks fall with the number of users (sample means are a reverse martingale), so pool sizes are
grouped, each group taking the distribution of its smallest size and a two-point distribution of its π's.

**Replacement adjacency.** A record moves x → x′: chain x → 0 → x′, (ε, δ) twice gives (2ε, δ(1 + e^ε)); or clone user 1's own
value, everyone at distance ≤ 2, which is all of the above at σ/2. The smaller one is taken.

Nothing is ever reported above :func:`opacus_shuffle.analysis.shuffled_rounds.unshuffled_epsilon`: few clones (σ below about 1
at n = 60000) mean no certified gain.

>>> rounds = [(ShuffledRound(noise_multiplier=9.48, num_users=60_000), 1)]
>>> round(compute_epsilon(rounds, delta=1 / 60_000), 5), round(compute_epsilon(rounds, delta=1 / 60_000, clones="truncated"), 5)
(0.00096, 0.00087)

Source: this library's. Clones: Feldman, McMillan, Talwar (arXiv 2012.12803), whose clones copy both values of user 1 and need
pure local ε₀ (:mod:`opacus_shuffle.analysis.clones`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

from opacus_shuffle.analysis import gaussian, privacy_loss
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.analysis.privacy_loss import Mixture
from opacus_shuffle.analysis.ratio_distribution import mean_distribution
from opacus_shuffle.analysis.shuffled_rounds import Rounds, ShuffledRound, coarsen, merge, tail_for, unshuffled_epsilon
from opacus_shuffle.core.validation import one_of, open_unit_interval

Counts = npt.NDArray[np.int64]
Merged = tuple[tuple[ShuffledRound, int], ...]
Clones = Literal["mended", "truncated"]
ADJACENCIES = ("zero_out", "replace")

RESOLUTION = 0.04
_LARGEST_STRETCH = 30.0
"""Truncated clones whose factor would be above e to this are of no use, and count as lost."""
_GROUP_BITS = 7
"""Pool sizes are rounded down to this many significant bits: by 0.6 % on average, 0.3 % in ε."""


def compute_epsilon(rounds: Rounds, *, delta: float, adjacency: str = "zero_out", clones: Clones = "mended") -> float:
    """ε of adaptive rounds at δ, for every data set, rounded up.

    Args:
        rounds: Rounds of any kinds, each with its number of repetitions, at least 1.
        delta: δ in (0, 1).
        adjacency: ``"zero_out"`` (a record becomes a zero report) or ``"replace"`` (it becomes any other).
        clones: Which proof: ``"mended"`` or ``"truncated"`` (see the module; smaller for σ above about 1).

    Returns:
        ε, never above the unshuffled reports'.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        (ε, δ)-differential privacy of the shuffled reports of all rounds together, for every data set whose records are clipped
        to norm 1, adaptively chosen rounds included. Proved in the module's documentation.

    Edge cases:
        ===========================  ==============================================
        n = 1, or next to no clones  the unshuffled reports
        σ below 0.05                 the unshuffled reports
        ===========================  ==============================================
    """
    delta = open_unit_interval("delta", delta)
    one_of("adjacency", adjacency, ADJACENCIES)
    one_of("clones", clones, ("mended", "truncated"))
    merged = merge(rounds)
    if not merged:
        return 0.0
    distance = 1.0 if adjacency == "zero_out" else 2.0
    best = unshuffled_epsilon(merged, delta=delta, distance=distance)
    if best == 0:
        return 0.0
    if adjacency == "zero_out":
        return min(best, _with_clones(merged, delta, clones))
    if all(each.noise_multiplier >= 1e-3 for each, _ in merged):
        halved = tuple((each.with_noise(each.noise_multiplier / 2), count) for each, count in merged)
        best = min(best, _with_clones(halved, delta, clones))
    return min(best, _chained(merged, delta, clones, give_up=best))


def clone_probability(noise_multiplier: float, margin: float) -> float:
    """α: how much of a user's distribution is a clone's, but for a share Φ(−``margin``)."""
    return math.exp(-margin / noise_multiplier - 0.5 / noise_multiplier**2)


def _chained(rounds: Merged, delta: float, clones: Clones, give_up: float) -> float:
    """Replacement as two zero-outs: 2ε at δ(1 + e^ε)."""
    share = delta / 2
    for _ in range(20):
        epsilon = _with_clones(rounds, share, clones)  # two unshuffled zero-outs never beat one unshuffled replacement
        if 2 * epsilon >= give_up:
            return math.inf
        fitting = delta / (1 + math.exp(epsilon))
        if share <= fitting:
            return 2 * epsilon
        share = fitting * (1 - 1e-4)
    return math.inf


@functools.lru_cache(maxsize=512)
def _with_clones(rounds: Merged, delta: float, clones: Clones) -> float:
    """ε by clones alone, at a margin t near the best one; ``inf`` where they are of no use."""
    tail = tail_for(rounds, delta)
    if tail is None:
        return math.inf
    rounds = coarsen(rounds, "upper")
    unshuffled = unshuffled_epsilon(rounds, delta=delta)
    budget = 1e-4 * delta / sum(count for _, count in rounds)
    best, guess = math.inf, 0.0
    for _ in range(6):
        margin = _best_margin(rounds, delta, clones, guess)
        if margin is None:
            break
        mixtures = [(_mixture(each, margin, clones, budget, tail), count) for each, count in rounds]
        epsilon = privacy_loss.compute_epsilon(mixtures, delta=delta, slack=_slack(rounds, margin, clones))
        best = min(best, epsilon)
        if abs(epsilon - guess) <= 0.02:  # e^guess was near enough
            break
        guess = epsilon if epsilon < math.inf else max(2 * guess, 1.0)
        if guess > unshuffled:
            break
    return best


def _slack(rounds: Merged, margin: float, clones: Clones) -> tuple[float, float]:
    """What all rounds add to δ: the first number, and the second times e^ε."""
    missing = float(ndtr(-margin))
    if clones == "mended":
        distance = sum(
            count * each.others * clone_probability(each.noise_multiplier, margin) * missing for each, count in rounds
        )
        return distance, distance
    total = sum(count for _, count in rounds)
    if total * missing > 1:
        return math.inf, math.inf
    masses = math.exp(total * missing)
    moved = sum(
        count * (float(ndtr(1 / each.noise_multiplier - margin)) + (0.0 if each.sampling is None else missing))
        for each, count in rounds
    )
    unmoved = sum(count * (1 if each.sampling is None else 2) * missing for each, count in rounds)
    return masses * moved, masses * unmoved


def _best_margin(rounds: Merged, delta: float, clones: Clones, guess: float) -> float | None:
    """A t near the best one, by what a Gaussian of the mixtures' variance would give; ``None`` with hardly any clones.

    ``guess`` is ε, for the slack's factor e^ε.
    """

    def pool(each: ShuffledRound, margin: float) -> float:
        return 1 + each.others * clone_probability(each.noise_multiplier, margin)

    def epsilon(margin: float) -> float:
        moved, unmoved = _slack(rounds, margin, clones)
        left = delta - moved - math.exp(min(guess, 600.0)) * unmoved
        if not left > 0:
            return 1e9 - 1e7 * margin
        variance = 0.0
        for each, count in rounds:
            size = pool(each, margin)
            stretch = math.exp(min(-float(log_ndtr(margin)) * size, 10.0)) if clones == "truncated" else 1.0
            u = each.noise_multiplier**-2
            variance += count * math.log1p(stretch**2 * each.sample_rate**2 * math.expm1(min(u, 600.0)) / size)
        found = gaussian.compute_epsilon(mu=math.sqrt(variance), delta=left)
        return found if found > 0 else 1e-9 * (margin - 38.0)  # of the margins that cost nothing, the smallest

    margin = float(minimize_scalar(epsilon, bounds=(0.5, 38.0), method="bounded", options={"xatol": 1e-3}).x)
    return None if max(pool(each, margin) for each, _ in rounds) < 1.5 else margin


def _mixture(each: ShuffledRound, margin: float, clones: Clones, budget: float, tail: float) -> Mixture:
    """The round's distribution of R as a mixture over pool sizes; ``budget`` of probability may be lost to rare ones."""
    probability = clone_probability(each.noise_multiplier, margin)
    stretch = 0.0
    if clones == "truncated":
        probability *= float(ndtr(margin))
        stretch = -float(log_ndtr(margin))
    parts = []
    lost = 0.0
    for weight, users, rates in _pools(each, probability, budget):
        if users == 0:
            lost += weight
            continue
        distribution = mean_distribution(
            noise_multiplier=each.noise_multiplier, num_users=users, resolution=RESOLUTION, tail=tail
        )
        for share, (size, rate) in rates:
            if stretch * (size - 1) > _LARGEST_STRETCH:
                lost += weight * share
                continue
            factor = math.exp(stretch * (size - 1))
            scaled = distribution.scaled(rate * factor)
            parts.append((weight * share, scaled))
            if factor > 1:  # atoms pushed below R = 0 count as lost, factor and all
                lost += weight * share * factor * float(distribution.masses[scaled.offsets <= -scaled.centre].sum())
    return Mixture(tuple(parts), lost)


def _pools(
    each: ShuffledRound, probability: float, budget: float
) -> Iterator[tuple[float, int, list[tuple[float, tuple[int, float]]]]]:
    """Yields groups of pool sizes: (probability, users, [(share, (largest size, π))]); users 0 for what is lost."""
    n, gamma = each.num_users, each.sample_rate
    clone = probability
    if each.sampling is None:
        inside = binom(n - 1, clone)
        outside, trials = inside, n - 1
    elif each.sampling == "fixed_size":
        reports = round(n * gamma)
        gamma = reports / n
        inside, outside, trials = binom(reports - 1, clone), binom(reports, clone), reports
    else:
        inside = outside = binom(n - 1, gamma * clone)
        trials = n - 1
    each_way = [_likely_range(distribution.args[0], distribution.args[1], budget / 8) for distribution in (inside, outside)]
    low = int(min(fewest for fewest, _ in each_way))
    high = min(int(max(most for _, most in each_way)) + 1, trials)
    sizes = np.arange(low, high + 2)
    present = gamma * inside.pmf(sizes - 1)
    absent = (1 - gamma) * outside.pmf(sizes) if gamma < 1 else np.zeros(len(sizes))
    weights = present + absent
    rare = gamma * (inside.cdf(low - 2) + inside.sf(high)) + (1 - gamma) * (outside.cdf(low - 1) + outside.sf(high + 1))
    yield float(max(rare, 0.0)), 0, []
    rates, lowest, highest = _membership(each, gamma, clone, sizes, present, weights, budget)
    groups = np.maximum(_rounded_down(sizes), 1)
    for group in np.unique(groups):
        chosen = (groups == group) & (weights > 0)
        total = float(weights[chosen].sum())
        if total == 0:
            continue
        floor, ceiling = float(lowest[chosen].min()), float(highest[chosen].max())
        mean = min(float(weights[chosen] @ rates[chosen]) / total * (1 + 1e-12), ceiling)
        share = 0.0 if ceiling <= floor else min(max((mean - floor) / (ceiling - floor), 0.0), 1.0)
        largest = int(sizes[chosen].max())
        split = [(1 - share, (largest, floor)), (share, (largest, ceiling))] if ceiling > floor else [(1.0, (largest, ceiling))]
        yield total, int(group), [part for part in split if part[0] > 0]
    if each.sampling == "poisson":
        yield budget / 4, 0, []  # the absent users' number outside the range that _membership takes


def _membership(
    each: ShuffledRound, gamma: float, clone: float, sizes: Counts, present: Vector, weights: Vector, budget: float
) -> tuple[Vector, Vector, Vector]:
    """π given the pool's size: its mean and its range over what else is revealed."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(weights > 0, present / np.where(weights > 0, weights, 1.0), 0.0)
    if each.sampling != "poisson" or gamma == 1:
        return mean, mean, mean
    absence = (1 - gamma) / (1 - gamma * clone)
    n = each.num_users
    fewest, _ = _likely_range(np.maximum(n - sizes - 1, 0), absence, budget / 16)
    _, most = _likely_range(np.maximum(n - sizes, 0), absence, budget / 16)
    most = most + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        highest = np.where(sizes > 0, sizes / (sizes + clone * fewest), 0.0)
        lowest = np.where(sizes > 0, sizes / (sizes + clone * most), 0.0)
    return mean, np.minimum(lowest, mean), np.maximum(highest, mean)


def _likely_range(trials: Any, chance: float, probability: float) -> tuple[Any, Any]:
    """Whole numbers outside which a binomial lies with at most ``probability`` on either side."""
    if probability > 1e-12:
        return binom.ppf(probability, trials, chance), binom.isf(probability, trials, chance)
    # Quantiles of less than the rounding of 1 would come out as the number of trials: Bernstein's inequality instead.
    mean = trials * chance
    tail = -math.log(probability)
    reach = tail / 3 + np.sqrt(tail**2 / 9 + 2 * mean * (1 - chance) * tail)
    return np.maximum(np.floor(mean - reach), 0.0), np.minimum(np.ceil(mean + reach), trials)


def _rounded_down(sizes: Counts) -> Counts:
    """Whole numbers with all but their leading bits cleared."""
    bits = np.maximum(np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64) - (_GROUP_BITS - 1), 0)
    return (sizes >> bits) << bits
