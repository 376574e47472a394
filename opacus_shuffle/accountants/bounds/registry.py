"""An ε with its meaning: which bound, which data sets, which adjacency, proved or not; and the open tables of bounds.

A bound is a function registered for a mechanism; nothing here knows what the bounds compute. A *baseline* is the same for
another trust model with the same noise: what no shuffler would give, or a trusted server. It is not an ε of the mechanism, so
nothing accounts or calibrates by it.

>>> from opacus_shuffle.accountants.mechanisms import ShuffleGauss
>>> rounds = [(ShuffleGauss(noise_multiplier=9.48, num_users=60_000), 7)]
>>> answer = compute_bound(rounds, delta=1 / 60_000, bound="pair")
>>> round(answer.epsilon, 7), answer.guarantee.name
(0.0020509, 'PAIR')
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from opacus_shuffle.accountants.mechanisms import Mechanism
from opacus_shuffle.core.guarantees import (
    ADVERSARY,
    SHUFFLER,
    Adjacency,
    Guarantee,
    NotCovered,
    PrivacyAssumptionWarning,
    PrivacyBound,
)
from opacus_shuffle.core.validation import one_of, open_unit_interval

__all__ = [
    "ADJACENCIES",
    "BoundValue",
    "Guarantee",
    "NotCovered",
    "PrivacyAssumptionWarning",
    "PrivacyBound",
    "compute_baseline",
    "compute_bound",
    "register_bound",
]

Rounds = Sequence[tuple[Mechanism, int]]
"""What ran, in order: mechanisms of one kind, each with its number of rounds."""

ADJACENCIES = tuple(Adjacency)


@dataclasses.dataclass(frozen=True)
class BoundValue:
    """What a bound function answers: ε, its worth, and the data sets it covers in words.

    ``lower``, where there is one, is a value that the exact ε of what is covered is not below. ``meaning`` is for mechanisms
    that give the bound's name another meaning than the shuffle-Gaussian family does.
    """

    epsilon: float
    guarantee: Guarantee
    covers: str
    lower: float | None = None
    trusted: str = SHUFFLER
    adversary: str = ADVERSARY
    meaning: str = ""


class BoundFunction(Protocol):
    """ε of several rounds at δ; ``orders`` fixes the Rényi orders where the bound uses any."""

    def __call__(self, rounds: Rounds, *, delta: float, adjacency: str, orders: Iterable[float] | None) -> BoundValue:
        """One ε with its worth."""


Table = dict[type[Mechanism], dict[str, BoundFunction]]
_BOUNDS: Table = {}
_BASELINES: Table = {}


def register_bound(
    mechanism: type[Mechanism], bound: str, *, baseline: bool = False
) -> Callable[[BoundFunction], BoundFunction]:
    """Decorator: let ``bound`` (or baseline) of ``mechanism`` be answered by this function."""

    def register(function: BoundFunction) -> BoundFunction:
        (_BASELINES if baseline else _BOUNDS).setdefault(mechanism, {})[bound] = function
        return function

    return register


def bounds_of(mechanism: type[Mechanism]) -> tuple[str, ...]:
    """The names of the bounds a mechanism has, in order of registration."""
    return tuple(_BOUNDS.get(mechanism, {}))


def baselines_of(mechanism: type[Mechanism]) -> tuple[str, ...]:
    """The names of the baselines a mechanism has, in order of registration."""
    return tuple(_BASELINES.get(mechanism, {}))


def compute_bound(
    rounds: Rounds,
    *,
    delta: float,
    bound: str = "published",
    adjacency: str = "zero_out",
    orders: Iterable[float] | None = None,
) -> PrivacyBound:
    """ε of ``rounds`` at δ, with its meaning. Nothing ran (no rounds) is an error here: it has no mechanism.

    Args:
        rounds: Mechanisms of one kind with their numbers of rounds, each at least 1.
        delta: δ in (0, 1).
        bound: A name in :func:`bounds_of`: ``"published"``, ``"pair"``, ``"certified"``, ``"certified_sharp"``.
        adjacency: ``"zero_out"`` (a record becomes a zero report) or ``"replace"``.
        orders: Rényi orders to use in place of the adaptive grid, for bounds that use any.

    Raises:
        ValueError: If an argument is out of range; :class:`NotCovered` if the bound has no value for the adjacency.
    """
    return _answer(_BOUNDS, rounds, delta=delta, bound=bound, adjacency=adjacency, orders=orders)


def compute_baseline(rounds: Rounds, *, delta: float, baseline: str, adjacency: str = "zero_out") -> PrivacyBound:
    """What the same noise would give under another trust model, with its meaning (arguments as :func:`compute_bound`)."""
    return _answer(_BASELINES, rounds, delta=delta, bound=baseline, adjacency=adjacency, orders=None)


def _answer(
    table: Table, rounds: Rounds, *, delta: float, bound: str, adjacency: str, orders: Iterable[float] | None
) -> PrivacyBound:
    """Look the function up, ask it, and attach the meaning."""
    delta = open_unit_interval("delta", delta)
    adjacency = Adjacency(adjacency)
    kinds = {type(mechanism) for mechanism, _ in rounds}
    if len(kinds) != 1:
        raise ValueError(f"rounds must hold one kind of mechanism, got {sorted(kind.name for kind in kinds)}")
    (kind,) = kinds
    functions = table.get(kind, {})
    one_of("bound", bound, functions)
    value = functions[bound](rounds, delta=delta, adjacency=adjacency, orders=orders)
    return PrivacyBound(
        mechanism=kind.name,
        bound=bound,
        epsilon=value.epsilon,
        delta=delta,
        adjacency=adjacency,
        guarantee=value.guarantee,
        covers=value.covers,
        rounds=sum(count for _, count in rounds),
        lower=value.lower,
        trusted=value.trusted,
        adversary=value.adversary,
        meaning=value.meaning,
    )
