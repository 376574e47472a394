"""The server's book of rounds: each is written down before it is released, and survives the process at any instant.

A round is **begun** (accounted, on the disk), then the shuffler hands it over, then it is **done** (its result, on the disk),
and then the shuffler forgets it. A server that was killed in between finds a round that is begun and not done. It is accounted,
and the server asks the shuffler for it again.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from opacus_shuffle.accountants.accountant import ShuffleAccountant, accountant_class
from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.atomic_file import replacing
from opacus_shuffle.core.guarantees import PrivacyBound
from opacus_shuffle.core.validation import open_unit_interval, positive
from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.shuffler import Released, UnknownRoundError


class RoundsOfAShuffler(Protocol):
    """What a server may ask a shuffler for, near or far."""

    simulated: bool

    def open_round(self, number: int) -> None:
        """Begins to take reports of a round."""

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
        Every round that the shuffler released is in the accountant, whenever the process was killed. A round that was begun
        and dropped for too few reports is accounted like any other: that it was dropped is part of what the server sees.
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
        self.format, self.shuffler = format, shuffler
        self.delta = open_unit_interval("delta", delta)
        self.target_epsilon = None if target_epsilon is None else positive("target_epsilon", target_epsilon)
        self.path = None if path is None else Path(path)
        self.accountant: ShuffleAccountant = accountant_class(type(format.mechanism))()
        self.accountant.plan(format.mechanism)
        self.round, self.begun, self.result = 0, False, None
        if self.path is not None and self.path.exists():
            self._read()

    def affords_another(self) -> bool:
        """Whether one more round stays within the target; one that is begun is paid for."""
        if self.begun or self.target_epsilon is None:
            return True
        rounds = [(self.format.mechanism, len(self.accountant) + 1)]
        return compute_bound(rounds, delta=self.delta).epsilon <= self.target_epsilon

    def open(self) -> int:
        """Opens the next round, or the one again that a killed process had begun; returns its number.

        Raises:
            ValueError: If the target allows no more.
        """
        if not self.affords_another():
            raise ValueError(
                f"another round would exceed target_epsilon={self.target_epsilon} at delta={self.delta}: {self.round} "
                "rounds are what it pays for"
            )
        if self.begun:
            return self.round
        self.shuffler.open_round(self.round + 1)
        return self.round + 1

    def begin(self) -> None:
        """Accounts for the open round, on the disk: from now on it may be released."""
        self.accountant.record(self.format.mechanism)
        self.round, self.begun = self.round + 1, True
        self._write()

    def close(self) -> Released:
        """Accounts for the open round, on the disk, unless that was done, and then asks the shuffler for it."""
        if not self.begun:
            self.begin()
        try:
            return self.shuffler.close_round(self.round)
        except UnknownRoundError:  # the shuffler was started anew: it has nothing of this round, and nobody ever will
            return Released(self.round, 0, ())

    def finish(self, result: Any = None) -> None:
        """Writes down what came out of the round, and has the shuffler forget it.

        Args:
            result: Tensors and plain values, such as the new weights; :attr:`result` after a restart.
        """
        self.begun, self.result = False, result
        self._write()
        self.shuffler.forget_round(self.round)

    def run(self, collect: Callable[[int], Any], update: Callable[[torch.Tensor | None], Any]) -> Released:
        """One round: opens it, has clients report, closes it, and writes down what ``update`` returns.

        Args:
            collect: Asks the clients for their reports of this round, and returns when it has waited long enough.
            update: Gets the estimate of the sum, float64 of shape (d,), or None if the round was dropped.
        """
        number = self.open()
        if not self.begun:
            collect(number)
        released = self.close()
        self.finish(update(self.estimate(released)))
        return released

    def estimate(self, released: Released) -> torch.Tensor | None:
        """The unbiased estimate of the sum of a round's vectors; None if it was dropped."""
        return None if released.dropped else self.format.estimate(released.mixed, released.num_reports)

    def epsilon(self, **options: Any) -> PrivacyBound:
        """What all rounds cost together, with its meaning; at least one must have been accounted.

        Args:
            **options: ``bound`` and ``adjacency``.
        """
        return self.accountant.bound(self.delta, **options)

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
        )

    def _write(self) -> None:
        if self.path is None:
            return
        state = {"accountant": self.accountant.state_dict(), "round": self.round, "begun": self.begun, "result": self.result}
        held = io.BytesIO()
        torch.save(state, held)
        with replacing(self.path) as file:
            file.write(held.getvalue())

    def _read(self) -> None:
        state = torch.load(self.path, weights_only=True)  # type: ignore[arg-type]
        self.accountant.load_state_dict(state["accountant"])
        self.round, self.begun, self.result = state["round"], state["begun"], state["result"]
