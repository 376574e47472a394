"""Trains with Opacus's own accountants, bit for bit as Opacus does.

Batches, noise and errors are the same. So is the account, except for adaptive clipping: Opacus
accounts for its noised count as if one record changed it by 1/2. Opacus's floating-point arithmetic
is the same as well: where Opacus makes 92 batches of 93 and accounts for the rate 1/92, so does
this scheme. Runs that would train on nothing are refused, and so are settings that would silently
have no effect. With a flag of this package, such as ``shuffle_weights``, noise and participation
are secret instead.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from typing import Any, ClassVar

import torch
from opacus.accountants.utils import get_noise_multiplier
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.opacus_report import UNPROVED
from opacus_shuffle.accountants.report import UNCHECKED
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.engine.batches.samplers import (
    ExactPoissonSampler,
    Kind,
    PoissonSampler,
    SamplingPlan,
    TicketedSampler,
    plan_sampling,
)
from opacus_shuffle.engine.guards.network_checks import MODES
from opacus_shuffle.engine.schemes.base import Budget, Scheme
from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer


class OpacusScheme(Scheme):
    """DP-SGD as Opacus trains it, for all accountants that are not of this package."""

    modes: ClassVar[tuple[str, ...]] = MODES
    clippings: ClassVar[tuple[str, ...]] = ("flat", "per_layer", "adaptive")
    coin_rate: float
    """The rate of the coins of Opacus's sampler; accounted is the rate of the sampling plan."""

    def check_ranks(
        self,
        noise_generator: torch.Generator | None,
        loader_generator: torch.Generator | None,
    ) -> None:
        """Refuses secure mode on several processes; Opacus allows the rest."""
        if self.engine.secure_mode and self.ranks.distributed:
            raise ValueError(
                "secure_mode=True is for one process, got a distributed module: Opacus's sampler "
                "for several has no secure form; leave it out"
            )

    def plan_sampling(
        self,
        data_loader: DataLoader,
        *,
        poisson_sampling: bool | None = None,
        sampling: str | None = None,
    ) -> SamplingPlan:
        """Plans as many batches, of as many records, as Opacus does."""
        kind: Kind = "own" if poisson_sampling is False else "poisson"
        plan = plan_sampling(self.name, data_loader, kind, expected=True)
        self.coin_rate = 1 / len(data_loader)
        steps = plan.steps_per_epoch if kind == "own" else int(1 / plan.sample_rate)
        rate = 1 / steps
        batch = int(plan.num_users * rate)
        if batch < 1:
            raise ValueError(
                f"data_loader has {plan.num_users} records in {plan.steps_per_epoch} batches, for "
                "which Opacus computes an expected_batch_size of 0, and gradients would be divided "
                "by 0: use a larger batch_size, or a shuffle accountant"
            )
        return dataclasses.replace(plan, steps_per_epoch=steps, batch_size=batch, sample_rate=rate)

    def calibrate(self, budget: Budget) -> float:
        """Returns Opacus's noise multiplier, for no fewer steps than will run."""
        if (budget.bound, budget.adjacency) != ("certified", "zero_out"):
            raise ValueError(
                f"accountant {self.name!r} has one ε only, got bound={budget.bound!r}, "
                f"adjacency={budget.adjacency!r}: leave them out or use a shuffle accountant"
            )
        # A distribution of privacy losses is as long as its ε is large: 400 takes 10 s. Others
        # cannot come within 0.01 of a target that is too large for floating-point numbers.
        largest = 400.0 if self.name == "prv" else 1e6
        if budget.target_epsilon > largest:
            raise ValueError(
                f"target_epsilon must be at most {largest:g} with accountant {self.name!r}, whose "
                f"search does not end above it, got {budget.target_epsilon!r}: use a smaller one, "
                "or pass noise_multiplier to make_private"
            )
        try:
            sigma: float = get_noise_multiplier(
                target_epsilon=budget.target_epsilon,
                target_delta=budget.target_delta,
                sample_rate=self.coin_rate,
                steps=max(
                    int(budget.epochs / self.coin_rate),
                    budget.epochs * self.sampling.steps_per_epoch,
                ),
                accountant=self.name,
            )
        except ValueError as error:
            raise ValueError(
                f"accountant {self.name!r} finds no noise for "
                f"target_epsilon={budget.target_epsilon!r} at "
                f"target_delta={budget.target_delta!r} ({error}): ask for other ones, or use "
                "another accountant"
            ) from error
        # With adaptive clipping the noised count costs its share: see _accounted.
        count_noise = self.adaptive.get("unclipped_num_std", math.inf)
        if not sigma < count_noise:
            raise ValueError(
                f"unclipped_num_std must be above {sigma:.4g}, got {count_noise!r}: the noised "
                "count of unclipped records would use up "
                f"target_epsilon={budget.target_epsilon!r}; pass about {10 * sigma:.2g}"
            )
        return float(sigma / math.sqrt(1 - 0.75 * (sigma / count_noise) ** 2))

    def describe(self, *, loss_reduction: str, noise_generator: torch.Generator | None) -> None:
        """Warns if a run is not what Opacus's accountants assume."""
        self.engine.pytorch_noise |= self.is_opacus and noise_generator is None
        reasons = ["own_batches"] * (self.sampling.kind == "own")
        reasons += ["seen_norms"] * (self.clipping == "adaptive")
        unchecked = dict.fromkeys((*self.accountant.unchecked, *reasons))
        self.accountant.unchecked = tuple(unchecked)
        for reason in reasons:
            warnings.warn(
                f"{self.name} assumes {UNCHECKED[reason]}, so that its ε is no guarantee; "
                f"{UNPROVED[reason]}",
                PrivacyAssumptionWarning,
                stacklevel=4,
            )

    @property
    def is_opacus(self) -> bool:
        """Whether the run uses nothing that Opacus lacks."""
        engine, moves = self.engine, self.shuffling.groups is not False
        return not moves and not engine.secure_mode and engine.seed is None

    def independent_sampler(self, generator: torch.Generator | None) -> TicketedSampler:
        """Returns Opacus's sampler; with a flag of this package or several ranks, the exact one."""
        exact = self.ranks.distributed or not self.is_opacus
        return (ExactPoissonSampler if exact else PoissonSampler)(
            num_samples=self.sampling.num_users,
            sample_rate=self.coin_rate,
            steps=self.sampling.steps_per_epoch,
            generator=generator,
            ranks=self.ranks,
        )

    def record(self, optimizer: PrivateOptimizer) -> None:
        """Records the step with Opacus's accountant, at the rate of Opacus's own hook."""
        rate = self.sampling.sample_rate * optimizer.accumulated_iterations
        before = list(self.accountant.history)
        try:
            self.accountant.step(noise_multiplier=_accounted(optimizer), sample_rate=rate)
        except BaseException:
            # Opacus's accountants remove the last entry before they check whether they can extend
            # it.
            self.accountant.history = before
            raise

    def rehearse(self, optimizer: PrivateOptimizer, steps: int) -> Any:
        """Returns a copy of Opacus's account that holds so many more steps."""
        ahead, rate = copy.deepcopy(self.accountant), self.sampling.sample_rate
        for _ in range(steps):
            ahead.step(noise_multiplier=_accounted(optimizer), sample_rate=rate)
        return ahead


def _accounted(optimizer: Any) -> float:
    """Returns the noise multiplier of a sum alone that costs as much as a step.

    With adaptive clipping Opacus raises the noise on the sum to (σ⁻² − (2σ_u)⁻²)^(−1/2), by Theorem
    1 of Andrew et al. 2021, "Differentially private learning with adaptive clipping"
    (arXiv:1905.03871), where each record counts ±1/2. Opacus counts 0 or 1, so that the sum and the
    count together cost (σ⁻² + ¾σ_u⁻²)^(−1/2).
    """
    count_noise = getattr(optimizer, "unclipped_num_std", math.inf)
    sigma = float(optimizer.noise_multiplier)
    return sigma / math.hypot(1.0, math.sqrt(0.75) * sigma / count_noise)
