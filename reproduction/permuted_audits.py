r"""Audits of the permuted Gaussian, the mechanism of weight shuffling.

Weight shuffling is by Yang, Ji and Xiang (WS). WS Definition 6 calls this mechanism the shuffled
Gaussian. WS Theorem 6 claims an ε of 0.5 for this run:

>>> result = audit_permuted_gaussian(
...     noise_multiplier=0.27372, dimension=85_800_000, steps=500, sample_rate=0.02, delta=5e-6,
...     pair="all_but_one", trials=20_000, generator=torch.Generator().manual_seed(0))
>>> [claim.bound for claim in result.contradicted]
['published']
>>> result.largest.lower.epsilon > 7
True
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri_exp

from opacus_shuffle.accountants.compute import compute_noise_multiplier
from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.audit.lower_bounds import audit_scores
from opacus_shuffle.audit.mechanism_audits import (
    MIN_TRIALS,
    check_trials,
    chunks,
    detection_limit,
    finite_bounds,
    numpy_generator,
)
from opacus_shuffle.audit.result import AuditResult, Finding
from opacus_shuffle.core.rounding import plural
from opacus_shuffle.core.validation import integer, one_of

Vector = npt.NDArray[np.float64]

PAIRS = {
    "one_coordinate": "the record's gradient is nonzero in one coordinate only",
    "all_but_one": "the record's gradient is 0 in one coordinate and the same in all others",
    "oblique": "the record's gradient is at 46 degrees to one with equal coordinates",
}

DELTA, SAMPLE_RATE, DIMENSION = 5e-6, 0.02, 85_800_000
"""δ, q = 1000/50,000 and d of the ViT on CIFAR-100 (WS sections VI-A and VI-F)."""

MAX_SUMS = 10**8
"""The number of sums drawn under each hypothesis, which takes ten seconds of one core."""


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
    r"""Runs the mechanism with and without the record, and returns what one test shows.

    In each step the adversary sees d noised coordinates in uniformly random order. For
    ``"one_coordinate"`` the test statistic is the largest coordinate of all steps. It is drawn from
    its closed distribution: with K ~ Bin(T, q) steps in which the record participates, it is the
    larger of the maximum of T·d − K coordinates of noise and the maximum of K coordinates around c.
    For the other pairs the statistic is the likelihood ratio of the T sums of coordinates. A better
    test can only show a larger ε.

    Args:
        noise_multiplier: σ/c of the **sum**, as in DP-SGD.
        dimension: d, the number of coordinates that are permuted among themselves, up to 2⁵³.
        delta: δ in (0, 1).
        steps: T.
        sample_rate: q, the probability that the record participates in a step (Poisson sampling,
            unknown to the adversary).
        batch_clip: c′/c, the norm to which the sum is clipped before the noise is added. A value
            below 1 shrinks the record's gradient.
        pair: ``"one_coordinate"``, ``"all_but_one"`` or ``"oblique"``.
        trials: Runs under each hypothesis, at least 1000, half of them to choose the test. The
            default is 10⁷. For the last two pairs it is limited to 2·10⁸ random numbers, one per
            step.
        confidence: The confidence of the finding, in (0, 1).
        generator: A CPU generator for repeatable audits. The default is a secret generator.

    Returns:
        The claims ``published`` (WS Theorem 6, composed), ``pair`` (exact for the first pair, which
        alone has it) and ``certified`` (that of DP-SGD), and one finding.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        With probability ``confidence``, the ε of the pair at δ is at least the finding, for an
        adversary who sees the permuted gradients and nothing else. The ε of any bound for all data
        sets that satisfy these conditions is then at least the finding as well.
    """
    dimension, steps = integer("dimension", dimension), integer("steps", steps)
    mechanism = ShuffledWeights(
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        dimension=dimension,
        batch_clip=batch_clip,
    )
    rate = mechanism.sample_rate
    one_of("pair", pair, PAIRS)
    single = pair == "one_coordinate"
    if not single and dimension < 2:
        raise ValueError(
            f"pair={pair!r} needs a dimension of at least 2, got {dimension}: use 'one_coordinate'"
        )
    if trials is None:
        trials = 10_000_000 if single else min(10_000_000, max(MIN_TRIALS, 100_000_000 // steps))
    delta, trials, confidence = check_trials(
        delta, trials, confidence, draws=1 if single else steps
    )
    run = {"steps": steps, "sample_rate": rate, "trials": trials, "rng": numpy_generator(generator)}
    shift = mechanism.record_norm / mechanism.noise_multiplier
    if single:
        scores = largest_coordinates(shift=shift, dimension=dimension, **run)
    else:
        equal = math.sqrt((dimension - 1) / dimension)
        cosine = equal if pair == "all_but_one" else math.cos(math.radians(46))
        scores = summed_coordinates(mean=shift * cosine, **run)
    names = ("published", "pair", "certified") if single else ("published", "certified")
    claims = finite_bounds([(mechanism, steps)], names, delta=delta)
    finding = Finding(
        "largest coordinate" if single else "sum of coordinates",
        audit_scores(*scores, delta=delta, confidence=confidence),
        "sees the noised gradient of every step, its coordinates in random order, and knows all "
        "other records",
    )
    return AuditResult(
        f"permuted Gaussian, noise multiplier {mechanism.noise_multiplier:.6g}, dimension "
        f"{dimension:,}, {plural(steps, 'step')}"
        + (f", sample rate {rate:.4g}" if rate < 1 else ""),
        delta,
        claims,
        (finding,),
        (
            f"Audited pair: the gradients of all other records add up to zero, and {PAIRS[pair]}, "
            "with the clipping norm as its length.",
            *detection_limit(claims, trials, delta, confidence),
        ),
    )


def audit_published_setting(
    *,
    target_epsilon: float = 0.5,
    steps: int = 500,
    trials: int = 10_000_000,
    pair: str = "one_coordinate",
    seed: int | None = None,
) -> AuditResult:
    """Audits the ViT's run with the noise that WS Theorem 6 asks for.

    For all pairs except ``"one_coordinate"``, a trial takes one random number per step, and few
    trials show a large ε. ``trials`` is therefore limited to 10⁸/steps.
    """
    run: dict[str, Any] = {
        "steps": steps,
        "sample_rate": SAMPLE_RATE,
        "dimension": DIMENSION,
        "batch_clip": 1.0,
    }
    sigma = compute_noise_multiplier(
        "shuffled_fw",
        target_epsilon=target_epsilon,
        target_delta=DELTA,
        num_users=round(1 / SAMPLE_RATE),
        bound="published",
        **run,
    )
    if pair != "one_coordinate":
        trials = min(trials, max(MIN_TRIALS, MAX_SUMS // steps))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return audit_permuted_gaussian(
        noise_multiplier=sigma, delta=DELTA, pair=pair, trials=trials, generator=generator, **run
    )


def largest_coordinates(
    *,
    shift: float,
    dimension: int,
    steps: int,
    sample_rate: float,
    trials: int,
    rng: np.random.Generator,
) -> tuple[Vector, Vector]:
    """Draws the largest coordinate of each run over all steps, without and with the record.

    The coordinates are in units of the noise.
    """
    coordinates = float(steps) * dimension
    null = largest_normal(coordinates, trials, rng)
    shifted = rng.binomial(steps, sample_rate, trials)
    noise = largest_normal(coordinates - shifted, trials, rng)
    return null, np.maximum(noise, shift + largest_normal(shifted, trials, rng))


def largest_normal(count: npt.ArrayLike, size: int, rng: np.random.Generator) -> Vector:
    """Draws the largest of ``count`` standard normals ``size`` times; −∞ if ``count`` is 0.

    ``count`` is one number, or one number per draw. The maximum is Φ⁻¹(U^{1/count}), which takes
    one random number for any count. With the exponential E = −log U it is the quantile whose
    logarithm is −E/count. Inverting log Φ keeps full precision where Φ itself rounds to 1.
    """
    exponential = rng.standard_exponential(size)
    with np.errstate(divide="ignore"):
        return ndtri_exp(-exponential / np.asarray(count, dtype=np.float64))


def summed_coordinates(
    *, mean: float, steps: int, sample_rate: float, trials: int, rng: np.random.Generator
) -> tuple[Vector, Vector]:
    """Draws the log likelihood ratio of the sums of each run, without and with the record.

    The sum of a step is N(0, 1). With the record it is N(``mean``, 1) with probability
    ``sample_rate``.
    """
    totals = np.zeros(trials), np.zeros(trials)
    for present, total in zip((False, True), totals, strict=True):
        for chunk in chunks(trials, steps):
            sums = rng.standard_normal((chunk.stop - chunk.start, steps))
            if present:
                sums += mean * (rng.random(sums.shape) < sample_rate)
            ratios = mean * sums - mean**2 / 2
            if sample_rate < 1:
                ratios = np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + ratios)
            total[chunk] = ratios.sum(axis=1)
    return totals
