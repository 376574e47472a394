"""Reports in bits, for Cheu, Joseph, Mao and Peng's shuffled vector sums (SCO), with everyone's coin a secret.

Every client sends a report in every round. If its coin says no it reports zero, which nobody can
tell from another vector. The sum is as private as a trusted server's with Poisson batches.

>>> reports = BitSums(dimension=3, max_norm=1.0, noise_multiplier=2.0, num_users=1000, sample_rate=0.1, delta=1e-6)
>>> report = reports.encode(1, torch.tensor([0.6, 0.8, 0.0]))
>>> len(report) == 24 + reports.bytes_per_report, reports.bytes_per_report
(True, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.accountants.mechanisms import ShuffledSums
from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.core.validation import one_of
from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.protocols.messages import Messages, shuffled
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


class BitSums(ReportFormat):
    """A vector on a grid, in ones among bits, with noise bits besides.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: Of the **sum**, over C, as in DP-SGD.
        num_users: n, all clients; each sends a report in every round.
        sample_rate: γ, the chance that a client's vector is in its report.
        delta: δ of the whole run, of which binomial tails take a millionth.
        rounds: Rounds of the run, which share those tails.
        honest_fraction: The share of the clients that is certain to follow the protocol.
        min_reports: So many clients must have reported, by default all. The accountant counts on
            the noise of so many less those that may be dishonest; that must be a third of all
            clients at least.
        messages: ``"counts"``: each client hands the shuffler the number of its ones in each
            coordinate, and the shuffler adds them: small messages, and a shuffler that is trusted
            to add. ``"bits"``: every bit travels, and the shuffler mixes all clients' bits of a
            coordinate.

    Formal Guarantees:
        What the shuffler hands over tells one number per coordinate, the sum of all ones: the round
        of ``shuffled_sums`` with secret coins.
        :class:`~opacus_shuffle.accountants.mechanisms.shuffled_sums.ShuffledSums` has the proof.
    """

    kind: ClassVar[str] = "bit_sums"
    letters: ClassVar[bytes] = b"OSS1"

    def __init__(
        self,
        *,
        dimension: int,
        max_norm: float,
        noise_multiplier: float,
        num_users: int,
        sample_rate: float = 1.0,
        delta: float,
        rounds: int = 1,
        honest_fraction: float = 1.0,
        min_reports: int | None = None,
        messages: str = "counts",
    ) -> None:
        super().__init__(
            dimension=dimension,
            max_norm=max_norm,
            num_users=num_users,
            sample_rate=sample_rate,
            honest_fraction=honest_fraction,
            min_reports=min_reports,
        )
        self.messages = one_of("messages", messages, ("counts", "bits"))
        if 3 * self.honest_reports < self.num_users:
            raise ValueError(
                f"min_reports={self.fewest_reports} and honest_fraction={honest_fraction} make "
                f"{self.honest_reports} honest "
                f"reports certain, BitSums needs {-(-self.num_users // 3)}, a third of "
                f"num_users={self.num_users}: raise "
                "min_reports"
            )
        self.protocol = ShuffleVectorSum.with_noise_multiplier(
            self.num_users,
            self.dimension,
            self.max_norm,
            noise_multiplier,
            delta=delta,
            rounds=rounds,
            honest_fraction=self.honest_reports / self.num_users,
            zero_on_grid=True,
            rate=self.sample_rate,
        )
        self.mechanism = ShuffledSums.of_protocol(self.protocol, sample_rate=self.sample_rate)
        self.noise_multiplier, self.delta, self.rounds = (
            float(noise_multiplier),
            self.protocol.delta,
            self.protocol.rounds,
        )
        self.bits = self.protocol.granularity + self.protocol.noise_bits
        if self.bits >= 2**32:
            raise ValueError(
                f"noise_multiplier={noise_multiplier} takes {self.bits} bits of each of "
                f"num_users={num_users}: choose less "
                "noise or more users"
            )

    @property
    def agreed(self) -> dict[str, Any]:
        """Everything that clients, shuffler and server must have in common: with what the noise multiplier was turned into."""
        plan = {
            name: getattr(self.protocol, name)
            for name in ("granularity", "noise_bits", "bit_probability")
        }
        return {**super().agreed, **plan}

    @property
    def _count_type(self) -> np.dtype:
        return np.dtype(next(f"<u{size}" for size in (1, 2, 4) if self.bits < 2 ** (8 * size)))

    @property
    def bytes_per_report(self) -> int:
        """A count for each coordinate, in the fewest whole bytes; or all its bits."""
        return self.dimension * (
            self._count_type.itemsize if self.messages == "counts" else -(-self.bits // 8)
        )

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """The number of ones of each coordinate, or so many ones and then zeros, eight to a byte."""
        protocol = self.protocol
        counts = (
            protocol.encode_zeros(1, generator)
            if vector is None
            else protocol.encode(vector[None], generator)
        )
        ones = (protocol.draw_noise(1, generator, part=True) + counts).numpy()
        if self.messages == "counts":
            return ones.astype(self._count_type).tobytes()
        return np.packbits(np.arange(self.bits) < ones[:, None], axis=1).tobytes()

    def counts_of(self, numbers: bytes) -> npt.NDArray[np.int64]:
        """How many ones each coordinate of a report in counts has, shape (d,)."""
        return np.frombuffer(numbers, self._count_type).astype(np.int64)

    def check_numbers(self, numbers: bytes) -> None:
        """Refuses counts of more ones than there are bits, and bits behind the last."""
        if len(numbers) != self.bytes_per_report:
            raise ValueError(f"report must be {self.bytes_per_report} bytes, got {len(numbers)}")
        if self.messages == "counts":
            largest = int(np.frombuffer(numbers, self._count_type).max())
            if largest > self.bits:
                raise ValueError(
                    f"report counts {largest} ones in a coordinate of {self.bits} bits: it is not "
                    "taken"
                )
            return
        spare = -self.bits % 8
        if (
            spare
            and (
                np.frombuffer(numbers, np.uint8).reshape(self.dimension, -1)[:, -1] & (2**spare - 1)
            ).any()
        ):
            raise ValueError(
                f"report has ones behind the {self.bits} bits of a coordinate: it is not taken"
            )

    def keep(self, held: list[Any], numbers: bytes) -> None:
        """Adds counts up as they come, so that a shuffler holds one number a coordinate, however many clients there are."""
        if self.messages == "bits":
            held.append(numbers)
            return
        if not held:
            held.append(np.zeros(self.dimension, np.int64))
        held[0] += self.counts_of(numbers)

    def mix(self, held: list[Any], generator: torch.Generator) -> list[bytes]:
        """The sum of the counts; or every coordinate's bits, all clients', in random order."""
        if self.messages == "counts":
            return [held[0].astype("<i8").tobytes()]
        together = [
            Messages(
                np.frombuffer(numbers, np.uint8).reshape(self.dimension, -1),
                self.bits,
                self.protocol.granularity,
            )
            for numbers in held
        ]
        return [shuffled(together, stream_of(generator)).bits.tobytes()]

    def estimate(self, mixed: Sequence[bytes], num_reports: int) -> torch.Tensor:
        """The analyzer's estimate from the numbers of ones."""
        (all_of_it,) = mixed
        if self.messages == "counts":
            ones = np.frombuffer(all_of_it, "<i8").astype(np.int64)
        else:
            rows = np.frombuffer(all_of_it, np.uint8).reshape(self.dimension, -1)
            ones = np.array([np.count_nonzero(np.unpackbits(row)) for row in rows])
        return self.protocol.decode(torch.from_numpy(ones.astype(np.int64)), num_reports)
