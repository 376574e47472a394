"""Which run a history is of, so that no file that is loaded takes rounds away or brings in others.

Equal numbers do not make equal rounds: two runs with the same noise release different things. So a
run counts its rounds under a random name, and whatever goes on from the same rounds elsewhere (a
fork, a copy, a checkpoint that was loaded, an account that was taken back) goes on under a new
one. A history is a chain of such names. Of two chains one is the beginning of the other, and then
the longer one holds all that was released; or they have parted, and no single account holds both.

>>> run = Lineage()
>>> run.name_rounds(2)
>>> saved, other = run.rewound_to(run), Lineage()
>>> run.name_rounds(3)
>>> run.reconcile([("round", 3)], saved, [("round", 2)])[1]
[('round', 3)]
>>> other.name_rounds(2)
>>> run.reconcile([("round", 3)], other, [("round", 2)])
Traceback (most recent call last):
    ...
ValueError: the state is of another run than the 3 rounds that ran here, or has parted from them ...
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

Entry = TypeVar("Entry")


@dataclasses.dataclass
class Lineage:
    """Counts the rounds of a history under each name, in the history's order.

    Attributes:
        held: The rounds of the history, by name.
        seen: The most rounds ever known under a name; more than ``held`` where an account was taken
            back.
    """

    held: dict[str, int] = dataclasses.field(default_factory=dict)
    seen: dict[str, int] = dataclasses.field(default_factory=dict)
    _own: tuple[int, str] | None = dataclasses.field(default=None, repr=False, compare=False)

    def name_rounds(self, rounds: int) -> None:
        """Gives the newest rounds of a history a name that no copy and no forked process has.

        Args:
            rounds: How many rounds the history has now; those that have a name keep it.
        """
        if rounds <= self.rounds:
            return
        process, name = self._own or (0, "")
        # Every copy, and what a load or a rewind leaves, is an object without a name of its own; a
        # forked process has its parent's.
        if process != os.getpid():
            name = secrets.token_hex(16)
        total = self.held.get(name, 0) + rounds - self.rounds
        held, seen = {**self.held, name: total}, {**self.seen, name: total}
        # All at once, because a handler of a signal may save a checkpoint in the middle of
        # anything.
        self.__dict__.update(held=held, seen=seen, _own=(os.getpid(), name))

    def __getstate__(self) -> dict[str, Any]:
        """Returns all but the object's own name, so that no copy counts on under it."""
        return {"held": dict(self.held), "seen": dict(self.seen), "_own": None}

    @property
    def rounds(self) -> int:
        """How many rounds the history holds."""
        return sum(self.held.values())

    @property
    def rewound(self) -> int:
        """How many rounds were released that the history no longer holds."""
        return sum(most - self.held.get(name, 0) for name, most in self.seen.items())

    def reconcile(
        self,
        history: Sequence[tuple[Entry, int]],
        other: Lineage,
        other_history: Sequence[tuple[Entry, int]],
    ) -> tuple[Lineage, list[tuple[Entry, int]]]:
        """Returns the longer of two histories of one run, with its lineage.

        Args:
            history: What this lineage is of: entries with their numbers of rounds.
            other: The other history's lineage.
            other_history: The other history.

        Raises:
            ValueError: If neither is the beginning of the other, or they hold the same rounds
                differently.
        """
        sides = (self.held, history), (other.held, other_history)
        (short_held, short), (long_held, long) = sorted(
            sides, key=lambda side: sum(side[0].values())
        )
        if not _begins(short_held, long_held):
            raise ValueError(
                f"the state is of another run than the {self.rounds} rounds that ran here, or has "
                "parted from them at a fork or an earlier checkpoint, and an account holds one "
                "run: load it into a new engine (the epsilons and deltas of both add up), or pass "
                "allow_rewind=True if nothing of what ran here was ever seen by anyone"
            )
        rounds = number_of_rounds(short)
        if first_rounds(long, rounds) != first_rounds(short, rounds):
            raise ValueError(
                "state_dict holds other rounds than this accountant has recorded of the very same "
                "steps: it was changed after it was saved; load the checkpoint as it was"
            )
        return dataclasses.replace(self.rewound_to(other), held=dict(long_held)), list(long)

    def rewound_to(self, other: Lineage) -> Lineage:
        """Returns the other history's lineage.

        It remembers that the rounds of this one ran, too.
        """
        seen = {
            name: max(self.seen.get(name, 0), other.seen.get(name, 0))
            for name in {**self.seen, **other.seen}
        }
        return Lineage(dict(other.held), seen)

    def as_state(self, content: Any) -> dict[str, Any]:
        """Returns plain values for a checkpoint.

        A digest of them and of what they belong to is among them.
        """
        names = {**self.held, **self.seen}
        known = [(name, self.held.get(name, 0), self.seen[name]) for name in names]
        return {"rounds": known, "digest": _digest([known, content])}

    @classmethod
    def from_state(cls, state: Any, content: Any) -> Lineage:
        """Restores a lineage from :meth:`as_state`.

        Args:
            state: What it returned.
            content: What it was saved with.

        Raises:
            ValueError: If state and content are not as they were saved together.
        """
        known = state.get("rounds") if isinstance(state, dict) else None
        if known is None or state.get("digest") != _digest([known, content]):
            raise ValueError(
                "the history in state_dict is not the one that was saved: it was changed after it "
                "was saved; load the checkpoint as it was"
            )
        held = {name: most for name, most, _ in known if most}
        return cls(held, {name: most for name, _, most in known})


def _begins(short: dict[str, int], long: dict[str, int]) -> bool:
    """Whether a chain of names is the beginning of another, whose last name may have gone on."""
    names = list(short)
    same = names == list(long)[: len(names)] and all(short[name] <= long[name] for name in names)
    return same and all(short[name] == long[name] for name in names[:-1])


def warn_of_kept_rounds(kept: int, loaded: int) -> None:
    """Warns that an account now holds more than what was loaded."""
    if kept:
        warnings.warn(
            f"the checkpoint holds {loaded} rounds; {kept} more, which ran or were loaded here "
            "before, were released and stay in the account (allow_rewind=True would leave them "
            "out, and reports would say so)",
            stacklevel=3,
        )


def rewound_sentence(rounds: int) -> str:
    """Returns what to say of an account that was taken back; empty if it was not."""
    if not rounds:
        return ""
    which = "1 round that ran is" if rounds == 1 else f"{rounds:,} rounds that ran are"
    return (
        f"{which} left out of this account, because a checkpoint was loaded with "
        "allow_rewind=True, or the history set by hand: no epsilon here covers whoever saw "
        "anything of what was released then."
    )


def _digest(content: Any) -> str:
    """Returns a fingerprint of plain values, the same for lists and tuples, as JSON keeps them."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()


def number_of_rounds(history: Iterable[tuple[Any, int]]) -> int:
    """Returns the number of rounds."""
    return sum(steps for _, steps in history)


def append_rounds(history: list[tuple[Entry, int]], entry: Entry, steps: int) -> None:
    """Adds rounds to a history; an equal last entry is counted on, and is missing at no moment."""
    if history and history[-1][0] == entry:
        history[-1] = (entry, history[-1][1] + steps)
    else:
        history.append((entry, steps))


def first_rounds(history: Iterable[tuple[Entry, int]], rounds: int) -> list[tuple[Entry, int]]:
    """Returns the history's first so many rounds; equal neighbours are merged."""
    first: list[tuple[Entry, int]] = []
    for entry, steps in history:
        taken = min(steps, rounds)
        if taken > 0:
            append_rounds(first, entry, taken)
        rounds -= steps
    return first
