"""Samplers that draw the batches that are accounted."""

from __future__ import annotations

from opacus_shuffle.engine.sampling.fixed_size_sampler import FixedSizeSampler
from opacus_shuffle.engine.sampling.sampling_plan import SamplingPlan, plan_sampling

__all__ = ["FixedSizeSampler", "SamplingPlan", "plan_sampling"]
