"""The history of an accountant of Opacus's own, which nothing that is loaded may shorten in silence."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from opacus.accountants import IAccountant

from opacus_shuffle.accountants.lineage import Lineage, append, count, tell_of_kept_rounds
from opacus_shuffle.core.validation import finite_number, integer

Entries = list[tuple[tuple[float, float], int]]


class OpacusLineage:
    """Follows the history of one of Opacus's accountants, and compares it with those of checkpoints.

    Attributes:
        lineage: Of which run the history is, as far as is known.
    """

    def __init__(self) -> None:
        self.lineage = Lineage()
        self._looked_at: list[Any] = []

    @contextlib.contextmanager
    def another_round(self, accountant: IAccountant) -> Iterator[None]:
        """Counts the round that the accountant records meanwhile; if it refuses it, its history is what it was.

        Opacus's accountants take the last entry out before they look whether they can put a longer
        one in.
        """
        if not _keeps_triples(accountant):
            yield
            return
        # Before it grows: a history that was shortened would be as long again after some rounds.
        self._look(accountant)
        before = list(accountant.history)
        try:
            yield
        except BaseException:
            accountant.history = before
            raise
        self._look(accountant)

    def _look(self, accountant: IAccountant) -> None:
        """Names what ran since the last look; what was set by hand, or loaded by the accountant, is another run's."""
        history, known = list(accountant.history), len(self._looked_at)
        if known:
            *whole, last = self._looked_at
            goes_on = len(history) >= known and history[: known - 1] == whole
            if (
                not goes_on
                or tuple(history[known - 1][:2]) != tuple(last[:2])
                or history[known - 1][2] < last[2]
            ):
                self.lineage = self.lineage.replaced_by(Lineage())
        self.lineage.reach(sum(steps for *_, steps in history))
        self._looked_at = history

    def follow(self, accountant: IAccountant) -> Entries:
        """Looks at what ran since the last look, and returns all of it.

        Raises:
            ValueError: If what was set by hand is no history.
        """
        entries = entries_of(accountant.history)
        self._look(accountant)
        return entries

    def loaded(
        self, accountant: IAccountant, state: Any, told: Any, *, name: str, allow_rewind: bool
    ) -> tuple[IAccountant, OpacusLineage]:
        """A copy of the accountant after a load, and what it then follows; this one and the accountant stay as they are.

        Args:
            accountant: What is loaded into.
            state: The accountant's state in the checkpoint.
            told: What :meth:`state` wrote beside it; None in a checkpoint of Opacus's own engine.
            name: A name for such a checkpoint's content.
            allow_rewind: Whether the state's rounds take the place of those that ran.

        Raises:
            ValueError: If the state is none of this accountant, of another run, malformed, or not
                as it was saved.
        """
        trial, after = copy.deepcopy(accountant), copy.deepcopy(self)
        trial.load_state_dict(copy.deepcopy(state))
        if not _keeps_triples(
            accountant
        ):  # an accountant from elsewhere, whose rounds nobody here can read
            if len(accountant) and not allow_rewind:
                raise ValueError(
                    f"accountant {accountant.mechanism()!r} has run {len(accountant)} rounds that "
                    "a load would drop: load the "
                    "checkpoint into a new engine, or pass allow_rewind=True"
                )
            return trial, after
        saved = entries_of(trial.history)
        rounds = count(saved)
        if told is not None:
            lineage = Lineage.from_state(told, saved, rounds)
        else:
            lineage = Lineage({name: rounds}, {name: rounds}) if rounds else Lineage()
        ran = after.follow(accountant)
        if allow_rewind or not ran:
            after.lineage = after.lineage.replaced_by(lineage)
        else:
            after.lineage, longer = after.lineage.longer_of(ran, lineage, saved)
            trial.history = [(*entry, steps) for entry, steps in longer]
            tell_of_kept_rounds(count(longer) - rounds, rounds)
        after._looked_at = list(trial.history)
        return trial, after

    def rewound(self, accountant: IAccountant) -> int:
        """How many rounds ran that the accountant no longer holds."""
        if _keeps_triples(accountant):
            self.follow(accountant)
        return self.lineage.rewound

    def state(self, accountant: IAccountant) -> dict[str, Any] | None:
        """Plain values to stand in a checkpoint beside the accountant's own; None for a history that is not Opacus's."""
        return (
            self.lineage.as_state(self.follow(accountant)) if _keeps_triples(accountant) else None
        )


def _keeps_triples(accountant: IAccountant) -> bool:
    """Whether its history is written and read as Opacus's own accountants do it."""
    return type(accountant).load_state_dict is IAccountant.load_state_dict


def entries_of(history: Any) -> Entries:
    """Opacus's triples as entries with their numbers of steps.

    Raises:
        ValueError: If a history is none.
    """
    entries: Entries = []
    for triple in history if isinstance(history, list | tuple) else [history]:
        if not isinstance(triple, list | tuple) or len(triple) != 3:
            raise ValueError(
                f"history must hold (noise_multiplier, sample_rate, steps) triples, got {triple!r}"
            )
        noise, rate = (
            finite_number(f"{name} in history", value)
            for name, value in zip(("noise", "rate"), triple, strict=False)
        )
        if noise < 0 or rate <= 0:
            raise ValueError(
                f"history must hold noise of at least 0 and sample rates above 0, got {triple!r}"
            )
        append(entries, (noise, rate), integer("steps in history", triple[2]))
    return entries
