r"""Lower bounds on ε from how often a test is wrong, at a stated confidence.

An audit runs a mechanism with and without a record and lets a test guess which it was. As the test
is post-processing, (ε, δ)-differential privacy limits its α = P(says "present" though absent) and β
= P(says "absent" though present): 1 − β ≤ e^ε α + δ and 1 − α ≤ e^ε β + δ. A mechanism whose test
does better has an ε of at least what these say (Eq. 45 of Yang, Ji and Xiang's weight shuffling,
WS). Clopper and Pearson's limits say how large α and β can be, given the counts.

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
    "clopper_pearson": "counts of mistakes",
    "gdp": "counts of mistakes, if the trade-off curve is Gaussian",
}

RELATIVE_ERROR = 1e-9
"""Clopper-Pearson limits and ε are moved to the safe side by this fraction.

It is more than inverting the beta distribution loses.
"""

SPACING = 1.07
"""Thresholds are tried at score ranks this far apart, from both ends of both samples.

These are some 800 for 10⁷ scores.
"""

CAUTION = 0.01
"""The threshold is chosen with limits that err at this fraction of the rate.

The largest of hundreds is else a lucky one.
"""


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """A lower bound on a mechanism's ε, true with the stated confidence.

    Attributes:
        epsilon: The bound, rounded down; 0 if the test showed nothing.
        confidence: The probability, over the audit's runs, with which such a bound is true, or
            more.
        method: ``"clopper_pearson"`` or ``"gdp"`` (which assumes a Gaussian trade-off curve).
        delta: The δ at which the mechanism's ε is meant.
        false_positives: Runs without the record in which the test saw it.
        false_negatives: Runs with the record in which the test did not see it.
        trials: Runs counted, ``(without, with)`` the record.
        mu: For ``"gdp"`` the lower bound on μ, else None.
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
    r"""Computes a lower bound on ε from the mistakes of a test that was fixed before these runs.

    Args:
        false_positives: Runs without the record in which the test said "present".
        false_negatives: Runs with the record in which the test said "absent".
        trials: Independent runs under each hypothesis, or a pair: runs without the record, runs
            with it. At least 1.
        delta: δ in (0, 1).
        confidence: In (0, 1).
        method: ``"clopper_pearson"``, or ``"gdp"``, larger but valid **only if** the trade-off
            curve is that of two Gaussians.

    Returns:
        The bound, rounded down. With no false positive in n runs at 95 % confidence it cannot
        exceed ln(n/3.7).

    Raises:
        ValueError: If an argument is out of range or a count exceeds its runs.

    Formal Guarantees:
        Over the runs, the bound exceeds the mechanism's ε at δ with probability 1 − ``confidence``
        at most. Proof: the counts are Bin(n₀, α) and Bin(n₁, β). Each Clopper-Pearson upper limit,
        taken at 1 − (1 − ``confidence``)/2, is below its rate with probability (1 −
        ``confidence``)/2 at most, so with probability ``confidence`` or more neither is (union
        bound). Then both terms of max{ln((1 − α − δ)/β), ln((1 − β − δ)/α), 0} (WS Eq. 45), which
        fall in α and in β, are at most what they are at the true rates, and that is at most ε (see
        the module). Under ``"gdp"`` likewise μ ≥ Φ⁻¹(1 − α) − Φ⁻¹(β) for the true rates, and ε(μ,
        δ) grows with μ (Dong, Roth & Su 2022; Nasr et al. 2023).
    """
    runs = _runs(trials)
    delta = open_unit_interval("delta", delta)
    confidence = open_unit_interval("confidence", confidence)
    one_of("method", method, METHODS)
    false_positives = integer("false_positives", false_positives, minimum=0, maximum=runs[0])
    false_negatives = integer("false_negatives", false_negatives, minimum=0, maximum=runs[1])
    tail = (1 - confidence) / 2
    value = max(
        float(_rank(false_positives, false_negatives, runs, delta=delta, tail=tail, method=method)),
        0.0,
    )
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

    The test is "score > threshold". The first half of both samples chooses the threshold at which
    *its* lower bound, at a hundredth of the error, is largest (one with few mistakes by mere luck
    has wide limits); the second half is counted.

    Args:
        null_scores: One score per run without the record, shape (n₀,), n₀ ≥ 2: an array, tensor or
            sequence of real numbers, ±∞ allowed, in an order that does not depend on the scores (do
            not sort them).
        alternative_scores: The same for runs with the record, shape (n₁,), n₁ ≥ 2.
        delta: δ in (0, 1).
        confidence: In (0, 1).
        method: ``"clopper_pearson"`` or ``"gdp"``, as in :func:`epsilon_lower_bound`.

    Returns:
        The bound, rounded down; its counts and ``trials`` are those of the second half.

    Raises:
        ValueError: If an argument is out of range, a score is NaN, or there are too few.

    Formal Guarantees:
        As :func:`epsilon_lower_bound`, if the runs are independent: given the first half the
        threshold is a constant for the second, so the guarantee holds for every value of the first
        half, and hence over both.
    """
    null, alternative = (
        _scores("null_scores", null_scores),
        _scores("alternative_scores", alternative_scores),
    )
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
    """Returns the threshold at which these scores' own lower bound is largest."""
    null, alternative = np.sort(null), np.sort(alternative)
    # The largest null score is a candidate: above it lies no false positive. So are alternatives
    # beyond it.
    thresholds = np.unique(
        np.concatenate([null[_ranks(len(null))], alternative[_ranks(len(alternative))]])
    )
    false_positives = len(null) - np.searchsorted(null, thresholds, side="right")
    false_negatives = np.searchsorted(alternative, thresholds, side="right")
    runs, tail = (len(null), len(alternative)), CAUTION * (1 - confidence) / 2
    scores = _rank(false_positives, false_negatives, runs, delta=delta, tail=tail, method=method)
    return float(thresholds[np.argmax(scores)])


def upper_limit(count: npt.ArrayLike, trials: int, *, tail: float) -> Vector:
    """Returns Clopper and Pearson's upper limit on a rate.

    At any larger rate so few events have a probability below ``tail``. Rounded up. Its complement,
    rounded down to as many digits, is ``lower_limit(trials - count, trials)``.
    """
    events = np.asarray(count, dtype=np.float64)
    # With b = 0 the beta distribution is a point at 1; scipy calls it NaN.
    inside = betainccinv(events + 1, np.maximum(trials - events, 0.5), tail)
    return np.where(events >= trials, 1.0, np.minimum(inside * (1 + RELATIVE_ERROR), 1.0))


def lower_limit(count: npt.ArrayLike, trials: int, *, tail: float) -> Vector:
    """Returns Clopper and Pearson's lower limit on a rate.

    At any smaller rate so many events have a probability below ``tail``. Rounded down.
    """
    events = np.asarray(count, dtype=np.float64)
    inside = betaincinv(np.maximum(events, 0.5), trials - events + 1, tail)
    return np.where(events <= 0, 0.0, inside * (1 - RELATIVE_ERROR))


def _rank(
    false_positives: npt.ArrayLike,
    false_negatives: npt.ArrayLike,
    runs: tuple[int, int],
    *,
    delta: float,
    tail: float,
    method: Method,
) -> Vector:
    """Returns each pair of counts' lower bound on ε, or on μ with ``"gdp"``, or −∞."""
    alpha = upper_limit(false_positives, runs[0], tail=tail)
    beta = upper_limit(false_negatives, runs[1], tail=tail)
    # 1 − α and 1 − β from their own limits: a power of 1e-9 would not survive a subtraction from 1.
    specificity = lower_limit(runs[0] - np.asarray(false_positives), runs[0], tail=tail)
    power = lower_limit(runs[1] - np.asarray(false_negatives), runs[1], tail=tail)
    with np.errstate(divide="ignore"):
        if method == "gdp":  # each quantile where it keeps its digits
            best = np.where(alpha < 0.5, -ndtri(alpha), ndtri(specificity)) + np.where(
                beta < 0.5, -ndtri(beta), ndtri(power)
            )
        else:
            best = np.log(
                np.maximum([(specificity - delta) / beta, (power - delta) / alpha], 0.0)
            ).max(axis=0)
    return np.where(best > 0, best * (1 - RELATIVE_ERROR), best)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns ε of μ-Gaussian differential privacy at δ, rounded down."""
    epsilon = gaussian.compute_epsilon(mu=mu, delta=delta)  # rounded up
    step = 2 * gaussian.RELATIVE_ERROR * epsilon
    while epsilon > 0 and gaussian.log_delta(mu=mu, epsilon=epsilon) < math.log(delta):
        epsilon, step = max(epsilon - step, 0.0), 2 * step
    return epsilon * (1 - gaussian.RELATIVE_ERROR)


def _ranks(size: int) -> npt.NDArray[np.int64]:
    """Returns positions 0, …, size − 1, dense at both ends."""
    steps = max(2, math.ceil(math.log(size + 1) / math.log(SPACING)))
    from_below = np.unique(np.floor(np.geomspace(1, size, steps) + 1e-9).astype(np.int64)) - 1
    return np.unique(np.concatenate([from_below, size - 1 - from_below]))


def _scores(name: str, scores: Any) -> Vector:
    """Returns scores as a row of at least two real numbers, or refuses them."""
    if isinstance(scores, torch.Tensor):
        scores = (scores.double() if scores.is_floating_point() else scores).numpy(force=True)
    array = np.asarray(scores)
    if array.dtype.kind not in "fiub" or array.ndim != 1:
        raise ValueError(
            f"{name} must be a row of real numbers, one per run, got {array.dtype} of shape "
            f"{array.shape}: pass a 1-D array"
        )
    if len(array) < 2:
        raise ValueError(
            f"{name} must hold at least 2 scores (one half chooses, one half counts), got "
            f"{len(array)}"
        )
    numbers = array.astype(np.float64, copy=False)
    if np.isnan(numbers).any():
        raise ValueError(
            f"{name} must hold no NaN, got {int(np.isnan(numbers).sum())} of them: score every run"
        )
    return numbers


def _runs(trials: Any) -> tuple[int, int]:
    """Returns the numbers of runs without the record and with it."""
    pair = (trials, trials) if np.ndim(trials) == 0 else tuple(trials)
    if len(pair) != 2:
        raise ValueError(
            "trials must be one number or a pair (runs without the record, runs with it), got "
            f"{trials!r}"
        )
    return integer("trials", pair[0]), integer("trials", pair[1])
