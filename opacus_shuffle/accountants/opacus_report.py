"""Reports what one of Opacus's own accountants has for a run: one bound, which trusts a server.

>>> from opacus.accountants import RDPAccountant
>>> accountant = RDPAccountant()
>>> accountant.history = [(1.0, 0.01, 100)]
>>> report = report_of_opacus(accountant, delta=1e-5)
>>> report.best.trusted, round(report.best.epsilon, 2)
('the server', 1.21)
"""

from __future__ import annotations

import copy
import dataclasses
import math
from importlib.metadata import version
from typing import Any, ClassVar

from opacus.accountants import GaussianAccountant, IAccountant, PRVAccountant, RDPAccountant

from opacus_shuffle.accountants.bounds.registry import Answer, Bound
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.accountants.report import UNCHECKED, PrivacyReport
from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.core.guarantees import EVERY_DATA_SET, Guarantee

_POISSON = "DP-SGD of Poisson samples, by Opacus's accountant of"
MEANINGS: dict[type[IAccountant], tuple[Guarantee, str]] = {
    PRVAccountant: (Guarantee.PROVED, f"{_POISSON} privacy loss distributions"),
    RDPAccountant: (Guarantee.PROVED, f"{_POISSON} Rényi divergences"),
    GaussianAccountant: (
        Guarantee.ESTIMATE,
        f"{_POISSON} a central limit, which can be below the truth: 'prv' is proved",
    ),
}
"""What the ε of each of Opacus's accountants is worth, and how it is found."""

UNPROVED = {
    "own_batches": "leave it out, or use 'subsampled_shuffle', 'shuffle_gauss' or 'shuffled_sums', "
    "which account for batches of one size",
    "seen_norms": "use clipping='flat'",
}
"""The entries of :data:`~opacus_shuffle.accountants.report.UNCHECKED` with which their ε is no
guarantee, with the remedy.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerRound(Mechanism, trains=False):
    """One step of DP-SGD at a trusted server, as Opacus's accountants record it.

    They do not record the number of users.
    """

    name: ClassVar[str] = "DP-SGD"
    sampling: ClassVar[Sampling] = "poisson"
    released: ClassVar[str] = "the noised sums"
    zeroed: ClassVar[str] = "one record's gradient is left out of the sums"
    noise_is_local: ClassVar[bool] = False
    num_users: int = 1


def report_of_opacus(accountant: IAccountant, *, delta: float, **facts: Any) -> PrivacyReport:
    """Returns what one of Opacus's own accountants says of a run, in the words of every report.

    Args:
        accountant: ``prv``, ``rdp`` or ``gdp``, after at least one step; it stays as it is.
        delta: δ in (0, 1).
        **facts: Others of :class:`~opacus_shuffle.accountants.report.PrivacyReport`. If one of
            :data:`UNPROVED` is unchecked, no ε is a guarantee.

    Raises:
        ValueError: If the accountant is another one, an argument is out of range, nothing ran,
            ``gdp`` has seen several kinds of steps, of which it counts the last only, or ε is not
            finite.
    """
    name, asked = accountant.mechanism(), copy.deepcopy(accountant)
    if type(accountant) not in MEANINGS:
        raise ValueError(
            "privacy_report knows the accountants of this package and Opacus's prv, rdp and gdp, "
            f"got {name!r}: use get_epsilon(delta)"
        )
    rounds: Any = [
        (ServerRound(noise_multiplier=noise, sample_rate=rate), steps)
        for noise, rate, steps in accountant.history
        if steps
    ]
    if not rounds:
        raise ValueError(
            f"accountant {name!r} has seen no step, got history={accountant.history!r}: train first"
        )
    if isinstance(accountant, GaussianAccountant) and len(rounds) > 1:
        raise ValueError(
            f"accountant 'gdp' counts one kind of steps only, got history={accountant.history!r}: "
            "use 'prv' or 'rdp'"
        )

    def spent(rounds: Any, *, delta: float, **_: Any) -> Answer:
        """Asks the accountant for the ε of some rounds."""
        asked.history = [(step.noise_multiplier, step.sample_rate, count) for step, count in rounds]
        try:
            epsilon = float(asked.get_epsilon(delta))
        except (ArithmeticError, MemoryError, ValueError):
            # With little noise, each accountant fails in a different way.
            epsilon = math.nan
        if not math.isfinite(epsilon):
            raise ValueError(
                f"accountant {name!r} has no finite epsilon here, got {epsilon} for "
                f"history={asked.history!r}: add noise"
            )
        return Answer(max(0.0, epsilon))

    guarantee, meaning = MEANINGS[type(accountant)]
    covers = EVERY_DATA_SET if guarantee is Guarantee.PROVED else "the limit of many steps"
    unproved = [reason for reason in facts.get("unchecked", ()) if reason in UNPROVED]
    if unproved:
        guarantee = Guarantee.ESTIMATE
        covers = " and ".join(UNCHECKED[reason] for reason in unproved)
    bound = Bound(
        name=name,
        function=spent,
        meaning=meaning,
        guarantee=guarantee,
        covers=covers,
        trusted="the server",
        adversary="sees the noised sum "
        + "and the noised count of unclipped records " * ("seen_norms" in unproved)
        + "of every round, but not how many records a batch has",
        cites=f"opacus {version('opacus')}, accountant {name!r}",
    )
    return PrivacyReport(rounds, delta=delta, entries=[bound], **facts)
