"""Sums records' clipped gradients as bits on a grid, with noise bits in place of Gaussian noise.

Each record represents a user of a :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum`.
Its whole gradient, all trainable parameters in the optimizer's order, is clipped, rounded at random
to the protocol's grid and added to whole-number counts. Each step draws binomial noise once, and
the counts become ``.grad``. The counts of several physical batches add up, so splitting a batch
changes only the memory. With ghost clipping (:class:`GhostShuffledSumsStrategy`) the counts are
made layer by layer.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
>>> model = GradSampleModule(torch.nn.Linear(10_000, 1, bias=False))
>>> protocol = ShuffleVectorSum(25, 10_000, 1.0, epsilon=1.0, delta=1e-5)
>>> sums = ShuffledSumsStrategy(protocol, noise_multiplier=2 / protocol.mu)
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
from collections.abc import Callable
from typing import Any

import torch

from opacus_shuffle.core.opacus_compat import check_unused, mark_as_used, norms_of_records
from opacus_shuffle.engine.batches.ranks import add_up
from opacus_shuffle.engine.step.clipping import Clipping, GhostClipping
from opacus_shuffle.engine.step.noise import Noise
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

_SLACK = 1 + 2**-13
"""Norms of the two passes of ghost clipping are the same to this factor, in single precision."""
_SEGMENT = 2**8
_ENTRIES = 2**17
"""Numbers that are turned into double precision at a time: what a processor's cache holds."""


class ShuffledSumsStrategy(Clipping, Noise):
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
        self.check_settings(optimizer)
        for parameter in optimizer.params:
            check_unused(parameter.grad_sample)
        rows = [
            sample.detach().reshape(len(sample), math.prod(sample.shape[1:]))
            for sample in optimizer.grad_samples
        ]
        norms = _without_overflow(torch.stack([_norms(row) for row in rows]))
        # A gradient that is not finite is reported as zero. An error would be visible to everyone,
        # and no ε covers it.
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

    def check_settings(self, optimizer: Any) -> None:
        """Refuses a batch that the protocol's noise does not cover.

        Raises:
            ValueError: If the optimizer's noise or norm is no longer the protocol's, or the batch
                before is still there.
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
        # Together with the estimate, the counts would reveal the noise.
        self.counts, self.released = None, True
        del counts  # for its memory
        estimate = protocol.decode(self.total(optimizer, noised), self.total_reports(optimizer))
        if optimizer.rank:
            estimate.zero_()
        sizes = [parameter.numel() for parameter in optimizer.params]
        for parameter, piece in zip(optimizer.params, torch.split(estimate, sizes), strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.device, parameter.dtype)


class GhostShuffledSumsStrategy(ShuffledSumsStrategy, GhostClipping):
    """Sums of bits with ghost clipping: one layer's gradients of records are held at a time.

    The criterion's first backward pass finds the norms, and in its second each parameter's
    gradients of records become counts at once. Entries are rounded independently, so the order of
    the layers does not matter. Where a parameter is used several times, the gradients of all uses
    are added up before they are rounded, once.

    No report is longer than the norm C, whatever the first pass has found: rounding, terms that
    cancel and operations that are not deterministic may leave it too little. What it has found of a
    record for parameter i, nᵢ with Σnᵢ² = N², is the most that the record's gradient there may
    have. Its norm mᵢ in the second pass is computed in double precision (on a GPU never too small),
    and the gradient multiplied by f·min(1, nᵢ/mᵢ) with f = min(1, C/N), so that the report's
    squared norm is f²·Σmin(mᵢ, nᵢ)² ≤ f²·N² ≤ C². All nᵢ are raised a little first, lest rounding
    shorten a gradient which needs no clipping.
    """

    def encoder(
        self, optimizer: Any, module: Any
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns the function that makes a parameter's gradients of records into counts."""
        norms: dict[torch.Tensor, Any] = {
            parameter: norms_of_records(parameter) for parameter in module.trainable_parameters
        }
        found = torch.stack([norm.double() for norm in norms.values()]) * _SLACK
        bound = min(module.max_grad_norm, self.protocol.max_norm)
        # A norm that is not finite gives a factor that is no number, or zero.
        factors = (bound / (_without_overflow(found) + 1e-6)).clamp(max=1.0)
        allowed = dict(zip(norms, found, strict=True))

        def encode(parameter: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            rows = sample.reshape(len(sample), parameter.numel())
            norms = torch.maximum(_norms(rows), allowed[parameter])
            # Zero where there is no gradient, and where a norm of either pass is not finite. An
            # error would be visible to everyone, and no ε covers it.
            scales = (factors * (allowed[parameter] / norms)).nan_to_num(nan=0.0)
            if (left_out := scales == 0).any():
                rows = rows.masked_fill(left_out[:, None], 0.0)
            return self.protocol.encode_scaled([rows], scales, optimizer.generator)

        return encode

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Adds the counts that the criterion's backward pass has made to those of the batch.

        Raises:
            ValueError: If the optimizer's noise or norm is no longer the protocol's, or what the
                pass has made is not there, or not of these parameters alone.
        """
        self.check_settings(optimizer)
        (records, norm), pieces = self.take(optimizer)
        counts = torch.cat(pieces) if records else torch.tensor(0, device="cpu")
        self.counts = counts if self.counts is None else self.counts + counts
        return records, norm


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """Returns every row's norm in double precision; not finite if the row is not."""
    if rows.dtype == torch.float64 and rows.numel():
        return _without_overflow(rows.T)
    if rows.is_cuda:
        return _norms_of_segments(rows)
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for columns in torch.split(rows, max(1, _ENTRIES // max(len(rows), 1)), dim=1):
        squares += columns.double().square_().sum(1)
    return squares.sqrt()


def _norms_of_segments(rows: torch.Tensor) -> torch.Tensor:
    """Returns every row's norm, never too small, with single precision for segments of a row.

    A GPU adds up a segment's squares in an order of its own. In any order the sum of 256 of them is
    right to 257·2⁻²⁴, and its root to half as much: by 2⁻¹⁶ the norm is raised. A segment whose
    norm is beyond 1.8·10¹⁹, so that its squares overflow, counts as not finite.
    """
    count, width = rows.shape
    segments, rest = divmod(width, _SEGMENT)
    parts = [rows[:, : width - rest].reshape(count, segments, _SEGMENT)]
    if rest:
        parts.append(rows[:, None, width - rest :])
    norms = [torch.linalg.vector_norm(part, dim=2, dtype=torch.float32) for part in parts]
    whole = torch.linalg.vector_norm(torch.cat(norms, dim=1), dim=1, dtype=torch.float64)
    return whole.mul_(1 + 2**-16)


def _without_overflow(columns: torch.Tensor) -> torch.Tensor:
    """Returns the norm of every column, also where its square would overflow."""
    largest = columns.abs().amax(dim=0).clamp_min(1.0)
    return largest * torch.linalg.vector_norm(columns / largest, dim=0)
