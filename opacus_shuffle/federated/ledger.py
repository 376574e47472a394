"""``Ledger``: the server's account of its rounds, written to a file before a round is released.

A round is **begun** when it is accounted on the disk. The shuffler then releases it. The round is
**done** when its result is on the disk, and the shuffler then forgets it. If the server is killed
in between, it finds after its restart a round that is begun and not done. The round is accounted,
and the server requests it from the shuffler again.
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
from opacus_shuffle.core.atomic_file import atomic_write, file_lock, open_private, resolve_path
from opacus_shuffle.core.guarantees import PrivacyBound
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    open_unit_interval,
    positive,
)
from opacus_shuffle.federated.report_formats import ReportFormat
from opacus_shuffle.federated.shuffler import ReleasedRound, ShufflerInterface, UnknownRoundError


class Ledger:
    """Accounts for a federated run, round by round, in a file (the server's *book*).

    Args:
        format: The format of the reports. Every round is accounted as its mechanism.
        shuffler: The shuffler at which rounds are opened and closed.
        delta: δ of the run.
        target_epsilon: No round begins that would raise the certified ε above it; None for no
            limit.
        path: The file of the book, readable by its owner alone (mode 0600), and no symbolic link.
            None keeps the book in memory, so it is lost when the process ends.

    Attributes:
        accountant: The accountant of the rounds that were begun.
        result: The argument of the last :meth:`finish`.

    Formal Guarantees:
        Every round that the shuffler released is in the accountant, no matter when the process was
        killed. A round that was begun and dropped for too few reports is accounted like any other,
        because the server sees that it was dropped. If each client participates once per epoch, a
        begun epoch is accounted in full, at its first round (Theorem 11.9).
    """

    def __init__(
        self,
        format: ReportFormat,
        shuffler: ShufflerInterface,
        *,
        delta: float,
        target_epsilon: float | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.format = instance_of("format", format, (ReportFormat,))
        if not isinstance(shuffler, ShufflerInterface):
            raise ValueError(
                f"shuffler must be a Shuffler, a RemoteShuffler or an Aggregation, got {shuffler!r}"
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
        # An absolute path: if the process changed its folder, a new book would be begun.
        self.path = None if path is None else resolve_path("path", path)
        compute_bound(
            [(format.mechanism, 1)], delta=self.delta
        )  # refuses a δ at which no round has an ε
        self.accountant = ShuffleAccountant(type(format.mechanism))
        self.accountant.plan(format.mechanism)
        self.round, self.begun = 0, False
        self._stamp = self._stamp_of_file()
        self.result: Any = None
        if self.path is not None and self.path.exists():
            self._read()

    def affords_another(self) -> bool:
        """Whether one more round stays within the target ε."""
        return self._affords(1)

    def affordable(self, rounds: int) -> int:
        """Returns how many more rounds, up to ``rounds``, stay within the target ε.

        A round that is begun and not done counts as the first of them.

        Args:
            rounds: The largest number of rounds of interest, at least 0.
        """
        counts = range(1, 1 + integer("rounds", rounds, minimum=0))
        return bisect.bisect(counts, 0, key=lambda count: not self._affords(count))

    def _affords(self, more: int) -> bool:
        """Whether ``more`` rounds, at least one, stay within the target ε."""
        added = self._accounted(self.round - self.begun + more) - len(self.accountant)
        if self.target_epsilon is None or not added:
            return True
        try:
            return self._after(added).bound(self.delta).epsilon <= self.target_epsilon
        except ValueError:  # The tails of so many rounds use all of δ.
            return False

    def _accounted(self, rounds: int) -> int:
        """Returns the number of rounds that are accounted for begun ones: whole epochs."""
        epoch = self.format.num_batches or 1
        return epoch * math.ceil(rounds / epoch)

    def _after(self, added: int) -> ShuffleAccountant:
        """Returns a copy of the accountant with more rounds."""
        accountant = copy.deepcopy(self.accountant)
        if added:
            accountant.record(self.format.mechanism, added)
        return accountant

    def open(self) -> int:
        """Opens the next round, or returns the one that a killed process had begun.

        Returns:
            The number of the round.

        Raises:
            ValueError: If another round would exceed the target ε.
        """
        if not self.affords_another():
            raise ValueError(
                f"another round would exceed target_epsilon={self.target_epsilon} at "
                f"delta={self.delta} after {self.round} rounds: end the run, or raise "
                "target_epsilon"
            )
        if self.begun:
            return self.round
        self.shuffler.open_round(self.round + 1, self.format.fingerprint)
        return self.round + 1

    def begin(self) -> None:
        """Accounts for the open round on the disk, so that it may be released.

        Raises:
            ValueError: If a round is already begun.
        """
        if self.begun:
            raise ValueError(f"round {self.round} is already begun: finish it first")
        accountant = self._after(self._accounted(self.round + 1) - len(self.accountant))
        self._write(accountant=accountant, round=self.round + 1, begun=True)

    def close(self) -> ReleasedRound:
        """Accounts for the open round, and then closes it at the shuffler.

        Raises:
            ValueError: If the shuffler releases fewer reports than are accounted for, as a shard
                may, or more than there are clients, or if the size of the output does not match its
                stated report count.
        """
        if not self.begun:
            self.begin()
        try:
            released = self.shuffler.close_round(self.round)
        except UnknownRoundError:
            # The shuffler was restarted, and the reports of this round are lost.
            return ReleasedRound(self.round, 0, b"")
        if not released.dropped and not (
            self.format.min_reports <= released.num_reports <= self.format.num_users
        ):
            raise ValueError(
                f"round {self.round} was released with {released.num_reports} reports, but "
                f"min_reports={self.format.min_reports} to num_users={self.format.num_users} are "
                "accounted for, so no ε covers this round: the shuffler is faulty, or a shard; "
                "connect to the main shuffler instead"
            )
        if not released.dropped:
            self.format.check_size(released.mixed, released.num_reports)
        return released

    def finish(self, result: Any = None) -> None:
        """Writes the result of a round to the book, and lets the shuffler forget the round.

        Args:
            result: Tensors and plain values, such as the new weights. After a restart it is
                :attr:`result`.

        Raises:
            ValueError: If no round is begun, or the result contains anything else.
        """
        if not self.begun:
            raise ValueError("no round is begun: call close() first")
        self._write(begun=False, result=result)
        self.shuffler.forget_round(self.round)

    def run(
        self, collect: Callable[[int], Any], update: Callable[[torch.Tensor | None], Any]
    ) -> ReleasedRound:
        """Runs one round: opens it, collects reports, closes it, and stores its result.

        Args:
            collect: Requests the reports of this round from the clients, and returns when it has
                waited long enough.
            update: Gets the estimate of the sum (float64, shape (d,)), or None if the round was
                dropped, and returns the result.
        """
        number = self.open()
        if not self.begun:
            collect(number)
        released = self.close()
        self.finish(update(self.estimate(released)))
        return released

    def estimate(self, released: ReleasedRound) -> torch.Tensor | None:
        """Returns the unbiased estimate of the sum of a round's vectors; None if it was dropped."""
        return (
            None if released.dropped else self.format.estimate(released.mixed, released.num_reports)
        )

    def estimated_mean(self, released: ReleasedRound) -> torch.Tensor | None:
        """Returns the estimate of the sum over γ·n, the expected number of clients, or None."""
        total = self.estimate(released)
        return None if total is None else total / (self.format.sample_rate * self.format.num_users)

    def epsilon(self, *, bound: str = "certified", adjacency: str = "zero_out") -> PrivacyBound:
        """Returns ε of all rounds together, with its meaning."""
        return self.accountant.bound(self.delta, bound=bound, adjacency=adjacency)

    def report(self, *, adjacency: str = "zero_out") -> PrivacyReport:
        """Returns the report with every bound on ε of all rounds together.

        Print it, show it in a notebook, or call its ``plot()``. If the shuffler runs in this
        process, the report says that it is simulated.
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
        """Writes changes to the book on the disk, and only then applies them to this object."""
        after = {
            name: changes.get(name, getattr(self, name))
            for name in ("accountant", "round", "begun", "result")
        }
        if self.path is not None:
            settings = self.format.fingerprint.hex()
            content = io.BytesIO()
            torch.save(
                {**after, "accountant": after["accountant"].state_dict(), "settings": settings},
                content,
            )
            try:  # Reading it again makes a copy that the caller cannot change.
                after["result"] = torch.load(io.BytesIO(content.getvalue()), weights_only=True)[
                    "result"
                ]
            except Exception:  # The unpickler refuses everything else.
                raise ValueError(
                    "result must hold tensors and plain values, got "
                    f"{type(after['result']).__name__}: a book with other objects could not be "
                    "read again; convert arrays to tensors"
                ) from None
            with file_lock(self.path):  # so that no other server writes between check and write
                if self._stamp != self._stamp_of_file():
                    raise ValueError(
                        f"path={str(self.path)!r} was written by another server since this one "
                        "read it, so rounds could be lost: stop one server, and restart the other"
                    )
                with atomic_write(self.path) as file:
                    file.write(content.getvalue())
                self._stamp = self._stamp_of_file()
        self.__dict__.update(after)  # atomic, even if this process is interrupted

    def _stamp_of_file(self) -> tuple[int, int] | None:
        """Returns a value that changes whenever the book is written; None without a file."""
        if self.path is None or not self.path.exists():
            return None
        status = self.path.stat()
        return status.st_ino, status.st_mtime_ns

    def _read(self) -> None:
        try:
            with open(self.path, "rb", opener=open_private) as file:  # type: ignore[arg-type]
                state = torch.load(file, weights_only=True)
            settings, rounds, begun = (
                state["settings"],
                integer("round", state["round"], minimum=0),
                state["begun"],
            )
            state["result"], state["accountant"], boolean("begun", begun)
        except Exception as error:  # Unpicklers raise many types of errors on other files.
            raise ValueError(
                f"path={str(self.path)!r} is damaged, or not a book of rounds ({error!r}): restore "
                "it; a new book would not include the ε spent so far"
            ) from None
        if settings != self.format.fingerprint.hex():
            raise ValueError(
                f"path={str(self.path)!r} is the book of a run with other settings than "
                f"{self.format.settings}: continue that run with its settings, or use a new book"
            )
        self.accountant.load_state_dict(state["accountant"])
        if len(self.accountant) != self._accounted(rounds):
            raise ValueError(
                f"path={str(self.path)!r} accounts for {len(self.accountant)} rounds, but {rounds} "
                "ran: restore it"
            )
        self.round, self.begun, self.result = rounds, begun, state["result"]
