"""Computes ε, and noise for a budget, from plain numbers without a model.

>>> from opacus_shuffle import ShuffledCheckIn, compute_epsilon, compute_noise_multiplier
>>> run = ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1)
>>> round(compute_epsilon(run, steps=5540, delta=1e-5), 3)
0.114
>>> sigma = compute_noise_multiplier(
...     "shuffle_gauss", target_epsilon=1.0, target_delta=1e-5, num_users=400, steps=10
... )
>>> round(sigma, 3)
2.25
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from scipy.optimize import minimize_scalar

from opacus_shuffle.accountants.bounds.registry import compute_bound, find_bound
from opacus_shuffle.accountants.calibrate import estimated_noise, noise_within, rounds_at
from opacus_shuffle.accountants.mechanism import MECHANISMS, Mechanism
from opacus_shuffle.accountants.report import PrivacyReport, drowned, large_delta
from opacus_shuffle.core.guarantees import Guarantee, PrivacyAssumptionWarning, PrivacyBound
from opacus_shuffle.core.validation import integer, one_of, open_unit_interval

_RATES = (1e-3, 0.999)
"""The range of rates that :func:`best_sample_rate` searches."""


def privacy_bound(
    mechanism: Mechanism | str,
    *,
    steps: int,
    delta: float,
    bound: str = "certified",
    adjacency: str = "zero_out",
    orders: Iterable[float] | None = None,
    **fields: Any,
) -> PrivacyBound:
    """Returns the ε of :func:`compute_epsilon` with its meaning, without a warning.

    Args:
        mechanism: One round, or its name, as for :func:`compute_epsilon`.
        steps: T, rounds, at least 1.
        delta: δ in (0, 1).
        bound: ``"certified"``, ``"pair"`` or ``"published"``, or another that the mechanism has.
        adjacency: ``"zero_out"`` or ``"replace"``, for which some bounds have no value.
        orders: Rényi orders in place of the adaptive grid, for ``"published"`` of the first three
            mechanisms.
        **fields: With a name: the mechanism's fields.

    Raises:
        ValueError: If an argument is out of range or unknown.
    """
    rounds = [(_mechanism(mechanism, fields), integer("steps", steps))]
    return compute_bound(rounds, delta=delta, bound=bound, adjacency=adjacency, orders=orders)


def privacy_report(
    mechanism: Mechanism | str,
    *,
    steps: int,
    delta: float,
    adjacency: str = "zero_out",
    orders: Iterable[float] | None = None,
    **fields: Any,
) -> PrivacyReport:
    """Returns a report with every bound, and with ε of the same noise under other trust models.

    Print the report, or ``.plot()`` it.

    Args:
        mechanism: One round, or its name, as for :func:`compute_epsilon`.
        steps: T, rounds, at least 1.
        delta: δ in (0, 1).
        adjacency: ``"zero_out"`` or ``"replace"``, which leaves out bounds without a value for it.
        orders: Rényi orders in place of the adaptive grid, for ``"published"`` of the first three
            mechanisms.
        **fields: The mechanism's fields.

    Raises:
        ValueError: If an argument is out of range or unknown.
    """
    rounds = [(_mechanism(mechanism, fields), integer("steps", steps))]
    return PrivacyReport(rounds, delta=delta, adjacency=adjacency, orders=orders)


def compute_epsilon(
    mechanism: Mechanism | str,
    *,
    steps: int,
    delta: float,
    bound: str = "certified",
    adjacency: str = "zero_out",
    orders: Iterable[float] | None = None,
    **fields: Any,
) -> float:
    """Returns ε of equal rounds of a mechanism.

    Args:
        mechanism: One round, or its name: ``"shuffle_gauss"``, ``"subsampled_shuffle"``,
            ``"shuffled_checkin"``, ``"shuffled_fw"``, ``"shuffled_sums"``,
            ``"random_allocation"`` or ``"secret_checkin"``.
        steps: T, rounds, at least 0.
        delta: δ in (0, 1).
        bound: ``"certified"``, ``"pair"`` or ``"published"``, or another that the mechanism has.
        adjacency: ``"zero_out"`` or ``"replace"``, for which some bounds have no value.
        orders: Rényi orders in place of the adaptive grid, for ``"published"`` of the first three
            mechanisms.
        **fields: With a name: the fields of the mechanism, such as ``noise_multiplier``,
            ``num_users``, ``sample_rate``.

    Returns:
        ε, rounded up; 0 if ``steps`` is 0.

    Raises:
        ValueError: If an argument is out of range or unknown.

    Warns:
        PrivacyAssumptionWarning: If the bound does not cover every data set, or δ is above 1/n.

    Formal Guarantees:
        ``"certified"`` covers every data set. ``"published"`` and ``"pair"`` cover one pair of
        data sets. For ``"shuffled_fw"``, ``"published"`` is an estimate, which can be below the
        exact ``"pair"`` of a pair that it should cover.
    """
    # With steps = 0, one round is computed, so that every argument is still validated.
    rounds = max(1, integer("steps", steps, minimum=0))
    round_ = _mechanism(mechanism, fields)
    answer = privacy_bound(
        round_, steps=rounds, delta=delta, bound=bound, adjacency=adjacency, orders=orders
    )
    _warn(answer, "compute_epsilon", round_)
    return answer.epsilon if steps else 0.0


def compute_noise_multiplier(
    mechanism: str,
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    bound: str = "certified",
    adjacency: str = "zero_out",
    **fields: Any,
) -> float:
    """Returns the smallest noise multiplier whose ε stays within a budget, rounded up.

    The multiplier is at least 1e-3.

    Args:
        mechanism: The mechanism's name, as for :func:`compute_epsilon`.
        target_epsilon: ε to stay within, above 0.
        target_delta: δ in (0, 1).
        steps: T, rounds, at least 1.
        bound: The bound that ε is computed by.
        adjacency: Between which data sets.
        **fields: The mechanism's other fields.

    Raises:
        ValueError: If an argument is out of range or unknown, or no noise meets the target.

    Warns:
        PrivacyAssumptionWarning: If the bound does not cover every data set, δ is above 1/n, or
            the noise is so large that nothing can be learned.
    """
    open_unit_interval("target_delta", target_delta)
    mechanism_class = MECHANISMS[one_of("mechanism", mechanism, MECHANISMS)]
    count = integer("steps", steps)
    if "noise_multiplier" in fields:
        raise ValueError(
            f"noise_multiplier={fields['noise_multiplier']!r} is the result of "
            "compute_noise_multiplier: leave it out, or call compute_epsilon"
        )
    rounds = rounds_at(mechanism_class, count, fields)
    sigma = noise_within(
        find_bound(mechanism_class, bound),
        rounds,
        target_epsilon=target_epsilon,
        delta=target_delta,
        adjacency=adjacency,
        lowest=mechanism_class.least_noise,
    )
    answer = compute_bound(rounds(sigma), delta=target_delta, bound=bound, adjacency=adjacency)
    _warn(answer, "compute_noise_multiplier", rounds(sigma)[0][0], count)
    return sigma


def best_sample_rate(
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    adjacency: str = "zero_out",
    **fields: Any,
) -> float:
    """Returns the rate q of secret check-in at which the mean gradient is least noisy.

    A larger rate adds signal to the reports, and removes noise reports that hide it.

    Args:
        target_epsilon: ε to stay within, above 0.
        target_delta: δ in (0, 1).
        steps: T, rounds, at least 1.
        adjacency: Between which data sets.
        **fields: Fields of ``SecretCheckIn``, such as ``num_users``.

    Returns:
        q, to three digits, by an estimate of the certified ε. Compute the noise for the budget with
        :func:`compute_noise_multiplier`.

    Raises:
        ValueError: If an argument is out of range or unknown.
    """
    mechanism_class = MECHANISMS["secret_checkin"]
    certified = find_bound(mechanism_class, "certified")
    open_unit_interval("target_delta", target_delta)
    count = integer("steps", steps)

    def noise_of_mean(rate: float) -> float:
        rounds = rounds_at(mechanism_class, count, dict(sample_rate=rate, **fields))
        sigma = estimated_noise(
            certified,
            rounds,
            target_epsilon=target_epsilon,
            delta=target_delta,
            adjacency=adjacency,
            lowest=mechanism_class.least_noise,
        )
        return rounds(sigma)[0][0].noise_of_mean

    best = minimize_scalar(noise_of_mean, bounds=_RATES, method="bounded", options={"xatol": 1e-3})
    return round(float(best.x), 3)


def _mechanism(mechanism: Mechanism | str, fields: dict[str, Any]) -> Mechanism:
    """Returns the mechanism, or builds the one of that name from these fields."""
    if not isinstance(mechanism, Mechanism):
        return MECHANISMS[one_of("mechanism", mechanism, MECHANISMS)].build(**fields)
    if fields:
        raise ValueError(
            f"{', '.join(fields)} can only be passed with a mechanism's name, got {mechanism!r}: "
            "leave it out"
        )
    return mechanism


def _warn(answer: PrivacyBound, function: str, round_: Mechanism, steps: int | None = None) -> None:
    """Warns if ε is not proved, δ is large, or the noise is too large to learn anything.

    The text is the same for every call, so Python shows it once per location.
    """
    unproved = (
        f"{function} with bound={answer.bound!r} covers {answer.covers}, which is no guarantee "
        "for every data set; bound='certified' is one"
    ) * (answer.guarantee is not Guarantee.PROVED)
    # Without the number of users the noise of the mean is unknown.
    useless = drowned(round_.noise_of_mean, steps) if steps and round_.num_users > 1 else ""
    for sentence in filter(None, [unproved, large_delta(answer.delta, round_.num_users), useless]):
        warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=3)
