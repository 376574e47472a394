"""``PrivacyBudget``: the ε and δ that an optimiser may spend, and how the noise for them is calibrated."""

from __future__ import annotations

import dataclasses

from opacus_shuffle.protocols.calibration import Promise


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The privacy of one run of an optimiser.

    Attributes:
        epsilon: ε of the whole run, in (0, 15], under replacement of one user's value.
        delta: δ of the whole run, in (0, ½).
        calibration: ``"tight"``: the least noise that is proved to be enough. ``"published"``: the paper's formulas.
        honest_fraction: The share of every round's users that must follow the protocol, in [1/3, 1]; 1 for pan-private runs.

    Raises:
        ValueError: If a value is out of range.
    """

    epsilon: float
    delta: float
    calibration: str = "tight"
    honest_fraction: float = 1.0

    def __post_init__(self) -> None:
        checked = Promise(self.epsilon, self.delta, self.calibration, self.honest_fraction)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, getattr(checked, field.name))
