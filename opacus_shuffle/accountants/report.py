"""The ladder of bounds on one run, printed so that no ε stands without its meaning.

>>> from opacus_shuffle.accountants import ShuffleGaussAccountant
>>> accountant = ShuffleGaussAccountant(num_users=60_000, local_noise=True)
>>> accountant.step(noise_multiplier=9.48, sample_rate=1.0)
>>> PrivacyReport(accountant.all_bounds(1 / 60_000)).to_dict()["bounds"][2]["guarantee"]
'PROVED'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opacus_shuffle.accountants.bounds import Guarantee, PrivacyBound
from opacus_shuffle.rounding import round_up

WEAK = 10.0
"""From here on an ε is not worth calling protection: the odds of any event may change by a factor of 22,000."""


class PrivacyReport:
    """Bounds on one run, of one mechanism at one δ.

    Args:
        bounds: What :meth:`ShuffleAccountant.all_bounds` answers; at least one.
        emulated: The noise was added once to the sum (``local_noise=False``): the shuffle protocol is emulated.
    """

    def __init__(self, bounds: Sequence[PrivacyBound], *, emulated: bool = False) -> None:
        if not bounds:
            raise ValueError("bounds must not be empty")
        self.bounds = tuple(bounds)
        self.emulated = emulated

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"emulated": self.emulated, "bounds": [bound.to_dict() for bound in self.bounds]}

    def __str__(self) -> str:
        first = self.bounds[0]
        rows = [("bound", "epsilon", "guarantee")]
        rows += [(b.bound, round_up(b.epsilon), f"{b.guarantee.name}: {b.guarantee.value}") for b in self.bounds]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{name:<{widths[0]}}  {value:>{widths[1]}}  {worth}" for name, value, worth in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        covered = {b.covers: None for b in self.bounds}  # in order, each once
        notes = [f"{', '.join(b.bound for b in self.bounds if b.covers == text)}: {text}" for text in covered]
        if self.emulated:
            notes.append(
                "the noise was added once to the sum: this emulates locally noised reports, in batches of the expected size"
            )
        notes.append("simulated in one process, which sees every record: the reports and the shuffler")
        proved = [b.epsilon for b in self.bounds if b.guarantee is Guarantee.PROVED]
        if proved and min(proved) > WEAK:
            notes.append(f"a proved epsilon above {WEAK:g} protects next to nothing")
        title = f"{first.mechanism}, {first.rounds} rounds, delta = {first.delta:.3g}, {first.adjacency} adjacency"
        return "\n".join([title, f"the adversary {first.adversary}", *lines, *notes])
