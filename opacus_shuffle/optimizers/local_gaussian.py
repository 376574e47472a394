"""Local Gaussian noise: every record's report carries its own N(0, σ²C²I), so the sum of k reports carries √k·σ·C.

The sum of k independent local noises is drawn at once: the same law, one draw per parameter. k is the number of records really
in the logical batch: Poisson batches vary, ``BatchMemoryManager`` splits them, and an empty one sends nothing, no noise either.

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
from typing import TYPE_CHECKING, Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer

from opacus_shuffle.optimizers.step_hooks import ComposedStepHooks

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer as _Base
else:
    _Base = object

SUPPORTED: tuple[type[DPOptimizer], ...] = (DPOptimizer, DPPerLayerOptimizer, DPOptimizerFastGradientClipping)


class LocalGaussianNoise(_Base):
    """Mixin for Opacus's flat, per-layer and ghost-clipping optimizers; ``noise_multiplier`` is the local σ.

    Attributes:
        num_records: Records of the current logical batch that have been clipped and summed so far.
    """

    num_records: int = 0
    noise_multiplier: float

    def clip_and_accumulate(self) -> None:
        """Clip and sum one physical batch, and count its records (flat and per-layer clipping)."""
        if self.params:
            self.num_records += len(self._get_flat_grad_sample(self.params[0]))
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Add √k·σ·C to the sum of k reports; the multiplier that others read stays the local one.

        Raises:
            ValueError: If a scheduler moved the noise's norm away from the one that the reports were clipped to.
        """
        clipped_to = self._clipping_norm()
        if not math.isclose(clipped_to, self.max_grad_norm, rel_tol=1e-6):
            raise ValueError(
                f"max_grad_norm is {self.max_grad_norm} for the noise but the reports were clipped to {clipped_to}: a "
                "gradient-clipping scheduler reaches both only with clipping='flat' and grad_sample_mode 'hooks', "
                "'functorch' or 'ew'"
            )
        local = self.noise_multiplier
        self.noise_multiplier = math.sqrt(self.num_records) * local
        try:
            super().add_noise()
        finally:
            self.noise_multiplier = local

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients, and the count whenever Opacus clears the sum."""
        super().zero_grad(set_to_none)
        if not self._is_last_step_skipped:
            self.num_records = 0

    def _clipping_norm(self) -> float:
        """The norm that one whole report was clipped to."""
        return self.max_grad_norm


class _PerLayer(LocalGaussianNoise):
    """Per-layer clipping: the reports' norm is that of the layers' norms, which schedulers do not reach."""

    def _clipping_norm(self) -> float:
        norms = self.max_grad_norms  # type: ignore[attr-defined]
        return float(torch.norm(torch.Tensor(norms), p=2).item())


class _Ghost(LocalGaussianNoise):
    """Ghost clipping: the module clips in the backward pass; only its per-sample norms show how many records came."""

    grad_sample_module: Any = None

    def accumulate(self) -> None:
        """Add one physical batch's clipped sum, and count its records."""
        norms = [p._norm_sample for p in self.params if getattr(p, "_norm_sample", None) is not None]
        if not norms:
            raise ValueError(
                "no per-sample norm was computed since the last step: call the criterion that make_private returned, then "
                "loss.backward(), then optimizer.step()"
            )
        self.num_records += len(norms[0])
        super().accumulate()  # type: ignore[misc]

    def _clipping_norm(self) -> float:
        return self.max_grad_norm if self.grad_sample_module is None else self.grad_sample_module.max_grad_norm


@functools.cache
def optimizer_class(base: type[DPOptimizer], *, local_noise: bool) -> type[DPOptimizer]:
    """Opacus's optimizer class with hooks that add up and, if asked, local noise.

    Raises:
        ValueError: If ``base`` has no local-noise form (adaptive clipping, distributed).
    """
    if not local_noise:
        return type(f"Shuffle{base.__name__}", (ComposedStepHooks, base), {})
    if base not in SUPPORTED:
        raise ValueError(f"local_noise=True has no form of {base.__name__}: use clipping='flat' or 'per_layer' on one process")
    noise = {DPPerLayerOptimizer: _PerLayer, DPOptimizerFastGradientClipping: _Ghost}.get(base, LocalGaussianNoise)
    return type(f"LocalGaussian{base.__name__}", (noise, ComposedStepHooks, base), {})
