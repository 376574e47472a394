"""Reports with Gaussian noise of their own, for Liew and Takahashi's shuffle Gaussian mechanism (SG).

>>> reports = GaussianReports(dimension=4, max_norm=1.0, noise_multiplier=2.0, num_users=1000, sample_rate=0.1)
>>> report = reports.encode(1, torch.tensor([3.0, 4.0, 0.0, 0.0]))
>>> len(report), reports.open(report).round
(32, 1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from scipy import stats

from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn, ShuffleGauss
from opacus_shuffle.core.opacus_compat import gaussian_noise
from opacus_shuffle.core.participation import subset
from opacus_shuffle.core.randomness import secret_generator
from opacus_shuffle.core.validation import integer, noise_level, sampling_rate
from opacus_shuffle.federated.report_format import ReportFormat

_REFUSED = 1e-12
"""The chance that an honest report is taken for one of a client that lies about its clip."""


class GaussianReports(ReportFormat):
    """A vector clipped to C plus N(0, σ²C²I), in single precision.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: σ of each report, over C.
        num_users: n, all clients.
        sample_rate: γ, the chance that a client takes part in a round; the others send nothing.
        honest_fraction: The share of the clients that is certain to follow the protocol and to be there. The accountant counts
            on these alone.
        min_reports: Fewer are not released; by default what honest clients fall below once in a million rounds.

    Formal Guarantees:
        All reports of a round in random order, with their number, are what the accountant's mechanism accounts for:
        ``shuffled_checkin``, or ``shuffle_gauss`` where every client takes part, with the honest clients as its users.
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
    ) -> None:
        self.dimension, self.max_norm = self.checked_sizes(dimension, max_norm)
        self.noise_multiplier = noise_level("noise_multiplier", noise_multiplier)
        self.num_users, self.sample_rate = integer("num_users", num_users), sampling_rate("sample_rate", sample_rate)
        self.honest_fraction = sampling_rate("honest_fraction", honest_fraction)
        honest = math.floor(self.num_users * self.honest_fraction * (1 + 1e-12))
        if honest < 1:
            raise ValueError(f"honest_fraction={honest_fraction} of num_users={num_users} is nobody: nothing hides a report")
        if self.sample_rate == 1:
            self.mechanism = ShuffleGauss(noise_multiplier=self.noise_multiplier, num_users=honest)
            fewest = honest
        else:
            self.mechanism = ShuffledCheckIn(
                noise_multiplier=self.noise_multiplier, num_users=honest, sample_rate=self.sample_rate
            )
            fewest = max(1, int(stats.binom(honest, self.sample_rate).ppf(1e-6)))
        self.most_reports = self.num_users
        self.fewest_reports = fewest if min_reports is None else integer("min_reports", min_reports, maximum=self.num_users)
        if self.sample_rate == 1 and self.fewest_reports < honest:
            raise ValueError(
                f"min_reports={min_reports} is below the {honest} honest reports that the accountant counts on: lower "
                "honest_fraction instead, so that it counts on fewer"
            )

    @property
    def silent_without_coin(self) -> bool:
        """True: a round's reports are those of the clients whose coins said so."""
        return True

    @property
    def bytes_per_report(self) -> int:
        """Four a coordinate."""
        return 4 * self.dimension

    @property
    def longest_report(self) -> float:
        """The norm that an honest report exceeds with a chance of 10⁻¹²: C + σC·χ."""
        return self.max_norm * (1 + self.noise_multiplier * math.sqrt(float(stats.chi2(self.dimension).isf(_REFUSED))))

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator | None) -> bytes:
        """The vector and its noise, drawn in double precision and rounded then."""
        point = torch.zeros(self.dimension, dtype=torch.float64) if vector is None else vector
        draws = secret_generator("cpu") if generator is None else generator
        noise = gaussian_noise(self.noise_multiplier * self.max_norm, point, draws)
        return (point + noise).numpy().astype("<f4").tobytes()

    def check_numbers(self, numbers: bytes) -> None:
        """Refuses numbers that are not finite, and reports longer than an honest client's ever is."""
        if len(numbers) != self.bytes_per_report:
            raise ValueError(f"report must hold {self.dimension} numbers of four bytes, got {len(numbers)} bytes")
        values = np.frombuffer(numbers, "<f4").astype(np.float64)
        norm = float(np.linalg.norm(values))
        if not norm <= self.longest_report:  # nor is NaN
            raise ValueError(
                f"report has a norm of {norm:.3g}, which no honest one exceeds {self.longest_report:.3g} of: it is not taken"
            )

    def mix(self, reports: Sequence[bytes], generator: torch.Generator | None) -> list[bytes]:
        """The reports in random order."""
        draws = secret_generator("cpu") if generator is None else generator
        return [reports[place] for place in subset(len(reports), len(reports), draws)]

    def estimate(self, mixed: Sequence[bytes], num_reports: int) -> torch.Tensor:
        """The sum of the reports, whose noise has mean zero."""
        if len(mixed) != num_reports:
            raise ValueError(f"num_reports is {num_reports}, got {len(mixed)} reports: the shuffler hands over all of them")
        total = np.zeros(self.dimension)
        for each in mixed:
            total += np.frombuffer(each, "<f4")
        return torch.from_numpy(total)
