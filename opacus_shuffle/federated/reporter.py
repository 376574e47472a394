"""``Reporter``: a client with its own coin, its own noise, and a book of the rounds it answered.

Which rounds it has answered, it notes in a book on its own disk (:class:`FileBook`) before it sends
anything, whatever the server says.

>>> import tempfile
>>> from opacus_shuffle.federated.report_formats import GaussianReports
>>> from opacus_shuffle.federated.shuffler import Shuffler
>>> reports = GaussianReports(dimension=2, max_norm=1.0, noise_multiplier=1.0, num_users=1)
>>> shuffler = Shuffler(reports)
>>> shuffler.open_round(1)
>>> with tempfile.TemporaryDirectory() as folder:
...     book = FileBook(os.path.join(folder, "book.json"))
...     reporter = Reporter(reports, max_rounds=10, book=book)
...     reporter.answer(1, lambda: torch.ones(2), lambda report: shuffler.submit("me", report))
>>> shuffler.waiting()
1
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from opacus_shuffle.core.atomic_file import locked, own_path, private, replacing
from opacus_shuffle.core.participation import bernoulli_indices, subset
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import boolean, instance_of, integer
from opacus_shuffle.federated.report_formats import LARGEST_ROUND, ReportFormat


class ClientBook:
    """The rounds that a client has answered, in memory: for simulations.

    Args:
        state: Where to note them; by default a new dictionary.

    Attributes:
        state: ``rounds``, how many it has answered, ``last``, the last of them, and ``settings``,
            the fingerprint of its reports' format in hexadecimal; empty before the first round.
            With random allocation also ``epoch`` and ``place``: which of that epoch's rounds the
            client's vector is in, which nobody else may learn.
    """

    def __init__(self, state: MutableMapping[str, Any] | None = None) -> None:
        self.state = {} if state is None else state

    def note(
        self, number: int, *, max_rounds: int, fingerprint: bytes, num_batches: int | None = None
    ) -> bool | None:
        """Notes a round as answered, before anything is sent.

        With random allocation it also says whether the client's vector is in it. An epoch are
        ``num_batches`` rounds by the ledger's numbers, from round 1 on. Its place is drawn at its
        first round, and at no other: a client that has not answered that one, or whose book has
        been lost or is an older copy, sits the epoch out, as a second draw within an epoch would
        be another mechanism.

        Args:
            number: The round.
            max_rounds: Rounds that the client agreed to.
            fingerprint: Of the format of its reports.
            num_batches: t, where it takes part in one of every t rounds.

        Returns:
            Whether it takes part in this one; None without ``num_batches``.

        Raises:
            ValueError: If it was answered before, all that were agreed to are, its number says so
                with random allocation, the book is of other settings or cannot be read, or an
                argument is no whole number.
        """
        number = integer("number", number, minimum=0, maximum=LARGEST_ROUND)  # NaN is below nothing
        integer("max_rounds", max_rounds)
        settings = fingerprint.hex()
        with self.opened(settings) as state:
            rounds, last = state.get("rounds", 0), state.get("last", -1)
            if state.get("settings", settings) != settings:
                raise ValueError(
                    "book is of other settings: nothing is sent; agree to a new run with a new "
                    "file, or to so many rounds of all runs with FileBook(path, most_rounds=...)"
                )
            if number <= last:
                raise ValueError(
                    f"round {number} was answered already (the last was {last}): a second "
                    "report costs again; a new run is another agreement, with another book"
                )
            # Numbers that leave rounds out would begin more epochs than were agreed to.
            if rounds >= max_rounds or (num_batches is not None and number > max_rounds):
                raise ValueError(
                    f"all max_rounds={max_rounds} rounds that this client agreed to are over: it "
                    "sends no more"
                )
            state.update(settings=settings, rounds=rounds + 1, last=number)
            if num_batches is None:
                return None
            epoch, place = divmod(number - 1, num_batches)
            if place == 0:
                (drawn,) = subset(num_batches, 1, SecretGenerator())
                state.update(epoch=epoch, place=drawn)
            return bool(state.get("epoch") == epoch and state["place"] == place)

    @contextlib.contextmanager
    def opened(self, settings: str) -> Iterator[MutableMapping[str, Any]]:
        """Yields a run's state for changes, which are kept if the block raises nothing."""
        yield self.state


class FileBook(ClientBook):
    """The rounds that a client has answered, in a file of its own.

    Args:
        path: The file, made at the first round for its owner alone (mode 0600), and no symbolic
            link. By default a run with other settings is another agreement, with another file.
        most_rounds: Rounds of all runs together that this file is good for: runs with other
            settings go into it, too, and none of them is answered once there are so many.
    """

    def __init__(self, path: str | os.PathLike[str], *, most_rounds: int | None = None) -> None:
        super().__init__()
        self.most_rounds = None if most_rounds is None else integer("most_rounds", most_rounds)
        self.path = own_path("book", path)

    @contextlib.contextmanager
    def opened(self, settings: str) -> Iterator[MutableMapping[str, Any]]:
        """Reads the file, yields a run's state, and writes changes back to the disk.

        Raises:
            ValueError: If the file is no book, or all ``most_rounds`` of it are answered.
        """
        # The lock keeps other processes of this client out from before the reading until after the
        # writing: else two of them could answer one round.
        with locked(self.path):
            runs = self._read()
            answered = sum(run["rounds"] for run in runs.values())
            if self.most_rounds is not None and answered >= self.most_rounds:
                raise ValueError(
                    f"book={str(self.path)!r} is good for most_rounds={self.most_rounds} rounds of "
                    f"all runs, and has {answered}: nothing is sent"
                )
            alone = self.most_rounds is None and runs  # then note refuses other settings
            self.state = runs.setdefault(next(iter(alone)) if alone else settings, {})
            yield self.state
            with replacing(self.path) as file:
                file.write(json.dumps(runs).encode())

    def _read(self) -> dict[str, dict[str, Any]]:
        """Returns the state of every run, by its settings."""
        try:
            with open(self.path, "rb", opener=private) as file:
                runs: dict[str, dict[str, Any]] = json.load(file)
            for state in runs.values():
                integer("rounds", state["rounds"]), integer("last", state["last"], minimum=0)
                state["settings"]
                if "epoch" in state:
                    integer("place", state["place"], minimum=0)
        except FileNotFoundError:
            return {}
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise ValueError(
                f"book={str(self.path)!r} is no book of a client ({error!r}): nothing is sent; "
                "restore it, or agree to a new run with a new file"
            ) from None
        return runs


class Reporter:
    """One client: in each round it takes part or not, and sends one report.

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
        """Answers a round; a fresh coin, or a draw for its epoch, says if the client takes part.

        If training fails, the client reports zero with its noise, and the error is logged: whether
        training fails may depend on its data.

        Args:
            number: The round that the server asks for.
            train: Computes this client's vector, shape (d,), from its own data. Training fails if
                this raises an ``Exception`` or returns something else.
            submit: Sends a report to the shuffler.
            always_train: Train whatever the coin says, and throw the vector away if it says no;
                else train if it says yes.

        Raises:
            ValueError: If the round or all agreed rounds were answered before, or an argument has a
                wrong type.
        """
        instance_of("train", train, (Callable,)), instance_of("submit", submit, (Callable,))
        always = boolean("always_train", always_train)
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        takes_part = self.book.note(
            round_,
            max_rounds=self.max_rounds,
            fingerprint=self.format.fingerprint,
            num_batches=self.format.num_batches,
        )
        if takes_part is None:
            takes_part = bool(bernoulli_indices(1, self.format.sample_rate, SecretGenerator()))
        if not (takes_part or always):
            submit(self.format.encode(round_, None))
            return
        try:
            vector = self.format.clip(train())
        except Exception as error:
            logging.getLogger("opacus_shuffle.reporter").warning(
                "training failed, the report is zero: %r", error
            )
            vector = torch.zeros(self.format.dimension)
        # Both are made, whatever is sent: the time that it takes would tell the coin.
        report, blank = self.format.encode(round_, vector), self.format.encode(round_, None)
        submit(report if takes_part else blank)
