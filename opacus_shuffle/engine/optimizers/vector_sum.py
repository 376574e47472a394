"""Shuffled sums in place of Gaussian noise: every record's clipped gradient on a grid, counted, and hidden by noise bits.

Each record plays a user of a :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum`: its whole gradient, all trainable
parameters in the optimizer's order, is clipped, rounded at random to the protocol's grid and added to whole-number counts. One
draw of binomials per step, and the counts become ``.grad``. The counts of several physical batches add up, so splitting a batch
changes nothing but memory.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum
>>> model = GradSampleModule(torch.nn.Linear(10_000, 1, bias=False))
>>> protocol = ShuffleVectorSum(25, 10_000, 1.0, epsilon=1.0, delta=1e-5, calibration="tight")
>>> optimizer = VectorSumOptimizer(
...     torch.optim.SGD(model.parameters(), lr=1.0), aggregator=protocol, noise_multiplier=2 / protocol.mu, max_grad_norm=1.0,
...     expected_batch_size=None, loss_reduction="sum", generator=torch.Generator().manual_seed(0))
>>> (0 * model(torch.zeros(25, 10_000))).sum().backward()
>>> optimizer.pre_step()
True
>>> round(float(next(model.parameters()).grad.std() / protocol.variance**0.5), 1)
1.0
"""

from __future__ import annotations

import math
from typing import Any

import torch
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer

from opacus_shuffle.core.opacus_compat import mark_as_used, refuse_used
from opacus_shuffle.engine.optimizers.accumulated import refuse_accumulated
from opacus_shuffle.engine.optimizers.logical_batch import LogicalBatch
from opacus_shuffle.engine.optimizers.step_hooks import StepHooks
from opacus_shuffle.engine.optimizers.ticketed_steps import TicketedSteps
from opacus_shuffle.engine.ranks import add_up
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

_ENTRIES = 2**17
"""Numbers that are turned into double precision at a time: what a processor's cache holds."""


class EncodedSum(DPOptimizer):
    """What takes the place of Opacus's clipping-and-summing and of its noise."""

    num_records: int  # of the logical batch, see LogicalBatch
    _counts: torch.Tensor | None = None
    _released: bool = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        aggregator: ShuffleVectorSum,
        everyone_reports: bool = False,
        **keywords: Any,
    ) -> None:
        super().__init__(optimizer, **keywords)
        self.aggregator, self._everyone_reports = aggregator, everyone_reports
        self._agreed = (aggregator, float(self.noise_multiplier))

    def pre_step(self, closure: Any = None) -> bool | None:
        """As Opacus's, which would pass raw gradients on where nothing requires a gradient any more."""
        self.check_agreement()
        return super().pre_step(closure)

    def clip_and_accumulate(self) -> None:
        """Clip every record's whole gradient by Opacus's factor, put it on the grid and count.

        Raises:
            ValueError: If gradients are missing, used before, not finite, or not those that the protocol is made for.
        """
        if self._released:
            raise ValueError("this batch has been released already: call optimizer.zero_grad() after optimizer.step()")
        refuse_accumulated(self)
        for parameter in self.params:
            refuse_used(parameter.grad_sample)
        samples = self.grad_samples
        if not math.isclose(self.max_grad_norm, self.aggregator.max_norm, rel_tol=1e-6):
            raise ValueError(
                f"max_grad_norm is {self.max_grad_norm}, the aggregator is made for max_norm={self.aggregator.max_norm}: its "
                "noise cannot follow a norm that changes"
            )
        usable, factors = self._clip_factors(samples)
        counts = self.aggregator.encode_scaled(usable, factors, self.generator)
        self._counts = counts if self._counts is None else self._counts + counts
        for parameter in self.params:
            mark_as_used(parameter.grad_sample)

    def check_agreement(self) -> None:
        """Refuse, before anything is released, what is not accounted.

        Raises:
            ValueError: If the protocol, its multiplier, or what is trained has changed.
        """
        aggregator, multiplier = self._agreed
        if self.aggregator is not aggregator:
            raise ValueError(
                "optimizer.aggregator was changed after make_private: shuffled_sums accounts for the protocol that "
                "make_private got; call it on a new engine"
            )
        if self.noise_multiplier != multiplier:
            raise ValueError(
                f"noise_multiplier of the optimizer is {self.noise_multiplier}, the protocol's is {multiplier}: its noise is "
                "fixed, no schedule changes it; leave noise_multiplier alone"
            )
        entries = sum(parameter.numel() for parameter in self.params)
        if entries != aggregator.dimension:
            raise ValueError(
                f"dimension of the aggregator is {aggregator.dimension}, the trainable parameters have {entries} entries: were "
                "some frozen or thawed after make_private?"
            )

    def _clip_factors(self, samples: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The records' gradients, those that are not finite replaced by zero, and Opacus's clipping factors: float64."""
        rows = [sample.detach().reshape(len(sample), math.prod(sample.shape[1:])) for sample in samples]
        norms = _without_overflow(torch.stack([_norms(each) for each in rows]))
        # An error would be an event that everyone sees and no ε speaks of: what is not finite is reported as zero.
        if not (usable := torch.isfinite(norms)).all():
            rows = [each.masked_fill(~usable[:, None].to(each.device), 0.0) for each in rows]
        # In double precision, no clipped norm exceeds the bound.
        bound = min(self.max_grad_norm, self.aggregator.max_norm)
        return rows, (bound / (norms.masked_fill(~usable, 0.0) + 1e-6)).clamp(max=1.0)

    def check_sum(self) -> None:
        """Refuse what the protocol does not cover.

        Raises:
            ValueError: If nothing was counted, it was released before, or there are too few or too many records.
        """
        if self._counts is None:
            raise ValueError(
                "there is no new sum to release: call loss.backward() first, and optimizer.zero_grad() after step()"
            )
        self.check_agreement()
        if self._everyone_reports and self.num_records > self.reports_here():
            raise ValueError(f"the batch has {self.num_records} records, the aggregator is for num_users={self.reports_here()}")
        self.aggregator.check_reports(self.total_reports())

    def reports_here(self) -> int:
        """How many users report on this process: those in the batch, or everyone, the others zero."""
        return self.aggregator.num_users if self._everyone_reports else self.num_records

    def draw_noise(self, reports: int) -> torch.Tensor:
        """The noise bits of so many users, added up."""
        return self.aggregator.draw_noise(reports, self.generator)

    def total_reports(self) -> int:
        """How many users report on all processes."""
        return self.reports_here()

    def total(self, counts: torch.Tensor) -> torch.Tensor:
        """The counts of all processes, added up."""
        return counts

    def add_noise(self) -> None:
        """Draw the reports' noise bits, and decode the counts into ``.grad``; see :meth:`check_sum` for what is refused."""
        self.check_sum()
        reports, counts = self.reports_here(), self._counts
        assert counts is not None
        if absent := reports - self.num_records:
            counts = counts + self.aggregator.encode_zeros(absent, self.generator)
        noised = self.draw_noise(reports).add_(counts)
        self._released, self._counts = True, None  # beside the estimate, the counts would tell the noise
        estimate = self.aggregator.decode(self.total(noised), self.total_reports())
        sizes = [parameter.numel() for parameter in self.params]
        for parameter, piece in zip(self.params, torch.split(estimate, sizes), strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.device, parameter.dtype)


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """Every row's norm in double precision, on the CPU; not finite if the row is not."""
    if rows.dtype == torch.float64 and rows.numel():
        return _without_overflow(rows.T).cpu()
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for columns in torch.split(rows, max(1, _ENTRIES // max(len(rows), 1)), dim=1):
        squares += columns.double().square_().sum(1)
    return squares.sqrt().cpu()


def _without_overflow(columns: torch.Tensor) -> torch.Tensor:
    """The norm of every column, whose squares double precision may not hold."""
    largest = columns.abs().amax(dim=0).clamp_min(1.0)
    return largest * torch.linalg.vector_norm(columns / largest, dim=0)


class VectorSumOptimizer(TicketedSteps, StepHooks, LogicalBatch, EncodedSum):
    """Opacus's optimizer with flat clipping, whose sums go through a shuffle protocol.

    Args:
        optimizer: As Opacus's, like every keyword not named here.
        aggregator: The protocol; its ``num_users`` records (with an ``honest_fraction``, not fewer than that share of them)
            must be in every logical batch, its ``dimension`` and ``max_norm`` are those of the gradients.
        everyone_reports: All of its ``num_users`` report in every round, and those whose records are not in the logical batch
            report zero.
        **keywords: ``generator`` lives on the CPU. ``noise_multiplier`` draws nothing; it is what the accountant reads, 2/μ.
    """

    sums_by_itself: bool = True

    def check_release(self) -> None:
        """Refuse a sum that is not accounted, too."""
        super().check_release()
        self.check_sum()

    def forget_sum(self) -> None:
        """Forget the counts, too."""
        super().forget_sum()
        self._counts, self._released = None, False


class DistributedVectorSumOptimizer(VectorSumOptimizer, DistributedDPOptimizer):
    """The same on several processes: each counts its share of the records and draws their noise bits, and all add up."""

    def reports_here(self) -> int:
        """How many users report on this process."""
        return len(range(self.rank, super().reports_here(), self.world_size)) if self._everyone_reports else self.num_records

    def draw_noise(self, reports: int) -> torch.Tensor:
        """The noise bits of this process's users, added up."""
        return self.aggregator.draw_noise(reports, self.generator, part=True)

    def total_reports(self) -> int:
        """How many users report on all processes."""
        return int(self.total(torch.tensor(self.reports_here())))

    def total(self, counts: torch.Tensor) -> torch.Tensor:
        """The counts of all processes, added up."""
        return add_up(counts, self.params[0].device)

    def add_noise(self) -> None:
        """Decode the sum of all counts on the first process; the others have nothing to add to it."""
        super().add_noise()
        if self.rank:
            for parameter in self.params:
                parameter.grad.zero_()
