"""``Ledger``: the server's book, in which each round is written before it is released.

The book survives the process at any instant.

A round is **begun** (accounted, on the disk), then the shuffler hands it over, then it is **done**
(its result, on the disk), and then the shuffler forgets it. A server that was killed in between
finds a round that is begun and not done. It is accounted, and the server asks the shuffler for it
again.
"""

from __future__ import annotations

import bisect
import copy
import io
import math
import os
from collections.abc import Callable
from typing import Any

import torch

from opacus_shuffle.accountants.accountant import ShuffleAccountant
from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.atomic_file import locked, own_path, private, replacing
from opacus_shuffle.core.guarantees import PrivacyBound
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    open_unit_interval,
    positive,
)
from opacus_shuffle.federated.report_formats import ReportFormat, check_mixed
from opacus_shuffle.federated.shuffler import Released, RoundsOfAShuffler, UnknownRoundError


class Ledger:
    """Accounts for a federated run, round by round, in a file.

    Args:
        format: What reports look like; its mechanism is what every round is accounted as.
        shuffler: Where rounds are opened and closed.
        delta: δ of the run.
        target_epsilon: No round begins that would take the certified ε above it; None for no limit.
        path: Where the book is kept: a file for its owner alone (mode 0600) and no symbolic link.
            None keeps it in memory, and a killed process forgets it.

    Attributes:
        accountant: Of the rounds that were begun.
        result: What the last :meth:`finish` was given.

    Formal Guarantees:
        Every round that the shuffler released is in the accountant, whenever the process was
        killed. A round that was begun and dropped for too few reports is accounted like any other:
        that it was dropped is part of what the server sees. Where each client takes part once an
        epoch, a begun epoch is accounted in full, at its first round (Theorem 11.9).
    """

    def __init__(
        self,
        format: ReportFormat,
        shuffler: RoundsOfAShuffler,
        *,
        delta: float,
        target_epsilon: float | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.format = instance_of("format", format, (ReportFormat,))
        if not isinstance(shuffler, RoundsOfAShuffler):
            raise ValueError(
                f"shuffler must be a Shuffler, a FarShuffler or an Aggregation, got {shuffler!r}"
            )
        if getattr(shuffler, "shares", 1) != format.shares:
            raise ValueError(
                f"format splits reports into {format.shares} shares, and shuffler is for "
                f"{getattr(shuffler, 'shares', 1)}: shares need Aggregation(format, aggregators)"
            )
        self.shuffler, self.delta = shuffler, open_unit_interval("delta", delta)
        self.target_epsilon = (
            None if target_epsilon is None else positive("target_epsilon", target_epsilon)
        )
        # It stays where it is if the process moves: a book elsewhere forgets what was spent.
        self.path = None if path is None else own_path("path", path)
        compute_bound(
            [(format.mechanism, 1)], delta=self.delta
        )  # refuses a δ that no round can have
        self.accountant = ShuffleAccountant(type(format.mechanism))
        self.accountant.plan(format.mechanism)
        self.round, self.begun = 0, False
        self._stamp = self._stamp_of_file()
        self.result: Any = None
        if self.path is not None and self.path.exists():
            self._read()

    def affords_another(self) -> bool:
        """Tells whether one more round stays within the target ε."""
        return self._affords(1)

    def affordable(self, rounds: int) -> int:
        """Returns how many of so many more rounds stay within the target ε.

        A round that is begun and not done is the first of them.

        Args:
            rounds: How many are wanted, at least 0.
        """
        wanted = range(1, 1 + integer("rounds", rounds, minimum=0))
        return bisect.bisect(wanted, 0, key=lambda count: not self._affords(count))

    def _affords(self, more: int) -> bool:
        """Tells whether so many more rounds, at least one, stay within the target ε."""
        added = self._accounted(self.round - self.begun + more) - len(self.accountant)
        if self.target_epsilon is None or not added:
            return True
        try:
            return self._after(added).bound(self.delta).epsilon <= self.target_epsilon
        except ValueError:  # so many rounds have no ε at this δ: their tails take all of it
            return False

    def _accounted(self, rounds: int) -> int:
        """Returns how many rounds are in the account once so many have begun: whole epochs."""
        epoch = self.format.num_batches or 1
        return epoch * math.ceil(rounds / epoch)

    def _after(self, added: int) -> ShuffleAccountant:
        """Returns the account with more rounds in it."""
        accountant = copy.deepcopy(self.accountant)
        if added:
            accountant.record(self.format.mechanism, added)
        return accountant

    def open(self) -> int:
        """Opens the next round, or reopens the one that a killed process had begun.

        Returns:
            Its number.

        Raises:
            ValueError: If the target allows no more.
        """
        if not self.affords_another():
            raise ValueError(
                f"another round would exceed target_epsilon={self.target_epsilon} at "
                f"delta={self.delta}: {self.round} "
                "rounds are what it pays for"
            )
        if self.begun:
            return self.round
        self.shuffler.open_round(self.round + 1, self.format.fingerprint)
        return self.round + 1

    def begin(self) -> None:
        """Writes on the disk that the open round is accounted, so that it may be released.

        Raises:
            ValueError: If a round is begun already.
        """
        if self.begun:
            raise ValueError(f"round {self.round} is begun: finish it first")
        accountant = self._after(self._accounted(self.round + 1) - len(self.accountant))
        self._write(accountant=accountant, round=self.round + 1, begun=True)

    def close(self) -> Released:
        """Accounts for the open round, then takes it from the shuffler.

        Raises:
            ValueError: If the shuffler hands over fewer reports than a round is accounted with, as
                a part of a shuffler does, or more than there are clients, or if their length does
                not match their number.
        """
        if not self.begun:
            self.begin()
        try:
            released = self.shuffler.close_round(self.round)
        except UnknownRoundError:
            # The shuffler was started anew: it has nothing of this round, and nobody ever will.
            return Released(self.round, 0, b"")
        if not released.dropped and not (
            self.format.min_reports <= released.num_reports <= self.format.num_users
        ):
            raise ValueError(
                f"round {self.round} was handed over with {released.num_reports} reports, and "
                f"min_reports={self.format.min_reports} to num_users={self.format.num_users} are "
                "accounted for: this shuffler is a part of another one, which you have to ask "
                "instead, or it is faulty; no ε covers what was seen of this round"
            )
        check_mixed(
            released.dropped or len(released.mixed) in self.format.sizes(released.num_reports)
        )
        return released

    def finish(self, result: Any = None) -> None:
        """Writes down a round's result, and has the shuffler forget the round.

        Args:
            result: Tensors and plain values, such as the new weights; :attr:`result` after a
                restart.

        Raises:
            ValueError: If no round is begun, or the result is more than tensors and plain values.
        """
        if not self.begun:
            raise ValueError("no round is begun: call close() first")
        self._write(begun=False, result=result)
        self.shuffler.forget_round(self.round)

    def run(
        self, collect: Callable[[int], Any], update: Callable[[torch.Tensor | None], Any]
    ) -> Released:
        """Runs one round: opens it, collects reports, closes it, and writes down its result.

        Args:
            collect: Asks the clients for their reports of this round, and returns when it has
                waited long enough.
            update: Gets the estimate of the sum, float64 of shape (d,), or None if the round was
                dropped; returns the result.
        """
        number = self.open()
        if not self.begun:
            collect(number)
        released = self.close()
        self.finish(update(self.estimate(released)))
        return released

    def estimate(self, released: Released) -> torch.Tensor | None:
        """The unbiased estimate of the sum of a round's vectors; None if it was dropped."""
        return (
            None if released.dropped else self.format.estimate(released.mixed, released.num_reports)
        )

    def estimated_mean(self, released: Released) -> torch.Tensor | None:
        """The sum's estimate over γ·n, the public number of clients expected; None if dropped."""
        total = self.estimate(released)
        return None if total is None else total / (self.format.sample_rate * self.format.num_users)

    def epsilon(self, *, bound: str = "certified", adjacency: str = "zero_out") -> PrivacyBound:
        """Returns what all rounds cost together, with its meaning."""
        return self.accountant.bound(self.delta, bound=bound, adjacency=adjacency)

    def report(self, *, adjacency: str = "zero_out") -> PrivacyReport:
        """Returns every bound on what all rounds cost together; print it.

        A notebook shows it, and it has a ``.plot()``. A shuffler in this process is a simulated
        one, as the report says.
        """
        return PrivacyReport(
            self.accountant.rounds,
            delta=self.delta,
            adjacency=adjacency,
            simulated=self.shuffler.simulated,
            clients=True,
            predictable=self.shuffler.predictable,
            sent=self.format.sent(self.round),
            ran=self.round,
        )

    def _write(self, **changes: Any) -> None:
        """Writes changes to the book on the disk, and only then applies them here."""
        after = {
            name: changes.get(name, getattr(self, name))
            for name in ("accountant", "round", "begun", "result")
        }
        if self.path is not None:
            settings = self.format.fingerprint.hex()
            held = io.BytesIO()
            torch.save(
                {**after, "accountant": after["accountant"].state_dict(), "settings": settings},
                held,
            )
            try:  # what was read again shares no memory with what the caller has
                after["result"] = torch.load(io.BytesIO(held.getvalue()), weights_only=True)[
                    "result"
                ]
            except Exception:  # of the unpickler, which refuses what a book must not hold
                raise ValueError(
                    "result must hold tensors and plain values, got "
                    f"{type(after['result']).__name__}: a book with anything "
                    "else in it could not be read again; turn arrays into tensors"
                ) from None
            with locked(self.path):  # no other server writes between check and write
                if self._stamp != self._stamp_of_file():
                    raise ValueError(
                        f"path={str(self.path)!r} was written by another server since this one has "
                        "read it: a book is one server's, or rounds of it would be forgotten; end "
                        "one of them, and start the other again"
                    )
                with replacing(self.path) as file:
                    file.write(held.getvalue())
                self._stamp = self._stamp_of_file()
        self.__dict__.update(after)  # all at once

    def _stamp_of_file(self) -> tuple[int, int] | None:
        """Returns what changes whenever the book is written; None while there is none."""
        if self.path is None or not self.path.exists():
            return None
        status = self.path.stat()
        return status.st_ino, status.st_mtime_ns

    def _read(self) -> None:
        try:
            with open(self.path, "rb", opener=private) as file:  # type: ignore[arg-type]
                state = torch.load(file, weights_only=True)
            settings, rounds, begun = (
                state["settings"],
                integer("round", state["round"], minimum=0),
                state["begun"],
            )
            state["result"], state["accountant"], boolean("begun", begun)
        except Exception as error:  # whatever an unpickler says of a file that is none of ours
            raise ValueError(
                f"path={str(self.path)!r} is no book of rounds, or a damaged one ({error!r}): "
                "restore it; a new book forgets what was spent"
            ) from None
        if settings != self.format.fingerprint.hex():
            raise ValueError(
                f"path={str(self.path)!r} is the book of a run with other settings than "
                f"{self.format.settings}: a run goes on "
                "with its own, and another one has another book"
            )
        self.accountant.load_state_dict(state["accountant"])
        if len(self.accountant) != self._accounted(rounds):
            raise ValueError(
                f"path={str(self.path)!r} has {len(self.accountant)} rounds accounted of {rounds}: "
                "restore it"
            )
        self.round, self.begun, self.result = rounds, begun, state["result"]
