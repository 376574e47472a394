"""Warnings about flags that were forgotten, or that Opacus's own engine does not read.

>>> print(unread_flags({"local_noise": True, "shuffle_weights": False}))
opacus.PrivacyEngine does not read local_noise: nothing was done for it; ...
>>> unread_flags({"local_noise": False})
''
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.accountants.report import WEAK
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.rounding import round_up

FLAGS = ("local_noise", "shuffle_weights", "aggregator", "report")
"""The keywords of ``make_private`` that Opacus's own does not have."""

DELTA = 1e-5
"""At which one step is judged: that is before anyone has said a δ."""


def unread_flags(keywords: Mapping[str, Any]) -> str:
    """Returns a warning about keywords that a stock engine's ``make_private`` ignores.

    It is empty if there are none.

    Args:
        keywords: What it took besides its own arguments.
    """
    asked = [
        name for name in FLAGS if keywords.get(name) is not None and keywords[name] is not False
    ]
    if not asked:
        return ""
    return (
        f"opacus.PrivacyEngine does not read {', '.join(asked)}: nothing was done for it; use "
        "opacus_shuffle.PrivacyEngine, or leave it out"
    )


def drowned(noise_of_mean: float, steps: int) -> str:
    """Returns a warning if the noise of all rounds exceeds the largest sum of their gradients.

    Args:
        noise_of_mean: Noise on one coordinate of a round's mean gradient, in clipping norms.
        steps: How many rounds there are.
    """
    return (
        f"noise on the mean gradient is {noise_of_mean:.3g} clipping norms in each of {steps:,} "
        "rounds: nothing can be learned; ask for a larger target_epsilon, or train on more records"
    ) * (steps < noise_of_mean**2)


def little_noise(mechanism: Mechanism, noise_of_sum: float) -> str:
    """Returns a warning where noise of the sum was likely meant for each report.

    It is empty where one step protects.

    Args:
        mechanism: One round whose reports' noise is added once to their sum.
        noise_of_sum: The noise multiplier as it was passed.
    """
    sigma, spent = mechanism.noise_multiplier, weak_step(mechanism)
    if spent is None:
        return ""
    return (
        f"noise_multiplier={noise_of_sum:g} is that of the batch's sum, so each report carries "
        f"{sigma:.2g} only, and a single step costs epsilon = {round_up(spent)} (delta = "
        f"{DELTA:g}): if it was meant as each record's own, pass local_noise=True to make_private "
        f"of opacus_shuffle.PrivacyEngine; else pass about {round_up(noise_of_sum / sigma, 2)} or "
        "more, or call make_private_with_epsilon"
    )


def little_local_noise(mechanism: Mechanism) -> str:
    """Returns a warning where each report's own noise protects next to nothing.

    It is empty where one step protects.

    Args:
        mechanism: One round of reports that carry their noise.
    """
    spent = weak_step(mechanism)
    if spent is None:
        return ""
    return (
        f"noise_multiplier={mechanism.noise_multiplier:g} with local_noise=True is the noise of "
        f"each report, and a single step costs epsilon = {round_up(spent)} (delta = {DELTA:g}), "
        "which protects next to nothing: shuffling hides reports among others only where each has "
        "noise of its own; pass about 1 or more, use accountant='shuffled_sums', whose "
        "noise_multiplier is that of the sum as in Opacus, or call make_private_with_epsilon"
    )


def weak_step(mechanism: Mechanism) -> float | None:
    """Returns the ε of a single round if it protects next to nothing, else None."""
    # Without a shuffler it costs no less, and that is known at once.
    unshuffled = gaussian.compute_epsilon(mu=1 / mechanism.noise_multiplier, delta=DELTA)
    if unshuffled <= WEAK:
        return None
    spent = compute_bound([(mechanism, 1)], delta=DELTA).epsilon
    return spent if spent > WEAK else None
