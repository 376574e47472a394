r"""Lower bounds on ε from the error counts of a test, at a stated confidence.

An audit runs a mechanism with and without a record, and a test guesses which case it was. Let α be
the rate of false positives (the test says "present" although the record is absent), and β the rate
of false negatives. The test is post-processing, so (ε, δ)-differential privacy implies 1 − β ≤ e^ε
α + δ and 1 − α ≤ e^ε β + δ. Small error rates therefore imply a large ε (Eq. 45 of Yang, Ji and
Xiang's weight shuffling, WS). Clopper-Pearson limits bound α and β from the counts.

>>> bound = epsilon_lower_bound(false_positives=0, false_negatives=500, trials=1000, delta=1e-5)
>>> round(bound.epsilon, 3), bound.confidence
(4.846, 0.95)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import betainccinv, betaincinv, ndtri

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.validation import integer, one_of, open_unit_interval

Method = Literal["clopper_pearson", "gdp"]
Vector = npt.NDArray[np.float64]

METHODS = {
    "clopper_pearson": "error counts",
    "gdp": "error counts, if the trade-off curve is Gaussian",
}

RELATIVE_ERROR = 1e-9
"""The relative amount by which Clopper-Pearson limits and ε are rounded to the safe side.

It exceeds the error of inverting the beta distribution.
"""

RANK_SPACING = 1.07
"""The ratio of consecutive score ranks that are tried as thresholds, from both ends of each sample.

This gives about 800 thresholds for 10⁷ scores.
"""

SELECTION_ERROR = 0.01
"""The threshold is chosen with limits that err at this fraction of the stated error rate.

Otherwise the best of hundreds of thresholds would be one with few errors by chance.
"""


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """A lower bound on the ε of a mechanism, with the stated confidence.

    Attributes:
        epsilon: The bound, rounded down; 0 if the test showed nothing.
        confidence: The minimum probability, over the runs of the audit, that such a bound holds.
        method: ``"clopper_pearson"`` or ``"gdp"`` (which assumes a Gaussian trade-off curve).
        delta: The δ of this ε.
        false_positives: Runs without the record in which the test said "present".
        false_negatives: Runs with the record in which the test said "absent".
        trials: The number of counted runs, ``(without, with)`` the record.
        mu: The lower bound on μ for ``"gdp"``, else None.
    """

    epsilon: float
    confidence: float
    method: Method
    delta: float
    false_positives: int
    false_negatives: int
    trials: tuple[int, int]
    mu: float | None


def epsilon_lower_bound(
    false_positives: int,
    false_negatives: int,
    trials: int | Sequence[int],
    delta: float,
    confidence: float = 0.95,
    *,
    method: Method = "clopper_pearson",
) -> LowerBound:
    r"""Computes a lower bound on ε from the errors of a test that was fixed before these runs.

    Args:
        false_positives: Runs without the record in which the test said "present".
        false_negatives: Runs with the record in which the test said "absent".
        trials: The number of independent runs under each hypothesis, or a pair (runs without the
            record, runs with it). At least 1.
        delta: δ in (0, 1).
        confidence: The confidence of the bound, in (0, 1).
        method: ``"clopper_pearson"``, or ``"gdp"``, which is larger but valid **only if** the
            trade-off curve is that of two Gaussians.

    Returns:
        The bound, rounded down. Without any false positive in n runs it cannot exceed ln(n/3.7) at
        95 % confidence.

    Raises:
        ValueError: If an argument is out of range, or a count exceeds the number of runs.

    Formal Guarantees:
        Over the runs, the bound exceeds the ε of the mechanism at δ with probability at most 1 −
        ``confidence``. Proof: the counts are Bin(n₀, α) and Bin(n₁, β). Each Clopper-Pearson upper
        limit, taken at 1 − (1 − ``confidence``)/2, is below its rate with probability at most (1 −
        ``confidence``)/2. With probability at least ``confidence``, neither is (union bound). Both
        terms of max{ln((1 − α − δ)/β), ln((1 − β − δ)/α), 0} (WS Eq. 45) decrease in α and in β.
        They are then at most their values at the true rates, which are at most ε (see the module).
        For ``"gdp"``, likewise, μ ≥ Φ⁻¹(1 − α) − Φ⁻¹(β) for the true rates, and ε(μ, δ) increases
        with μ (Dong, Roth & Su 2022; Nasr et al. 2023).
    """
    runs = _runs(trials)
    delta = open_unit_interval("delta", delta)
    confidence = open_unit_interval("confidence", confidence)
    one_of("method", method, METHODS)
    false_positives = integer("false_positives", false_positives, minimum=0, maximum=runs[0])
    false_negatives = integer("false_negatives", false_negatives, minimum=0, maximum=runs[1])
    tail = (1 - confidence) / 2
    limit = _bounds(false_positives, false_negatives, runs, delta=delta, tail=tail, method=method)
    value = max(float(limit), 0.0)
    return LowerBound(
        value if method == "clopper_pearson" else _gaussian_epsilon(value, delta),
        confidence=confidence,
        method=method,
        delta=delta,
        false_positives=false_positives,
        false_negatives=false_negatives,
        trials=runs,
        mu=value if method == "gdp" else None,
    )


def audit_scores(
    null_scores: Any,
    alternative_scores: Any,
    *,
    delta: float,
    confidence: float = 0.95,
    method: Method = "clopper_pearson",
) -> LowerBound:
    """Computes a lower bound on ε from one score per run.

    The test is "score > threshold". The first half of both samples chooses the threshold with the
    largest lower bound at a hundredth of the error rate. The errors are counted on the second half.

    Args:
        null_scores: One score per run without the record, shape (n₀,), n₀ ≥ 2: an array, tensor or
            sequence of real numbers, ±∞ allowed. Their order must not depend on the scores, so do
            not sort them.
        alternative_scores: The same for runs with the record, shape (n₁,), n₁ ≥ 2.
        delta: δ in (0, 1).
        confidence: The confidence of the bound, in (0, 1).
        method: ``"clopper_pearson"`` or ``"gdp"``, as in :func:`epsilon_lower_bound`.

    Returns:
        The bound, rounded down. Its counts and ``trials`` are those of the second half.

    Raises:
        ValueError: If an argument is out of range, a score is NaN, or there are too few scores.

    Formal Guarantees:
        That of :func:`epsilon_lower_bound`, if the runs are independent. Given the first half, the
        threshold is a constant for the second half. The guarantee therefore holds for every value
        of the first half, and hence over both halves.
    """
    null = _scores("null_scores", null_scores)
    alternative = _scores("alternative_scores", alternative_scores)
    delta = open_unit_interval("delta", delta)
    confidence = open_unit_interval("confidence", confidence)
    half = len(null) // 2, len(alternative) // 2
    threshold = choose_threshold(
        null[: half[0]], alternative[: half[1]], delta=delta, confidence=confidence, method=method
    )
    return epsilon_lower_bound(
        int(np.count_nonzero(null[half[0] :] > threshold)),
        int(np.count_nonzero(alternative[half[1] :] <= threshold)),
        (len(null) - half[0], len(alternative) - half[1]),
        delta,
        confidence,
        method=method,
    )


def choose_threshold(
    null: Vector, alternative: Vector, *, delta: float, confidence: float, method: Method
) -> float:
    """Returns the threshold with the largest lower bound for these scores."""
    null, alternative = np.sort(null), np.sort(alternative)
    # The largest null score is a candidate, because it has no false positive above it. Larger
    # alternative scores are candidates as well.
    candidates = null[_ranks(len(null))], alternative[_ranks(len(alternative))]
    thresholds = np.unique(np.concatenate(candidates))
    false_positives = len(null) - np.searchsorted(null, thresholds, side="right")
    false_negatives = np.searchsorted(alternative, thresholds, side="right")
    runs, tail = (len(null), len(alternative)), SELECTION_ERROR * (1 - confidence) / 2
    bounds = _bounds(false_positives, false_negatives, runs, delta=delta, tail=tail, method=method)
    return float(thresholds[np.argmax(bounds)])


def upper_limit(count: npt.ArrayLike, trials: int, *, tail: float) -> Vector:
    """Returns the Clopper-Pearson upper limit on a rate, rounded up.

    For any larger rate, the probability of at most ``count`` events is below ``tail``. The
    complement to 1 with its own full precision is ``lower_limit(trials - count, trials)``.
    """
    events = np.asarray(count, dtype=np.float64)
    # With b = 0 the beta distribution is a point mass at 1, for which scipy returns NaN.
    inside = betainccinv(events + 1, np.maximum(trials - events, 0.5), tail)
    return np.where(events >= trials, 1.0, np.minimum(inside * (1 + RELATIVE_ERROR), 1.0))


def lower_limit(count: npt.ArrayLike, trials: int, *, tail: float) -> Vector:
    """Returns the Clopper-Pearson lower limit on a rate, rounded down.

    For any smaller rate, the probability of at least ``count`` events is below ``tail``.
    """
    events = np.asarray(count, dtype=np.float64)
    inside = betaincinv(np.maximum(events, 0.5), trials - events + 1, tail)
    return np.where(events <= 0, 0.0, inside * (1 - RELATIVE_ERROR))


def _bounds(
    false_positives: npt.ArrayLike,
    false_negatives: npt.ArrayLike,
    runs: tuple[int, int],
    *,
    delta: float,
    tail: float,
    method: Method,
) -> Vector:
    """Returns the lower bound on ε (on μ for ``"gdp"``) of each pair of counts, possibly −∞."""
    alpha = upper_limit(false_positives, runs[0], tail=tail)
    beta = upper_limit(false_negatives, runs[1], tail=tail)
    # 1 − α and 1 − β have their own limits: a power of 1e-9 would lose its digits as 1 − β.
    specificity = lower_limit(runs[0] - np.asarray(false_positives), runs[0], tail=tail)
    power = lower_limit(runs[1] - np.asarray(false_negatives), runs[1], tail=tail)
    with np.errstate(divide="ignore"):
        if method == "gdp":  # Each quantile is taken from the tail that keeps its precision.
            best = np.where(alpha < 0.5, -ndtri(alpha), ndtri(specificity)) + np.where(
                beta < 0.5, -ndtri(beta), ndtri(power)
            )
        else:
            best = np.log(
                np.maximum([(specificity - delta) / beta, (power - delta) / alpha], 0.0)
            ).max(axis=0)
    return np.where(best > 0, best * (1 - RELATIVE_ERROR), best)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the ε of μ-Gaussian differential privacy at δ, rounded down."""
    epsilon = gaussian.compute_epsilon(mu=mu, delta=delta)  # Rounded up.
    step = 2 * gaussian.RELATIVE_ERROR * epsilon
    while epsilon > 0 and gaussian.log_delta(mu=mu, epsilon=epsilon) < math.log(delta):
        epsilon, step = max(epsilon - step, 0.0), 2 * step
    return epsilon * (1 - gaussian.RELATIVE_ERROR)


def _ranks(size: int) -> npt.NDArray[np.int64]:
    """Returns ranks from 0 to size − 1, dense at both ends."""
    steps = max(2, math.ceil(math.log(size + 1) / math.log(RANK_SPACING)))
    from_below = np.unique(np.floor(np.geomspace(1, size, steps) + 1e-9).astype(np.int64)) - 1
    return np.unique(np.concatenate([from_below, size - 1 - from_below]))


def _scores(name: str, scores: Any) -> Vector:
    """Returns scores as a 1-D array.

    Raises:
        ValueError: If they are not at least two real numbers.
    """
    if isinstance(scores, torch.Tensor):
        scores = (scores.double() if scores.is_floating_point() else scores).numpy(force=True)
    array = np.asarray(scores)
    if array.dtype.kind not in "fiub" or array.ndim != 1:
        raise ValueError(
            f"{name} must be a 1-D array of real numbers, one per run, got {array.dtype} of shape "
            f"{array.shape}"
        )
    if len(array) < 2:
        raise ValueError(
            f"{name} must have at least 2 scores (the first half chooses the threshold, the second "
            f"is counted), got {len(array)}"
        )
    numbers = array.astype(np.float64, copy=False)
    if np.isnan(numbers).any():
        raise ValueError(
            f"{name} must not contain NaN, got {int(np.isnan(numbers).sum())}: score every run"
        )
    return numbers


def _runs(trials: Any) -> tuple[int, int]:
    """Returns the number of runs without the record and with it."""
    pair = (trials, trials) if np.ndim(trials) == 0 else tuple(trials)
    if len(pair) != 2:
        raise ValueError(
            "trials must be one number or a pair (runs without the record, runs with it), got "
            f"{trials!r}"
        )
    return integer("trials", pair[0]), integer("trials", pair[1])
