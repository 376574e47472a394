"""What clients send, how the shuffler looks at it and mixes it, and what the server makes of it: ``ReportFormat``.

A format is one file of this folder. It derives a class from :class:`ReportFormat`; nothing else of
this package knows which there are. A report is bytes: a header that says which round and format it
is of, and the numbers. All randomness is the operating system's own: a generator that PyTorch seeds
is no secret to who sees enough of its numbers, and a server sees many.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from opacus_shuffle.accountants.communication import Communication
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.core.randomness import SecretGenerator, check_generator
from opacus_shuffle.core.validation import (
    instance_of,
    integer,
    moderate,
    one_of,
    reject_unknown,
    sampling_rate,
)
from opacus_shuffle.protocols.calibration import honest_users

_HEADER = struct.Struct(
    "<4sIQ8s"
)  # four letters for the format, the round, the number of coordinates, the fingerprint
LARGEST_ROUND = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Envelope:
    """A report as the shuffler sees it: which round it is for, and the numbers in it; nothing of these says who sent it."""

    round: int
    numbers: bytes


class ReportFormat(ABC):
    """One way of reporting a vector, with the noise that hides it.

    Every client sends one report in every round, all of one length, whatever its coin says: who
    watches the network learns nothing from it, and the shuffler knows how many clients are there.

    Args:
        dimension: d, entries of a vector.
        max_norm: C, absolute; longer vectors are scaled down to it.
        num_users: n, all clients.
        sample_rate: γ, the chance that a client takes part in a round.
        honest_fraction: The share of the clients that is certain to follow the protocol; the others
            may send what they like.
        min_reports: So many clients must have reported before a round is released, by default all
            of them. Whoever is missing, and whoever keeps it away: a round of fewer is dropped.

    Attributes:
        kind: The format's name.
        letters: Four letters that every report of this format begins with.
        mechanism: What one round is to the accountant.
        coin_rate: The chance of the coin that a client tosses for itself.
        fewest_reports: ``min_reports``; fewer are not released.
        most_reports: More are not taken.
        honest_reports: Those that the accountant counts on: of ``min_reports``, all but as many as
            may be dishonest.
        selected: Who takes part is drawn by the server, which knows them then: a simulation.
    """

    kind: ClassVar[str]
    letters: ClassVar[bytes]
    mechanism: Mechanism
    selected: bool = False

    def __init__(
        self,
        *,
        dimension: int,
        max_norm: float,
        num_users: int,
        sample_rate: float,
        honest_fraction: float,
        min_reports: int | None,
    ) -> None:
        self.dimension, self.max_norm = (
            integer("dimension", dimension),
            moderate("max_norm", max_norm),
        )
        self.num_users, self.sample_rate = (
            integer("num_users", num_users),
            sampling_rate("sample_rate", sample_rate),
        )
        self.coin_rate, self.most_reports = self.sample_rate, self.num_users
        self.min_reports = (
            None
            if min_reports is None
            else integer("min_reports", min_reports, maximum=self.num_users)
        )
        self.fewest_reports = self.num_users if self.min_reports is None else self.min_reports
        self.honest_fraction = sampling_rate("honest_fraction", honest_fraction)
        dishonest = self.num_users - honest_users(self.num_users, self.honest_fraction)
        self.honest_reports = self.fewest_reports - dishonest
        if self.honest_reports < 1:
            raise ValueError(
                f"min_reports={self.fewest_reports} may all come from the {dishonest} of "
                f"num_users={self.num_users} that are "
                f"dishonest with honest_fraction={honest_fraction}: nothing hides a report then; "
                "raise min_reports"
            )

    @staticmethod
    def of_settings(settings: Any) -> ReportFormat:
        """The format that settings describe: ``{"kind": ..., **keywords}``, as clients, shuffler and server read from one file.

        Raises:
            ValueError: If there is no such kind, or a keyword is missing, unknown or out of range.
        """
        given = {
            str(name): value for name, value in instance_of("settings", settings, (dict,)).items()
        }
        kinds = {kind.kind: kind for kind in ReportFormat.__subclasses__()}
        kind = kinds[one_of("kind in settings", given.pop("kind", None), kinds)]
        parameters = inspect.signature(kind).parameters
        unknown = {name: value for name, value in given.items() if name not in parameters}
        reject_unknown(f"settings of {kind.kind}", unknown, parameters)
        missing = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and name not in given
        ]
        if missing:
            raise ValueError(f"settings of {kind.kind} need {', '.join(missing)}: add them")
        return kind(**given)

    @property
    def settings(self) -> dict[str, Any]:
        """What :meth:`of_settings` makes the same format of: plain values, for a JSON file that everyone reads."""
        names = inspect.signature(type(self)).parameters
        return {"kind": self.kind, **{name: getattr(self, name) for name in names}}

    @property
    def agreed(self) -> dict[str, Any]:
        """Everything that clients, shuffler and server must have in common."""
        return {**self.settings, "min_reports": self.fewest_reports}

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """First 8 bytes of SHA-256 of the agreed settings: in every report and at the opening of every round."""
        return hashlib.sha256(json.dumps(self.agreed, sort_keys=True).encode()).digest()[:8]

    def check_fingerprint(self, whose: str, fingerprint: bytes) -> None:
        """Refuses a party that goes by other settings.

        Raises:
            ValueError: If it does.
        """
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"{whose} goes by other settings than these, {self.settings}: give everyone the "
                "same file of settings, and the "
                "same version of this package and of SciPy"
            )

    @abstractmethod
    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """The numbers of one report, as long as any other.

        Args:
            vector: float64 on the CPU, shape (d,), of norm at most C; None if the client's coin
                said no.
            generator: On the CPU.
        """

    @abstractmethod
    def check_numbers(self, numbers: bytes) -> None:
        """Refuses what no client makes that follows the protocol.

        Raises:
            ValueError: If the length is wrong or a number is out of range.
        """

    def keep(self, held: list[Any], numbers: bytes) -> None:
        """Adds a report's numbers to what the shuffler holds of a round, by the same work whatever they are."""
        held.append(numbers)

    @abstractmethod
    def mix(self, held: list[Any], generator: torch.Generator) -> list[bytes]:
        """What the shuffler hands over of what it holds: nothing of it depends on the order of reports."""

    @abstractmethod
    def estimate(self, mixed: Sequence[bytes], num_reports: int) -> torch.Tensor:
        """The server's unbiased estimate of the sum of all vectors: float64, shape (d,).

        Args:
            mixed: What :meth:`mix` made.
            num_reports: How many clients reported.
        """

    def ask(self, clients: Sequence[int]) -> list[int]:
        """Whom of all clients the server asks in a round: everyone, as clients toss their own coins."""
        return list(clients)

    @property
    def sent(self) -> Communication:
        """What a client sends in a round, without headers and encryption."""
        size = self.bytes_per_report
        bits = -(-8 * size // self.dimension)
        return Communication(
            bits_per_coordinate=bits,
            count_bits_per_coordinate=None,
            bytes_per_user=size,
            every_round=not self.selected,
        )

    @property
    @abstractmethod
    def bytes_per_report(self) -> int:
        """How long the numbers of a report are."""

    def encode(
        self, number: int, vector: torch.Tensor | None, generator: torch.Generator | None = None
    ) -> bytes:
        """Returns one client's report of a round: clipped, noised and packed. Nothing else of the vector leaves the client.

        Args:
            number: The round.
            vector: Shape (d,), any norm. One whose norm is not finite in double precision is
                reported as zero; None if the client's coin said no.
            generator: On the CPU; by default the operating system's.

        Raises:
            ValueError: If the vector is no dense real tensor of this shape.
        """
        check_generator("generator", generator)
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        clipped = None if vector is None else self.clip(vector)
        header = _HEADER.pack(self.letters, round_, self.dimension, self.fingerprint)
        return header + self.randomize(
            clipped, SecretGenerator(secure=True) if generator is None else generator
        )

    @property
    def report_size(self) -> int:
        """Bytes of a whole report."""
        return _HEADER.size + self.bytes_per_report

    def clip(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the vector in double precision, scaled down to norm C at most; zero if its norm is not finite."""
        given = instance_of("vector", vector, (torch.Tensor,)).detach()
        if given.shape != (self.dimension,):
            raise ValueError(
                f"vector must have shape ({self.dimension},), got {tuple(given.shape)}: join the "
                "parts"
            )
        if given.layout != torch.strided or given.is_complex() or given.is_meta:
            raise ValueError(
                f"vector must be a dense tensor of real numbers, got {given.layout}, "
                f"{given.dtype}, {given.device}"
            )
        point = given.to("cpu", torch.float64)
        # Squares of entries below 1e-154 vanish, which are far shorter than any norm that C may be.
        norm = float(torch.linalg.vector_norm(point))
        if norm <= self.max_norm:
            return point
        # A hair less, so that no rounding makes it longer than the noise is made for.
        return (
            point * (self.max_norm / norm * (1 - 2**-40))
            if math.isfinite(norm)
            else torch.zeros_like(point)
        )

    def open(self, report: bytes) -> Envelope:
        """Reads a report and refuses what is none of this format.

        Raises:
            ValueError: If it is malformed; the message says how, and nothing of what is in it.
        """
        if not isinstance(report, bytes) or len(report) != self.report_size:
            got = len(report) if isinstance(report, bytes) else type(report).__name__
            raise ValueError(f"report must be {self.report_size} bytes, got {got}")
        letters, round_, dimension, fingerprint = _HEADER.unpack_from(report)
        if letters != self.letters or dimension != self.dimension:
            raise ValueError(
                f"report is of format {letters!r} with {dimension} coordinates, this round takes "
                f"{self.letters!r} with "
                f"{self.dimension}"
            )
        self.check_fingerprint("the report's client", fingerprint)
        numbers = report[_HEADER.size :]
        self.check_numbers(numbers)
        return Envelope(round_, numbers)
