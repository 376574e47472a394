"""Which releases a history consists of, so that two histories can be united with every release counted once.

Equal numbers do not make equal rounds: two runs with the same noise release different things. So every accountant counts its
rounds under a random name of its own, and what a checkpoint holds of one name is the beginning of what that name has released.

>>> run, other = Origins(), Origins()
>>> history, foreign = [("round", 3)], [("round", 2)]
>>> run.reach(2)
>>> saved = run.replaced_by(run)
>>> run.reach(3)
>>> other.reach(2)
>>> run.united(history, saved, [("round", 2)])[1]
[('round', 3)]
>>> run.united(history, other, foreign)[1]
[('round', 5)]
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from opacus_shuffle.core.validation import integer

Entry = TypeVar("Entry")
_NAME_LENGTH = 32


@dataclasses.dataclass
class Origins:
    """How many rounds a history holds of each name, in the history's order.

    Attributes:
        held: The rounds of the history, by name.
        seen: The most rounds that were ever known of a name; more than ``held`` where a checkpoint rewound the accounting.
    """

    held: dict[str, int] = dataclasses.field(default_factory=dict)
    seen: dict[str, int] = dataclasses.field(default_factory=dict)
    _own: tuple[int, str] | None = dataclasses.field(default=None, repr=False, compare=False)

    def reach(self, rounds: int) -> None:
        """Names the rounds of a history that now has so many: no copy of this accountant and no forked process has that name.

        All at once, because a handler of a signal may save a checkpoint in the middle of anything.
        """
        if rounds <= self.rounds:
            return
        process, name = self._own or (0, "")
        if process != os.getpid() or name != next(reversed(self.held), None) or self.held[name] != self.seen[name]:
            name = secrets.token_hex(_NAME_LENGTH // 2)
        total = self.held.get(name, 0) + rounds - self.rounds
        held, seen = {**self.held, name: total}, {**self.seen, name: total}
        self.__dict__.update(held=held, seen=seen, _own=(os.getpid(), name))

    def __getstate__(self) -> dict[str, Any]:
        """All but the name under which this very object counts on."""
        return {"held": dict(self.held), "seen": dict(self.seen), "_own": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def rounds(self) -> int:
        """How many rounds the history holds."""
        return sum(self.held.values())

    @property
    def rewound(self) -> int:
        """How many rounds were released that the history no longer holds."""
        return sum(most - self.held.get(name, 0) for name, most in self.seen.items())

    def united(
        self, history: Sequence[tuple[Entry, int]], other: Origins, other_history: Sequence[tuple[Entry, int]]
    ) -> tuple[Origins, list[tuple[Entry, int]]]:
        """Returns the rounds of both histories, each round once, and their origins.

        Args:
            history: What this one is of: entries with their numbers of rounds.
            other: The origins of the other one.
            other_history: The other one.

        Raises:
            ValueError: If both hold a round, and hold it differently.
        """
        pieces, others = self._pieces(history), other._pieces(other_history)
        for name, piece in others.items():
            known = pieces.get(name, [])
            shorter, longer = sorted((known, piece), key=count)
            if cut(longer, 0, count(shorter)) != shorter:
                raise ValueError(
                    "state_dict holds other rounds than this accountant has recorded of the very same steps: it was changed "
                    "after it was saved; load the checkpoint as it was"
                )
            pieces[name] = longer
        union: list[tuple[Entry, int]] = []
        for piece in pieces.values():
            for entry, steps in piece:
                append(union, entry, steps)
        held = {name: count(piece) for name, piece in pieces.items()}
        return Origins(held, self._most(other)), union

    def replaced_by(self, other: Origins) -> Origins:
        """The origins of the other's history, which remember that this one's rounds ran, too."""
        return Origins(dict(other.held), self._most(other))

    def _most(self, other: Origins) -> dict[str, int]:
        return {name: max(self.seen.get(name, 0), other.seen.get(name, 0)) for name in {**self.seen, **other.seen}}

    def _pieces(self, history: Sequence[tuple[Entry, int]]) -> dict[str, list[tuple[Entry, int]]]:
        pieces, begin = {}, 0
        for name, rounds in self.held.items():
            pieces[name] = cut(history, begin, begin + rounds)
            begin += rounds
        return pieces

    def as_state(self, history: Iterable[tuple[Any, int]]) -> dict[str, Any]:
        """Plain values for a checkpoint, with a digest of the history that they belong to."""
        known = [(name, self.held.get(name, 0), self.seen[name]) for name in {**self.held, **self.seen}]
        return {"rounds": known, "digest": digest(history)}

    @classmethod
    def from_state(cls, state: Any, history: Sequence[tuple[Any, int]]) -> Origins:
        """Reads :meth:`as_state`.

        Raises:
            ValueError: If it is malformed, or the history is not the one that it was saved with.
        """
        origins = cls()
        if not isinstance(state, dict) or set(state) != {"rounds", "digest"} or not isinstance(state["rounds"], list | tuple):
            raise ValueError(f"the origins of the rounds in state_dict are malformed, got {state!r}: they were changed")
        for each in state["rounds"]:
            if not isinstance(each, list | tuple) or len(each) != 3 or not isinstance(each[0], str) or each[0] in origins.seen:
                raise ValueError(f"the origins of the rounds in state_dict are malformed, got {each!r}: they were changed")
            name, held, most = each[0], integer("rounds held in state_dict", each[1], minimum=0), each[2]
            if held:
                origins.held[name] = held
            origins.seen[name] = integer("rounds seen in state_dict", most, minimum=max(1, held))
        if origins.rounds != count(history) or state["digest"] != digest(history):
            raise ValueError(
                f"the history in state_dict, {count(history)} rounds, is not the one that was saved, {origins.rounds} rounds: "
                "it was changed after it was saved; load the checkpoint as it was"
            )
        return origins

    @classmethod
    def named(cls, name: str, rounds: int) -> Origins:
        """Those of a history that says nothing of its origins, under a name for its content."""
        return cls({name: rounds}, {name: rounds}) if rounds else cls()

    @classmethod
    def unknown(cls, rounds: int) -> Origins:
        """Those of a history that says nothing of its origins: it is another one than all others."""
        origins = cls()
        origins.reach(rounds)
        return origins


def tell_of_kept_rounds(kept: int, loaded: int) -> None:
    """Warns that an account now holds more than what was loaded."""
    if kept:
        warnings.warn(
            f"the checkpoint holds {loaded} rounds; {kept} more, which ran or were loaded here before, were released and "
            "stay in the account (allow_rewind=True would leave them out, and reports would say so)",
            stacklevel=3,
        )


def rewound_sentence(rounds: int) -> str:
    """What to say of an account that was rewound; empty if it was not."""
    if not rounds:
        return ""
    which = "1 round that ran is" if rounds == 1 else f"{rounds:,} rounds that ran are"
    return (
        f"{which} left out of this account, because a checkpoint was loaded with allow_rewind=True, or the history set by "
        "hand: no epsilon here covers whoever saw anything of what was released then."
    )


def digest(history: Iterable[tuple[Any, int]]) -> str:
    """A fingerprint of what ran, however its equal neighbours are merged."""
    merged: list[tuple[Any, int]] = []
    for entry, steps in history:
        append(merged, entry, steps)
    return hashlib.sha256(repr(merged).encode()).hexdigest()


def count(history: Iterable[tuple[Any, int]]) -> int:
    """The number of rounds."""
    return sum(steps for _, steps in history)


def append(entries: list[tuple[Entry, int]], entry: Entry, steps: int) -> None:
    """Adds to a list of repetitions; an equal last entry is counted on, and is missing at no moment."""
    if entries and entries[-1][0] == entry:
        entries[-1] = (entry, entries[-1][1] + steps)
    else:
        entries.append((entry, steps))


def cut(history: Iterable[tuple[Entry, int]], begin: int, end: int) -> list[tuple[Entry, int]]:
    """The rounds from number ``begin`` to before number ``end``; equal neighbours are merged."""
    found: list[tuple[Entry, int]] = []
    position = 0
    for entry, steps in history:
        taken = min(end, position + steps) - max(begin, position)
        if taken > 0:
            append(found, entry, taken)
        position += steps
    return found
