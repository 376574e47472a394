"""Samplers that match the accountants, and loaders of the data sets of the main job and the tutorials."""

from __future__ import annotations

from opacus_shuffle.data.fixed_size_sampler import FixedSizeSampler
from opacus_shuffle.data.image_datasets import DATASETS, load_image_dataset
from opacus_shuffle.data.sampling_plan import SamplingPlan, plan_sampling

__all__ = ["DATASETS", "FixedSizeSampler", "SamplingPlan", "load_image_dataset", "plan_sampling"]
