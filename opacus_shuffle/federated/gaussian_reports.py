"""Reports with Gaussian noise of their own, for Liew and Takahashi's shuffle Gaussian mechanism (SG).

>>> reports = GaussianReports(dimension=4, max_norm=1.0, noise_multiplier=2.0, num_users=1000, sample_rate=0.1)
>>> report = reports.encode(1, torch.tensor([3.0, 4.0, 0.0, 0.0]))
>>> len(report), reports.open(report).round
(40, 1)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from scipy import stats

from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn, ShuffleGauss, SubsampledShuffle
from opacus_shuffle.core.opacus_compat import gaussian_noise
from opacus_shuffle.core.participation import bernoulli_indices, subset
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import noise_level, one_of
from opacus_shuffle.federated.report_format import ReportFormat

_REFUSED = 1e-30
"""The chance that an honest report is taken for one of a client that lies about its clip: far below any δ, in all rounds."""
_LEAST, _MOST = 1e-30, 1e30
"""Numbers that single precision holds with all of their bits, and their sums, too."""


class GaussianReports(ReportFormat):
    """A vector clipped to C plus N(0, σ²C²I), in single precision.

    A client whose coin says no sends a report of nothing but zeros, which noise never is: the
    shuffler knows then that it is there, and hands nothing of it over. It holds these like the
    others until it mixes: while reports come in, nothing that it does depends on a coin, as whoever
    sends can watch how long that takes.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: σ of each report, over C.
        num_users: n, all clients.
        sample_rate: γ, the chance that a client takes part in a round.
        honest_fraction: The share of the clients that is certain to follow the protocol.
        min_reports: So many clients must have reported, by default all. The accountant counts on so
            many less those that may be dishonest.
        server_selects: ``"poisson"`` or ``"fixed_size"`` (γ·n of them): the server draws who takes
            part in a round, in place of the clients' own coins. That is a simulation, as reports
            say: a server that draws them knows who takes part, and no gain from sampling holds
            against it.

    Formal Guarantees:
        All reports of a round in random order, with their number, are what the accountant's
        mechanism accounts for: ``shuffled_checkin``, or ``shuffle_gauss`` where every client takes
        part, with the honest reports as its users. ``subsampled_shuffle`` where the server selects
        a fixed number, against who sees nothing but these reports.
    """

    kind: ClassVar[str] = "gaussian_reports"
    letters: ClassVar[bytes] = b"OSG1"

    def __init__(
        self,
        *,
        dimension: int,
        max_norm: float,
        noise_multiplier: float,
        num_users: int,
        sample_rate: float = 1.0,
        honest_fraction: float = 1.0,
        min_reports: int | None = None,
        server_selects: str | None = None,
    ) -> None:
        super().__init__(
            dimension=dimension,
            max_norm=max_norm,
            num_users=num_users,
            sample_rate=sample_rate,
            honest_fraction=honest_fraction,
            min_reports=min_reports,
        )
        self.server_selects = one_of(
            "server_selects", server_selects, (None, "poisson", "fixed_size")
        )
        self.noise_multiplier = noise_level("noise_multiplier", noise_multiplier)
        self.selected = server_selects is not None
        if not (self.noise_multiplier * self.max_norm >= _LEAST and self.longest_report <= _MOST):
            raise ValueError(
                f"max_norm={max_norm} with noise_multiplier={noise_multiplier} is beyond single "
                "precision, which reports "
                "travel in: scale the vectors"
            )
        if self.selected:
            # Clients toss no coins then; that others are missing or lie is no part of that
            # simulation.
            if self.sample_rate == 1 or honest_fraction != 1 or min_reports is not None:
                raise ValueError(
                    f"server_selects={self.server_selects!r} takes sample_rate below 1, and "
                    "neither honest_fraction nor "
                    f"min_reports, got sample_rate={self.sample_rate}, "
                    f"honest_fraction={honest_fraction}, "
                    f"min_reports={min_reports}: it is a simulation in which all are honest and "
                    "there"
                )
            self.coin_rate, self.fewest_reports = 1.0, 1
        if server_selects == "fixed_size":
            self.mechanism = SubsampledShuffle(
                noise_multiplier=self.noise_multiplier,
                num_users=self.num_users,
                sample_rate=self.sample_rate,
            )
            self.sample_rate = self.mechanism.sample_rate  # of a whole number of clients
            self.fewest_reports = self.most_reports = round(self.sample_rate * self.num_users)
        elif self.sample_rate == 1:
            self.mechanism = ShuffleGauss(
                noise_multiplier=self.noise_multiplier, num_users=self.honest_reports
            )
        else:
            self.mechanism = ShuffledCheckIn(
                noise_multiplier=self.noise_multiplier,
                num_users=self.honest_reports,
                sample_rate=self.sample_rate,
            )

    def ask(self, clients: Sequence[int]) -> list[int]:
        """Everyone; or whom the server draws afresh, in secret.

        Raises:
            ValueError: If the server draws from others than all clients, whose number is what is
                accounted.
        """
        if not self.selected:
            return super().ask(clients)
        count, draws = len(clients), SecretGenerator()
        if count != self.num_users:
            raise ValueError(
                f"server_selects={self.server_selects!r} draws from all num_users={self.num_users} "
                f"clients, got {count}: "
                "no more and no fewer must be there"
            )
        poisson = self.server_selects == "poisson"
        chosen = (
            bernoulli_indices(count, self.sample_rate, draws)
            if poisson
            else subset(count, self.fewest_reports, draws)
        )
        return [clients[place] for place in chosen]

    @property
    def bytes_per_report(self) -> int:
        """Four a coordinate."""
        return 4 * self.dimension

    @functools.cached_property
    def longest_report(self) -> float:
        """The norm that an honest report exceeds with a chance of 10⁻¹²: C + σC·χ."""
        return self.max_norm * (
            1 + self.noise_multiplier * math.sqrt(float(stats.chi2(self.dimension).isf(_REFUSED)))
        )

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """The vector and its noise, drawn in double precision and rounded then; or zeros."""
        if vector is None:
            return bytes(self.bytes_per_report)
        noise = gaussian_noise(self.noise_multiplier * self.max_norm, vector, generator)
        return (vector + noise).numpy().astype("<f4").tobytes()

    def check_numbers(self, numbers: bytes) -> None:
        """Refuses numbers that are not finite, and reports longer than an honest client's ever is."""
        if len(numbers) != self.bytes_per_report:
            raise ValueError(
                f"report must hold {self.dimension} numbers of four bytes, got {len(numbers)} bytes"
            )
        values = np.frombuffer(numbers, "<f4").astype(np.float64)
        norm = math.sqrt(
            np.square(values).sum()
        )  # no library of matrices, whose threads wait for each other
        if not norm <= self.longest_report:  # nor is NaN
            raise ValueError(
                f"report has a norm of {norm:.3g}, which no honest one exceeds "
                f"{self.longest_report:.3g} of: it is not taken"
            )

    def mix(self, held: list[Any], generator: torch.Generator) -> list[bytes]:
        """The reports of those that take part, in random order. How many they are, the server sees anyway."""
        absent = bytes(self.bytes_per_report)
        there = [numbers for numbers in held if numbers != absent]
        return [there[place] for place in subset(len(there), len(there), generator)]

    def estimate(self, mixed: Sequence[bytes], num_reports: int) -> torch.Tensor:
        """The sum of the reports, whose noise has mean zero."""
        total = np.zeros(self.dimension)
        for numbers in mixed:
            self.check_numbers(numbers)  # again: this is another party
            total += np.frombuffer(numbers, "<f4")
        return torch.from_numpy(total)
