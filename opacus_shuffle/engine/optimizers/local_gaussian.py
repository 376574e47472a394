"""Local Gaussian noise: every record's report carries its own N(0, σ²C²I), so the sum of k reports carries √k·σ·C.

The sum of k independent local noises is drawn at once: the same distribution, one draw per parameter. k is the number of
records really in the logical batch: Poisson batches vary, ``BatchMemoryManager`` splits them, and an empty one sends nothing,
no noise either.

>>> import torch
>>> from opacus import GradSampleModule
>>> from opacus.optimizers import DPOptimizer
>>> model = GradSampleModule(torch.nn.Linear(10_000, 1, bias=False))
>>> optimizer = optimizer_class(DPOptimizer, local_noise=True)(
...     torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=2.0, max_grad_norm=1.0,
...     expected_batch_size=None, loss_reduction="sum", generator=torch.Generator().manual_seed(0))
>>> (0 * model(torch.zeros(25, 10_000))).sum().backward()
>>> optimizer.pre_step()
True
>>> round(float(next(model.parameters()).grad.std()))  # sqrt(25) reports · 2.0
10
"""

from __future__ import annotations

import functools
import math

from opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
)

from opacus_shuffle.engine.optimizers.batch_clipping import BatchClipping
from opacus_shuffle.engine.optimizers.logical_batch import GhostLogicalBatch, LogicalBatch, PerLayerLogicalBatch
from opacus_shuffle.engine.optimizers.step_hooks import StepHooks
from opacus_shuffle.engine.optimizers.ticketed_steps import TicketedSteps
from opacus_shuffle.engine.optimizers.usable_records import UsableRecords

_BATCHES: dict[type[DPOptimizer], type[LogicalBatch]] = {
    DPOptimizer: LogicalBatch,
    DPPerLayerOptimizer: PerLayerLogicalBatch,
    DPOptimizerFastGradientClipping: GhostLogicalBatch,
    DistributedDPOptimizer: LogicalBatch,
    SimpleDistributedPerLayerOptimizer: PerLayerLogicalBatch,
    DistributedDPOptimizerFastGradientClipping: GhostLogicalBatch,
}


class NoisePerRecord(LogicalBatch):
    """Scales the noise by √k while it is drawn; ``noise_multiplier`` stays the local σ for everyone else.

    Attributes:
        rank: Of several processes, which one this is. Opacus's first one alone adds noise; here each adds that of its reports.
    """

    noise_multiplier: float
    rank: int = 0

    def add_noise(self) -> None:
        """Add √k·σ·C to the sum of k reports."""
        told = self.noise_multiplier, self.rank
        self.noise_multiplier, self.rank = math.sqrt(self.num_records) * told[0], 0
        try:
            super().add_noise()
        finally:
            self.noise_multiplier, self.rank = told


@functools.cache
def optimizer_class(base: type[DPOptimizer], *, local_noise: bool) -> type[DPOptimizer]:
    """Opacus's optimizer class with hooks that add up, notes on the logical batch where it has them, and local noise if asked.

    Raises:
        ValueError: If ``base`` has no local-noise form (adaptive clipping).
    """
    batch = _BATCHES.get(base)
    bases = (batch or UsableRecords, base) if batch is None or not issubclass(batch, base) else (batch,)
    if not local_noise:
        return type(f"Shuffle{base.__name__}", (TicketedSteps, StepHooks, BatchClipping, *bases), {})
    if batch is None:
        raise ValueError(f"local_noise=True has no form of {base.__name__}: use clipping='flat' or 'per_layer'")
    return type(f"LocalGaussian{base.__name__}", (TicketedSteps, NoisePerRecord, StepHooks, *bases), {})
