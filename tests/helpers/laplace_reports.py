"""A mechanism without training: a frozen class and its bounds.

A report carries Laplace noise of its own, and everyone takes part in every round: T rounds of scale
b cost T·Δ/b.
"""

import dataclasses
from typing import ClassVar

import opacus_shuffle
from opacus_shuffle.accountants import register_bound
from opacus_shuffle.accountants.bounds.registry import Answer
from opacus_shuffle.accountants.mechanism import Mechanism, described

PROVED, ESTIMATE = opacus_shuffle.Guarantee.PROVED, opacus_shuffle.Guarantee.ESTIMATE

# --- one: what a round is
# --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaplaceReports(Mechanism):
    """Every user's clipped report with Laplace noise of this scale on every entry."""

    name: ClassVar[str] = "laplace_reports"
    sampling: ClassVar[None] = None
    diameter: float = described("the largest l1 norm over the clipping norm", "R", default=1.0)


# --- two: what it costs
# ----------------------------------------------------------------------------------------------


@register_bound(
    LaplaceReports,
    "certified",
    guarantee=PROVED,
    meaning="pure differential privacy adds up, whoever sees the reports",
)
def _certified(rounds, *, delta, adjacency, orders):
    return Answer(
        sum(count * each.diameter / each.noise_multiplier for each, count in rounds)
        * adjacency.distance
    )


@register_bound(
    LaplaceReports, "half", meaning="no guarantee at all", legend="nothing", guarantee=ESTIMATE
)
def _half(rounds, *, delta, adjacency, orders):
    return Answer(_certified(rounds, delta=delta, adjacency=adjacency, orders=orders).epsilon / 2)
