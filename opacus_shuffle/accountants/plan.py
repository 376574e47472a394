"""Plans a run: computes the noise that a privacy budget costs under each trust model.

>>> costs = plan(num_users=400, steps=3, sample_rate=0.25, target_epsilon=10.0, target_delta=1e-5)
>>> for row in costs.rows:
...     server = f"as a server with noise multiplier {row.server_noise_multiplier:.2g}"
...     print(f"{row.trusted}, {row.mechanism}: {server}")
nobody, shuffled_checkin: as a server with noise multiplier 7.2
the shuffler, shuffle_gauss: as a server with noise multiplier 4.3
the shuffler, shuffled_checkin: as a server with noise multiplier 7.2
the shuffler, secret_checkin: as a server with noise multiplier 4.9
the shuffler, shuffled_sums: as a server with noise multiplier 0.6
the aggregation, shuffled_checkin: as a server with noise multiplier 0.94
the server, random_allocation: as a server with noise multiplier 0.45
the server, shuffled_checkin: as a server with noise multiplier 0.57
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from opacus_shuffle.accountants.bounds.registry import Bound, entries_of, evaluate_bound
from opacus_shuffle.accountants.calibrate import noise_within, rounds_at
from opacus_shuffle.accountants.compute import best_sample_rate
from opacus_shuffle.accountants.mechanism import MECHANISMS, Communication, Mechanism, sent_per_user
from opacus_shuffle.accountants.mechanisms import RandomAllocation, SecretCheckIn
from opacus_shuffle.core.guarantees import SHUFFLER, Adjacency, Guarantee, PrivacyBound
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import paragraph, text_table
from opacus_shuffle.core.validation import (
    integer,
    open_unit_interval,
    positive,
    sampling_rate,
)

TOLERANCE = 3e-4
"""Relative tolerance of noise multipliers. Three digits are enough for planning; they are rounded
up.
"""

CLOSE = 0.01
"""A mechanism replaces another one in a row if its noise is smaller by more than this share."""

ASSUMED_DIMENSION = 1_000_000
"""The number of trained parameters if no dimension is given.

The noise of sums of bits is the same to a percent for 1 and for 10⁸ parameters, and the number of
bits grows slowly.
"""

HOPELESS = 10.0
"""Below this signal-to-noise ratio almost nothing can be learned.

In ``opacus-shuffle compare`` the last row has a ratio of 17, and is a few percent more accurate
than guessing.
"""

SERVER = "the server"

HEAD = ("trusted", "mechanism", "noise", "on mean", "server's", "bits")


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """The cost of a budget under one trust model.

    Attributes:
        trusted: Who must not be the adversary.
        round: One round, with the noise that it needs.
        bound: The proved ε of all rounds, within the budget.
        server_noise_multiplier: The multiplier of DP-SGD on a trusted server, at the requested
            rate, with the same noise on the mean gradient. The run can be expected to reach the
            accuracy that Opacus reaches with this multiplier.
        sent: What one user sends over all rounds; None if it sends its record to the server, or if
            no dimension was given.
    """

    trusted: str
    round: Mechanism
    bound: PrivacyBound
    server_noise_multiplier: float
    sent: Communication | None

    @property
    def mechanism(self) -> str:
        """The mechanism's name, which is its accountant's."""
        return self.round.name

    @property
    def noise_of_mean(self) -> float:
        """Standard deviation of the noise on one coordinate of the mean, in clipping norms."""
        return self.round.noise_of_mean

    @property
    def signal_to_noise(self) -> float:
        """An upper bound on the signal-to-noise ratio of all gradients together.

        It takes the mean gradient of each round to be as long as the clipping norm, and all of them
        to have one direction.
        """
        return math.sqrt(self.bound.rounds) / self.noise_of_mean

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON: those of the bound, and the noise."""
        return {
            **self.bound.to_dict(),
            "reports": self.round.expected_reports,
            "noise_of_sum": self.round.noise_of_sum,
            "noise_of_mean": self.noise_of_mean,
            "server_noise_multiplier": self.server_noise_multiplier,
            **(self.sent.to_dict() if self.sent else {}),
            "noise_multiplier": self.round.noise_multiplier,
            "signal_to_noise": self.signal_to_noise,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """The costs of a budget under all trust models; print it.

    Attributes:
        rows: From the least trust to the most; the last one is DP-SGD on a trusted server.
        num_users: n.
        steps: T.
        sample_rate: γ.
        target_epsilon: ε.
        target_delta: δ.
        dimension: d; None if sums of bits are planned for ``ASSUMED_DIMENSION``.
    """

    rows: tuple[PlannedRun, ...]
    num_users: int
    steps: int
    sample_rate: float
    target_epsilon: float
    target_delta: float
    dimension: int | None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            **{name: value for name, value in vars(self).items() if name != "rows"},
            "assumed_dimension": ASSUMED_DIMENSION if self.dimension is None else None,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        server = self.rows[-1]
        cells = [
            (
                row.trusted.removeprefix("the "),
                "DP-SGD" if row is server else row.mechanism,
                round_up(
                    row.server_noise_multiplier if row is server else row.round.noise_multiplier
                ),
                round_up(row.noise_of_mean, 3),
                round_up(row.server_noise_multiplier, 3),
                "" if row.trusted == SERVER else f"{row.round.bits_per_coordinate:,}",
            )
            for row in self.rows
        ]
        title = (
            f"epsilon = {self.target_epsilon:g} at delta = {self.target_delta:g}, zero_out "
            f"adjacency, proved for every data set: {self.num_users:,} users, {self.steps:,} "
            f"rounds, sampling rate {self.sample_rate:g}"
        )
        lines = [*paragraph(title), "", *text_table(HEAD, cells, right=HEAD[2:]), ""]
        lines += [*paragraph(LEGEND), ""]
        return "\n".join([*lines, *(line for note in self._notes() for line in paragraph(note))])

    def _notes(self) -> list[str]:
        """Returns sentences about single rows: large noise, sampling, and what a user sends."""
        notes = []
        hopeless = ", ".join(
            f"{round_up(row.noise_of_mean, 3)} clipping norms ({row.trusted}, {row.mechanism})"
            for row in self.rows
            if row.signal_to_noise < HOPELESS
        )
        if hopeless:
            notes.append(f"Noise on the mean gradient is {hopeless}: nothing can be learned.")
        if self.dimension is None:
            notes.append(
                f"Sums of bits are planned for {ASSUMED_DIMENSION:,} trained parameters, as no "
                "dimension (--dimension) is given: their noise hardly depends on it."
            )
        for row in self.rows:
            # Some values of epsilon rely on more than on who is trusted.
            parts = row.bound.meaning.split("; ")
            notes += [f"{row.mechanism} {part}." for part in parts if part.startswith("counts on")]
            if isinstance(row.round, RandomAllocation):
                batches = f"{row.round.num_batches:,} batches per epoch"
                notes.append(f"{row.mechanism}: {batches}, and begun epochs count in full.")
            if isinstance(row.round, SecretCheckIn):
                coins = f"secret coins of rate {row.round.sample_rate:g} (sample_rate)"
                notes.append(f"{row.mechanism}: {coins} decide who participates.")
        everyone = [row.mechanism for row in self.rows[:-1] if row.round.reporting_rate == 1]
        notes.append(f"{', '.join(dict.fromkeys(everyone))}: all users report in every round.")
        sending = [row for row in self.rows if row.trusted == SHUFFLER and row.sent]
        if sending:
            best = min(sending, key=lambda row: row.noise_of_mean)
            notes.append(f"By {best.mechanism}: {best.sent}")
        return notes


LEGEND = (
    "noise: multiplier to pass, of a report or the sum. on mean: noise per coordinate of the mean "
    "gradient, in clipping norms. server's: DP-SGD's multiplier for as much. bits: per coordinate "
    "and report. The adversary sees named reports (trusting nobody), shuffled ones, or sums "
    f"(aggregation). zero_out: {Adjacency.ZERO_OUT.meaning}."
)
"""The legend of the table; the meaning of each row is in its values for JSON."""


def plan(
    *,
    num_users: int,
    steps: int,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float = 1.0,
    dimension: int | None = None,
) -> Plan:
    """Returns the noise that a proved ε costs under each trust model.

    Users participate by coins at the sampling rate (samples of fixed size cost about the same), or
    in every round if a mechanism samples nobody. At γ = 1 secret check-in uses the rate at which
    the mean is least noisy. Random allocation has the whole number of batches nearest to 1/γ, and a
    begun epoch counts in full, as in training. It has a row if there are at least 2 batches and at
    most as many as users.

    Args:
        num_users: n, the whole population.
        steps: T, rounds, at least 1.
        target_epsilon: ε to stay within, above 0, zero-out adjacency.
        target_delta: δ in (0, 1).
        sample_rate: γ, the expected share of the users in a round.
        dimension: d, the number of trained parameters. If it is None, sums of bits, whose noise
            hardly depends on it, are planned for ``ASSUMED_DIMENSION``, and the plan does not say
            how much a user sends.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        The ε of every row is proved for every data set. It was computed at the noise of the row.
    """
    setting: dict[str, Any] = {
        "num_users": integer("num_users", num_users),
        "sample_rate": sampling_rate("sample_rate", sample_rate),
    }
    setting["num_batches"] = round(1 / setting["sample_rate"])
    entries = ASSUMED_DIMENSION if dimension is None else integer("dimension", dimension)
    setting["dimension"] = entries
    steps = integer("steps", steps)
    target_epsilon = positive("target_epsilon", target_epsilon)
    delta = open_unit_interval("target_delta", target_delta)
    best: dict[tuple[str, str], tuple[Bound, Mechanism]] = {}
    for mechanism_class, entry, fields in _candidates(setting):
        if mechanism_class is SecretCheckIn and sample_rate == 1:
            # Secret check-in needs users who send noise alone, so it has a rate below 1.
            del fields["sample_rate"]
            fields["sample_rate"] = best_sample_rate(
                steps=steps, target_epsilon=target_epsilon, target_delta=delta, **fields
            )
        key = entry.trusted, "" if entry.baseline else mechanism_class.name
        previous = best[key][1] if key in best else None
        if entry.baseline and previous and previous.noise_multiplier > previous.least_noise:
            continue  # a baseline depends on the noise alone, so one mechanism is enough
        rounds = rounds_at(mechanism_class, steps, fields)
        sigma = noise_within(
            entry,
            rounds,
            target_epsilon=target_epsilon,
            delta=delta,
            lowest=mechanism_class.least_noise,
            tolerance=TOLERANCE,
        )
        ((round_, _),) = rounds(sigma)
        if not previous or round_.noise_of_mean < (1 - CLOSE) * previous.noise_of_mean:
            best[key] = entry, round_
    rows = tuple(
        PlannedRun(
            trusted=entry.trusted,
            round=round_,
            bound=evaluate_bound(entry, [(round_, steps)], delta=delta),
            server_noise_multiplier=round_.noise_of_mean * num_users * sample_rate,
            sent=None
            if entry.trusted == SERVER or dimension is None
            else sent_per_user([(round_, steps)], dimension=dimension),
        )
        for entry, round_ in sorted(
            best.values(), key=lambda row: (row[0].trusted == SERVER, row[0].rank)
        )
    )
    return Plan(rows, num_users, steps, sample_rate, target_epsilon, delta, dimension)


def _candidates(
    setting: dict[str, Any],
) -> Iterator[tuple[type[Mechanism], Bound, dict[str, Any]]]:
    """Yields mechanisms, each with a proved bound and its fields from the setting.

    The mechanisms are random allocation and those with a shuffler; the bounds are the certified
    ones and baselines.
    """
    everyone = setting["sample_rate"] == 1
    for mechanism_class in MECHANISMS.values():
        names = mechanism_class.field_names()
        fields = {name: value for name, value in setting.items() if name in names}
        allocated, secret = mechanism_class is RandomAllocation, mechanism_class is SecretCheckIn
        if mechanism_class.sampling is None or allocated:  # its rate follows from its batches
            fields.pop("sample_rate")
        # Samples of fixed size cost about the same as coins, and coins of rate 1 are the mechanism
        # that samples nobody.
        redundant = mechanism_class.sampling == "fixed_size" or (
            everyone and mechanism_class.sampling and mechanism_class.noise_is_local and not secret
        )
        fits = mechanism_class.shuffled
        if allocated:
            fits = 1 < setting["num_batches"] <= setting["num_users"]
        complete = {*mechanism_class.required_fields()} <= {*fields, "noise_multiplier"}
        if redundant or not complete or not fits:
            continue
        for entry in entries_of(mechanism_class):
            # The baselines of these mechanisms are those of others at another rate.
            other_rate = allocated or secret or not (everyone or mechanism_class.sampling)
            wanted = entry.name == "certified" or (entry.baseline and not other_rate)
            if entry.guarantee is Guarantee.PROVED and wanted:
                yield mechanism_class, entry, fields
