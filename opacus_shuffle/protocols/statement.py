"""``PrivacyStatement``: ε of a sum or an optimisation, with its users, rounds and messages."""

from __future__ import annotations

import dataclasses

from opacus_shuffle.core.guarantees import EVERY_DATA_SET, Adjacency, Guarantee, PrivacyBound
from opacus_shuffle.core.rounding import round_down, round_up

ADVERSARIES = {
    "one round": "sees every shuffled message of the round (bits with their coordinate)",
    "sequential": "sees every shuffled message of every round (bits with their coordinate)",
    "full": "sees every shuffled message of every round (bits with their coordinate)",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyStatement(PrivacyBound):
    """An ε that is proved for every data set, and the run to which it applies.

    Attributes:
        interaction: ``"one round"``, ``"sequential"`` (every user in one round: SCO Definition
            2.7) or ``"full"`` (users in many: Definition 2.8); it says what the adversary sees.
        rounds: The number of rounds.
        rounds_per_user: The number of rounds in which one user participates.
        num_users: The number of users whose data were used.
        bits_per_user: The number of bits that a user sends over the whole run.
        honest_fraction: The share of every round's users that must follow the protocol. The others
            may drop out or send anything.
        sample_rate: γ: if below 1, every round's users are a fresh, secret, uniform sample of that
            share of all.
    """

    mechanism: str = "shuffled_sums"
    bound: str = "certified"
    adjacency: Adjacency | str = Adjacency.REPLACE
    guarantee: Guarantee = Guarantee.PROVED
    covers: str = EVERY_DATA_SET
    interaction: str
    rounds_per_user: int
    num_users: int
    bits_per_user: int
    honest_fraction: float = 1.0
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "adversary", ADVERSARIES[self.interaction])
        super().__post_init__()

    def __str__(self) -> str:
        lines = [
            f"epsilon = {round_up(self.epsilon)} at delta = {self.delta:.3g}: "
            f"{self.guarantee.value}",
            f"  neighbours: one user's value is replaced, by zero or any other ({self.num_users:,} "
            "users)",
            f"  adversary:  {self.adversary}",
            f"  trusted:    {self.trusted}",
        ]
        if self.honest_fraction < 1:
            lines.append(
                f"  holds if:   at least {self.honest_fraction:.3g} of every round's users follow "
                "the protocol"
            )
        often = f"a user participates in {self.rounds_per_user:,}"
        if self.sample_rate < 1:
            often = f"each of a fresh, secret sample of {self.sample_rate:.3g} of all users"
        lines.append(f"  rounds:     {self.rounds:,}, {often}")
        lines.append(f"  sends:      {self.bits_per_user:,} bits per user")
        if self.lower is not None:
            lines.append(f"  at least:   {round_down(self.lower)} (one pair of data sets has that)")
        return "\n".join(lines)
