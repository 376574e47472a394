"""An ε with its meaning: what it is worth, for which data sets and rounds, and against whom.

>>> values = ("shuffle_gauss", "certified", 0.25, 1e-5, "zero_out")
>>> bound = PrivacyBound(*values, Guarantee.PROVED, "every data set", rounds=7)
>>> bound.adjacency == "zero_out", bound.to_dict()["guarantee"]
(True, 'PROVED')
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from typing import Any

from opacus_shuffle.core.validation import instance_of, integer, open_unit_interval

ADVERSARY = "sees every shuffled report of every round"
SHUFFLER = "the shuffler"
EVERY_DATA_SET = "every data set"


class Guarantee(enum.Enum):
    """How much an ε is worth."""

    PROVED = "a differential-privacy guarantee for every data set"
    PAIR = "about one pair of data sets only, no differential-privacy guarantee"
    ESTIMATE = "an approximation, no guarantee"


class Adjacency(str, enum.Enum):
    """Which two data sets are neighbours.

    ``Adjacency("zero_out")`` checks a plain string, which is equal to its member.
    """

    ZERO_OUT = "zero_out"
    """One record's report becomes a report of zero."""
    REPLACE = "replace"
    """One record becomes any other."""

    @classmethod
    def _missing_(cls, value: object) -> Adjacency:
        raise ValueError(
            f"adjacency must be one of {', '.join(repr(member.value) for member in cls)}, got "
            f"{value!r}"
        )

    def __str__(self) -> str:
        return self.value

    @property
    def meaning(self) -> str:
        """What a run is compared with, for a table's foot."""
        other = "reports zero" if self is Adjacency.ZERO_OUT else "is any other record"
        return f"compared with a run in which one record {other}"

    @property
    def distance(self) -> float:
        """How far one record's report may move, in clipping norms."""
        return 1.0 if self is Adjacency.ZERO_OUT else 2.0


class PrivacyAssumptionWarning(UserWarning):
    """An ε was shown that does not cover every data set."""


class NotCovered(ValueError):
    """A bound has no value for this adjacency or this run; reports leave it out."""


class InconsistentBound(RuntimeError):
    """An ε that cannot be right, an error of this library: NaN, negative, or contradicted."""


@dataclasses.dataclass(frozen=True)
class PrivacyBound:
    """One ε and everything needed to read it.

    Attributes:
        mechanism: The name of what ran.
        bound: The name of the bound.
        epsilon: ε, rounded up.
        delta: δ.
        adjacency: Which data sets are neighbours.
        guarantee: What ε is worth.
        covers: The data sets that it covers, in words.
        rounds: How many rounds ran.
        lower: A value, rounded down, that the exact ε of what is covered is not below; None where
            none is known.
        trusted: Who must not be the adversary.
        adversary: What the adversary sees.
        meaning: What the bound computes, in words.
        proof: Which of several proofs gave ε; empty where there is only one.

    Raises:
        InconsistentBound: If ε is no number, negative, or below its own lower value.
    """

    mechanism: str
    bound: str
    epsilon: float
    delta: float
    adjacency: Adjacency | str
    guarantee: Guarantee
    covers: str
    rounds: int
    lower: float | None = None
    trusted: str = SHUFFLER
    adversary: str = ADVERSARY
    meaning: str = ""
    proof: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        open_unit_interval("delta", self.delta)
        instance_of("guarantee", self.guarantee, (Guarantee,))
        integer("rounds", self.rounds)
        for name, value in (("epsilon", self.epsilon), ("lower", self.lower or 0.0)):
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if not self.epsilon >= 0 or (self.lower is not None and not self.epsilon >= self.lower):
            raise self.contradicted(f"lower = {self.lower!r}")

    def contradicted(self, by: str) -> InconsistentBound:
        """What to raise where ε cannot be right for what is said, a value that it contradicts."""
        return InconsistentBound(
            f"{self.mechanism}: bound {self.bound!r} says epsilon = {self.epsilon!r}, {by} at "
            "delta = "
            f"{self.delta!r} ({self.adjacency}); this is an error in opacus_shuffle: report it, "
            "and use "
            "no epsilon of it"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; infinity becomes None."""
        return finite(
            {
                **dataclasses.asdict(self),
                "guarantee": self.guarantee.name,
                "adjacency": str(self.adjacency),
            }
        )


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """The same with None for infinity, which JSON does not know."""
    return {name: None if value == math.inf else value for name, value in values.items()}
