"""``FileBook``: which rounds a client has answered, on its own disk, whatever the server says.

It is written before a report is sent.

>>> import tempfile
>>> folder = tempfile.TemporaryDirectory()
>>> path = os.path.join(folder.name, "book.json")
>>> FileBook(path).note(4, max_rounds=2, fingerprint=b"12345678")
>>> FileBook(path).note(4, max_rounds=2, fingerprint=b"12345678")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
ValueError: round 4 was answered already (the last was 4): a second report costs again; a new run is another agreement, ...
>>> folder.cleanup()
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from opacus_shuffle.core.atomic_file import replacing
from opacus_shuffle.core.validation import instance_of, integer

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

    def note(self, number: int, *, max_rounds: int, fingerprint: bytes) -> None:
        """Notes a round as answered, before anything of it is sent.

        Args:
            number: The round.
            max_rounds: Rounds that the client agreed to.
            fingerprint: Of the format of its reports.

        Raises:
            ValueError: If it was answered before, all that were agreed to are, an argument is no whole number, or what is
                noted cannot be read.
        """
        number, max_rounds = integer("number", number, minimum=0), integer("max_rounds", max_rounds)  # NaN is below nothing
        with self.alone():
            self.read(fingerprint)
            if number <= self.last:
                raise ValueError(
                    f"round {number} was answered already (the last was {self.last}): a second report costs again; a new run "
                    "is another agreement, with another book"
                )
            if self.rounds >= max_rounds:
                raise ValueError(f"all max_rounds={max_rounds} rounds that this client agreed to are over: it sends no more")
            self.write(self.rounds + 1, number, fingerprint)
            self.rounds, self.last = self.rounds + 1, number

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
        path: The file, made at the first round. A new run with other settings is another agreement, with another file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(instance_of("book", path, (str, os.PathLike)))
        if not self.path.absolute().parent.is_dir():
            raise ValueError(f"book={str(path)!r} must be a file in a folder that is there: make the folder")

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
                f"book={str(self.path)!r} is no book of a client ({error!r}): nothing is sent; restore it, or agree to a new "
                "run with a new file"
            ) from None
        if settings != fingerprint.hex():
            raise ValueError(
                f"book={str(self.path)!r} is of other settings: nothing is sent; agree to a new run with a new file"
            )
        self.rounds, self.last = rounds, last

    def write(self, rounds: int, last: int, fingerprint: bytes) -> None:
        """Has it on the disk."""
        with replacing(self.path) as file:
            file.write(json.dumps({"settings": fingerprint.hex(), "rounds": rounds, "last": last}).encode())

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Locks a file beside it."""
        if fcntl is None:
            yield
            return
        with open(f"{self.path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
