"""Opacus's optimizers with local noise and with step hooks that add up; expanded weights with empty batches."""

from __future__ import annotations

from opacus_shuffle.optimizers.empty_batches import allow_empty_batches
from opacus_shuffle.optimizers.local_gaussian import LocalGaussianNoise, optimizer_class
from opacus_shuffle.optimizers.step_hooks import ComposedStepHooks

__all__ = ["ComposedStepHooks", "LocalGaussianNoise", "allow_empty_batches", "optimizer_class"]
