"""Opacus's optimizers with local noise, clipped or shuffled sums, with notes on what was summed, and step hooks that add up."""

from __future__ import annotations

from opacus_shuffle.engine.optimizers.batch_clipping import BatchClipping
from opacus_shuffle.engine.optimizers.local_gaussian import optimizer_class
from opacus_shuffle.engine.optimizers.logical_batch import GhostLogicalBatch, LogicalBatch
from opacus_shuffle.engine.optimizers.ticketed_steps import TicketedSteps
from opacus_shuffle.engine.optimizers.vector_sum import DistributedVectorSumOptimizer, VectorSumOptimizer

__all__ = [
    "BatchClipping",
    "DistributedVectorSumOptimizer",
    "GhostLogicalBatch",
    "LogicalBatch",
    "TicketedSteps",
    "VectorSumOptimizer",
    "optimizer_class",
]
