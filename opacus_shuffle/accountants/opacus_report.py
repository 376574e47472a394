"""The report on a run that one of Opacus's own accountants accounts for: a single bound, trusting a server, with its meaning.

>>> from opacus.accountants import RDPAccountant
>>> accountant = RDPAccountant()
>>> accountant.history = [(1.0, 0.01, 100)]
>>> report = OpacusReport(accountant, delta=1e-5)
>>> report.best.trusted, round(report.best.epsilon, 2)
('the server', 1.21)
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
from opacus.accountants import GaussianAccountant, IAccountant, PRVAccountant, RDPAccountant

from opacus_shuffle.accountants.bounds.registry import STYLES, Style
from opacus_shuffle.accountants.lineage import first_rounds
from opacus_shuffle.accountants.report import POINTS, PrivacyReport
from opacus_shuffle.core.guarantees import EVERY_DATA_SET, Adjacency, Guarantee, PrivacyBound
from opacus_shuffle.core.validation import boolean, integer, open_unit_interval

_POISSON = "DP-SGD of Poisson samples, by Opacus's accountant of"
MEANINGS: dict[type[IAccountant], tuple[Guarantee, str]] = {
    PRVAccountant: (Guarantee.PROVED, f"{_POISSON} privacy loss distributions"),
    RDPAccountant: (Guarantee.PROVED, f"{_POISSON} Rényi divergences"),
    GaussianAccountant: (Guarantee.ESTIMATE, f"{_POISSON} a central limit, which can be below the truth: 'prv' is proved"),
}
"""What the ε of each of Opacus's accountants is worth, and how it is found."""


@dataclasses.dataclass(frozen=True)
class ServerRound:
    """One step of DP-SGD at a trusted server, as Opacus's accountants record it: they know no number of users."""

    name: ClassVar[str] = "DP-SGD"
    released: ClassVar[str] = "the noised sums"
    zeroed: ClassVar[str] = "one record's gradient is left out of the sums"
    noise_multiplier: float
    sample_rate: float

    noise_of_mean: ClassVar[None] = None

    @property
    def noise_of_sum(self) -> float:
        """Standard deviation of the noise on one coordinate of the sum, over the clipping norm."""
        return self.noise_multiplier


class OpacusReport(PrivacyReport):
    """What one of Opacus's own accountants says of a run, in the words and with the methods of every report.

    Args:
        accountant: ``prv``, ``rdp`` or ``gdp``, after at least one step.
        delta: δ in (0, 1).
        poisson: Whether every batch was a Poisson sample, without which no ε of these accountants is a guarantee.
        rewound: As :class:`~opacus_shuffle.accountants.report.PrivacyReport`'s.
        predictable: Likewise.
        max_grad_norms: Likewise.
        num_users: Likewise.
        pytorch_noise: The noise came from PyTorch's own generator, as in Opacus.
        unchecked: Likewise.

    Raises:
        ValueError: If the accountant is another one, an argument is out of range, nothing ran, ``gdp`` has seen several kinds
            of steps, of which it counts the last only, or ε is not finite.
    """

    def __init__(
        self,
        accountant: IAccountant,
        *,
        delta: float,
        poisson: bool = True,
        rewound: int = 0,
        predictable: Sequence[str] = (),
        pytorch_noise: bool = False,
        max_grad_norms: Sequence[float] = (),
        num_users: int | None = None,
        unchecked: Sequence[str] = (),
    ) -> None:
        if type(accountant) not in MEANINGS:
            raise ValueError(
                f"privacy_report knows the accountants of this package and Opacus's prv, rdp and gdp, got "
                f"{accountant.mechanism()!r}: use get_epsilon(delta)"
            )
        self.kind = ServerRound  # type: ignore[assignment]
        self.rounds = tuple((ServerRound(noise, rate), steps) for noise, rate, steps in accountant.history if steps)  # type: ignore[misc]
        if not self.rounds:
            raise ValueError(
                f"accountant {accountant.mechanism()!r} has seen no step, got history={accountant.history!r}: train first"
            )
        if isinstance(accountant, GaussianAccountant) and len(self.rounds) > 1:
            raise ValueError(
                f"accountant 'gdp' counts one kind of steps only, got history={accountant.history!r}: use 'prv' or 'rdp'"
            )
        self.delta, self.adjacency = open_unit_interval("delta", delta), Adjacency.ZERO_OUT
        self.simulated = self.clients = self.selected = self.emulated = False
        self.rewound = integer("rewound", rewound, minimum=0)
        self.predictable, self.unchecked = tuple(predictable), tuple(unchecked)
        self.orders, self.sent, self.pytorch_noise = None, None, boolean("pytorch_noise", pytorch_noise)
        self.max_grad_norms, self.num_users = tuple(max_grad_norms), num_users
        self._accountant, self._poisson = copy.deepcopy(accountant), poisson
        self.bounds = (self._bound(sum(steps for _, steps in self.rounds)),)

    @property
    def best(self) -> PrivacyBound:
        """The only bound there is."""
        return self.bounds[0]

    @property
    def noisiest(self) -> Any:
        """The step with the most noise."""
        return max((each for each, _ in self.rounds), key=lambda each: each.noise_of_sum)

    def _bound(self, rounds: int) -> PrivacyBound:
        """ε after the first rounds."""
        accountant = copy.deepcopy(self._accountant)
        accountant.history = [
            (each.noise_multiplier, each.sample_rate, steps) for each, steps in first_rounds(self.rounds, rounds)
        ]
        try:
            epsilon = float(accountant.get_epsilon(self.delta))
        except (ArithmeticError, ValueError):  # of no noise or next to none, each accountant in its own way
            epsilon = math.nan
        if not math.isfinite(epsilon):
            raise ValueError(
                f"accountant {accountant.mechanism()!r} knows no finite epsilon here, got {epsilon} for history="
                f"{accountant.history!r}: add noise"
            )
        guarantee, meaning = MEANINGS[type(accountant)]
        covers = EVERY_DATA_SET if guarantee is Guarantee.PROVED else "the limit of many steps"
        if not self._poisson:
            guarantee, covers = Guarantee.ESTIMATE, "Poisson samples, which these batches were not"
        name = accountant.mechanism()
        return PrivacyBound(
            name,
            name,
            max(0.0, epsilon),
            self.delta,
            self.adjacency,
            guarantee,
            covers,
            rounds=rounds,
            trusted="the server",
            adversary="sees the noised sum of every round",
            meaning=meaning,
        )

    def _cited(self) -> str:
        return f"opacus {version('opacus')}, accountant {self.best.bound!r}"

    def _noise(self) -> str:
        return ""  # it is what was asked for

    def _left_out(self) -> list[str]:
        return []

    def _curves(self) -> dict[str, list[tuple[int, float]]]:
        total = self.best.rounds
        counts = sorted({round(value) for value in np.geomspace(1, total, POINTS)})
        return {self.best.bound: [(count, self._bound(count).epsilon) for count in counts]}

    def _line(self, name: str) -> tuple[Style, str]:
        return STYLES["central"], self.best.covers
