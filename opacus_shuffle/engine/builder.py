"""``BuilderMixin``: what Opacus's ``make_private`` asks an engine to build, and taking back what came to nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import OpenEngine, forget_parameters
from opacus_shuffle.engine.ghost_loss import clipped_whatever_happens
from opacus_shuffle.engine.network_checks import (
    FirstBatch,
    check_network,
    explain_missing_calls,
    refuse_unsupported,
    watch_packs,
)
from opacus_shuffle.engine.pickling import leave_out_records
from opacus_shuffle.engine.sampling.empty_batches import let_layers_be_empty, prepare_empty_batches
from opacus_shuffle.engine.sampling.loaders import seeded_copy
from opacus_shuffle.engine.schemes import Scheme
from opacus_shuffle.engine.training_plan import Run
from opacus_shuffle.engine.weights.module import ShuffleGradSampleModule, make_plain, make_shuffled
from opacus_shuffle.networks.batch_state import StateWatch
from opacus_shuffle.networks.running import unwrap


@dataclasses.dataclass
class _Plan:
    """What is being built, the wrapper that was built, and what is to look at the first batch."""

    scheme: Scheme
    run: Run
    wrapped: Any = None
    first_batch: FirstBatch | None = None


class BuilderMixin(OpenEngine):
    """Opacus's four builders, which follow the run that is being built."""

    secure_mode: bool
    seed: int | None
    _plan: _Plan | None = None

    @contextmanager
    def building(self, scheme: Scheme, run: Run) -> Iterator[None]:
        """While inside, ``make_private`` builds what the run needs; if it fails, all is as before.

        Opacus refuses some things midway, an unsupported layer say, when the module is wrapped and
        the accountant was told.
        """
        module, plan = run.request.module, _Plan(scheme, run)
        before = [(changed, dict(vars(changed))) for changed in (self.accountant, self)]
        earlier = module.shuffler if isinstance(module, ShuffleGradSampleModule) else None
        known = vars(self).get("shuffler")
        self._plan = plan
        try:
            yield
        except BaseException:
            shuffler = vars(self).get("shuffler")
            if shuffler is not None and shuffler is not known:
                shuffler.detach()
            for changed, attributes in before:
                changed.__dict__.clear()
                changed.__dict__.update(attributes)
            if earlier is not None and not isinstance(module, ShuffleGradSampleModule):
                make_shuffled(module, earlier)
            if plan.wrapped is not None and plan.wrapped is not module:
                plan.wrapped.cleanup()
                forget_parameters(module)
            raise
        del self._plan
        if plan.first_batch is not None:
            plan.first_batch.wait_on(
                plan.wrapped if isinstance(plan.wrapped, nn.Module) else module
            )
        for model in (module, plan.wrapped):
            leave_out_records(model)
        StateWatch(unwrap(module))
        watch_packs(unwrap(module))

    def build_model(self, module: nn.Module, **keywords: Any) -> Any:
        """Opacus's wrapper, which lets empty batches pass."""
        make_plain(module)
        refuse_unsupported(self, module)
        first_batch = None if self._plan is None else check_network(self._plan.run.request, self)
        wrapped = super().build_model(module, **keywords)
        let_layers_be_empty(wrapped, unwrap(module))
        explain_missing_calls(wrapped)
        if self._plan is not None:
            self._plan.wrapped, self._plan.first_batch = wrapped, first_batch
        return wrapped

    def build_data_loader(
        self, data_loader: DataLoader, *, distributed: bool, **keywords: Any
    ) -> DataLoader:
        """The loader with the scheme's sampler."""
        if self.seed is not None and self._plan is not None:
            data_loader = seeded_copy(data_loader, self._plan.scheme.fresh_generator("the loader"))
        secure, own = (
            self.secure_mode,
            self._plan is not None and self._plan.run.sampling.kind == "own",
        )
        # Opacus lets the loader's own order be drawn by the secure generator, and fails where there
        # is no order to draw.
        self.secure_mode = (
            secure and own and getattr(data_loader.sampler, "generator", False) is not False
        )
        try:
            loader = super().build_data_loader(data_loader, distributed=distributed, **keywords)
        finally:
            self.secure_mode = secure
        if self._plan is None:
            return loader
        prepare_empty_batches(loader, data_loader, self._plan.run.sampling)
        return self._plan.scheme.sampler(self._plan.run, loader, distributed=distributed)

    def build_optimizer(self, *, optimizer: torch.optim.Optimizer, **keywords: Any) -> DPOptimizer:
        """The scheme's optimizer."""
        if self._plan is None:
            raise RuntimeError("build_optimizer is called by make_private alone")
        stock = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
        return self._plan.scheme.build_optimizer(self._plan.run, optimizer=stock, **keywords)

    def build_criterion(self, **keywords: Any) -> Any:
        """The criterion of ghost clipping, which clips whatever happens."""
        return clipped_whatever_happens(super().build_criterion(**keywords))
