"""ε and noise from plain numbers, without a model.

>>> from opacus_shuffle import compute_noise_multiplier
>>> sigma = compute_noise_multiplier("shuffled_checkin", target_epsilon=1.0, target_delta=1e-5, num_users=60_000,
...                                  steps=1000, sample_rate=0.1, bound="pair")
>>> round(sigma, 3)
0.531
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from opacus_shuffle.accountants import (
    Guarantee,
    PrivacyAssumptionWarning,
    PrivacyBound,
    compute_bound,
)
from opacus_shuffle.accountants.mechanisms import MECHANISMS, Mechanism, ShuffledWeights
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.analysis.calibration import smallest_noise_multiplier
from opacus_shuffle.analysis.fenton_wilkinson import Dimension
from opacus_shuffle.core.validation import integer, one_of, open_unit_interval, positive, reject_unknown


def privacy_bound(
    mechanism: str,
    *,
    noise_multiplier: float,
    num_users: int,
    steps: int,
    delta: float,
    sample_rate: float = 1.0,
    bound: str = "published",
    adjacency: str = "zero_out",
    orders: Iterable[float] | None = None,
    dimension: Dimension | None = None,
    clip: float | None = None,
    batch_clip: float | None = None,
) -> PrivacyBound:
    """:func:`compute_epsilon` with its meaning attached, and no warning. At least one step."""
    ran = _mechanism(mechanism, noise_multiplier, num_users, sample_rate, dimension, clip, batch_clip)
    rounds = [(ran, integer("steps", steps))]
    return compute_bound(rounds, delta=delta, bound=bound, adjacency=adjacency, orders=orders)


def privacy_report(
    mechanism: str,
    *,
    noise_multiplier: float,
    num_users: int,
    steps: int,
    delta: float,
    sample_rate: float = 1.0,
    adjacency: str = "zero_out",
    dimension: Dimension | None = None,
    clip: float | None = None,
    batch_clip: float | None = None,
    **unknown: Any,
) -> PrivacyReport:
    """Every bound on ``steps`` rounds, and what the same noise would give under other trust models: print or plot it.

    Args:
        mechanism: As :func:`compute_epsilon`, like every argument.
        noise_multiplier: See there.
        num_users: See there.
        steps: Rounds, at least 1.
        delta: See there.
        sample_rate: See there.
        adjacency: ``"zero_out"``, or ``"replace"``, for which ``published`` and ``pair`` have no value.
        dimension: See there.
        clip: See there.
        batch_clip: See there.
        **unknown: Refused.

    Raises:
        ValueError: If an argument is out of range or unknown.
    """
    reject_unknown("privacy_report", unknown)
    ran = _mechanism(mechanism, noise_multiplier, num_users, sample_rate, dimension, clip, batch_clip)
    return PrivacyReport([(ran, integer("steps", steps))], delta=delta, adjacency=adjacency)


def compute_epsilon(
    mechanism: str,
    *,
    noise_multiplier: float,
    num_users: int,
    steps: int,
    delta: float,
    sample_rate: float = 1.0,
    bound: str = "published",
    adjacency: str = "zero_out",
    orders: Iterable[float] | None = None,
    dimension: Dimension | None = None,
    clip: float | None = None,
    batch_clip: float | None = None,
    **unknown: Any,
) -> float:
    """ε of ``steps`` rounds of a mechanism at δ.

    Args:
        mechanism: ``"shuffle_gauss"``, ``"subsampled_shuffle"``, ``"shuffled_checkin"`` or ``"shuffled_fw"``.
        noise_multiplier: Local σ: one report's noise over the clipping norm. Above 0. For ``"shuffled_fw"``, which is DP-SGD
            with shuffled weights, the noise of the **sum** over the clipping norm.
        num_users: n, the whole population; for ``"shuffle_gauss"`` the users of one round.
        steps: Rounds, at least 0.
        delta: δ in (0, 1).
        sample_rate: γ in (0, 1]; m = round(γ·n) for ``"subsampled_shuffle"``; 1 for ``"shuffle_gauss"``.
        bound: ``"published"``, ``"pair"``, ``"certified"`` or ``"certified_sharp"``; for ``"shuffled_fw"``
            ``"published_optimised"`` in place of the last.
        adjacency: ``"zero_out"``, or ``"replace"`` with the certified bounds.
        orders: Rényi orders in place of the adaptive grid, for ``"published"`` of the first three mechanisms.
        dimension: ``"shuffled_fw"`` alone, and needed there: how many coordinates are permuted, or a sequence of these numbers,
            one per layer, for WS's theorem layer by layer.
        clip: ``"shuffled_fw"`` alone: c, the norm of one record's clipped gradient, by default 1.
        batch_clip: ``"shuffled_fw"`` alone: c′, the norm that a batch's sum is clipped to, in the units of ``clip``; by
            default c.
        **unknown: Refused.

    Returns:
        ε, rounded up; 0 if ``steps`` is 0.

    Raises:
        ValueError: If an argument is out of range or unknown.

    Warns:
        PrivacyAssumptionWarning: If the bound does not cover every data set.

    Formal Guarantees:
        ``"certified"`` and ``"certified_sharp"`` cover every data set. ``"published"`` and ``"pair"`` are about one pair of data
        sets: everyone else reports zero and one record at the clipping norm becomes zero (SG ICLR Theorems 1–3). For
        ``"shuffled_fw"``, ``"published"`` is an estimate (WS Theorem 6), and below the exact ``"pair"`` of a pair it should cover.
    """
    reject_unknown("compute_epsilon", unknown)
    # A round of no effect on the answer lets the validators see every argument even when nothing ran.
    answer = privacy_bound(
        mechanism,
        noise_multiplier=noise_multiplier,
        num_users=num_users,
        steps=max(1, integer("steps", steps, minimum=0)),
        delta=delta,
        sample_rate=sample_rate,
        bound=bound,
        adjacency=adjacency,
        orders=orders,
        dimension=dimension,
        clip=clip,
        batch_clip=batch_clip,
    )
    _warn_of_assumption(answer, "compute_epsilon")
    return answer.epsilon if steps else 0.0


def compute_noise_multiplier(
    mechanism: str,
    *,
    target_epsilon: float,
    target_delta: float,
    num_users: int,
    steps: int,
    sample_rate: float = 1.0,
    bound: str = "published",
    adjacency: str = "zero_out",
    dimension: Dimension | None = None,
    clip: float | None = None,
    batch_clip: float | None = None,
    **unknown: Any,
) -> float:
    """The smallest local σ whose ε stays within ``target_epsilon``, rounded up.

    Args:
        mechanism: As :func:`compute_epsilon`, like every argument not named here.
        target_epsilon: ε to stay within, above 0.
        target_delta: δ in (0, 1).
        num_users: See there.
        steps: Rounds, at least 1.
        sample_rate: See there.
        bound: See there.
        adjacency: See there.
        dimension: See there.
        clip: See there.
        batch_clip: See there.
        **unknown: Refused.

    Returns:
        Local σ (``"shuffled_fw"``: that of the sum), at least 1e-3.

    Raises:
        ValueError: If an argument is out of range or unknown, or no σ meets the target.

    Warns:
        PrivacyAssumptionWarning: If the bound does not cover every data set.
    """
    reject_unknown("compute_noise_multiplier", unknown)
    positive("target_epsilon", target_epsilon)
    target_delta = open_unit_interval("target_delta", target_delta)

    def answer(noise_multiplier: float) -> PrivacyBound:
        return privacy_bound(
            mechanism,
            noise_multiplier=noise_multiplier,
            num_users=num_users,
            steps=steps,
            delta=target_delta,
            sample_rate=sample_rate,
            bound=bound,
            adjacency=adjacency,
            dimension=dimension,
            clip=clip,
            batch_clip=batch_clip,
        )

    sigma = smallest_noise_multiplier(lambda s: answer(s).epsilon, target_epsilon=target_epsilon)
    _warn_of_assumption(answer(sigma), "compute_noise_multiplier")
    return sigma


def _mechanism(
    name: str,
    noise_multiplier: float,
    num_users: int,
    sample_rate: float,
    dimension: Dimension | None,
    clip: float | None,
    batch_clip: float | None,
) -> Mechanism:
    """The mechanism of that name."""
    kind = MECHANISMS[one_of("mechanism", name, MECHANISMS)]
    weights = {"dimension": dimension, "clip": clip, "batch_clip": batch_clip}
    given = {key: value for key, value in weights.items() if value is not None}
    if given and not issubclass(kind, ShuffledWeights):
        raise ValueError(f"{name} has no {', '.join(given)}: leave them out, or use mechanism='shuffled_fw'")
    return kind(noise_multiplier=noise_multiplier, num_users=num_users, sample_rate=sample_rate, **given)


def _warn_of_assumption(answer: PrivacyBound, function: str) -> None:
    """One sentence, the same for every call, so that Python shows it once per place in the user's code."""
    if answer.guarantee is not Guarantee.PROVED:
        warnings.warn(
            f"{function} with bound={answer.bound!r} covers {answer.covers}, which is no guarantee for every data set; "
            "bound='certified' is one",
            PrivacyAssumptionWarning,
            stacklevel=3,
        )
