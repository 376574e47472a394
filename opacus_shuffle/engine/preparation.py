"""What an engine builds for a planned run: the module, the loader with the accounted sampler, the optimizer.

Opacus calls these three builders while ``make_private`` runs; they follow its :class:`opacus_shuffle.engine.run_plan.Run`.

>>> [name for name in vars(PreparationMixin) if name.startswith("build")]
['build_model', 'build_data_loader', 'build_optimizer']
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from opacus.optimizers import DPOptimizer, get_optimizer_class
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import OpenEngine, allow_empty_batches
from opacus_shuffle.core.randomness import secret_generator
from opacus_shuffle.engine.optimizers import VectorSumOptimizer, optimizer_class
from opacus_shuffle.engine.run_plan import Run
from opacus_shuffle.engine.sampling.epoch_start import PoissonSampler
from opacus_shuffle.engine.sampling.fixed_size_sampler import FixedSizeSampler, with_batch_sampler
from opacus_shuffle.engine.weights.module import make_plain


class PreparationMixin(OpenEngine):
    """Opacus's three builders, following the plan of the run at hand."""

    _run: Run | None = None
    _wrapped: AbstractGradSampleHooks | None = None

    def build_model(self, module: nn.Module, **keywords: Any) -> Any:
        """Opacus's wrapper, which lets empty batches pass."""
        make_plain(module)
        self._wrapped = super().build_model(module, **keywords)
        allow_empty_batches(self._wrapped)
        return self._wrapped

    def build_data_loader(
        self, data_loader: DataLoader, *, poisson_sampling: bool, distributed: bool, **keywords: Any
    ) -> DataLoader:
        """The loader with the sampler that is accounted."""
        loader = super().build_data_loader(data_loader, poisson_sampling=poisson_sampling, distributed=distributed, **keywords)
        if self._run is None:
            return loader
        plan = self._run.sampling
        generator = self.secure_rng if self.secure_mode else data_loader.generator
        if plan.kind == "fixed_size":
            fixed = FixedSizeSampler(
                num_samples=plan.num_users,
                batch_size=plan.batch_size,
                steps=plan.steps_per_epoch,
                generator=generator,
            )
            return with_batch_sampler(loader, fixed)
        if plan.kind == "poisson":
            if generator is None:
                generator = secret_generator("cpu")
            if distributed:
                drawn: Any = loader.batch_sampler
                drawn.num_batches, drawn.generator = plan.steps_per_epoch, generator
            else:  # DataLoader forbids setting its sampler, but asks for it anew in every epoch
                sampler = PoissonSampler(
                    num_samples=plan.num_users,
                    sample_rate=plan.sample_rate,
                    steps=plan.steps_per_epoch,
                    generator=generator,
                )
                object.__setattr__(loader, "batch_sampler", sampler)
        return loader

    def build_optimizer(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        expected_batch_size: float,
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **keywords: Any,
    ) -> DPOptimizer:
        """Opacus's optimizer with the noise that is accounted."""
        if self._run is None:
            raise RuntimeError("build_optimizer is called by make_private alone")
        if not distributed:
            expected_batch_size = self._run.sampling.batch_size
        build: Callable[..., DPOptimizer]
        if self._run.aggregator is not None:
            build = functools.partial(VectorSumOptimizer, aggregator=self._run.aggregator)
        else:
            base = get_optimizer_class(clipping=clipping, distributed=distributed, grad_sample_mode=grad_sample_mode)
            build = optimizer_class(base, local_noise=self._run.local_noise)
        return build(
            optimizer=optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            expected_batch_size=expected_batch_size,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
            **keywords,
        )
