"""The history of an accountant of Opacus's own, which nothing that is loaded may shorten in silence."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from opacus.accountants import GaussianAccountant, IAccountant

from opacus_shuffle.accountants.origins import Origins, append, count, cut, tell_of_kept_rounds
from opacus_shuffle.core.validation import finite_number, integer

Entries = list[tuple[tuple[float, float], int]]


class OpacusHistory:
    """Follows an accountant's history, and unites it with those of checkpoints.

    Attributes:
        origins: Which releases the history consists of, as far as is known.
    """

    def __init__(self) -> None:
        self.origins = Origins()
        self._looked_at: Entries = []

    @contextlib.contextmanager
    def another_round(self, accountant: IAccountant) -> Iterator[None]:
        """Counts the round that the accountant records meanwhile; if it refuses it, its history is what it was.

        Opacus's accountants take the last entry out before they look whether they can put a longer one in.
        """
        if not _keeps_triples(accountant):
            yield
            return
        before = list(accountant.history)
        try:
            yield
        except BaseException:
            accountant.history = before
            raise
        self.origins.reach(sum(steps for *_, steps in accountant.history))

    def follow(self, accountant: IAccountant) -> Entries:
        """Looks at what ran since the last look; a history that was set by hand, or by the accountant, is another one."""
        entries = entries_of(accountant.history)
        if cut(entries, 0, count(self._looked_at)) != self._looked_at or count(entries) < self.origins.rounds:
            self.origins = self.origins.replaced_by(Origins())
        self.origins.reach(count(entries))
        self._looked_at = entries
        return entries

    def loaded(
        self, accountant: IAccountant, state: Any, origins: Any, *, name: str, allow_rewind: bool
    ) -> tuple[IAccountant, OpacusHistory]:
        """A copy of the accountant after a load, and what it then follows; this one and the accountant stay as they are.

        Args:
            accountant: What is loaded into.
            state: The accountant's state in the checkpoint.
            origins: What :meth:`state` wrote beside it; None in a checkpoint of Opacus's own engine.
            name: A name for such a checkpoint's content.
            allow_rewind: Whether the state's rounds take the place of those that ran.

        Raises:
            ValueError: If the state is none of this accountant, malformed, or not as it was saved.
        """
        trial, after = copy.deepcopy(accountant), copy.deepcopy(self)
        trial.load_state_dict(copy.deepcopy(state))
        if not _keeps_triples(accountant):  # an accountant from elsewhere, whose rounds nobody here can read
            if len(accountant) and not allow_rewind:
                raise ValueError(
                    f"accountant {accountant.mechanism()!r} has run {len(accountant)} rounds that a load would drop: load the "
                    "checkpoint into a new engine, or pass allow_rewind=True"
                )
            return trial, after
        saved = entries_of(trial.history)
        told = Origins.from_state(origins, saved) if origins is not None else Origins.named(name, count(saved))
        ran = after.follow(accountant)
        if allow_rewind or not ran:
            after.origins = after.origins.replaced_by(told)
        else:
            after.origins, union = after.origins.united(ran, told, saved)
            if isinstance(accountant, GaussianAccountant) and len(union) > 1:
                raise ValueError(
                    "accountant 'gdp' cannot hold what ran here and the checkpoint, whose noise or sample rate differs: load "
                    "it into a new engine, or pass allow_rewind=True"
                )
            if union != saved:
                trial.history = [(*entry, steps) for entry, steps in union]
            tell_of_kept_rounds(count(union) - count(saved), count(saved))
        after._looked_at = entries_of(trial.history)
        return trial, after

    def rewound(self, accountant: IAccountant) -> int:
        """How many rounds ran that the accountant no longer holds."""
        if _keeps_triples(accountant):
            self.follow(accountant)
        return self.origins.rewound

    def state(self, accountant: IAccountant) -> dict[str, Any] | None:
        """Plain values to stand in a checkpoint beside the accountant's own; None for a history that is not Opacus's."""
        return self.origins.as_state(self.follow(accountant)) if _keeps_triples(accountant) else None


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
            raise ValueError(f"history must hold (noise_multiplier, sample_rate, steps) triples, got {history!r}")
        noise, rate = (
            finite_number(f"{name} in history", value) for name, value in zip(("noise", "rate"), triple, strict=False)
        )
        if noise < 0 or rate <= 0:
            raise ValueError(f"history must hold noise of at least 0 and sample rates above 0, got {triple!r}")
        append(entries, (noise, rate), integer("steps in history", triple[2]))
    return entries
