"""Sums records' clipped gradients as bits on a grid, with noise bits in place of Gaussian noise.

Each record plays a user of a :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum`: its
whole gradient, all trainable parameters in the optimizer's order, is clipped, rounded at random to
the protocol's grid and added to whole-number counts. One draw of binomials per step, and the counts
become ``.grad``. The counts of several physical batches add up, so splitting a batch changes
nothing but memory.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
>>> model = GradSampleModule(torch.nn.Linear(10_000, 1, bias=False))
>>> protocol = ShuffleVectorSum(25, 10_000, 1.0, epsilon=1.0, delta=1e-5, calibration="tight")
>>> sums = ShuffledSum(protocol, noise_multiplier=2 / protocol.mu)
>>> optimizer = PrivateOptimizer(
...     torch.optim.SGD(model.parameters(), lr=1.0), clipping=sums, noise=sums,
...     noise_multiplier=2 / protocol.mu, max_grad_norm=1.0, expected_batch_size=None,
...     loss_reduction="sum", generator=torch.Generator().manual_seed(0))
>>> (0 * model(torch.zeros(25, 10_000))).sum().backward()
>>> optimizer.step()
>>> round(float(next(model.parameters()).grad.std() / protocol.variance**0.5), 1)
1.0
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.compiled import jitted, worth_compiling
from opacus_shuffle.core.opacus_compat import check_unused, mark_as_used
from opacus_shuffle.engine.clipping import Clipping
from opacus_shuffle.engine.noise import Noise
from opacus_shuffle.engine.ranks import add_up
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

_SEGMENT = 2**10
_ENTRIES = 2**19
"""Numbers that are turned into double precision at a time."""


class ShuffledSum(Clipping, Noise):
    """The clipping and the noise of sums of bits, both strategies at once.

    On several processes each counts its share of the records and draws their noise bits, and all
    add up.

    Args:
        protocol: Its ``num_users`` records (with an ``honest_fraction``, not fewer than that share
            of them) must be in every logical batch; its ``dimension`` and ``max_norm`` are those of
            the gradients.
        noise_multiplier: Of the optimizer, 2/μ: it draws nothing, and is what accountants read.
        everyone_reports: All ``num_users`` report in every round, and those whose records are not
            in the logical batch report zero.
    """

    def __init__(
        self, protocol: ShuffleVectorSum, *, noise_multiplier: float, everyone_reports: bool = False
    ) -> None:
        self.protocol, self.everyone_reports = protocol, everyone_reports
        self.noise_multiplier = noise_multiplier
        self.forget_sum()

    def forget_sum(self) -> None:
        """Forgets the counts."""
        self.counts: torch.Tensor | None = None
        self.released = False

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Clips every record's gradient, rounds it to the grid, and adds up the counts.

        Raises:
            ValueError: If the optimizer's noise or norm is no longer the protocol's, or gradients
                are missing or were used before.
        """
        protocol = self.protocol
        if self.released:
            raise ValueError(
                "this batch has been released already: call optimizer.zero_grad() after "
                "optimizer.step()"
            )
        if optimizer.noise_multiplier != self.noise_multiplier:
            raise ValueError(
                f"noise_multiplier of the optimizer is {optimizer.noise_multiplier}, the "
                f"protocol's is {self.noise_multiplier}: its noise is fixed, no schedule changes "
                "it; leave noise_multiplier alone"
            )
        if not math.isclose(optimizer.max_grad_norm, protocol.max_norm, rel_tol=1e-6):
            raise ValueError(
                f"max_grad_norm is {optimizer.max_grad_norm}, the aggregator is made for "
                f"max_norm={protocol.max_norm}: its noise cannot follow a norm that changes"
            )
        for parameter in optimizer.params:
            check_unused(parameter.grad_sample)
        rows = [
            sample.detach().reshape(len(sample), math.prod(sample.shape[1:]))
            for sample in optimizer.grad_samples
        ]
        compiled = worth_compiling(sum(row.numel() for row in rows))
        norms = _without_overflow(torch.stack([_norms(row, compiled) for row in rows]))
        # An error would be an event that everyone sees and no ε speaks of: what is not finite is
        # reported as zero.
        if not (usable := torch.isfinite(norms)).all():
            rows = [row.masked_fill(~usable[:, None], 0.0) for row in rows]
        # In double precision, no clipped norm exceeds the bound.
        bound = min(optimizer.max_grad_norm, protocol.max_norm)
        factors = (bound / (norms.masked_fill(~usable, 0.0) + 1e-6)).clamp(max=1.0)
        counts = protocol.encode_scaled(rows, factors, optimizer.generator)
        self.counts = counts if self.counts is None else self.counts + counts
        for parameter in optimizer.params:
            mark_as_used(parameter.grad_sample)
        return len(norms), float(optimizer.max_grad_norm)

    def check_release(self, optimizer: Any) -> None:
        """Refuses sums of more or fewer records than the protocol covers.

        Raises:
            ValueError: If the protocol does not cover as many as there are.
        """
        here = self.reports_here(optimizer)
        if self.everyone_reports and optimizer.num_records > here:
            raise ValueError(
                f"the batch has {optimizer.num_records} records, the aggregator is for "
                f"num_users={here}"
            )
        self.protocol.check_reports(self.total_reports(optimizer))

    def reports_here(self, optimizer: Any) -> int:
        """Returns how many users report on this process."""
        if not self.everyone_reports:
            return int(optimizer.num_records)
        return len(range(optimizer.rank, self.protocol.num_users, optimizer.world_size))

    def total_reports(self, optimizer: Any) -> int:
        """Returns how many users report on all processes."""
        return int(self.total(optimizer, torch.tensor(self.reports_here(optimizer), device="cpu")))

    def total(self, optimizer: Any, counts: torch.Tensor) -> torch.Tensor:
        """Adds up the counts of all processes."""
        return add_up(counts, optimizer.params[0].device) if optimizer.distributed else counts

    def add(self, optimizer: Any) -> None:
        """Draws the reports' noise bits, and decodes all counts into ``.grad``.

        The first process decodes the sum of all counts; the others have nothing to add to it.
        """
        protocol, generator = self.protocol, optimizer.generator
        reports, counts = self.reports_here(optimizer), self.counts
        if counts is None:
            raise ValueError(
                "there is no new sum to release: call loss.backward() first, and "
                "optimizer.zero_grad() after step()"
            )
        part = {"part": True} if optimizer.distributed else {}
        noised = protocol.draw_noise(reports, generator, **part).add_(counts)
        if absent := reports - optimizer.num_records:
            noised += protocol.encode_zeros(absent, generator)
        # Beside the estimate, the counts would tell the noise.
        self.counts, self.released = None, True
        del counts  # for its memory
        estimate = protocol.decode(self.total(optimizer, noised), self.total_reports(optimizer))
        if optimizer.rank:
            estimate.zero_()
        sizes = [parameter.numel() for parameter in optimizer.params]
        for parameter, piece in zip(optimizer.params, torch.split(estimate, sizes), strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.device, parameter.dtype)


def _norms(rows: torch.Tensor, compiled: bool) -> torch.Tensor:
    """Returns every row's norm in double precision; not finite if the row is not."""
    kernel = jitted(_add_squares, reorders=True) if compiled else None
    if kernel is not None and rows.dtype == torch.float32 and rows.device.type == "cpu":
        sums = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        kernel(rows.numpy(), sums.numpy())
        return sums.sqrt_()
    if rows.dtype == torch.float64 and rows.numel():
        return _without_overflow(rows.T)
    if rows.is_cuda:
        return _norms_of_segments(rows)
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    together = min(rows.shape[1], max(1, _ENTRIES // max(len(rows), 1)))
    room = squares.new_empty(len(rows), together)
    for columns in torch.split(rows, max(1, together), dim=1):
        # In memory that is kept, as asking for it each time costs more than the work.
        doubled = room[:, : columns.shape[1]].copy_(columns)
        squares += doubled.square_().sum(1)
    return squares.sqrt_()


def _add_squares(rows: npt.NDArray[np.float32], sums: npt.NDArray[np.float64]) -> None:
    """Adds every row's squares, in double precision: compiled, a single pass without a copy."""
    for record in range(len(rows)):
        row, total, quarter = rows[record], 0.0, rows.shape[1] // 4
        # At four places at a time: memory answers to them sooner than to one after another.
        for entry in range(quarter):
            for part in range(4):
                number = np.float64(row[part * quarter + entry])
                total += number * number
        for entry in range(4 * quarter, len(row)):
            total += np.float64(row[entry]) * row[entry]
        sums[record] = total


def _norms_of_segments(rows: torch.Tensor) -> torch.Tensor:
    """Returns every row's norm, never too small, with single precision for segments of a row.

    A GPU adds up a segment's squares in an order of its own. In any order the sum of 1,024 of them
    is right to 1,025·2⁻²⁴, and its root to half as much: by 2⁻¹⁴ the norm is raised. A segment
    whose norm is beyond 1.8·10¹⁹, so that its squares overflow, counts as not finite.
    """
    count, width = rows.shape
    whole = width - width % _SEGMENT
    parts = rows[:, :whole].reshape(count, -1, _SEGMENT), rows[:, None, whole:]
    norms = [torch.linalg.vector_norm(part, dim=2, dtype=torch.float32) for part in parts]
    squares = torch.cat(norms, dim=1).double().square_().sum(1)
    return squares.sqrt_().mul_(1 + 2**-14)


def _without_overflow(columns: torch.Tensor) -> torch.Tensor:
    """Returns the norm of every column, also where its square would overflow."""
    largest = columns.abs().amax(dim=0).clamp_min(1.0)
    return largest * torch.linalg.vector_norm(columns / largest, dim=0)
