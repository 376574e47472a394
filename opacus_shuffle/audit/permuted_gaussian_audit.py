r"""Audits of the permuted Gaussian of weight shuffling (WS, Yang, Ji and Xiang; Definition 6 there calls it shuffled).

All pairs meet every condition of WS Theorem 6: f = 0, all other gradients adding up to nothing, and the record's has norm c. It
is

* ``"one_coordinate"``: f′ = c·e₁, of which the largest of the permuted coordinates tells;
* ``"all_but_one"``: f′ = c·(0, 1, …, 1)/√(d − 1), of which the *sum* of the coordinates tells, as it does not change by
  permuting: N(μ, 1) in units of its noise, μ = √((d−1)/d)·c/σ. That is DP-SGD itself with σ larger by 1/2d;
* ``"oblique"``: any f′ at 46° to (1, …, 1), of which the sum still tells μ = cos 46°·c/σ.

The proof of WS Theorem 6 sets aside gradients whose entries are all equal, and its Appendix D those within 45° of that, as
almost impossible. The first pair and the last are neither.

>>> result = audit_permuted_gaussian(noise_multiplier=0.27372, dimension=85_800_000, steps=500, sample_rate=0.02, delta=5e-6,
...                                  pair="all_but_one", trials=20_000, generator=torch.Generator().manual_seed(0))
>>> [claim.name for claim in result.contradicted]  # WS Theorem 6 says 0.5
['published']
>>> round(float(result.largest.lower))
7
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri_exp

from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.audit.lower_bounds import audit_scores
from opacus_shuffle.audit.mechanism_audits import chunks, claimed, common, numpy_generator, plural, reach
from opacus_shuffle.audit.result import AuditResult, Finding
from opacus_shuffle.core.validation import integer, one_of

Vector = npt.NDArray[np.float64]

PAIRS = {
    "one_coordinate": "the record's lies in one coordinate, at the clipping norm",
    "all_but_one": "the record's is 0 in one coordinate and the same in all others, at the clipping norm",
    "oblique": "the record's is at 46 degrees to one with equal coordinates, at the clipping norm",
}
_RUNS = 10_000_000
_DRAWS = 200_000_000
"""Random numbers that the sums take by default, both hypotheses together: some ten seconds of one core."""


def audit_permuted_gaussian(
    *,
    noise_multiplier: float,
    dimension: int,
    delta: float,
    steps: int = 1,
    sample_rate: float = 1.0,
    batch_clip: float = 1.0,
    pair: str = "one_coordinate",
    trials: int | None = None,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> AuditResult:
    r"""Runs the mechanism with and without the record, and shows what one test tells.

    Per step the adversary sees d noised coordinates in uniformly random order. ``"one_coordinate"``: the test goes by the
    largest coordinate of all steps, drawn from its closed distribution: with K ~ Bin(T, q) steps that the record takes part in,
    the largest of T·d − K coordinates of noise, and the largest of K around c. Else it goes by the likelihood ratio of the T
    sums of coordinates. A better test can only show a larger ε.

    Args:
        noise_multiplier: σ/c, of the **sum** (as DP-SGD's).
        dimension: d, coordinates that are permuted among themselves, up to 2⁵³.
        delta: δ in (0, 1).
        steps: T.
        sample_rate: q, with which the record takes part in a step (Poisson sampling; the adversary is not told).
        batch_clip: c′/c, the norm that the sum is clipped to before the noise: below 1 it shrinks the record's gradient.
        pair: ``"one_coordinate"``, ``"all_but_one"`` or ``"oblique"``.
        trials: Runs under each hypothesis, at least 1000, half of them to choose the test. By default 10⁷, for the other two
            pairs no more than take 2·10⁸ random numbers, one per step.
        confidence: In (0, 1).
        generator: A CPU generator, for repeatable audits; by default a secret one.

    Returns:
        The claims ``published`` (WS Theorem 6, composed), ``pair`` (the first pair, exactly; not with the second) and
        ``certified`` (DP-SGD's own), and one finding.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        With probability ``confidence`` the pair's ε at δ, and so that of any bound for all data sets that satisfy these
        conditions, is at least the finding, for an adversary who sees the permuted gradients and nothing else.
    """
    dimension, steps = integer("dimension", dimension), integer("steps", steps)
    mechanism = ShuffledWeights(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, dimension=dimension, batch_clip=batch_clip
    )
    rate = mechanism.sample_rate
    one_of("pair", pair, PAIRS)
    single = pair == "one_coordinate"
    if not single and dimension < 2:
        raise ValueError(f"pair={pair!r} needs a dimension of at least 2, got {dimension}: use 'one_coordinate'")
    if trials is None:
        trials = _RUNS if single else min(_RUNS, max(1000, _DRAWS // (2 * steps)))
    delta, trials, confidence = common(delta, trials, confidence, draws=1 if single else steps)
    rng = numpy_generator(generator)
    shift = mechanism.record_norm / mechanism.noise_multiplier
    test = "largest coordinate" if single else "sum of coordinates"
    if single:
        scores = largest_coordinates(shift=shift, dimension=dimension, steps=steps, sample_rate=rate, trials=trials, rng=rng)
    else:
        mean = shift * (math.sqrt((dimension - 1) / dimension) if pair == "all_but_one" else math.cos(math.radians(46)))
        scores = summed_coordinates(mean=mean, steps=steps, sample_rate=rate, trials=trials, rng=rng)
    bounds = ("published", "pair", "certified") if single else ("published", "certified")
    claims = claimed([(mechanism, steps)], bounds, delta=delta)
    sees = "sees the noised gradient of every step, its coordinates in random order, and knows all other records"
    return AuditResult(
        f"permuted Gaussian, noise multiplier {mechanism.noise_multiplier:.6g}, dimension {dimension:,}, "
        + plural(steps, "step")
        + (f", sample rate {rate:.4g}" if rate < 1 else ""),
        delta,
        claims,
        (Finding(test, audit_scores(*scores, delta=delta, confidence=confidence), sees),),
        (f"Audited: the gradients of all others add up to zero, {PAIRS[pair]}.", *reach(claims, trials, delta, confidence)),
    )


def largest_coordinates(
    *, shift: float, dimension: int, steps: int, sample_rate: float, trials: int, rng: np.random.Generator
) -> tuple[Vector, Vector]:
    """Draws the largest coordinate of all steps in units of the noise, per run, without the record and with it."""
    coordinates = float(steps) * dimension
    null, alternative = np.empty(trials), np.empty(trials)
    for part in chunks(trials):
        size = part.stop - part.start
        null[part] = largest_normal(coordinates, size, rng)
        shifted = rng.binomial(steps, sample_rate, size)
        noise = largest_normal(coordinates - shifted, size, rng)
        alternative[part] = np.maximum(noise, shift + largest_normal(shifted, size, rng))
    return null, alternative


def largest_normal(count: npt.ArrayLike, size: int, rng: np.random.Generator) -> Vector:
    """Draws ``size`` times the largest of ``count`` (one number, or one per draw) standard normals; −∞ of none at all.

    It is Φ⁻¹(U^{1/count}): one random number, however large the count is. With the exponential E = −log U that is the quantile
    whose logarithm is −E/count, and inverting log Φ loses nothing where Φ itself rounds to 1.
    """
    exponential = rng.standard_exponential(size)
    with np.errstate(divide="ignore"):
        return ndtri_exp(-exponential / np.asarray(count, dtype=np.float64))


def summed_coordinates(
    *, mean: float, steps: int, sample_rate: float, trials: int, rng: np.random.Generator
) -> tuple[Vector, Vector]:
    """Draws the log likelihood ratio of all steps' sums, N(0, 1) against N(``mean``, 1) with rate q, per run, both ways."""
    log_absent = math.log(1 - sample_rate) if sample_rate < 1 else -math.inf
    totals = np.zeros(trials), np.zeros(trials)
    for present, total in zip((False, True), totals, strict=True):
        for part in chunks(trials, steps):
            sums = rng.standard_normal((part.stop - part.start, steps))
            if present:
                sums += mean * (rng.random(sums.shape) < sample_rate)
            ratios = mean * sums - mean**2 / 2
            total[part] = np.sum(np.logaddexp(log_absent, math.log(sample_rate) + ratios), axis=1)
    return totals
