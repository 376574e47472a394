"""``PrivacyBound``: an ε with its guarantee, its data sets and rounds, and its adversary.

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
    """The kind of statement that an ε makes."""

    PROVED = "a differential-privacy guarantee for every data set"
    PAIR = "about one pair of data sets only, no differential-privacy guarantee"
    ESTIMATE = "an approximation, no guarantee"


class Adjacency(str, enum.Enum):
    """Which two data sets are neighbours.

    ``Adjacency("zero_out")`` checks a string. A member is equal to its string.
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
        """A description of the neighbouring run, for the foot of a table."""
        other = "reports zero" if self is Adjacency.ZERO_OUT else "is any other record"
        return f"compared with a run in which one record {other}"

    @property
    def distance(self) -> float:
        """The largest distance between the two reports of one record, in clipping norms."""
        return 1.0 if self is Adjacency.ZERO_OUT else 2.0


class PrivacyAssumptionWarning(UserWarning):
    """An ε is shown that does not cover every data set."""


class NotCovered(ValueError):
    """A bound has no value for this adjacency or this run; reports omit it."""


class InconsistentBound(RuntimeError):
    """An ε is NaN, negative or contradicted by another value: an error in this library."""


@dataclasses.dataclass(frozen=True)
class PrivacyBound:
    """One ε and everything needed to interpret it.

    Attributes:
        mechanism: The name of the mechanism.
        bound: The name of the bound.
        epsilon: ε, rounded up.
        delta: δ.
        adjacency: Which data sets are neighbours.
        guarantee: The kind of statement that ε makes.
        covers: The data sets that it covers, in words.
        rounds: The number of rounds.
        lower: A lower bound, rounded down, on the exact ε for these data sets; None if unknown.
        trusted: The party that must be trusted.
        adversary: What the adversary sees.
        meaning: What the bound computes, in words.
        proof: The proof that gave ε, if the bound has several; otherwise empty.

    Raises:
        InconsistentBound: If ε is NaN, negative, or below its own lower bound.
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
        """Returns the error to raise if another value contradicts ε; ``by`` describes it."""
        return InconsistentBound(
            f"{self.mechanism}: bound {self.bound!r} says epsilon = {self.epsilon!r}, {by} at "
            f"delta = {self.delta!r} ({self.adjacency}); this is an error in opacus_shuffle: "
            "report it, and do not use this epsilon"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for JSON; infinity becomes None."""
        return finite(
            {
                **dataclasses.asdict(self),
                "guarantee": self.guarantee.name,
                "adjacency": str(self.adjacency),
            }
        )


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with None for infinity, which JSON does not support."""
    return {name: None if value == math.inf else value for name, value in values.items()}
