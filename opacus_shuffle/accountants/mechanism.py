"""Defines mechanisms, the frozen records of one round, and what a user sends over several rounds.

A mechanism is a frozen dataclass derived from :class:`Mechanism`, which registers it under its
name, unless only other software trains with it (``trains=False``). Its fields are the keywords of
:func:`~opacus_shuffle.accountants.compute.compute_epsilon` and the flags of the command line; its
bounds are registered in :mod:`opacus_shuffle.accountants.bounds`.

>>> sorted(MECHANISMS)[:2], list(MECHANISMS["shuffled_checkin"].field_names())
(['random_allocation', 'secret_checkin'], ['noise_multiplier', 'num_users', 'sample_rate'])
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.core.validation import (
    check_unregistered,
    integer,
    noise_level,
    reject_unknown,
    sampling_rate,
)

MECHANISMS: dict[str, type[Mechanism]] = {}
"""Every mechanism by its name."""


def described(
    text: str, metavar: str, *, varies: bool = False, choices: Any = (), **options: Any
) -> Any:
    """Returns a dataclass field with its help for the command line.

    Args:
        text: One line of help.
        metavar: The placeholder for a value.
        varies: Whether the field may differ between rounds of one run, as noise may.
        choices: The allowed values, if they are a few words.
        **options: As :func:`dataclasses.field`'s.
    """
    return dataclasses.field(
        metadata={"help": text, "metavar": metavar, "varies": varies, "choices": choices}, **options
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One round of a run.

    Attributes:
        name: The name of its accountant.
        sampling: How the round's users are drawn: None for everyone, ``"poisson"`` or
            ``"fixed_size"``.
        released: What the adversary sees, in words.
        zeroed: The run that zero-out adjacency compares with, in words.
        noise_is_local: Whether ``noise_multiplier`` is that of each report, not of the sum.
        shuffled: Whether reports pass through a shuffler, which a training run simulates.
        trains_on_stock_engines: Whether Opacus's engine can train with it.
        least_noise: The smallest σ that calibration tries.
        noise_multiplier: σ, the noise's standard deviation over the clipping norm.
        num_users: n, the whole population.
        sample_rate: γ, the expected share of it in the round.
    """

    name: ClassVar[str]
    sampling: ClassVar[Sampling]
    released: ClassVar[str] = "all the shuffled reports"
    zeroed: ClassVar[str] = "one record's report is noise alone"
    noise_is_local: ClassVar[bool] = True
    shuffled: ClassVar[bool] = True
    trains_on_stock_engines: ClassVar[bool] = True
    least_noise: ClassVar[float] = 1e-3
    noise_multiplier: float = described(
        "noise of one report over the clipping norm", "SIGMA", varies=True
    )
    num_users: int = described("n, the whole population", "N")
    sample_rate: float = described("expected share of the users in a round", "GAMMA", default=1.0)

    def __init_subclass__(cls, *, trains: bool = True, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "name" in cls.__dict__ and trains:
            check_unregistered(f"the mechanism's name {cls.name!r}", MECHANISMS.get(cls.name), cls)
            MECHANISMS[cls.name] = cls

    def __post_init__(self) -> None:
        self._set(
            noise_multiplier=noise_level("noise_multiplier", self.noise_multiplier),
            num_users=integer("num_users", self.num_users),
            sample_rate=sampling_rate("sample_rate", self.sample_rate),
        )

    def _set(self, **fields: Any) -> None:
        """Replaces fields by validated values."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _round_the_sample(self) -> None:
        """Rounds γ to the share of a whole number of users."""
        reports = integer("round(sample_rate * num_users)", round(self.expected_reports))
        self._set(sample_rate=reports / self.num_users)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Returns the names of the fields."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def required_fields(cls) -> tuple[str, ...]:
        """Returns the names of the fields without a default."""
        return tuple(
            field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING
        )

    @classmethod
    def build(cls, **fields: Any) -> Mechanism:
        """Returns the mechanism with these fields.

        Raises:
            ValueError: If a field is unknown, missing or out of range.
        """
        names = cls.field_names()
        reject_unknown(
            cls.name, {name: value for name, value in fields.items() if name not in names}, names
        )
        missing = [name for name in cls.required_fields() if name not in fields]
        if missing:
            raise ValueError(
                f"{cls.name} needs {', '.join(missing)}: pass "
                f"{', '.join(f'{name}=...' for name in missing)}"
            )
        return cls(**fields)

    @classmethod
    def of_batch(
        cls,
        *,
        noise_multiplier: float,
        num_users: int,
        sample_rate: float,
        batch_size: int | None = None,
        emulated: bool = False,
        **fields: Any,
    ) -> Mechanism:
        """Returns the round of one training step.

        Args:
            noise_multiplier: The multiplier of the optimizer.
            num_users: n, the size of the data set.
            sample_rate: γ, the expected share of it in a batch.
            batch_size: B, if it may exceed n·γ.
            emulated: Whether the noise is added once to the sum, √B·σ, in place of the reports'.
            **fields: Other fields of the mechanism.
        """
        if emulated:
            noise_multiplier = noise_multiplier / math.sqrt(
                max(1, num_users * sample_rate, batch_size or 1)
            )
        if cls.sampling is None:
            # Rounding errors of n·γ are tolerated. Other fractions are dropped, because fewer
            # reports hide less.
            num_users, sample_rate = math.floor(num_users * sample_rate + 1e-6), 1.0
        return cls(
            noise_multiplier=noise_multiplier,
            num_users=num_users,
            sample_rate=sample_rate,
            **fields,
        )

    def with_noise(self, noise_multiplier: float) -> Mechanism:
        """Returns the same round at another σ."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def same_run_as(self, other: Mechanism) -> bool:
        """Tells whether both may be rounds of one run: all fields that may not vary are equal."""
        fixed = [
            field.name for field in dataclasses.fields(self) if not field.metadata.get("varies")
        ]
        return type(self) is type(other) and all(
            getattr(self, name) == getattr(other, name) for name in fixed
        )

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuses an optimizer whose next step is not such a round; by default none."""

    @property
    def expected_reports(self) -> float:
        """Reports per round: exact where their number is fixed, else its mean."""
        return self.num_users * self.sample_rate

    @property
    def noised_reports(self) -> float:
        """The number of reports whose local noise is in their sum: the expected reports."""
        return self.expected_reports

    @property
    def bits_per_coordinate(self) -> int | None:
        """The bits of one coordinate of a report; None if the mechanism does not define them."""
        return None

    @property
    def count_bits_per_coordinate(self) -> int | None:
        """The bits of a coordinate if the shuffler receives the count of its ones.

        It is None if reports are not bits.
        """
        return None

    @property
    def reporting_rate(self) -> float:
        """The expected share of the users who send a report in a round."""
        return self.sample_rate

    @property
    def noise_of_sum(self) -> float:
        """Standard deviation of one coordinate's noise on the sum of the expected reports.

        It is in clipping norms.
        """
        return self.noise_multiplier * (
            math.sqrt(self.noised_reports) if self.noise_is_local else 1.0
        )

    @property
    def noise_of_mean(self) -> float:
        """Standard deviation of one coordinate's noise on the mean gradient, in clipping norms."""
        return self.noise_of_sum / self.expected_reports


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """The traffic of one user, without labels, headers and encryption.

    Attributes:
        bits_per_coordinate: Bits per coordinate of one report; the largest, if rounds differ.
        count_bits_per_coordinate: The same for a report that sends the shuffler a count in place of
            each coordinate's bits; None if reports are not counts.
        bytes_per_user: Bytes over the whole run by ``bits_per_coordinate``, rounded up; the
            expected number if users are sampled.
        every_round: Whether every user reports in every round.
    """

    bits_per_coordinate: int
    count_bits_per_coordinate: int | None
    bytes_per_user: int
    every_round: bool

    def to_dict(self) -> dict[str, int | None]:
        """Returns plain values for JSON."""
        return {
            "bits_per_coordinate": self.bits_per_coordinate,
            "count_bits_per_coordinate": self.count_bits_per_coordinate,
            "bytes_per_user": self.bytes_per_user,
        }

    def __str__(self) -> str:
        count = self.count_bits_per_coordinate
        counted = "" if count is None else f" ({count:,} if it hands the shuffler their count)"
        who, when, mean = ("Every user", "in every round", "")
        if not self.every_round:
            who, when, mean = ("A user", "in each round that it is drawn for", " on average")
        return (
            f"{who} sends {self.bits_per_coordinate:,} bits a coordinate{counted} {when}, "
            f"{size_of(self.bytes_per_user)} over the whole run{mean}."
        )


def sent_per_user(
    rounds: Sequence[tuple[Mechanism, int]], *, dimension: int | None = None
) -> Communication | None:
    """Returns the traffic of one user over all rounds.

    It is None if a mechanism does not define it, or the number of coordinates is unknown.

    Args:
        rounds: Mechanisms with their numbers of rounds.
        dimension: d, coordinates of a report, for mechanisms without this field.

    Raises:
        ValueError: If ``dimension`` is not at least 1.
    """
    given = None if dimension is None else integer("dimension", dimension)
    reports, counts, total = [], [], 0.0
    for mechanism, count in rounds:
        bits, entries = mechanism.bits_per_coordinate, getattr(mechanism, "dimension", given)
        if bits is None or entries is None:
            return None
        reports.append(bits)
        counts.append(mechanism.count_bits_per_coordinate)
        total += count * mechanism.reporting_rate * entries * bits
    if not reports:
        return None
    known = [count for count in counts if count is not None]
    return Communication(
        bits_per_coordinate=max(reports),
        count_bits_per_coordinate=max(known) if len(known) == len(counts) else None,
        bytes_per_user=math.ceil(total / 8),
        every_round=all(mechanism.reporting_rate == 1 for mechanism, _ in rounds),
    )


def size_of(count: int) -> str:
    """Returns a number of bytes with its unit, rounded up.

    >>> size_of(999), size_of(1_001), size_of(5_306_880)
    ('999 B', '1.1 kB', '5.4 MB')
    """
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{-(-count * 10 // 1000**power) / 10:,g} {unit}"
    return f"{count} B"
