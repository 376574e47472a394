"""``Reporter``: a client with its own coin and noise, and a book of the rounds that it answered.

A client records a round in its book, a file on its own disk (:class:`FileBook`), before it sends
anything. So no server can make it answer a round twice.

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

from opacus_shuffle.core.atomic_file import atomic_write, file_lock, open_private, resolve_path
from opacus_shuffle.core.participation import bernoulli_indices, subset
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import boolean, instance_of, integer
from opacus_shuffle.federated.report_formats import LARGEST_ROUND, ReportFormat


class ClientBook:
    """The rounds that a client answered, in memory, for simulations.

    Args:
        state: The mapping in which they are recorded; by default a new dictionary.

    Attributes:
        state: ``rounds``, the number of answered rounds; ``last``, the last of them; ``settings``,
            the fingerprint of the report format in hexadecimal. Empty before the first round. With
            random allocation also ``epoch`` and ``place``, the round of that epoch in which the
            client participates. This is a secret of the client.
    """

    def __init__(self, state: MutableMapping[str, Any] | None = None) -> None:
        self.state = {} if state is None else state

    def note(
        self, number: int, *, max_rounds: int, fingerprint: bytes, num_batches: int | None = None
    ) -> bool | None:
        """Records a round as answered, before anything is sent.

        With random allocation it also returns whether the client's vector is in the round. Rounds
        count from 1, and ``num_batches`` rounds are an epoch. The client's round of an epoch is
        drawn at the first round of the epoch only. A client that did not answer this round, or that
        uses a new or an older copy of its book, does not participate in the epoch: a second draw
        would be another mechanism.

        Args:
            number: The round.
            max_rounds: The number of rounds that the client agreed to.
            fingerprint: The fingerprint of its report format.
            num_batches: t, if it participates in one of every t rounds.

        Returns:
            Whether it participates in this round; None without ``num_batches``.

        Raises:
            ValueError: If the round was answered before, all agreed rounds were answered (with
                random allocation, also if the number is larger than ``max_rounds``), the book is of
                other settings or unreadable, or an argument is not a whole number.
        """
        number = integer("number", number, minimum=0, maximum=LARGEST_ROUND)  # NaN would pass <=
        integer("max_rounds", max_rounds)
        settings = fingerprint.hex()
        with self.opened(settings) as state:
            rounds, last = state.get("rounds", 0), state.get("last", -1)
            if state.get("settings", settings) != settings:
                raise ValueError(
                    "book is of other settings, so nothing is sent: use a new file for a new run, "
                    "or one file for all runs with FileBook(path, most_rounds=...)"
                )
            if number <= last:
                raise ValueError(
                    f"round {number} was already answered (the last was {last}), and a second "
                    "report would increase epsilon: use another book for another run"
                )
            # By skipping numbers, a server could begin more epochs than were agreed to.
            if rounds >= max_rounds or (num_batches is not None and number > max_rounds):
                raise ValueError(
                    f"all max_rounds={max_rounds} rounds that this client agreed to are answered"
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
        """Yields the state of a run for changes, which are kept if the block raises no error."""
        yield self.state


class FileBook(ClientBook):
    """The rounds that a client answered, in a file of its own.

    Args:
        path: The file. It is created at the first round, readable by its owner alone (mode 0600),
            and must not be a symbolic link. By default each run with other settings needs another
            file.
        most_rounds: The limit for the rounds of all runs together. With a limit, runs with other
            settings use the same file, and no run is answered once the limit is reached.
    """

    def __init__(self, path: str | os.PathLike[str], *, most_rounds: int | None = None) -> None:
        super().__init__()
        self.most_rounds = None if most_rounds is None else integer("most_rounds", most_rounds)
        self.path = resolve_path("book", path)

    @contextlib.contextmanager
    def opened(self, settings: str) -> Iterator[MutableMapping[str, Any]]:
        """Reads the file, yields a run's state, and writes changes back to the disk.

        Raises:
            ValueError: If the file is not a book, or ``most_rounds`` is reached.
        """
        # Without the lock two processes of this client could answer the same round.
        with file_lock(self.path):
            runs = self._read()
            answered = sum(run["rounds"] for run in runs.values())
            if self.most_rounds is not None and answered >= self.most_rounds:
                raise ValueError(
                    f"book={str(self.path)!r} is limited to most_rounds={self.most_rounds} rounds "
                    f"of all runs, and has {answered}: nothing is sent"
                )
            # Without a limit there is one run, and note refuses other settings.
            run = next(iter(runs)) if self.most_rounds is None and runs else settings
            self.state = runs.setdefault(run, {})
            yield self.state
            with atomic_write(self.path) as file:
                file.write(json.dumps(runs).encode())

    def _read(self) -> dict[str, dict[str, Any]]:
        """Returns the state of every run by its settings."""
        try:
            with open(self.path, "rb", opener=open_private) as file:
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
                f"book={str(self.path)!r} is damaged, or not a client's book ({error!r}), so "
                "nothing is sent: restore it, or use a new file for a new run"
            ) from None
        return runs


class Reporter:
    """One client: it sends one report in each round, and participates by a secret coin.

    Args:
        format: The format of its reports.
        max_rounds: T, the number of rounds that it agreed to. It answers no further rounds.
        book: The record of answered rounds, a :class:`FileBook`; by default in memory, for
            simulations.

    Formal Guarantees:
        The server learns neither the coin nor the vector. Each round gets at most one report, which
        is clipped and noised here, and the coin is tossed before training. The client trains and
        encodes in every round, because the time that this takes would reveal the coin. In
        simulations, where no one observes the time, ``always_train=False`` saves this work.
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
        """Answers a round: decides by coin whether to participate, trains, and sends a report.

        If training fails, the client reports zero with its noise and logs the error, because
        whether training fails may depend on its data.

        Args:
            number: The round that the server requests.
            train: Computes this client's vector, shape (d,), from its own data. Training fails if
                it raises an ``Exception`` or returns anything else.
            submit: Sends a report to the shuffler.
            always_train: Whether to train also if the client does not participate, and discard the
                vector.

        Raises:
            ValueError: If the round or all agreed rounds were answered before, or an argument has a
                wrong type.
        """
        instance_of("train", train, (Callable,)), instance_of("submit", submit, (Callable,))
        always = boolean("always_train", always_train)
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        participates = self.book.note(
            round_,
            max_rounds=self.max_rounds,
            fingerprint=self.format.fingerprint,
            num_batches=self.format.num_batches,
        )
        if participates is None:
            participates = bool(bernoulli_indices(1, self.format.sample_rate, SecretGenerator()))
        if not (participates or always):
            submit(self.format.encode(round_, None))
            return
        try:
            vector = self.format.clip(train())
        except Exception as error:
            logging.getLogger("opacus_shuffle.reporter").warning(
                "training failed; reporting zero: %r", error
            )
            vector = torch.zeros(self.format.dimension)
        # Both are computed in every round: the time would otherwise reveal the coin.
        report, blank = self.format.encode(round_, vector), self.format.encode(round_, None)
        submit(report if participates else blank)
