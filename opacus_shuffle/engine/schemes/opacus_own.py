"""Opacus's own accountants train as Opacus does, bit by bit: the same batches, noise and errors under ``torch.manual_seed``.

That includes its arithmetic in floating-point numbers: where it makes 92 batches of 93 and accounts
for the rate 1/92, which is no less than is spent, so does this. What is refused besides is what
would train on nothing, and settings of which nothing would come in silence. With a flag of this
package, such as ``shuffle_weights``, noise and participation are secret instead.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch.utils.data import DataLoader

from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.core.randomness import secret_after_fork
from opacus_shuffle.core.validation import finite_number, positive
from opacus_shuffle.engine.opacus_lineage import OpacusLineage
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.ranks import PARALLEL
from opacus_shuffle.engine.sampling.samplers import (
    DistributedPoissonSampler,
    ExactPoissonSampler,
    PoissonSampler,
    TicketedSampler,
)
from opacus_shuffle.engine.sampling.sampling_plan import Kind, SamplingPlan, plan_sampling
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.training_plan import Budget, Request, Run
from opacus_shuffle.engine.weights.batch_clip_plan import BatchClipPlan, plan_batch_clip
from opacus_shuffle.permutation import PermutationSpec

LARGEST_TARGET = 1e6
"""Opacus asks for ε within 0.01 of its target, and numbers far beyond this are not as close to each other."""
LARGEST_TARGETS = {"prv": 400.0}
"""Distributions of privacy losses are as long as they are large: this takes 10 seconds, and a thousand minutes."""


class OpacusOwn(Scheme):
    """DP-SGD as Opacus trains it, for every accountant that knows no mechanism of this package."""

    def refuse(self, request: Request) -> None:
        """Refuses what Opacus does not know."""
        if request.local_noise:
            raise ValueError(
                f"local_noise=True needs an accountant that knows it, got {self.name!r}: use "
                "'shuffle_gauss', "
                "'subsampled_shuffle' or 'shuffled_checkin'"
            )
        self.refuse_aggregator(request)
        if self.engine.secure_mode and (
            isinstance(request.module, PARALLEL) or request.grad_sample_mode.startswith("ghost_")
        ):
            raise ValueError(
                f"secure_mode=True is for one process, got a {type(request.module).__name__} with "
                f"grad_sample_mode={request.grad_sample_mode!r}: its sampler has no secure form; "
                "leave it out"
            )

    def check_noise(self, request: Request) -> float:
        """The noise multiplier; Opacus allows none at all."""
        if request.noise_multiplier is None:
            return super().check_noise(request)  # which says that it is missing
        sigma = finite_number("noise_multiplier", request.noise_multiplier)
        return sigma if sigma == 0 else positive("noise_multiplier", sigma)

    def plan_sampling(self, request: Request) -> SamplingPlan:
        """Opacus's numbers of batches and of records in them: Poisson, unless the loader's own were asked for."""
        kind: Kind = "own" if request.poisson_sampling is False else "poisson"
        plan = plan_sampling(self.name, request.data_loader, kind, expected=True)
        steps = plan.steps_per_epoch if kind == "own" else int(1 / plan.sample_rate)
        rate = 1 / steps
        batch = int(plan.num_users * rate)
        if batch < 1:
            raise ValueError(
                f"data_loader has {plan.num_users} records in {plan.steps_per_epoch} batches, of "
                "which Opacus's arithmetic "
                "makes an expected_batch_size of 0, so that gradients would be divided by it: take "
                "a larger batch_size, or a "
                "shuffle accountant"
            )
        return dataclasses.replace(plan, steps_per_epoch=steps, batch_size=batch, sample_rate=rate)

    def poisson_sampler(
        self, run: Run, generator: torch.Generator | None, opacus: Any
    ) -> TicketedSampler:
        """Opacus's, number by number (with a flag of ours the exact one): drawn at the rate of the loader that was passed."""
        plan = run.sampling
        if isinstance(opacus, DistributedUniformWithReplacementSampler):
            drawn: Any = opacus
            drawn.__class__ = DistributedPoissonSampler
            drawn.num_batches, drawn.generator = plan.steps_per_epoch, generator
            return drawn  # type: ignore[no-any-return]
        kind = PoissonSampler if self.is_opacus(run.request) else ExactPoissonSampler
        return kind(
            num_samples=plan.num_users,
            sample_rate=1 / len(run.request.data_loader),
            steps=plan.steps_per_epoch,
            generator=generator,
        )

    def sampling_generator(self, run: Run) -> torch.Generator | None:
        """Opacus's: the loader's, or PyTorch's own."""
        return (
            run.request.data_loader.generator
            if self.is_opacus(run.request)
            else super().sampling_generator(run)
        )

    def noise_generator(self, request: Request) -> torch.Generator | None:
        """Opacus's: PyTorch's own."""
        return None if self.is_opacus(request) else super().noise_generator(request)

    def expected_batch_size(self, run: Run, opacus: float) -> float:
        """Opacus's."""
        return opacus

    def is_opacus(self, request: Request) -> bool:
        """Whether nothing was asked for that Opacus does not have."""
        return (
            request.shuffling.groups is False
            and not self.engine.secure_mode
            and self.engine.seed is None
        )

    def named_before(self, run: Run, optimizer: Any) -> list[torch.Generator | None]:
        """PyTorch's own alone, where that is what Opacus draws from."""
        return [None] if self.is_opacus(run.request) else super().named_before(run, optimizer)

    @property
    def tells_of_generators(self) -> Any:
        """The engine: Opacus's accountants know nothing of generators."""
        return self.engine

    def predictable(self, run: Run) -> tuple[str, ...]:
        """As Opacus, all is: there nothing is said of it."""
        return () if self.is_opacus(run.request) else super().predictable(run)

    def plan_batch_clip(
        self, request: Request, spec: PermutationSpec | None
    ) -> BatchClipPlan | None:
        """Clips sums only where it was asked for."""
        request.shuffling.refuse(("dimension", "unshuffled_noise_multiplier"), self.name)
        if spec is None or request.shuffling.batch_clip is None:
            return None
        return plan_batch_clip(
            request.shuffling,
            spec,
            request.module,
            max_grad_norm=request.max_grad_norm,
            optimizer=request.optimizer,
        )

    def calibrate(self, request: Request, budget: Budget) -> dict[str, Any]:
        """Finds Opacus's noise multiplier; for a step more where Opacus would count one less than will run."""
        if (budget.bound, budget.adjacency) != ("certified", "zero_out"):
            raise ValueError(
                f"accountant {self.name!r} has one ε only, got bound={budget.bound!r}, "
                f"adjacency={budget.adjacency!r}: leave "
                "them out or use a shuffle accountant"
            )
        self.refuse(request)
        sampling, rate = self.plan_sampling(request), 1 / len(request.data_loader)
        if budget.target_epsilon > (largest := LARGEST_TARGETS.get(self.name, LARGEST_TARGET)):
            raise ValueError(
                f"target_epsilon must be at most {largest:g} with accountant {self.name!r}, whose "
                "search does not end "
                f"above, got {budget.target_epsilon!r}: ask for less, or pass noise_multiplier to "
                "make_private"
            )
        try:
            sigma = get_noise_multiplier(
                target_epsilon=budget.target_epsilon,
                target_delta=budget.target_delta,
                sample_rate=rate,
                steps=max(int(budget.epochs / rate), budget.epochs * sampling.steps_per_epoch),
                accountant=self.name,
            )
        except ValueError as error:
            raise ValueError(
                f"accountant {self.name!r} finds no noise for "
                f"target_epsilon={budget.target_epsilon!r} at "
                f"target_delta={budget.target_delta!r} ({error}): ask for other ones, or use "
                "another accountant"
            ) from error
        return {"noise_multiplier": float(sigma)}

    def describe(self, run: Run) -> None:
        """Warns where batches are not what Opacus's accountants assume; all else they learn from the step hook."""
        engine = self.engine
        engine.predictable = tuple(dict.fromkeys((*engine.predictable, *self.predictable(run))))
        own = self.is_opacus(run.request) and run.request.noise_generator is None
        engine.pytorch_noise = engine.pytorch_noise or own
        if run.sampling.kind == "own":
            engine.poisson = False
            warnings.warn(
                f"poisson_sampling=False: {self.name} accounts for Poisson samples, which the "
                "batches of this data loader are "
                "not, and nobody sees how often each is stepped on, so that no ε of it is a "
                "guarantee; leave it out, or use "
                "'subsampled_shuffle', 'shuffle_gauss' or 'shuffled_sums', which account for "
                "batches of one size",
                PrivacyAssumptionWarning,
                stacklevel=3,
            )

    def record(self, run: Run, optimizer: PrivateOptimizer) -> None:
        """Tells Opacus's accountant of the step, by Opacus's own hook."""
        try:
            another_round = self.engine.another_round
        except ReferenceError:  # a network may outlive its engine
            another_round = OpacusLineage().another_round
        with another_round(self.accountant):
            self.hook(optimizer)

    def attach(self, run: Run, made: tuple[Any, ...]) -> None:
        """Starts the run as every scheme does, and lets forked processes draw by secrets of their own."""
        self.hook = self.accountant.get_optimizer_hook_fn(sample_rate=run.sampling.sample_rate)
        super().attach(run, made)
        secret_after_fork(made[1], self.noise_device(run.request))
        if isinstance(made[-1].batch_sampler, PoissonSampler):
            secret_after_fork(made[-1].batch_sampler, torch.device("cpu"))

    def sampler(self, run: Run, loader: DataLoader, *, distributed: bool) -> DataLoader:
        """As Opacus's: the user's own loader stays what it is."""
        if run.sampling.kind == "own":
            return loader
        ticketed: Any = super().sampler(run, loader, distributed=distributed)
        ticketed.tickets.warns_of_fewer = self.is_opacus(run.request)
        return ticketed  # type: ignore[no-any-return]
