"""Accounts a training run for Opacus.

It records every round as a mechanism, and answers with any bound on them.

>>> from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn
>>> accountant = ShuffleAccountant(ShuffledCheckIn, num_users=60_000, local_noise=True)
>>> for _ in range(100):
...     accountant.step(noise_multiplier=5.0, sample_rate=0.1)
>>> accountant.rounds
[(ShuffledCheckIn(noise_multiplier=5.0, num_users=60000, sample_rate=0.1), 100)]
>>> accountant.history
[(5.0, 0.1, 100)]
>>> round(accountant.get_epsilon(1e-5), 3)
0.011
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer

from opacus_shuffle.accountants.bounds.registry import bounds_of, compute_bound
from opacus_shuffle.accountants.history import (
    append_rounds,
    check_load,
    number_of_rounds,
    read_history,
    rewound_sentence,
)
from opacus_shuffle.accountants.mechanisms import Mechanism
from opacus_shuffle.accountants.report import PrivacyReport, weak_noise
from opacus_shuffle.core.guarantees import (
    Adjacency,
    Guarantee,
    PrivacyAssumptionWarning,
    PrivacyBound,
)
from opacus_shuffle.core.opacus_compat import POISSON_SAMPLERS, stock_engine_call
from opacus_shuffle.core.randomness import is_secret
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.validation import (
    boolean,
    integer,
    noise_level,
    one_of,
    open_unit_interval,
    reject_unknown,
    sampling_rate,
)

Step = tuple[float, float]
"""A step as Opacus records it: its noise multiplier and its sample rate."""

OUR_FLAGS = ("local_noise", "shuffle_weights", "aggregator", "report")
"""Keywords of this package's ``make_private`` that Opacus's ``make_private`` does not have."""

_STOCK_GENERATOR = "the state of the generator of opacus.PrivacyEngine's noise, which is no cipher,"


class ShuffleAccountant(IAccountant):
    """Accounts for the rounds of one run, all of one mechanism; saves and loads them.

    Args:
        mechanism_class: The class of the rounds, such as ``ShuffledCheckIn``.
        num_users: n, the size of the data set. On a stock engine the step hook sets it.
        batch_size: B, reports per round. If it exceeds n·γ, the noise of the sum is divided by its
            root.
        local_noise: The meaning of Opacus's multipliers: ``False`` is the noise of the sum, √B·σ;
            ``True`` is the σ of each report.

    Attributes:
        mechanism_class: The class of the rounds.
        planned: Every round of the run except for its noise; None until :meth:`plan` sets it.
        emulated: Whether the noise of the reports is added once to their sum. ε describes the
            emulated protocol then.
        rewound: How many accounted rounds were replaced, by a load with ``allow_rewind=True`` or by
            a history that was set by hand.
        predictable: Seeds and generators passed by a user, with which others can draw the run's
            randomness again. The run is not private then.
        unchecked: Assumptions behind every ε that nothing verifies, such as the content of a loaded
            file, or that batches were skipped independently of their content.

    Formal Guarantees:
        Those of the bound; ``bound="certified"``, the default, is proved for every data set.
    """

    def __init__(
        self,
        mechanism_class: type[Mechanism],
        *,
        num_users: int | None = None,
        batch_size: int | None = None,
        local_noise: bool = False,
    ) -> None:
        self.mechanism_class = mechanism_class
        if boolean("local_noise", local_noise) and not mechanism_class.noise_is_local:
            raise ValueError(
                f"{mechanism_class.name} adds no noise to single reports: leave out "
                "local_noise=True"
            )
        self.num_users = None if num_users is None else integer("num_users", num_users)
        self.batch_size = None if batch_size is None else integer("batch_size", batch_size)
        self.planned: Mechanism | None = None
        self.emulated = mechanism_class.noise_is_local and not local_noise
        # Opacus's calibration sets the history before it passes the number of users.
        self._entries: list[tuple[Mechanism | Step, int]] = []
        self.rewound = 0
        self.predictable: tuple[str, ...] = ()
        self.unchecked: tuple[str, ...] = ()
        self._warned = False
        super().__init__()

    def mechanism(self) -> str:  # type: ignore[override]
        """The name under which Opacus knows this accountant."""
        return self.mechanism_class.name

    # ---- what ran

    def plan(self, mechanism: Mechanism, *, emulated: bool | None = None) -> None:
        """Sets what every round of a run will be, before it starts.

        Args:
            mechanism: One round; its noise may change from step to step.
            emulated: Whether the noise of the reports is added once to their sum; by default as
                set by the constructor.

        Raises:
            ValueError: If another run is accounted already: any field but the noise differs.
                Nothing is changed then.
        """
        self._check_class(mechanism)
        emulated = self.emulated if emulated is None else boolean("emulated", emulated)
        if emulated and not self.mechanism_class.noise_is_local:
            raise ValueError(
                f"{self.mechanism()} adds no noise to single reports: leave out emulated=True"
            )
        accounted = self.planned or next(iter(self._recorded), None)
        if accounted is not None and not (
            mechanism.same_run_as(accounted) and emulated == self.emulated
        ):
            raise ValueError(
                "this accountant accounts for a run with {}, got one with {}: use a new "
                "PrivacyEngine for another run".format(
                    *_contrast(
                        _run(accounted, emulated=self.emulated), _run(mechanism, emulated=emulated)
                    )
                )
            )
        self.planned, self.emulated = mechanism, emulated

    def record(self, mechanism: Mechanism, steps: int = 1) -> None:
        """Records rounds; equal neighbours are merged."""
        self._check_class(mechanism)
        append_rounds(self._entries, mechanism, integer("steps", steps))

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Records one round from Opacus's numbers. This package's engine calls :meth:`record`.

        Args:
            noise_multiplier: The optimizer's multiplier (local or summed, see ``local_noise``),
                above 0.
            sample_rate: Expected share of the users in the round, in (0, 1].

        Raises:
            ValueError: If a number is out of range, or a field of the round is unknown, such as n.
        """
        self.record(
            self._round(
                noise_level("noise_multiplier", noise_multiplier),
                sampling_rate("sample_rate", sample_rate),
            )
        )

    def _check_class(self, mechanism: Any) -> None:
        """Refuses other classes, also derived ones, which may mean something else."""
        if type(mechanism) is not self.mechanism_class:
            raise ValueError(
                f"mechanism must be a {self.mechanism_class.__name__}, got {mechanism!r}: use the "
                "accountant of its name"
            )

    def __len__(self) -> int:
        """Returns the number of rounds so far."""
        return number_of_rounds(self._entries)

    @property
    def _recorded(self) -> list[Mechanism]:
        """The mechanisms of the rounds that ran, without steps that were set as a history."""
        return [entry for entry, _ in self._entries if isinstance(entry, Mechanism)]

    @property
    def rounds(self) -> list[tuple[Mechanism, int]]:
        """What ran, in order: mechanisms with their numbers of rounds.

        Raises:
            ValueError: If a field of a round is unknown, such as n.
        """
        return self._rounds_with({})

    def _rounds_with(self, fields: dict[str, Any]) -> list[tuple[Mechanism, int]]:
        """Returns what ran; ``fields`` complete steps that were set as a history."""
        rounds: list[tuple[Mechanism, int]] = []
        for entry, steps in self._entries:
            mechanism = entry if isinstance(entry, Mechanism) else self._round(*entry, **fields)
            append_rounds(rounds, mechanism, steps)
        return rounds

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Opacus's triples (noise multiplier, sample rate, steps), σ as its optimizer has it.

        Opacus's calibration sets it, in place of all rounds so far. Rounds that ran are counted in
        :attr:`rewound` then.
        """
        merged: list[tuple[Step, int]] = []
        for entry, steps in self._entries:
            append_rounds(merged, self._as_step(entry), steps)
        return [(*step, steps) for step, steps in merged]

    @history.setter
    def history(self, triples: Iterable[tuple[float, float, int]]) -> None:
        entries: list[tuple[Mechanism | Step, int]] = [
            ((noise_level("noise_multiplier", sigma), sampling_rate("sample_rate", rate)), steps)
            for (sigma, rate), steps in read_history(triples)
        ]
        # Steps that were set as a history, as Opacus's calibration does, did not run.
        self.rewound += sum(steps for entry, steps in self._entries if isinstance(entry, Mechanism))
        self._entries = entries

    def _round(self, noise_multiplier: float, sample_rate: float, **fields: Any) -> Mechanism:
        """Returns one of Opacus's steps as a round; ``fields`` are those that Opacus does not know.

        Raises:
            ValueError: If a field of the round is unknown.
        """
        batch = fields.pop("batch_size", self.batch_size)
        users = fields.pop("num_users", self.num_users)
        if self.planned is None:
            given = {"noise_multiplier", "sample_rate", *fields, *(["num_users"] if users else [])}
            required = self.mechanism_class.required_fields()
            if missing := sorted({*required} - given, reverse=True):
                raise ValueError(self._missing_fields_message(missing))
            return self.mechanism_class.of_batch(
                noise_multiplier=noise_multiplier,
                num_users=users or 1,
                sample_rate=sample_rate,
                batch_size=batch,
                emulated=self.emulated,
                **fields,
            )
        mechanism = self.planned
        if self.mechanism_class.sampling is not None:
            mechanism = dataclasses.replace(mechanism, sample_rate=sample_rate)
        if self.emulated:
            shares = max(1, mechanism.noised_reports, (users or 0) * sample_rate, batch or 1)
            noise_multiplier /= math.sqrt(shares)
        return mechanism.with_noise(noise_multiplier)

    def _missing_fields_message(self, missing: list[str]) -> str:
        """Returns an error message that says how to pass missing fields of a round."""
        given = ", ".join(f"{name}=..." for name in missing)
        users = (
            "set engine.accountant.num_users = len(dataset), " if missing == ["num_users"] else ""
        )
        return (
            f"{self.mechanism()} does not know {', '.join(missing)}: {users}describe a round with "
            f"engine.accountant.plan({self.mechanism_class.__name__}({given}, ...)), pass {given} "
            "to get_epsilon, or use opacus_shuffle.PrivacyEngine, which sets it. (A stock engine "
            f"uses make_private_with_epsilon(..., {given}) for the noise, but does not keep it.)"
        )

    def _as_step(self, mechanism: Mechanism | Step) -> Step:
        """Returns the noise multiplier of Opacus's optimizer and the rate of its sampler."""
        if not isinstance(mechanism, Mechanism):
            return mechanism
        shares = max(1, mechanism.noised_reports, self.batch_size or 1) if self.emulated else 1
        rate = mechanism.sample_rate
        if self.num_users is not None and mechanism.sampling is None:
            rate = min(1.0, mechanism.expected_reports / self.num_users)
        return mechanism.noise_multiplier * math.sqrt(shares), rate

    # ---- what it costs

    def get_epsilon(
        self,
        delta: float,
        *,
        bound: str = "certified",
        adjacency: str = "zero_out",
        orders: Iterable[float] | None = None,
        **fields: Any,
    ) -> float:
        """Returns ε spent so far; warns once if it does not cover every data set.

        Args:
            delta: δ in (0, 1).
            bound: ``"certified"``, ``"pair"``, ``"published"``, or another that the mechanism has.
            adjacency: ``"zero_out"`` or ``"replace"``, for which some bounds have no value.
            orders: Rényi orders in place of the adaptive grid, for bounds that use any.
            **fields: Fields that complete a history that was set, as Opacus's calibration passes
                them: ``num_users``, n, ``batch_size``, B, and other fields of the mechanism.

        Returns:
            ε, rounded up; 0 if nothing ran.

        Raises:
            ValueError: If a value is missing or out of range, or a keyword is unknown or already
                determined by what ran.

        Warns:
            PrivacyAssumptionWarning: The first time that ε does not cover every data set, with the
                value that does; and whenever rounds that ran are left out.
        """
        self._check_fields(fields)
        open_unit_interval("delta", delta)
        one_of("bound", bound, bounds_of(self.mechanism_class))
        Adjacency(adjacency)
        if self.rewound:
            warnings.warn(rewound_sentence(self.rewound), PrivacyAssumptionWarning, stacklevel=3)
        if not len(self):
            return 0.0
        rounds = self._rounds_with(fields)
        answer = compute_bound(rounds, delta=delta, bound=bound, adjacency=adjacency, orders=orders)
        if not self._warned and answer.guarantee is not Guarantee.PROVED:
            self._warned = True
            certified = compute_bound(rounds, delta=delta, adjacency=adjacency)
            sentence = assumption(answer, certified, emulated=self.emulated)
            warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=3)
        return answer.epsilon

    def _check_fields(self, fields: dict[str, Any]) -> None:
        """Refuses fields that are unknown, or already determined by what ran."""
        # Opacus passes the other two itself.
        names = {*self.mechanism_class.field_names(), "batch_size"} - {
            "noise_multiplier",
            "sample_rate",
        }
        unknown = {name: value for name, value in fields.items() if name not in names}
        reject_unknown(self.mechanism(), unknown, ["bound", "adjacency", "orders", *sorted(names)])
        ran = self.planned is not None or bool(self._recorded)
        for name, value in fields.items():
            if ran or getattr(self, name, None) is not None:
                raise ValueError(
                    f"{name} is already determined by what ran, got {value!r}: leave it out"
                )

    def bound(self, delta: float, **options: Any) -> PrivacyBound:
        """Returns ε of at least one round with its meaning, without a warning.

        Args:
            delta: δ in (0, 1).
            **options: ``bound``, ``adjacency`` and ``orders``, as :meth:`get_epsilon` takes them.
        """
        return compute_bound(self.rounds, delta=delta, **options)

    def report(
        self,
        delta: float,
        *,
        adjacency: str = "zero_out",
        max_grad_norms: Sequence[float] = (),
    ) -> PrivacyReport:
        """Returns every bound, and ε of the same noise under other trust models.

        Args:
            delta: δ in (0, 1).
            adjacency: ``"zero_out"`` or ``"replace"``.
            max_grad_norms: The clipping norms of the rounds, for the statement. No bound depends
                on them.

        Raises:
            ValueError: If an argument is out of range, or nothing ran.
        """
        return PrivacyReport(
            self.rounds,
            delta=delta,
            adjacency=adjacency,
            simulated=self.mechanism_class.shuffled,
            emulated=self.emulated,
            rewound=self.rewound,
            predictable=self.predictable,
            max_grad_norms=max_grad_norms,
            num_users=self.num_users,
            unchecked=self.unchecked,
        )

    # ---- what checkpoints keep

    def state_dict(self, destination: Any = None) -> Any:
        """Returns plain values: every round by its mechanism's fields, and the other attributes."""
        destination = OrderedDict() if destination is None else destination
        destination.update(
            mechanism=self.mechanism(),
            rounds=[(dataclasses.asdict(mechanism), steps) for mechanism, steps in self.rounds],
            planned=None if self.planned is None else dataclasses.asdict(self.planned),
            emulated=self.emulated,
            num_users=self.num_users,
            batch_size=self.batch_size,
            rewound=self.rewound,
            predictable=list(self.predictable),
            unchecked=list(self.unchecked),
        )
        return destination

    def load_state_dict(self, state_dict: Any, *, allow_rewind: bool = False) -> None:
        """Loads a :meth:`state_dict` into an accountant that has accounted no rounds.

        What ran was released, and a load cannot undo that. So an accountant that holds rounds
        refuses every state.

        Args:
            state_dict: From :meth:`state_dict` of this mechanism's accountant.
            allow_rewind: Replace accounted rounds by those of the state. This is right only if
                nobody ever saw a result of the replaced rounds. Reports mention how many were
                replaced.

        Raises:
            ValueError: If rounds are accounted and ``allow_rewind`` is False, or the state is
                malformed or belongs to another mechanism, data set or plan. Nothing is changed
                then.
        """
        saved = self._parsed(state_dict)
        if self._contradicts(saved):
            raise ValueError(
                "state_dict is of a run with {}, this accountant of one with {}: load it into an "
                "engine made private with the same network, data set and kind of noise".format(
                    *_contrast(saved._facts, self._facts)
                )
            )
        check_load(len(self), allow_rewind=boolean("allow_rewind", allow_rewind))
        saved.planned = self.planned or saved.planned
        saved.batch_size = saved.batch_size or self.batch_size
        saved._warned = self._warned
        saved.rewound += self.rewound + len(self)
        saved.predictable = tuple(dict.fromkeys((*self.predictable, *saved.predictable)))
        saved.unchecked = tuple(dict.fromkeys((*self.unchecked, *saved.unchecked)))
        self.__dict__.update(saved.__dict__)

    def _parsed(self, state_dict: Any) -> ShuffleAccountant:
        """Builds an accountant from a state, and refuses a malformed one."""
        mechanism = state_dict.get("mechanism") if isinstance(state_dict, dict) else state_dict
        if mechanism != self.mechanism():
            raise ValueError(
                f"mechanism in state_dict must be {self.mechanism()!r}, got {mechanism!r}: load it "
                "into a PrivacyEngine(accountant=...) with the accountant that wrote it"
            )
        build = self.mechanism_class.build
        try:
            saved = type(self)(
                self.mechanism_class,
                num_users=state_dict["num_users"],
                batch_size=state_dict["batch_size"],
            )
            if (planned := state_dict["planned"]) is not None:
                saved.planned = build(**planned)
            for fields, steps in state_dict["rounds"]:
                saved.record(build(**fields), steps)
            saved.emulated = boolean("emulated", state_dict["emulated"])
            saved.rewound = integer("rewound", state_dict["rewound"], minimum=0)
            saved.predictable = names_in("predictable", state_dict["predictable"])
            saved.unchecked = names_in("unchecked", state_dict["unchecked"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state_dict of {self.mechanism()} is malformed ({type(error).__name__}: {error}): "
                "load what state_dict() of an accountant of this version returned"
            ) from error
        return saved

    @property
    def _facts(self) -> dict[str, Any]:
        """The fields that describe the run, by name."""
        return _run(
            self.planned or next(iter(self._recorded), None),
            num_users=self.num_users,
            batch_size=self.batch_size,
            emulated=self.emulated,
        )

    def _contradicts(self, saved: ShuffleAccountant) -> bool:
        """Whether the other one is of another run than this one is known to account for."""
        known = self.num_users is not None or self.planned is not None or len(self) > 0
        planned = self.planned or saved.planned
        batches = {self.batch_size, saved.batch_size} - {None}
        return (
            (self.num_users is not None and saved.num_users != self.num_users)
            or (known and saved.emulated != self.emulated)
            or len(batches) > 1
            or not all(
                _fits_plan(mechanism, planned)
                for mechanism in (saved.planned, *saved._recorded)
                if mechanism is not None and planned is not None
            )
        )

    # ---- the stock engine

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """Returns the step hook of a stock engine, which also sets n and B.

        Raises:
            ValueError: If the engine's batches are not random samples as accounted, or the engine
                cannot add such noise.

        Warns:
            UserWarning: If the engine ignores a flag; and at the first step, if the noise
                multiplier of the sum was likely meant for each report.
        """
        if not self.mechanism_class.trains_on_stock_engines:
            raise ValueError(
                f"Opacus's engine cannot train {self.mechanism()}: train with "
                "opacus_shuffle.PrivacyEngine"
            )
        loader, unread = stock_engine_call()
        users = None
        if loader is not None:
            users = len(loader.dataset)  # type: ignore[arg-type]
            self._check_sampler(loader.batch_sampler)
        ignored = [
            name for name in OUR_FLAGS if unread.get(name) is not None and unread[name] is not False
        ]
        if ignored:
            warnings.warn(
                f"opacus.PrivacyEngine ignores {', '.join(ignored)}: use "
                "opacus_shuffle.PrivacyEngine, or leave it out",
                stacklevel=3,
            )

        def record(optimizer: DPOptimizer) -> None:
            if not optimizer.expected_batch_size:
                raise ValueError(
                    f"expected_batch_size is {optimizer.expected_batch_size}, so the gradients "
                    "were divided by nothing: use a larger batch, or opacus_shuffle.PrivacyEngine, "
                    "which computes it in whole numbers"
                )
            if self.num_users is None and users is not None:
                # On the safe side B is rounded up.
                self.num_users, self.batch_size = users, math.ceil(users * sample_rate - 1e-6)
            sigma = optimizer.noise_multiplier
            rate = min(1.0, sample_rate * optimizer.accumulated_iterations)
            mechanism = self._round(sigma, rate)
            mechanism.check_optimizer(optimizer)
            if self.emulated and not len(self) and (sentence := weak_noise(mechanism, sigma)):
                # The hook is called by the optimizer's step.
                warnings.warn(sentence, stacklevel=4)
            if not is_secret(optimizer.generator):
                self.predictable = tuple(dict.fromkeys((*self.predictable, _STOCK_GENERATOR)))
            self.step(noise_multiplier=sigma, sample_rate=rate)

        return record

    def _check_sampler(self, sampler: Any) -> None:
        """Refuses a stock engine's batches that are not random samples.

        It warns if they are samples of another type than accounted.
        """
        name, planned = self.mechanism(), self.planned
        expected = (planned or self.mechanism_class).sampling
        # This package's samplers have an attribute. Their classes cannot be imported here, because
        # imports run downwards.
        drawn = getattr(sampler, "sampling", None)
        if isinstance(sampler, POISSON_SAMPLERS):
            drawn = "poisson"
        if expected is not None and drawn not in ("poisson", expected):
            raise ValueError(
                f"{name} accounts for batches that are random samples, got a loader with a "
                f"{type(sampler).__name__} (poisson_sampling=False?): leave poisson_sampling out, "
                "use opacus_shuffle.PrivacyEngine, or account with 'shuffle_gauss'; make the model "
                "and optimizer anew"
            )
        if drawn == "poisson" and expected != "poisson":
            warnings.warn(
                f"opacus.PrivacyEngine draws every record by its own coin, {name} "
                "accounts for batches of one size: its epsilon is that of batches of the expected "
                "size, and no guarantee here; use opacus_shuffle.PrivacyEngine, which draws "
                "such batches, or accountant='shuffled_checkin'",
                PrivacyAssumptionWarning,
                stacklevel=4,
            )


def assumption(answer: PrivacyBound, certified: PrivacyBound, *, emulated: bool = False) -> str:
    """Returns the warning about an ε that is not proved for every data set."""
    how = (
        " (and the noise was added once to the sum, emulating batches of the expected size)"
        if emulated
        else ""
    )
    return (
        f"epsilon={round_up(answer.epsilon)} (bound={answer.bound!r}, delta={answer.delta:.3g}) "
        f"covers {answer.covers}{how}, which is no guarantee for every data set; proved for every "
        f"data set is epsilon={round_up(certified.epsilon)} (bound={certified.bound!r})"
    )


def _fits_plan(mechanism: Mechanism, planned: Mechanism) -> bool:
    """Tells whether a round may belong to the planned run.

    The sample of a round of accumulated batches is larger.
    """
    return mechanism.sample_rate >= planned.sample_rate and dataclasses.replace(
        mechanism, sample_rate=planned.sample_rate
    ).same_run_as(planned)


def _run(mechanism: Mechanism | None, **facts: Any) -> dict[str, Any]:
    """Returns the fields of a run without its noise, which may change."""
    fields = {} if mechanism is None else dataclasses.asdict(mechanism)
    return {**facts, **fields, "noise_multiplier": None}


def _contrast(*runs: Mapping[str, Any]) -> list[str]:
    """Returns the fields in which two runs differ, as a text for each run."""
    names = [name for name in runs[0] if runs[0][name] != runs[1].get(name)] or runs[0]
    return [", ".join(f"{name}={run.get(name)!r}" for name in names) for run in runs]


def names_in(name: str, value: Any) -> tuple[str, ...]:
    """Reads a list of strings of a checkpoint.

    Raises:
        ValueError: If it is anything else.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise ValueError(f"{name} must be a list of strings, got {value!r}")
    return tuple(value)
