"""The client: its own coin, its own noise, one report a round, and no more rounds than it agreed to.

Which rounds it has answered, it notes in a book on its own disk (:class:`FileBook`) before it sends
anything, whatever the server says.

>>> import tempfile
>>> from opacus_shuffle.federated.gaussian_reports import GaussianReports
>>> from opacus_shuffle.federated.shuffler import Shuffler
>>> shuffler = Shuffler(GaussianReports(dimension=2, max_norm=1.0, noise_multiplier=1.0, num_users=1))
>>> shuffler.open_round(1)
>>> with tempfile.TemporaryDirectory() as folder:
...     reporter = Reporter(shuffler.format, max_rounds=10, book=FileBook(os.path.join(folder, "book.json")))
...     reporter.answer(1, lambda: torch.ones(2), lambda report: shuffler.submit("me", report))
>>> shuffler.waiting()
1
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from opacus_shuffle.core.atomic_file import replacing
from opacus_shuffle.core.participation import bernoulli_indices
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import boolean, instance_of, integer
from opacus_shuffle.federated.report_format import LARGEST_ROUND, ReportFormat

try:
    import fcntl
except ImportError:  # Windows: there two processes of one client must not answer at once
    fcntl = None  # type: ignore[assignment]


class ClientBook:
    """The rounds of one client in memory, which another process does not see: for simulations.

    Attributes:
        rounds: How many it has answered.
        last: The last of them, -1 for none.
    """

    def __init__(self) -> None:
        self.rounds, self.last = 0, -1

    def note(self, number: int, *, max_rounds: int, fingerprint: bytes) -> int:
        """Notes a round as answered, before anything of it is sent.

        Args:
            number: The round.
            max_rounds: Rounds that the client agreed to.
            fingerprint: Of the format of its reports.

        Returns:
            The round.

        Raises:
            ValueError: If it was answered before, all that were agreed to are, an argument is no
                whole number, or what is noted cannot be read.
        """
        number = integer("number", number, minimum=0, maximum=LARGEST_ROUND)  # NaN is below nothing
        integer("max_rounds", max_rounds)
        with self.alone():
            self.read(fingerprint)
            if number <= self.last:
                raise ValueError(
                    f"round {number} was answered already (the last was {self.last}): a second "
                    "report costs again; a new run "
                    "is another agreement, with another book"
                )
            if self.rounds >= max_rounds:
                raise ValueError(
                    f"all max_rounds={max_rounds} rounds that this client agreed to are over: it "
                    "sends no more"
                )
            self.write(self.rounds + 1, number, fingerprint)
            self.rounds, self.last = self.rounds + 1, number
        return number

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Keeps other processes of this client out."""
        return contextlib.nullcontext()

    def read(self, fingerprint: bytes) -> None:
        """Gets what was noted by other processes."""

    def write(self, rounds: int, last: int, fingerprint: bytes) -> None:
        """Notes it for other processes."""


class FileBook(ClientBook):
    """The rounds of one client and one format, in a file of its own.

    Args:
        path: The file, made at the first round. A new run with other settings is another agreement,
            with another file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(instance_of("book", path, (str, os.PathLike)))
        if not self.path.absolute().parent.is_dir():
            raise ValueError(
                f"book={str(path)!r} must be a file in a folder that is there: make the folder"
            )

    def read(self, fingerprint: bytes) -> None:
        """Reads the file, if there is one."""
        if not self.path.exists():
            return
        try:
            state = json.loads(self.path.read_text())
            settings, rounds, last = state["settings"], state["rounds"], state["last"]
            integer("rounds", rounds), integer("last", last, minimum=0)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"book={str(self.path)!r} is no book of a client ({error!r}): nothing is sent; "
                "restore it, or agree to a new "
                "run with a new file"
            ) from None
        if settings != fingerprint.hex():
            raise ValueError(
                f"book={str(self.path)!r} is of other settings: nothing is sent; agree to a new "
                "run with a new file"
            )
        self.rounds, self.last = rounds, last

    def write(self, rounds: int, last: int, fingerprint: bytes) -> None:
        """Has it on the disk."""
        with replacing(self.path) as file:
            file.write(
                json.dumps({"settings": fingerprint.hex(), "rounds": rounds, "last": last}).encode()
            )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Locks a file beside it."""
        if fcntl is None:
            yield
            return
        with open(f"{self.path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class Reporter:
    """What one client does in a round, whoever the server is.

    Args:
        format: What its reports look like.
        max_rounds: T, rounds that it agreed to: a server that asks for more gets no report of its
            data.
        book: Where it notes which rounds it has answered: a :class:`FileBook`; by default in
            memory, for simulations.

    Formal Guarantees:
        The server learns neither the coin nor the vector: each round gets at most one report,
        clipped and noised here, and the coin is tossed before any training. The client trains and
        encodes whatever the coin says, as the time that it takes would tell; where nobody can watch
        that, as in a simulation, ``always_train=False`` spares it.
    """

    def __init__(
        self, format: ReportFormat, *, max_rounds: int, book: ClientBook | None = None
    ) -> None:
        self.format = instance_of("format", format, (ReportFormat,))
        self.max_rounds = integer("max_rounds", max_rounds)
        self.book = ClientBook() if book is None else instance_of("book", book, (ClientBook,))

    def answer(
        self,
        number: int,
        train: Callable[[], torch.Tensor],
        submit: Callable[[bytes], Any],
        *,
        always_train: bool = True,
    ) -> None:
        """Takes part in a round, or not, as a fresh coin says.

        Args:
            number: The round that the server asks for.
            train: Computes this client's vector, shape (d,), from its own data.
            submit: Sends a report to the shuffler.
            always_train: Train whatever the coin says, and throw the vector away if it says no;
                else train if it says yes.

        Raises:
            ValueError: If the round was answered before, or all that were agreed to are, or
                ``train`` returns something else.
        """
        always = boolean("always_train", always_train)
        round_ = self.book.note(
            number, max_rounds=self.max_rounds, fingerprint=self.format.fingerprint
        )
        takes_part = bool(bernoulli_indices(1, self.format.coin_rate, SecretGenerator()))
        if not (takes_part or always):
            submit(self.format.encode(round_, None))
            return
        vector = instance_of("what train returns", train(), (torch.Tensor,))
        reports = (
            self.format.encode(round_, vector),
            self.format.encode(round_, None),
        )  # both, whatever is sent
        submit(reports[0] if takes_part else reports[1])
