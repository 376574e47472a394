"""Opacus's own accountants train as Opacus does, bit by bit, with exact numbers of batches; weights may be shuffled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DPOptimizer
from torch.utils.data import DataLoader

from opacus_shuffle.core.validation import finite_number, positive
from opacus_shuffle.engine.run import Budget, Request, Run
from opacus_shuffle.engine.sampling.sampling_plan import Kind, SamplingPlan, plan_sampling
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.weights.batch_clip_plan import BatchClipPlan, plan_batch_clip
from opacus_shuffle.permutation import PermutationSpec


class OpacusOwn(Scheme):
    """DP-SGD as Opacus trains it, for every accountant that knows no mechanism of this package."""

    def refuse(self, request: Request) -> None:
        """Refuses what Opacus does not know."""
        if request.local_noise:
            raise ValueError(
                f"local_noise=True needs an accountant that knows it, got {self.name!r}: use 'shuffle_gauss', "
                "'subsampled_shuffle' or 'shuffled_checkin'"
            )
        self.refuse_aggregator(request)

    def check_noise(self, request: Request) -> float:
        """The noise multiplier; Opacus allows none at all."""
        if request.noise_multiplier is None:
            raise ValueError("noise_multiplier is missing: pass it, or call make_private_with_epsilon")
        sigma = finite_number("noise_multiplier", request.noise_multiplier)
        return sigma if sigma == 0 else positive("noise_multiplier", sigma)

    def plan_sampling(self, request: Request) -> SamplingPlan:
        """The loader's number of batches: Poisson, unless its own were asked for."""
        kind: Kind = "own" if request.poisson_sampling is False else "poisson"
        return plan_sampling(self.name, request.data_loader, kind, expected=True)

    def plan_batch_clip(self, request: Request, spec: PermutationSpec | None) -> BatchClipPlan | None:
        """Clips sums only where it was asked for."""
        request.shuffling.refuse(("dimension", "unshuffled_noise_multiplier"), self.name)
        if spec is None or request.shuffling.batch_clip is None:
            return None
        return plan_batch_clip(
            request.shuffling, spec, request.module, max_grad_norm=request.max_grad_norm, optimizer=request.optimizer
        )

    def calibrate(self, request: Request, budget: Budget) -> dict[str, Any]:
        """Finds Opacus's noise multiplier, for an exact number of steps."""
        if (budget.bound, budget.adjacency) != ("certified", "zero_out"):
            raise ValueError(
                f"accountant {self.name!r} has one ε only, got bound={budget.bound!r}, adjacency={budget.adjacency!r}: leave "
                "them out or use a shuffle accountant"
            )
        self.refuse(request)
        sampling = self.plan_sampling(request)
        found = get_noise_multiplier(
            target_epsilon=budget.target_epsilon,
            target_delta=budget.target_delta,
            sample_rate=sampling.sample_rate,
            steps=budget.epochs * sampling.steps_per_epoch,
            accountant=self.name,
        )
        return {"noise_multiplier": float(found)}

    def describe(self, run: Run) -> None:
        """Nothing: Opacus's accountants learn all from the step hook."""

    def account(self, run: Run) -> Callable[[DPOptimizer], None]:
        """Opacus's own."""
        hook: Callable[[DPOptimizer], None] = self.accountant.get_optimizer_hook_fn(sample_rate=run.sampling.sample_rate)
        return hook

    def sampler(self, run: Run, loader: DataLoader, *, distributed: bool) -> DataLoader:
        """As Opacus's: the user's own loader stays what it is."""
        return loader if run.sampling.kind == "own" else super().sampler(run, loader, distributed=distributed)
