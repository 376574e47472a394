"""Plans a run: what noise a privacy budget costs under each kind of trust.

>>> found = plan(num_users=400, steps=3, sample_rate=0.25, target_epsilon=10.0, target_delta=1e-5)
>>> for row in found.rows:
...     print(f"{row.trusted}, {row.mechanism}: as a server with noise multiplier {row.server_noise_multiplier:.2g}")
nobody, shuffled_checkin: as a server with noise multiplier 7.2
the shuffler, shuffle_gauss: as a server with noise multiplier 4.3
the shuffler, shuffled_checkin: as a server with noise multiplier 7.2
the aggregation, shuffled_checkin: as a server with noise multiplier 0.94
the server, shuffled_checkin: as a server with noise multiplier 0.57
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from opacus_shuffle.accountants.bounds.registry import Bound, ask, baselines_of, find_bound
from opacus_shuffle.accountants.calibrate import least_within, noise_within
from opacus_shuffle.accountants.communication import Communication, sent_per_user
from opacus_shuffle.accountants.mechanism import MECHANISMS, Mechanism
from opacus_shuffle.core.guarantees import SHUFFLER, Adjacency, Guarantee, PrivacyBound
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import paragraph, text_table
from opacus_shuffle.core.validation import (
    integer,
    open_unit_interval,
    positive,
    reject_unknown,
    sampling_rate,
)

TOLERANCE = 1e-3
"""Relative, of noise multipliers: three digits are enough to plan with, and they are rounded up."""

COARSE = 0.01
"""Relative, of how many users it takes."""

MOST_USERS = 10**12

UNKNOWN_DIMENSION = (
    "Without the number of trained parameters (dimension, --dimension) sums of bits are left out, "
    "which are nearly as good as "
    "a trusted server and trust a shuffler alone."
)

HEAD = ("trusted", "mechanism", "noise", "on mean", "server's", "users", "bits")


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """What a budget costs under one kind of trust.

    Attributes:
        trusted: Who must not be the adversary.
        round: One round, with the noise that it needs.
        bound: The proved ε of all rounds, within the budget.
        reports: B, the expected number of records in a round's sum.
        noise_of_sum: Standard deviation of the noise on one coordinate of the sum, over the
            clipping norm.
        server_noise_multiplier: Of DP-SGD on a trusted server, at the rate asked for, whose mean
            gradient is as noisy: what such a run reaches with Opacus alone, this one reaches.
        users_needed: n from which on the mean gradient is no noisier than that of the server at the
            n asked for, to one percent; None if no population up to 10¹² is enough.
        sent: What one user sends over all rounds; None where it sends its record, once, or the
            dimension is not known.
    """

    trusted: str
    round: Mechanism
    bound: PrivacyBound
    reports: float
    noise_of_sum: float
    server_noise_multiplier: float
    users_needed: int | None
    sent: Communication | None

    @property
    def mechanism(self) -> str:
        """The mechanism's name, which is its accountant's."""
        return self.round.name

    @property
    def noise_of_mean(self) -> float:
        """Standard deviation of the noise on one coordinate of the mean gradient, over the clipping norm."""
        return self.noise_of_sum / self.reports

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        names = (
            "trusted",
            "mechanism",
            "reports",
            "noise_of_sum",
            "noise_of_mean",
            "server_noise_multiplier",
        )
        return {
            **{name: getattr(self, name) for name in (*names, "users_needed")},
            **(self.sent.to_dict() if self.sent else {}),
            "noise_multiplier": self.round.noise_multiplier,
            "epsilon": self.bound.epsilon,
            "bound": self.bound.bound,
            "meaning": self.bound.meaning,
            "adversary": self.bound.adversary,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a budget costs under every kind of trust; print it.

    Attributes:
        rows: From the least trust to the most.
        num_users: n that was asked for.
        steps: T.
        sample_rate: γ.
        target_epsilon: ε.
        target_delta: δ.
        dimension: d, or None.
    """

    rows: tuple[PlannedRun, ...]
    num_users: int
    steps: int
    sample_rate: float
    target_epsilon: float
    target_delta: float
    dimension: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        asked = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "rows"
        }
        return {**asked, "rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        cells = [
            (
                row.trusted.removeprefix("the "),
                *(
                    (row.mechanism, round_up(row.round.noise_multiplier))
                    if row is not self.rows[-1]
                    else ("DP-SGD", "")
                ),
                round_up(row.noise_of_mean, 3),
                round_up(row.server_noise_multiplier, 3),
                "too many" if row.users_needed is None else f"{row.users_needed:,}",
                ""
                if row is self.rows[-1] or (bits := row.round.bits_per_coordinate) is None
                else f"{bits:,}",
            )
            for row in self.rows
        ]
        title = (
            f"epsilon = {self.target_epsilon:g} at delta = {self.target_delta:g}, zero_out "
            "adjacency, proved for every data "
            f"set: {self.num_users:,} users, {self.steps:,} rounds, sampling rate "
            f"{self.sample_rate:g}"
        )
        lines = [
            *paragraph(title),
            "",
            *([*paragraph(UNKNOWN_DIMENSION), ""] if self.dimension is None else []),
        ]
        lines += [*text_table(HEAD, cells, right=HEAD[2:]), ""]
        for term, text in _GLOSSARY.items():
            lines += paragraph(text, term=term, indent=max(map(len, _GLOSSARY)) + 2)
        lines += ["", "What each row's epsilon is about, in the same order:"]
        for row, (trusted, mechanism, *_) in zip(self.rows, cells, strict=True):
            lines += paragraph(row.bound.meaning, term=f"{trusted}, {mechanism}: ", indent=2)
        lines += ["", *paragraph(self._users())]
        return "\n".join(lines)

    def _users(self) -> str:
        """Where all users report, and what the least noisy way that trusts no server takes of each."""
        rows = [row for row in self.rows[:-1] if row.round.reporting_rate == 1]
        everyone = f"{', '.join(dict.fromkeys(row.mechanism for row in rows))}: all users report in every round."
        sending = [row for row in self.rows if row.trusted == SHUFFLER and row.sent]
        best = min(sending, key=lambda row: row.noise_of_mean, default=None)
        return everyone if best is None else f"{everyone} By {best.mechanism}: {best.sent}"


_GLOSSARY = {
    "noise": "the noise multiplier to pass: of one report, or of the sum where the mechanism has it so",
    "on mean": "noise on one coordinate of the mean gradient, in clipping norms",
    "server's": "the noise multiplier of DP-SGD on a trusted server, at the same sampling rate, whose mean gradient is as "
    "noisy: train so with Opacus alone to see the accuracy that this row reaches",
    "users": "how many users make the mean gradient no noisier than the trusted server's is here",
    "bits": "what a user sends for each coordinate, in every round that it takes part in; a server is handed the record once",
    "zero_out": Adjacency.ZERO_OUT.meaning,
}


def plan(
    *,
    num_users: int,
    steps: int,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float = 1.0,
    dimension: int | None = None,
    **fields: Any,
) -> Plan:
    """Returns the noise that a proved ε costs with each kind of trust, and how many users would make up for it.

    Users take part by coins at the sampling rate (samples of fixed size cost much the same), and
    everyone in every round where a mechanism samples nobody.

    Args:
        num_users: n, the whole population.
        steps: T, rounds, at least 1.
        target_epsilon: ε to stay within, above 0, zero-out adjacency.
        target_delta: δ in (0, 1).
        sample_rate: γ, the expected share of the users in a round.
        dimension: d, how many parameters are trained. Mechanisms that must know it are left out
            without it.
        **fields: Other fields of mechanisms, such as ``honest_fraction``; a mechanism takes those
            that it has.

    Raises:
        ValueError: If an argument is out of range or no mechanism has such a field.

    Formal Guarantees:
        Every row's ε is proved for every data set and was computed at the noise that the row
        states.
    """
    asked = {
        "num_users": integer("num_users", num_users),
        "sample_rate": sampling_rate("sample_rate", sample_rate),
    }
    epsilon, delta = (
        positive("target_epsilon", target_epsilon),
        open_unit_interval("target_delta", target_delta),
    )
    count = integer("steps", steps)
    if dimension is not None:
        asked["dimension"] = integer("dimension", dimension)
    kinds = [kind for kind in MECHANISMS.values() if kind.shuffled]
    known = sorted(
        {name for kind in kinds for name in kind.field_names()}
        - {"noise_multiplier"}
        - asked.keys()
    )
    reject_unknown(
        "plan", {name: value for name, value in fields.items() if name not in known}, known
    )
    ways = [
        _Way(entry, kind, own, count, epsilon, delta)
        for kind in kinds
        for entry, own in _entries(kind, asked, fields)
    ]
    if unread := sorted(fields.keys() - {name for way in ways for name in way.fields}):
        given = ", ".join(f"{name}={fields[name]!r}" for name in unread)
        raise ValueError(
            f"{given} is about mechanisms that need dimension, which is left out: pass dimension, "
            "or leave it out"
        )
    for way in ways:
        way.build(1.0)  # refuses bad fields before others take their time
    best: dict[tuple[str, str], tuple[_Way, Mechanism]] = {}
    for way in ways:
        key = way.entry.trusted, "" if way.entry.baseline else way.kind.name
        round_ = way.calibrated()
        if round_ and (
            key not in best or round_.noise_of_mean < (1 - COARSE) * best[key][1].noise_of_mean
        ):
            best[key] = way, round_
    chosen = sorted(best.values(), key=lambda pair: pair[0].entry.style.place)
    server = chosen[-1][1].noise_of_mean
    rows = [
        PlannedRun(
            trusted=way.entry.trusted,
            round=round_,
            bound=way.spent(round_, count),
            reports=round_.expected_reports,
            noise_of_sum=round_.noise_of_sum,
            server_noise_multiplier=round_.noise_of_mean * num_users * sample_rate,
            users_needed=way.users_needed(round_, server),
            sent=sent_per_user([(round_, count)], dimension=dimension)
            if round_ is not chosen[-1][1]
            else None,
        )
        for way, round_ in chosen
    ]
    return Plan(tuple(rows), num_users, count, sample_rate, epsilon, delta, dimension)


def _entries(
    kind: type[Mechanism], asked: dict[str, Any], fields: dict[str, Any]
) -> Iterator[tuple[Bound, dict[str, Any]]]:
    """Yields a mechanism's default bound and its baselines at the rate asked for, with the fields that it has."""
    own = {name: value for name, value in {**asked, **fields}.items() if name in kind.field_names()}
    rate = asked["sample_rate"]
    everyone = kind.sampling is None and rate < 1
    sampling = getattr(kind, "sampling", "poisson")
    if sampling == "fixed_size" or (rate == 1 and sampling and kind.noise_is_local):
        return  # hardly different from coins; the same as the mechanism that samples nobody
    if kind.sampling is None:
        own.pop("sample_rate")
    if {*kind.required_fields()} <= {*own, "noise_multiplier"}:
        yield find_bound(kind, "certified"), own
        if not everyone:
            yield from ((find_bound(kind, name, baseline=True), own) for name in baselines_of(kind))


@dataclasses.dataclass(frozen=True)
class _Way:
    """A mechanism's rounds by one bound, within a budget."""

    entry: Bound
    kind: type[Mechanism]
    fields: dict[str, Any]
    steps: int
    epsilon: float
    delta: float

    def build(self, noise_multiplier: float, **changed: Any) -> Mechanism:
        """Returns one round."""
        return self.kind.build(noise_multiplier=noise_multiplier, **{**self.fields, **changed})

    def spent(self, mechanism: Mechanism, steps: int) -> PrivacyBound:
        """Returns what rounds cost."""
        return ask(self.entry, [(mechanism, steps)], delta=self.delta)

    def calibrated(self) -> Mechanism | None:
        """Returns a round with the least noise, None if its ε is not proved."""
        if self.spent(self.build(1.0), 1).guarantee is not Guarantee.PROVED:
            return None
        sigma = noise_within(
            self.entry,
            lambda noise: [(self.build(noise), self.steps)],
            target_epsilon=self.epsilon,
            delta=self.delta,
            lowest=self.kind.least_noise,
            tolerance=TOLERANCE,
        )
        return self.build(sigma)

    def users_needed(self, mechanism: Mechanism, noise: float) -> int | None:
        """Returns how many users make the mean gradient no noisier than this, at the noise multiplier that does so."""
        if mechanism.noise_of_mean <= noise:
            return mechanism.num_users
        users, _ = least_within(
            self.entry,
            lambda users: [(self._as_noisy(mechanism, noise, math.ceil(users)), self.steps)],
            target_epsilon=self.epsilon,
            delta=self.delta,
            lowest=mechanism.num_users,
            highest=MOST_USERS,
            tolerance=COARSE
            / 4,  # of ε, which falls with the root of the number of users or faster
        )
        return None if users is None else math.ceil(users)

    def _as_noisy(self, mechanism: Mechanism, noise: float, users: int) -> Mechanism:
        """Returns the round of so many users whose mean gradient is as noisy as this."""
        sigma = mechanism.noise_multiplier
        same = self.build(sigma, num_users=users)
        return self.build(
            max(sigma * noise / same.noise_of_mean, self.kind.least_noise), num_users=users
        )
