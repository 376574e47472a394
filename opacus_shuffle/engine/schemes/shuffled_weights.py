"""Trains by DP-SGD with shuffled weights and clipped sums (Yang, Ji and Xiang, Algorithm 1)."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import ClassVar

from torch import nn

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledWeights
from opacus_shuffle.core.validation import one_of
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.step.weight_shuffling import (
    BatchClipPlan,
    noise_ratio,
    plan_batch_clip,
    whole_norm,
)
from opacus_shuffle.engine.training_plan import Budget


class ShuffledDPSGD(Scheme):
    """One noised, clipped sum per step at a trusted server, and the weights permuted."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (ShuffledWeights,)

    def plan_batch_clip(self, module: nn.Module, noise_multiplier: float | None) -> None:
        """Clips the sum to the norm of one record's gradient, unless told otherwise.

        Warns:
            UserWarning: If no weights are shuffled.
        """
        if self.spec is not None:
            self.batch_clip = plan_batch_clip(
                self.shuffling,
                self.spec,
                module,
                max_grad_norm=self.max_grad_norm,
                noise_multiplier=noise_multiplier,
                trained=self.trained,
            )
            return
        self.batch_clip = self.without_shuffling()
        if self.shuffle_weights is False:
            warnings.warn(
                "shuffled_fw without shuffle_weights is plain DP-SGD by the looser composition of "
                "WS Theorems 1 and 2: pass shuffle_weights=True, or quote bound='certified'",
                stacklevel=3,
            )

    def without_shuffling(self) -> BatchClipPlan:
        """Returns the plan of plain DP-SGD, which clips no sums."""
        return BatchClipPlan((), 1, whole_norm(self.max_grad_norm), math.inf, None)

    def calibrate(self, budget: Budget) -> float:
        """Finds σ for the shuffled parameters, and σ₀ without shuffling for the others.

        Warns:
            UserWarning: If σ ≥ σ₀ by the published bound: then it is plain DP-SGD with σ₀, neither
                shuffled nor clipped as a batch (line 11).
        """
        if self.shuffling.unshuffled_noise_multiplier is not None:
            raise ValueError(
                "unshuffled_noise_multiplier is what make_private_with_epsilon finds: leave it out"
            )
        one_of("bound", budget.bound, bounds_of(ShuffledWeights))
        step, steps = self.mechanism(1.0), budget.epochs * self.sampling.steps_per_epoch
        sigma, plain = calibrated_noise(step, steps, budget)
        published = budget.bound == "published"
        if self.spec is not None and published and sigma >= plain * (1 - 1e-6):
            warnings.warn(
                f"shuffling needs noise_multiplier {sigma:.4g}, plain DP-SGD needs {plain:.4g}: "
                "WS Algorithm 1 falls back to plain DP-SGD, with no shuffling and no clipping of "
                "sums (a smaller batch_clip needs less noise)",
                stacklevel=4,
            )
            self.spec, self.batch_clip = None, self.without_shuffling()
            return plain
        plan, ratio = self.batch_clip, None
        assert plan is not None
        if budget.bound != "certified" and plan.unshuffled_noise_ratio is not None:
            ratio = max(1.0, plain / sigma)

        def rounds(sigma: float) -> list[tuple[Mechanism, int]]:
            more = None if ratio is None else noise_ratio(sigma, sigma * ratio)
            return [(_with_noise(step, sigma, more), steps)]

        # The ratio was found apart from sigma, so rounding may exceed the budget.
        if ratio is not None and budget.spent(rounds(sigma)).epsilon > budget.target_epsilon:
            sigma = budget.smallest_noise(rounds)
        budget.warn_of_assumption(rounds(sigma))
        if ratio is not None:
            more = noise_ratio(sigma, sigma * ratio)
            self.batch_clip = dataclasses.replace(plan, unshuffled_noise_ratio=more)
        return sigma

    def mechanism(self, noise_multiplier: float, batches: int = 1) -> ShuffledWeights:
        """Returns the mechanism of one step."""
        plan = self.batch_clip
        assert plan is not None
        step = ShuffledWeights(
            noise_multiplier=noise_multiplier,
            num_users=self.sampling.num_users,
            sample_rate=min(1.0, self.sampling.sample_rate * batches),
            dimension=plan.dimension,
            clip=plan.clip,
            batch_clip=plan.batch_clip,
            orbit=plan.orbit,
        )
        return _with_noise(step, noise_multiplier, plan.unshuffled_noise_ratio)


def calibrated_noise(step: ShuffledWeights, steps: int, budget: Budget) -> tuple[float, float]:
    """Finds σ and σ₀, with shuffling and without, by one bound (WS Algorithm 1, lines 2 and 3).

    σ₀ is that of one dimension. Proved bounds ask for the same noise with and without shuffling.
    """

    def smallest(step: ShuffledWeights) -> float:
        return budget.smallest_noise(lambda sigma: [(_with_noise(step, sigma), steps)])

    shuffled = smallest(step)
    # Parameters that are not shuffled are not clipped as a batch either. One record may move their
    # sum by c, even if c′ is smaller.
    plain = dataclasses.replace(step, dimension=1, batch_clip=math.inf, orbit=None)
    return shuffled, smallest(plain) if budget.bound != "certified" else shuffled


def _with_noise(step: ShuffledWeights, sigma: float, ratio: float | None = None) -> ShuffledWeights:
    """Returns the same step at another noise, with σ₀/σ = ``ratio``."""
    stays = None if ratio is None else max(sigma, sigma * ratio)
    return dataclasses.replace(step, noise_multiplier=sigma, unshuffled_noise_multiplier=stays)
