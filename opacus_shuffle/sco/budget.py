"""``PrivacyBudget``: the ε and δ that an optimiser may spend, and how the noise for them is calibrated.

>>> PrivacyBudget(epsilon=1.0, delta=1e-6).protocol(100, 3, 1.0).num_users
100
"""

from __future__ import annotations

import dataclasses

from opacus_shuffle.protocols.calibration import Promise, noise_variance
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


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

    def protocol(self, num_users: int, dimension: int, max_norm: float, *, rounds: int = 1) -> ShuffleVectorSum:
        """Returns the protocol of each of so many rounds with the same users; all of them together spend the budget."""
        return ShuffleVectorSum(
            num_users,
            dimension,
            max_norm,
            self.epsilon,
            self.delta,
            rounds=rounds,
            calibration=self.calibration,
            honest_fraction=self.honest_fraction,
        )

    def planned_variance(self, dimension: int, max_norm: float) -> float:
        """Returns the variance per coordinate of a round's sum, before its number of users is known.

        Where only the honest users' noise counts, the others' comes on top, hence the division.
        """
        variance = noise_variance(
            dimension=dimension, max_norm=max_norm, epsilon=self.epsilon, delta=self.delta, calibration=self.calibration
        )
        return variance / self.honest_fraction

    def statement(
        self, interaction: str, *, rounds: int, num_users: int, bits_per_user: int | None, rounds_per_user: int = 1
    ) -> PrivacyStatement:
        """Returns what a run has revealed, to whom; the arguments are the statement's own."""
        return PrivacyStatement(
            epsilon=self.epsilon,
            delta=self.delta,
            interaction=interaction,
            rounds=rounds,
            rounds_per_user=rounds_per_user,
            num_users=num_users,
            bits_per_user=bits_per_user,
            calibration=self.calibration,
            honest_fraction=self.honest_fraction,
        )
