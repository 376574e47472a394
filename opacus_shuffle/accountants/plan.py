"""Plans a run: what noise a privacy budget costs under each kind of trust.

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
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from opacus_shuffle.accountants.bounds.registry import (
    Bound,
    Rounds,
    ask,
    entries_of,
)
from opacus_shuffle.accountants.calibrate import least_within, noise_within
from opacus_shuffle.accountants.communication import Communication, sent_per_user
from opacus_shuffle.accountants.compute import best_sample_rate
from opacus_shuffle.accountants.mechanism import MECHANISMS, Mechanism
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

TOLERANCE = 1e-3
"""Relative, of noise multipliers: three digits are enough to plan with, and they are rounded up."""

COARSE = 0.01
"""Relative, of how many users it takes."""

MOST_USERS = 10**12

ASSUMED_DIMENSION = 1_000_000
"""Trained parameters where nobody says how many.

The noise of sums of bits is the same to a percent for 1 and for 10⁸; their bits grow slowly.
"""

HOPELESS = 10.0
"""A row whose gradients stand out from all rounds' noise by less learns next to nothing.

In ``opacus-shuffle compare`` the last row stands out by 17, and classifies a few percent better
than guessing.
"""

SERVER = "the server"

HEAD = ("trusted", "mechanism", "noise", "on mean", "server's", "users", "bits")


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """What a budget costs under one kind of trust.

    Attributes:
        trusted: Who must not be the adversary.
        round: One round, with the noise that it needs.
        bound: The proved ε of all rounds, within the budget.
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
    server_noise_multiplier: float
    users_needed: int | None
    sent: Communication | None

    @property
    def mechanism(self) -> str:
        """The mechanism's name, which is its accountant's."""
        return self.round.name

    @property
    def noise_of_mean(self) -> float:
        """Standard deviation of one coordinate's noise on the mean, over the clipping norm."""
        return self.round.noise_of_mean

    @property
    def signal_to_noise(self) -> float:
        """By how much the run's gradients stand out from its noise, at the very most.

        All rounds' mean gradients, were each of them as long as the clipping norm and in one
        direction, over the standard deviation of all rounds' noise in that direction.
        """
        return math.sqrt(self.bound.rounds) / self.noise_of_mean

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: the bound's own, and what it costs."""
        return {
            **self.bound.to_dict(),
            "reports": self.round.expected_reports,
            "noise_of_sum": self.round.noise_of_sum,
            "noise_of_mean": self.noise_of_mean,
            "server_noise_multiplier": self.server_noise_multiplier,
            "users_needed": self.users_needed,
            **(self.sent.to_dict() if self.sent else {}),
            "noise_multiplier": self.round.noise_multiplier,
            "signal_to_noise": self.signal_to_noise,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a budget costs under every kind of trust; print it.

    Attributes:
        rows: From the least trust to the most; the last one is DP-SGD on a trusted server.
        num_users: n that was asked for.
        steps: T.
        sample_rate: γ.
        target_epsilon: ε.
        target_delta: δ.
        dimension: d, or None where sums of bits are planned for ``ASSUMED_DIMENSION``.
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
        return {
            **asked,
            "assumed_dimension": ASSUMED_DIMENSION if self.dimension is None else None,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        cells = [
            (
                row.trusted.removeprefix("the "),
                *(
                    (row.mechanism, round_up(row.round.noise_multiplier))
                    if row is not self.rows[-1]
                    else ("DP-SGD", round_up(row.server_noise_multiplier))
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
            f"adjacency, proved for every data set: {self.num_users:,} users, {self.steps:,} "
            f"rounds, sampling rate {self.sample_rate:g}"
        )
        lines = [*paragraph(title), "", *text_table(HEAD, cells, right=HEAD[2:]), ""]
        lines += [*paragraph(LEGEND), ""]
        return "\n".join([*lines, *(line for note in self._notes() for line in paragraph(note))])

    def _notes(self) -> list[str]:
        """Returns sentences about single rows: what fails, how to train, what is sent."""
        notes = []
        drowned = [
            f"{round_up(row.noise_of_mean, 3)} clipping norms ({row.trusted}, {row.mechanism})"
            for row in self.rows
            if row.signal_to_noise < HOPELESS
        ]
        if drowned:
            noise = ", ".join(drowned)
            notes.append(f"Noise on the mean gradient is {noise}: nothing can be learned.")
        if self.dimension is None:
            notes.append(
                f"Sums of bits are planned for {ASSUMED_DIMENSION:,} trained parameters, as no "
                "dimension (--dimension) is given: their noise hardly depends on it."
            )
        for row in self.rows:
            # What an epsilon counts on besides whom it trusts is said with it.
            parts = row.bound.meaning.split("; ")
            counted = [part for part in parts if part.startswith("counts on")]
            notes += [f"{row.mechanism} {part}." for part in counted]
            if isinstance(row.round, RandomAllocation):
                batches = f"{row.round.num_batches:,} batches to an epoch"
                notes.append(f"{row.mechanism}: {batches}, and begun epochs count in full.")
            if isinstance(row.round, SecretCheckIn):
                coins = f"secret coins of rate {row.round.sample_rate:g} (sample_rate)"
                notes.append(f"{row.mechanism}: {coins} say who takes part.")
        everyone = [row.mechanism for row in self.rows[:-1] if row.round.reporting_rate == 1]
        notes.append(f"{', '.join(dict.fromkeys(everyone))}: all users report in every round.")
        sending = [row for row in self.rows if row.trusted == SHUFFLER and row.sent]
        if sending:
            best = min(sending, key=lambda row: row.noise_of_mean)
            notes.append(f"By {best.mechanism}: {best.sent}")
        return notes


LEGEND = (
    "noise: multiplier to pass, of a report or the sum. on mean: noise per coordinate of the mean "
    "gradient, in clipping norms. server's: DP-SGD's multiplier for as much. users: how many reach "
    "the last row's. bits: per coordinate and report. Seen are named reports (trusting nobody), "
    f"shuffled ones, or sums (aggregation). zero_out: {Adjacency.ZERO_OUT.meaning}."
)
"""What the words of the table mean; each row's own meaning is in its values for JSON."""


def plan(
    *,
    num_users: int,
    steps: int,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float = 1.0,
    dimension: int | None = None,
) -> Plan:
    """Returns the noise that a proved ε costs with each kind of trust.

    It also has how many users would make up for it.

    Users take part by coins at the sampling rate (samples of fixed size cost much the same), and
    everyone in every round where a mechanism samples nobody. Where γ is 1 secret check-in, in which
    all report anyhow, has the rate at which the mean is least noisy. Random allocation has the
    whole number of batches nearest to 1/γ; an epoch that the rounds begin counts in full, as it
    does where they are trained. It has a row where these are at least 2 batches and at most one for
    each user.

    Args:
        num_users: n, the whole population.
        steps: T, rounds, at least 1.
        target_epsilon: ε to stay within, above 0, zero-out adjacency.
        target_delta: δ in (0, 1).
        sample_rate: γ, the expected share of the users in a round.
        dimension: d, how many parameters are trained. Without it sums of bits, whose noise hardly
            depends on it, are planned for ``ASSUMED_DIMENSION``, and what they send is not said.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        Every row's ε is proved for every data set and was computed at the noise that the row
        states.
    """
    asked = {
        "num_users": integer("num_users", num_users),
        "sample_rate": sampling_rate("sample_rate", sample_rate),
    }
    asked["num_batches"] = round(1 / asked["sample_rate"])
    asked["dimension"] = ASSUMED_DIMENSION if dimension is None else integer("dimension", dimension)
    steps = integer("steps", steps)
    budget: dict[str, Any] = {
        "target_epsilon": positive("target_epsilon", target_epsilon),
        "delta": open_unit_interval("target_delta", target_delta),
    }
    best: dict[tuple[str, str], tuple[Bound, Callable[..., Rounds], Mechanism, int]] = {}
    for kind, entry, fields in _ways(asked):
        if kind is SecretCheckIn and sample_rate == 1:  # not all of those who are there
            everyone = {name: value for name, value in fields.items() if name != "sample_rate"}
            fields["sample_rate"] = best_sample_rate(
                steps=steps,
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                **everyone,
            )
        rounds = functools.partial(_rounds, kind, steps, fields)
        key = entry.trusted, "" if entry.baseline else kind.name
        held = best.get(key)
        if held and entry.baseline and held[2].noise_multiplier > held[2].least_noise:
            continue  # the same server by another mechanism
        sigma = noise_within(entry, rounds, lowest=kind.least_noise, tolerance=TOLERANCE, **budget)
        ((one, count),) = rounds(sigma)
        if not held or one.noise_of_mean < (1 - COARSE) * held[2].noise_of_mean:
            best[key] = entry, rounds, one, count
    ways = sorted(best.values(), key=lambda way: (way[0].trusted == SERVER, way[0].place))
    server = ways[-1][2]
    rows = [
        PlannedRun(
            trusted=entry.trusted,
            round=one,
            bound=ask(entry, [(one, count)], delta=target_delta),
            server_noise_multiplier=one.noise_of_mean * num_users * sample_rate,
            users_needed=_users_needed(entry, rounds, one, server.noise_of_mean, budget),
            sent=None
            if entry.trusted == SERVER or dimension is None
            else sent_per_user([(one, count)], dimension=dimension),
        )
        for entry, rounds, one, count in ways
    ]
    return Plan(tuple(rows), num_users, steps, sample_rate, target_epsilon, target_delta, dimension)


def _ways(asked: dict[str, Any]) -> Iterator[tuple[type[Mechanism], Bound, dict[str, Any]]]:
    """Yields random allocation and each shuffled mechanism with its default bound and baselines.

    The fields that it takes of those that are asked for come with it.
    """
    everyone = asked["sample_rate"] == 1
    for kind in MECHANISMS.values():
        fields = {name: value for name, value in asked.items() if name in kind.field_names()}
        allocated = kind is RandomAllocation
        if kind.sampling is None or allocated:  # whose rate follows from its batches
            fields.pop("sample_rate")
        # Samples of fixed size are hardly different from coins, and coins that always fall on the
        # same side are the mechanism that samples nobody.
        secret = kind is SecretCheckIn
        needless = kind.sampling == "fixed_size" or (
            everyone and kind.sampling and kind.noise_is_local and not secret
        )
        fits = 1 < asked["num_batches"] <= asked["num_users"] if allocated else kind.shuffled
        known = {*kind.required_fields()} <= {*fields, "noise_multiplier"}
        if needless or not known or not fits:
            continue
        for entry in entries_of(kind):
            # Those baselines are the same server, and the same users seen by name, at other rates.
            baseline = entry.baseline and (everyone or kind.sampling) and not (allocated or secret)
            if entry.guarantee is Guarantee.PROVED and (entry.name == "certified" or baseline):
                yield kind, entry, fields


def _rounds(
    kind: type[Mechanism], steps: int, fields: dict[str, Any], sigma: float, **changed: Any
) -> Rounds:
    """Returns all rounds at a noise multiplier."""
    return [(kind.build(**{**fields, "noise_multiplier": sigma, **changed}), steps)]


def _users_needed(
    entry: Bound,
    rounds: Callable[..., Rounds],
    one: Mechanism,
    noise: float,
    budget: dict[str, Any],
) -> int | None:
    """Returns how many users make the mean gradient no noisier than ``noise`` within the budget."""
    if one.noise_of_mean <= noise:
        return one.num_users

    def as_noisy(users: float) -> Rounds:
        """Returns the rounds of so many users whose mean gradient is as noisy as this."""
        ((same, _),) = rounds(one.noise_multiplier, num_users=math.ceil(users))
        sigma = max(one.noise_multiplier * noise / same.noise_of_mean, one.least_noise)
        return rounds(sigma, num_users=math.ceil(users))

    users = least_within(
        entry,
        as_noisy,
        lowest=one.num_users,
        highest=MOST_USERS,
        # Of ε, which falls with the root of the number of users or faster.
        tolerance=COARSE / 4,
        **budget,
    )
    return None if users is None else math.ceil(users)
