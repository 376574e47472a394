"""The server's book of rounds: each is written down before it is released, and survives the process at any instant.

A round is **begun** (accounted, on the disk), then the shuffler hands it over, then it is **done**
(its result, on the disk), and then the shuffler forgets it. A server that was killed in between
finds a round that is begun and not done. It is accounted, and the server asks the shuffler for it
again.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from opacus_shuffle.accountants.accountant import ShuffleAccountant
from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.atomic_file import replacing
from opacus_shuffle.core.guarantees import PrivacyBound
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    open_unit_interval,
    positive,
)
from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.shuffler import Released, UnknownRoundError


class RoundsOfAShuffler(Protocol):
    """What a server may ask a shuffler for, near or far."""

    simulated: bool
    predictable: tuple[str, ...]

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Begins to take reports of a round, in the format that has this fingerprint."""

    def close_round(self, number: int) -> Released:
        """Hands over what was mixed."""

    def forget_round(self, number: int) -> None:
        """Destroys what was handed over."""


class Ledger:
    """Accounts for a federated run, round by round.

    Args:
        format: What reports look like; its mechanism is what every round is accounted as.
        shuffler: Where rounds are opened and closed.
        delta: δ of the run.
        target_epsilon: No round begins that would take the certified ε above it; None for no limit.
        path: Where the book is kept; None keeps it in memory, and a killed process forgets it.

    Attributes:
        accountant: Of the rounds that were begun.
        result: What the last :meth:`finish` was given.

    Formal Guarantees:
        Every round that the shuffler released is in the accountant, whenever the process was
        killed. A round that was begun and dropped for too few reports is accounted like any other:
        that it was dropped is part of what the server sees.
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
        if missing := [
            name
            for name in ("open_round", "close_round", "forget_round", "simulated", "predictable")
            if not hasattr(shuffler, name)
        ]:
            raise ValueError(
                f"shuffler must be a Shuffler or a FarShuffler, got {shuffler!r} without "
                f"{', '.join(missing)}"
            )
        self.shuffler, self.delta = shuffler, open_unit_interval("delta", delta)
        self.target_epsilon = (
            None if target_epsilon is None else positive("target_epsilon", target_epsilon)
        )
        self.path = None if path is None else Path(instance_of("path", path, (str, os.PathLike)))
        if self.path is not None and not self.path.absolute().parent.is_dir():
            raise ValueError(
                f"path={str(path)!r} must be a file in a folder that is there: make the folder"
            )
        compute_bound(
            [(format.mechanism, 1)], delta=self.delta
        )  # refuses a δ that no round can have
        self.accountant = ShuffleAccountant(type(format.mechanism))
        self.accountant.plan(format.mechanism)
        self.round, self.begun = 0, False
        self.result: Any = None
        if self.path is not None and self.path.exists():
            self._read()

    def affords_another(self) -> bool:
        """Whether one more round stays within the target; one that is begun is paid for."""
        if self.begun or self.target_epsilon is None:
            return True
        after = copy.deepcopy(self.accountant)
        after.record(self.format.mechanism)
        return after.bound(self.delta).epsilon <= self.target_epsilon

    def open(self) -> int:
        """Opens the next round, or the one again that a killed process had begun; returns its number.

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
        """Accounts for the open round, on the disk: from now on it may be released.

        Raises:
            ValueError: If a round is begun already.
        """
        if self.begun:
            raise ValueError(f"round {self.round} is begun: finish it first")
        accountant = copy.deepcopy(self.accountant)
        accountant.record(self.format.mechanism)
        self._write(accountant=accountant, round=self.round + 1, begun=True)

    def close(self) -> Released:
        """Accounts for the open round, on the disk, unless that was done, and then asks the shuffler for it."""
        if not self.begun:
            self.begin()
        try:
            return self.shuffler.close_round(self.round)
        except (
            UnknownRoundError
        ):  # the shuffler was started anew: it has nothing of this round, and nobody ever will
            return Released(self.round, 0, ())

    def finish(self, result: Any = None) -> None:
        """Writes down what came out of the round, and has the shuffler forget it.

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
        """One round: opens it, has clients report, closes it, and writes down what ``update`` returns.

        Args:
            collect: Asks the clients for their reports of this round, and returns when it has
                waited long enough.
            update: Gets the estimate of the sum, float64 of shape (d,), or None if the round was
                dropped.
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
        """The sum's estimate over γ·n, the public number of clients expected; None if the round was dropped."""
        total = self.estimate(released)
        return None if total is None else total / (self.format.sample_rate * self.format.num_users)

    def epsilon(self, *, bound: str = "certified", adjacency: str = "zero_out") -> PrivacyBound:
        """What all rounds cost together, with its meaning; at least one must have been accounted."""
        return self.accountant.bound(self.delta, bound=bound, adjacency=adjacency)

    def report(self, *, adjacency: str = "zero_out") -> PrivacyReport:
        """Every bound on what all rounds cost together, with its meaning: print it, show it in a notebook, ``.plot()`` it.

        A shuffler in this process is a simulated one, as the report says.
        """
        return PrivacyReport(
            self.accountant.rounds,
            delta=self.delta,
            adjacency=adjacency,
            simulated=self.shuffler.simulated,
            clients=True,
            selected=self.format.selected,
            predictable=self.shuffler.predictable,
            sent=dataclasses.replace(
                self.format.sent, bytes_per_user=self.round * self.format.bytes_per_report
            ),
        )

    def _write(self, **changes: Any) -> None:
        """Has the book on the disk with these changes, and only then makes them here."""
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
            with replacing(self.path) as file:
                file.write(held.getvalue())
        self.__dict__.update(after)  # all at once

    def _read(self) -> None:
        try:
            state = torch.load(self.path, weights_only=True)  # type: ignore[arg-type]
            settings, rounds, begun = (
                state["settings"],
                integer("round", state["round"], minimum=0),
                state["begun"],
            )
            state["result"], state["accountant"], boolean("begun", begun)
        except Exception as error:  # whatever an unpickler says of a file that is none of ours
            raise ValueError(
                f"path={str(self.path)!r} is no book of rounds, or a damaged one ({error!r}): "
                "restore it; a new book forgets "
                "what was spent"
            ) from None
        if settings != self.format.fingerprint.hex():
            raise ValueError(
                f"path={str(self.path)!r} is the book of a run with other settings than "
                f"{self.format.settings}: a run goes on "
                "with its own, and another one has another book"
            )
        self.accountant.load_state_dict(state["accountant"])
        if len(self.accountant) != rounds:
            raise ValueError(
                f"path={str(self.path)!r} has {len(self.accountant)} rounds accounted of {rounds}: "
                "restore it"
            )
        self.round, self.begun, self.result = rounds, begun, state["result"]
