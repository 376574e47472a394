"""The history of one run: which rounds ran, what Opacus calls them, and the state that checkpoints keep."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from opacus.accountants import IAccountant

from opacus_shuffle.accountants.lineage import Lineage, append, count, tell_of_kept_rounds
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.core.plain_values import plain
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    noise_level,
    one_of,
    reject_unknown,
    sampling_rate,
)

Triple = tuple[float, float, int]
"""Opacus's record of equal steps: noise multiplier, sample rate, number of steps."""
Entry = Mechanism | tuple[float, float]
"""A round, or the noise multiplier and sample rate of one of Opacus's steps that is not yet one."""
_TOLD_BY_OPACUS = ("noise_multiplier", "num_users", "sample_rate")
_SAID = ("predictable", "unchecked")
"""What a state holds where there is something to say."""


class RecordedRounds(IAccountant):
    """Records the rounds of one run, all of one mechanism, and saves and loads them.

    Args:
        mechanism_class: What is accounted, such as ``ShuffledCheckIn``.
        num_users: n, the size of the data set. On a stock engine the step hook learns it.
        batch_size: B, reports per round. Used for n while n is unknown; where it exceeds n·γ, the
            noise of the sum is divided by its root.
        local_noise: What Opacus's multipliers mean: ``False`` is the noise of the sum, √B·σ;
            ``True`` each report's own σ.
        **fields: Other fields of the mechanism, for Opacus's own :meth:`step`.

    Attributes:
        mechanism_class: What is accounted.
        planned: What every round of a run is, but for its noise; None until :meth:`plan` says it.
        emulated: Whether the noise of the reports is added once to their sum: ε describes the
            protocol that is emulated.
        predictable: What a user has passed that lets others draw the run's randomness again: then
            it is not private.
        unchecked: Files whose word for the rounds that they brought is all there is.
    """

    def __init__(
        self,
        mechanism_class: type[Mechanism],
        *,
        num_users: int | None = None,
        batch_size: int | None = None,
        local_noise: bool = False,
        **fields: Any,
    ) -> None:
        self.mechanism_class = kind = mechanism_class
        if boolean("local_noise", local_noise) and not kind.noise_is_local:
            raise ValueError(
                f"{kind.name} has no noise of each report's own: leave out local_noise=True"
            )
        self.num_users = optional_count("num_users", num_users)
        self.batch_size = optional_count("batch_size", batch_size)
        self.planned: Mechanism | None = None
        self.emulated = kind.noise_is_local and not local_noise
        self._fields = self._known_fields(fields)
        self._entries: list[tuple[Entry, int]] = []
        self._lineage = Lineage()
        # else all rounds were set as a history, as calibration does, and none was released
        self._ran = False
        self.predictable: tuple[str, ...] = ()
        self.unchecked: tuple[str, ...] = ()
        self._warned = False
        super().__init__()
        if fields and kind.trains_on_stock_engines and self._unknown() in ([], ["num_users"]):
            kind.of_batch(
                noise_multiplier=kind.least_noise, num_users=1, sample_rate=1.0, **self._fields
            )  # refuses bad ones

    def mechanism(self) -> str:  # type: ignore[override]
        """The name under which Opacus knows this accountant."""
        return self.mechanism_class.name

    def plan(self, mechanism: Mechanism, *, emulated: bool | None = None) -> None:
        """Sets what every round of a run will be, before it starts.

        Args:
            mechanism: One round; its noise may change from step to step.
            emulated: The noise of the reports is added once to their sum; by default as the
                constructor was told.

        Raises:
            ValueError: If another run is accounted already: any field but the noise differs.
                Nothing is changed then.
        """
        self._check_kind(mechanism)
        emulated = self.emulated if emulated is None else boolean("emulated", emulated)
        if emulated and not self.mechanism_class.noise_is_local:
            raise ValueError(
                f"{self.mechanism()} has no noise of each report's own: leave out emulated=True"
            )
        ran = [] if self._unknown() else self.rounds
        accounted = self.planned if self.planned is not None else ran[-1][0] if ran else None
        if accounted is not None and not (
            mechanism.same_run_as(accounted) and emulated == self.emulated
        ):
            raise ValueError(
                f"this accountant accounts for {accounted} (emulated={self.emulated}), got "
                f"{mechanism} (emulated={emulated}): "
                "use a new PrivacyEngine for another run"
            )
        if self.planned is not None:
            self._entries = list(ran)  # the earlier plan's
        self.planned, self.emulated = mechanism, emulated

    def record(self, mechanism: Mechanism, steps: int = 1) -> None:
        """Records rounds; equal neighbours are merged."""
        self._check_kind(mechanism)
        self._append(mechanism, integer("steps", steps))

    def _append(self, entry: Entry, steps: int) -> None:
        """Records what ran, and names it in the lineage."""
        self._ran, rounds = True, self._lineage.rounds + steps
        append(self._entries, entry, steps)
        self._lineage.reach(rounds)

    def _check_kind(self, mechanism: Any) -> None:
        """Refuses all but rounds of this very mechanism: one derived from it may mean something else, with other bounds."""
        if type(mechanism) is not self.mechanism_class:
            kind = self.mechanism_class.__name__
            raise ValueError(
                f"mechanism must be a {kind}, got {mechanism!r}: use the accountant of its own name"
            )

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one round as Opacus tells of it; this package's engine calls :meth:`record`.

        Args:
            noise_multiplier: The optimizer's multiplier (local or summed, see ``local_noise``),
                above 0.
            sample_rate: Expected share of the users in the round, in (0, 1].
        """
        told, steps = _read((noise_multiplier, sample_rate, 1))
        if not self._unknown():
            self._round(*told)  # refuses what is no round
        self._append(told, steps)

    def __len__(self) -> int:
        """Rounds so far."""
        return count(self._entries)

    @property
    def lineage(self) -> Lineage:
        """Which run the rounds are of. Names a round first that an interrupt has left without a name."""
        self._lineage.reach(len(self))
        return self._lineage

    @property
    def rewound(self) -> int:
        """Rounds that ran and are no longer accounted, by ``allow_rewind=True`` or a history set by hand."""
        return self.lineage.rewound

    @property
    def rounds(self) -> list[tuple[Mechanism, int]]:
        """What ran, in order: mechanisms with their numbers of rounds.

        Raises:
            ValueError: If something is unknown that turns Opacus's steps into rounds, such as n.
        """
        unknown = self._unknown()
        if unknown and len(self._recorded()) < len(self._entries):
            given = ", ".join(f"{name}=..." for name in unknown)
            users = (
                "set engine.accountant.num_users = len(dataset), "
                if unknown == ["num_users"]
                else ""
            )
            raise ValueError(
                f"{self.mechanism()} does not know {', '.join(unknown)}: {users}describe a round "
                "with "
                f"engine.accountant.plan({self.mechanism_class.__name__}({given}, ...)), pass "
                f"{given} to get_epsilon, or use "
                "opacus_shuffle.PrivacyEngine, which knows. (A stock engine takes "
                f"make_private_with_epsilon(..., {given}) "
                "for the noise, but forgets it.)"
            )
        rounds: list[tuple[Mechanism, int]] = []
        for entry, steps in self._entries:
            append(rounds, entry if isinstance(entry, Mechanism) else self._round(*entry), steps)
        return rounds

    def _recorded(self) -> list[Mechanism]:
        """Lists the rounds that were recorded as mechanisms, not as Opacus's steps."""
        return [entry for entry, _ in self._entries if isinstance(entry, Mechanism)]

    @property
    def history(self) -> list[Triple]:
        """Opacus's triples, with σ as its optimizer has it.

        Opacus's calibration sets it, in the place of all rounds so far; those that ran are said to
        be left out then.
        """
        return [
            (*(self._as_step(entry) if isinstance(entry, Mechanism) else entry), steps)
            for entry, steps in self._entries
        ]

    @history.setter
    def history(self, triples: Iterable[Triple]) -> None:
        if not isinstance(triples, Iterable):
            raise ValueError(
                "history must be a list of (noise_multiplier, sample_rate, steps) triples, got "
                f"{triples!r}"
            )
        entries: list[tuple[Entry, int]] = [_read(triple) for triple in triples]
        lineage = Lineage()
        lineage.reach(count(entries))
        self._lineage = self.lineage.replaced_by(lineage) if self._ran else lineage
        self._entries = entries

    def _unknown(self) -> list[str]:
        """Lists the fields that turn one of Opacus's steps into a round and are not known yet."""
        if self.planned is not None:
            return []
        known = {"noise_multiplier", "sample_rate", *self._fields}
        if self.num_users is not None or self.batch_size is not None:
            known.add("num_users")
        return sorted({*self.mechanism_class.required_fields()} - known, reverse=True)

    def _round(self, noise_multiplier: float, sample_rate: float) -> Mechanism:
        """Turns one of Opacus's steps into a round."""
        kind, batch, users, planned = (
            self.mechanism_class,
            self.batch_size,
            self.num_users,
            self.planned,
        )
        if planned is not None:
            mechanism = (
                planned
                if kind.sampling is None
                else dataclasses.replace(planned, sample_rate=sample_rate)
            )
            if not kind.trains_on_stock_engines and not mechanism.same_run_as(planned):
                raise ValueError(
                    f"sample_rate must be {planned.sample_rate} as planned, got {sample_rate}: use "
                    "a new PrivacyEngine"
                )
            shares = (
                max(1, mechanism.expected_reports, (users or 0) * sample_rate, batch or 1)
                if self.emulated
                else 1
            )
            return mechanism.with_noise(noise_multiplier / math.sqrt(shares))
        if users is None:
            users = 1 if batch is None else max(1, round(batch / sample_rate))
        return kind.of_batch(
            noise_multiplier=noise_multiplier,
            num_users=users,
            sample_rate=sample_rate,
            batch_size=batch,
            emulated=self.emulated,
            **self._fields,
        )

    def _as_step(self, mechanism: Mechanism) -> tuple[float, float]:
        """The noise multiplier and sample rate of a round as Opacus's optimizer and sampler had it."""
        shares = max(1, mechanism.expected_reports, self.batch_size or 1) if self.emulated else 1
        rate = mechanism.sample_rate
        if self.num_users is not None and mechanism.sampling is None:
            rate = min(1.0, mechanism.expected_reports / self.num_users)
        return mechanism.noise_multiplier * math.sqrt(shares), rate

    def state_dict(self, destination: Any = None) -> Any:
        """Returns plain values: every round by the fields of its mechanism, and what else this accountant knows.

        Its attribute ``_metadata``, as that of a module's state, says which releases these rounds
        are, and holds a digest of all of the state; it travels with it through ``copy``, ``pickle``
        and ``torch.save``. Without it, as in ``dict(state)``, a state cannot be loaded.
        """
        destination = OrderedDict() if destination is None else destination
        entries: Iterable[tuple[Entry, int]] = self._entries if self._unknown() else self.rounds
        destination.update(
            mechanism=self.mechanism(),
            rounds=[
                (dataclasses.asdict(entry) if isinstance(entry, Mechanism) else entry, steps)
                for entry, steps in entries
            ],
            planned=None if self.planned is None else dataclasses.asdict(self.planned),
            emulated=self.emulated,
            num_users=self.num_users,
            batch_size=self.batch_size,
            fields=plain(self._fields, set()),
        )
        destination.update(
            {name: list(getattr(self, name)) for name in _SAID if getattr(self, name)}
        )
        if isinstance(destination, OrderedDict):
            destination._metadata = self.lineage.as_state(destination)  # type: ignore[attr-defined]
        return destination

    def load_state_dict(self, state_dict: Any, *, allow_rewind: bool = False) -> None:
        """Loads a :meth:`state_dict` of the same run; refuses it whole if it was changed or is of another run.

        What ran here was released, whatever is loaded. So an earlier state of the same run leaves
        its later rounds in the history, a later one adds those that are missing here, and one that
        has parted from what ran here is refused.

        Args:
            state_dict: From :meth:`state_dict` of this mechanism's accountant.
            allow_rewind: Hold the state's rounds alone, which is right only if nothing of the
                others was ever seen by anyone. Reports say how many rounds were left out.

        Raises:
            ValueError: If a key is missing or malformed, a round is none of this mechanism, this
                accountant accounts for another run already, or the state is not as it was saved.
                Nothing is changed then.
        """
        boolean("allow_rewind", allow_rewind)
        saved = self._parsed(state_dict)
        if self._contradicts(saved):
            raise ValueError(
                f"state_dict speaks of {_run(saved)}, this accountant of {_run(self)}: load it "
                "into an engine made private "
                "with the same data set and the same kind of noise"
            )
        rounds = len(saved)
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is None:
            raise ValueError(
                f"state_dict of {self.mechanism()} has lost its _metadata, which says which "
                f"releases its {rounds} "
                "rounds are, and whether it was changed: load what state_dict() returned, or a "
                "copy by copy.deepcopy"
            )
        lineage = Lineage.from_state(metadata, state_dict, rounds)
        saved.planned, saved.batch_size = (
            self.planned or saved.planned,
            saved.batch_size or self.batch_size,
        )
        saved._fields, saved._warned, saved._ran = (
            {**self._fields, **saved._fields},
            self._warned,
            True,
        )
        for name in _SAID:
            setattr(
                saved, name, tuple(dict.fromkeys((*getattr(self, name), *getattr(saved, name))))
            )
        if allow_rewind or not len(self):
            saved._lineage = self.lineage.replaced_by(lineage)
        else:
            ran = copy.copy(saved)  # what ran here, in the light of what the state tells
            ran._entries = self._entries
            unknown = ", ".join(saved._unknown())
            if unknown and (ran._recorded() or saved._recorded()):
                raise ValueError(
                    f"what ran here cannot be merged with state_dict while {unknown} is unknown: "
                    "set it first"
                )
            mine, theirs = (
                accountant._entries if unknown else accountant.rounds for accountant in (ran, saved)
            )
            saved._lineage, saved._entries = self.lineage.longer_of(mine, lineage, theirs)  # type: ignore[type-var]
            tell_of_kept_rounds(len(saved) - rounds, rounds)
        self.__dict__.update(saved.__dict__)

    def _parsed(self, state_dict: Any) -> RecordedRounds:
        """Builds an accountant from a state; refuses what is no state."""
        keys = [key for key in self.state_dict() if key not in _SAID]
        if not isinstance(state_dict, dict) or set(state_dict) - {*_SAID} != set(keys):
            got = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else repr(state_dict)
            raise ValueError(
                f"state_dict of {self.mechanism()} must hold {', '.join(keys)}, got {got}"
            )
        one_of("mechanism in state_dict", state_dict["mechanism"], [self.mechanism()])
        saved = type(self)(
            self.mechanism_class,
            num_users=state_dict["num_users"],
            batch_size=state_dict["batch_size"],
        )
        saved.emulated = boolean("emulated", state_dict["emulated"])
        saved._fields = saved._known_fields(
            instance_of("fields in state_dict", state_dict["fields"], (dict,))
        )
        for entry, steps in _pairs("rounds", state_dict["rounds"]):
            if isinstance(entry, dict):
                saved._entries.append((self._restored(entry), integer("steps", steps)))
            else:
                saved._entries.append(_read((*_pairs("rounds", [entry])[0], steps)))
        for name in _SAID:
            said = instance_of(f"{name} in state_dict", state_dict.get(name, []), (list,))
            setattr(
                saved,
                name,
                tuple(instance_of(f"{name} in state_dict", text, (str,)) for text in said),
            )
        if state_dict["planned"] is not None:
            saved.planned = self._restored(state_dict["planned"])
        if not saved._unknown():
            saved._entries = list(saved.rounds)  # refuses what no such run can have
        return saved

    def _contradicts(self, saved: RecordedRounds) -> bool:
        """Whether the other one is of another run than this one is known to account for, or of several."""
        if self.num_users is not None and saved.num_users != self.num_users:
            return True
        if (
            self.num_users is not None or self.planned is not None or len(self)
        ) and saved.emulated != self.emulated:
            return True
        if self.batch_size and saved.batch_size and saved.batch_size != self.batch_size:
            return True
        if any(saved._fields.get(name, value) != value for name, value in self._fields.items()):
            return True
        kind, ran = self.mechanism_class, saved._recorded()
        if (
            kind.sampling is not None
            and saved.num_users is not None
            and any(m.num_users != saved.num_users for m in ran)
        ):
            return True
        plans = [planned for planned in (self.planned, saved.planned) if planned is not None]
        return any(
            not self._may_be(mechanism, planned)
            for planned in plans
            for mechanism in [*plans, *ran]
        )

    @staticmethod
    def _may_be(mechanism: Mechanism, planned: Mechanism) -> bool:
        """Whether a round is one of the planned run; where batches were accumulated, its sample is larger."""
        if mechanism.num_users != planned.num_users or mechanism.sample_rate < planned.sample_rate:
            return False
        return dataclasses.replace(mechanism, sample_rate=planned.sample_rate).same_run_as(planned)

    def _restored(self, fields: Any) -> Mechanism:
        """A mechanism from its saved fields, through its validators."""
        names = self.mechanism_class.field_names()
        if set(instance_of("a round in state_dict", fields, (dict,))) != set(names):
            raise ValueError(
                f"a round of {self.mechanism()} in state_dict must hold {', '.join(names)}, got "
                f"{fields!r}"
            )
        return self.mechanism_class(**fields)

    def _known_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Refuses fields that no step leaves open; returns the others."""
        names = [name for name in self.mechanism_class.field_names() if name not in _TOLD_BY_OPACUS]
        unknown = {str(name): value for name, value in fields.items() if name not in names}
        known = ["bound", "adjacency", "orders", "num_users", "batch_size", *names]
        reject_unknown(self.mechanism(), unknown, known)
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }


def _read(triple: Any) -> tuple[tuple[float, float], int]:
    """Checks one of Opacus's triples."""
    if not isinstance(triple, tuple | list) or len(triple) != 3:
        raise ValueError(
            f"history must hold (noise_multiplier, sample_rate, steps) triples, got {triple!r}"
        )
    sigma, rate, steps = triple
    return (noise_level("noise_multiplier", sigma), sampling_rate("sample_rate", rate)), integer(
        "steps", steps
    )


def optional_count(name: str, value: Any) -> int | None:
    """Checks a whole number of at least 1, or None."""
    return None if value is None else integer(name, value)


def _pairs(name: str, value: Any) -> list[tuple[Any, Any]]:
    """Checks a list of pairs, as ``state_dict`` writes it."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    ):
        raise ValueError(f"{name} in state_dict must be a list of pairs, got {value!r}")
    return [tuple(pair) for pair in value]


def _run(accountant: RecordedRounds) -> str:
    """Describes what an accountant accounts for, in words."""
    known = {
        "num_users": accountant.num_users,
        "batch_size": accountant.batch_size,
        "emulated": accountant.emulated,
    }
    said = ", ".join(f"{name}={value}" for name, value in {**known, **accountant._fields}.items())
    return f"{said}, {accountant.planned or accountant._recorded()[-1:]}"
