"""Turns rounds, δ and an adjacency into an ε with its meaning, by registered bounds.

The rounds are mechanisms with their numbers of repetitions. A *bound* is a function that turns
rounds, δ and an adjacency into a number (:class:`Answer`). It is registered for a mechanism
together with the meaning of that number (:class:`Bound`). :func:`evaluate_bound` combines the two
into a :class:`~opacus_shuffle.core.guarantees.PrivacyBound`, the only form in which an ε leaves
this package. The computations are in the other files of this folder.

A *baseline* is a bound under another trust model with the same noise, such as no shuffler or a
trusted server. It is no ε of the mechanism, so it is never used for accounting or calibration.

>>> from opacus_shuffle.accountants.mechanisms import ShuffleGauss
>>> rounds = [(ShuffleGauss(noise_multiplier=9.48, num_users=60_000), 7)]
>>> answer = compute_bound(rounds, delta=1 / 60_000)
>>> round(answer.epsilon, 7), answer.guarantee.name, answer.covers, answer.trusted, answer.proof
(0.0029256, 'PROVED', 'every data set', 'the shuffler', 'truncated clones')
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.core.guarantees import (
    ADVERSARY,
    EVERY_DATA_SET,
    SHUFFLER,
    Adjacency,
    Guarantee,
    NotCovered,
    PrivacyBound,
)
from opacus_shuffle.core.validation import (
    check_unregistered,
    integer,
    one_of,
    open_unit_interval,
)

Rounds = Sequence[tuple[Mechanism, int]]
"""What ran, in order: mechanisms of one class, each with its number of rounds."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a bound function.

    The fields are those of :class:`PrivacyBound`. None means the value registered with the bound.
    """

    epsilon: float
    lower: float | None = None
    proof: str = ""
    guarantee: Guarantee | None = None
    covers: str | None = None
    meaning: str | None = None
    adversary: str | None = None


BoundFunction = Callable[..., Answer]
"""Returns the ε of rounds at δ: ``function(rounds, delta=..., adjacency=..., orders=...)``.

``orders`` are Rényi orders in place of an adaptive grid; most bounds use none.
"""

ORDER = (
    "local",
    "composition",
    "certified",
    "published",
    "pair",
    "secure_aggregation",
    "central",
)
"""Bounds from the least trust to the most, as reports list them; those of other names come last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """A registered bound: its function and the meaning of its ε.

    ``guarantee``, ``covers``, ``trusted`` and ``adversary`` are :class:`PrivacyBound`'s.

    Attributes:
        name: Every mechanism should have ``"certified"``, proved for every data set.
        function: Computes the :class:`Answer`.
        meaning: What the bound computes, as one sentence of the report's glossary.
        legend: A few words for the picture; by default the data sets covered.
        baseline: Whether the bound is about another trust model with the same noise.
        zero_out_only: Whether the bound has no value for replacement.
        uses_orders: Whether the bound takes Rényi orders.
        cites: Where the proof is written down, for statements.
        estimate: A function that approximates ε quickly, called as ``function`` without
            ``orders``. It bounds nothing: calibration starts its search there.
    """

    name: str
    function: BoundFunction
    meaning: str
    guarantee: Guarantee
    legend: str = ""
    baseline: bool = False
    covers: str = EVERY_DATA_SET
    trusted: str = SHUFFLER
    adversary: str = ADVERSARY
    zero_out_only: bool = False
    uses_orders: bool = False
    cites: str = ""
    estimate: Callable[..., float] | None = None

    @property
    def rank(self) -> int:
        """The position in a report, from the least trust to the most."""
        return ORDER.index(self.name) if self.name in ORDER else len(ORDER)


_REGISTERED: dict[type[Mechanism], dict[str, Bound]] = {}


def register_bound(
    mechanisms: type[Mechanism] | Iterable[type[Mechanism]], name: str, **entry: Any
) -> Callable[[BoundFunction], BoundFunction]:
    """Returns a decorator that registers a function as a bound of one or several mechanisms.

    Args:
        mechanisms: One mechanism class or several.
        name: The bound's name.
        **entry: The other fields of :class:`Bound`; ``meaning`` and ``guarantee`` are required.
    """
    classes = [mechanisms] if isinstance(mechanisms, type) else list(mechanisms)

    def register(function: BoundFunction) -> BoundFunction:
        bound = Bound(name=name, function=function, **entry)
        for mechanism in classes:
            existing = _REGISTERED.get(mechanism, {}).get(name)
            check_unregistered(
                f"bound {name!r} of {mechanism.name}", existing and existing.function, function
            )
        for mechanism in classes:
            _REGISTERED.setdefault(mechanism, {})[name] = bound
        return function

    return register


def find_bound(mechanism: type[Mechanism], name: str) -> Bound:
    """Returns a mechanism's bound by its name.

    Raises:
        ValueError: If the mechanism has no bound of that name.
    """
    return _REGISTERED[mechanism][one_of("bound", name, bounds_of(mechanism))]


def bounds_of(mechanism: type[Mechanism]) -> tuple[str, ...]:
    """Returns the names of a mechanism's bounds, in the order of a report."""
    return tuple(entry.name for entry in entries_of(mechanism) if not entry.baseline)


def compute_bound(
    rounds: Rounds,
    *,
    delta: float,
    bound: str = "certified",
    adjacency: str = "zero_out",
    orders: Iterable[float] | None = None,
) -> PrivacyBound:
    """Returns ε of rounds at δ, with its meaning.

    Args:
        rounds: Mechanisms of one class with their numbers of rounds, each at least 1; at least one.
        delta: δ in (0, 1).
        bound: A name in :func:`bounds_of`.
        adjacency: ``"zero_out"`` (a record becomes a zero report) or ``"replace"``.
        orders: Rényi orders in place of the adaptive grid, for bounds that use any.

    Raises:
        ValueError: If an argument is out of range;
            :class:`~opacus_shuffle.core.guarantees.NotCovered` if the bound has no value for the
            adjacency.
    """
    return evaluate_bound(
        find_bound(mechanism_type(rounds), bound),
        rounds,
        delta=delta,
        adjacency=adjacency,
        orders=orders,
    )


def ladder(
    rounds: Rounds,
    *,
    delta: float,
    adjacency: str = "zero_out",
    orders: Sequence[float] | None = None,
    entries: Sequence[Bound] | None = None,
) -> list[PrivacyBound]:
    """Returns every bound and baseline that has a value for this adjacency.

    They are sorted from the least trust to the most, and compared with each other.

    Args:
        rounds: As :func:`compute_bound`.
        delta: δ in (0, 1).
        adjacency: Between which data sets.
        orders: Rényi orders for the bounds that use any.
        entries: The bounds to evaluate; by default all of the rounds' mechanism.

    Raises:
        ValueError: If Rényi orders are given and no bound uses them.
        InconsistentBound: If a proved ε of the mechanism is below a lower value of one of its
            bounds (for replacement also below one of zero-out), or if ``certified`` is above
            ``local``. One of the two values is false then.
    """
    entries = entries_of(mechanism_type(rounds)) if entries is None else entries
    if orders is not None and not any(entry.uses_orders for entry in entries):
        raise ValueError(
            f"no bound of {rounds[0][0].name} uses Rényi orders, got "
            f"orders={reprlib.repr(orders)}: leave them out"
        )
    rows = []
    for entry in entries:
        with contextlib.suppress(NotCovered):
            chosen = orders if entry.uses_orders else None
            rows.append(
                evaluate_bound(entry, rounds, delta=delta, adjacency=adjacency, orders=chosen)
            )
    of_mechanism = {entry.name for entry in entries if not entry.baseline}
    # Replacement covers zero-out, because a record may also be replaced by a zero record.
    zeroed = (
        [entry for entry in entries if entry.name in ("certified", "pair")]
        if Adjacency(adjacency) is Adjacency.REPLACE
        else []
    )
    # A bound for every data set holds for every pair (10.16). The adversary of "local" sees the
    # same reports unshuffled, so its epsilon cannot be the smaller one.
    for row, other in itertools.product(
        rows, rows + (ladder(rounds, delta=delta, entries=zeroed) if zeroed else [])
    ):
        if (row.bound, other.bound) == ("certified", "local") and row.epsilon > other.epsilon:
            raise row.contradicted(f"'local' {other.epsilon!r}")
        proved = row.guarantee is Guarantee.PROVED and {row.bound, other.bound} <= of_mechanism
        if proved and other.lower is not None and row.epsilon < other.lower:
            raise row.contradicted(
                f"{other.bound!r} at least {other.lower!r} for {other.adjacency}"
            )
    return rows


def mechanism_type(rounds: Rounds) -> type[Mechanism]:
    """Returns the one class of mechanism that ran."""
    pairs = isinstance(rounds, Sequence) and all(
        isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[0], Mechanism)
        for entry in rounds
    )
    if not pairs:
        raise ValueError(
            f"rounds must be a list of (mechanism, number of rounds) pairs, got {rounds!r}"
        )
    if not rounds:
        raise ValueError("rounds must not be empty: there is nothing to report")
    classes = {type(mechanism) for mechanism, _ in rounds}
    if len(classes) != 1:
        names = sorted(mechanism.name for mechanism in classes)
        raise ValueError(f"rounds must be of one mechanism, got {names}")
    (mechanism_class,) = classes
    if mechanism_class not in _REGISTERED:
        raise ValueError(
            f"{mechanism_class.__name__} has no bounds, so no epsilon can be computed: register "
            f"one with register_bound({mechanism_class.__name__}, ...)"
        )
    return mechanism_class


def entries_of(mechanism: type[Mechanism]) -> list[Bound]:
    """Returns a mechanism's bounds and baselines, in the order of a report."""
    if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism)):
        raise ValueError(
            f"mechanism must be a class such as ShuffleGauss, got {mechanism!r}: pass the class, "
            "not its name"
        )
    return sorted(_REGISTERED.get(mechanism, {}).values(), key=lambda entry: entry.rank)


def evaluate_bound(
    entry: Bound,
    rounds: Rounds,
    *,
    delta: float,
    adjacency: str = "zero_out",
    orders: Iterable[float] | None = None,
) -> PrivacyBound:
    """Evaluates a bound or baseline on rounds, and returns ε with its meaning.

    The arguments are those of :func:`compute_bound`.
    """
    delta, adjacency = open_unit_interval("delta", delta), Adjacency(adjacency)
    if adjacency is not Adjacency.ZERO_OUT and entry.zero_out_only:
        raise NotCovered(
            f"bound={entry.name!r} supports adjacency='zero_out' only, got {adjacency.value!r}: "
            "use bound='certified', which covers both"
        )
    if orders is not None and not entry.uses_orders:
        raise ValueError(
            f"bound={entry.name!r} uses no Rényi orders, got orders={reprlib.repr(orders)}: leave "
            "them out"
        )
    total = sum(integer("number of rounds", count) for _, count in rounds)
    answer = entry.function(rounds, delta=delta, adjacency=adjacency, orders=orders)
    return PrivacyBound(
        mechanism=rounds[0][0].name,
        bound=entry.name,
        epsilon=answer.epsilon,
        delta=delta,
        adjacency=adjacency,
        guarantee=answer.guarantee or entry.guarantee,
        covers=answer.covers or entry.covers,
        rounds=total,
        lower=answer.lower,
        trusted=entry.trusted,
        adversary=answer.adversary or entry.adversary,
        meaning=answer.meaning or entry.meaning,
        proof=answer.proof,
    )
