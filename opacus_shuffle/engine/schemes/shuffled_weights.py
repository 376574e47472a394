"""Trains by DP-SGD with shuffled weights and clipped sums (Yang, Ji and Xiang, Algorithm 1)."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, ClassVar

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledWeights
from opacus_shuffle.core.validation import one_of
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.training_plan import Budget, Request, Run
from opacus_shuffle.engine.weights.weight_shuffling import (
    BatchClipPlan,
    WeightShuffling,
    noise_ratio,
    plan_batch_clip,
    whole_norm,
)
from opacus_shuffle.permutation import PermutationSpec


class ShuffledDPSGD(Scheme):
    """One noised, clipped sum per step at a trusted server, and the weights permuted."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (ShuffledWeights,)
    noise_elsewhere: ClassVar[str] = "adds the noise to the sum, at the server"

    def check(self, request: Request) -> Run:
        """Decides what will run, and warns if no weights are shuffled."""
        run = super().check(request)
        if request.shuffle_weights is False:
            warnings.warn(
                "shuffled_fw without shuffle_weights is plain DP-SGD by the looser composition of "
                "WS Theorems 1 and 2: pass shuffle_weights=True, or quote bound='certified'",
                stacklevel=3,
            )
        return run

    def plan_batch_clip(self, request: Request, spec: PermutationSpec | None) -> BatchClipPlan:
        """Clips the sum to the norm of one record's gradient, unless told otherwise."""
        norm = request.max_grad_norm
        if spec is None:
            return BatchClipPlan((), 1, whole_norm(norm), math.inf, None)
        return plan_batch_clip(
            request.shuffling,
            spec,
            request.module,
            max_grad_norm=norm,
            noise_multiplier=request.noise_multiplier,
            trained=request.trainable,
        )

    def calibrate(self, request: Request, budget: Budget) -> dict[str, Any]:
        """Finds σ for the shuffled parameters, and σ₀ without shuffling for the others.

        Warns:
            UserWarning: If σ ≥ σ₀ by the published bound: then it is plain DP-SGD with σ₀, neither
                shuffled nor clipped as a batch (line 11).
        """
        if request.shuffling.unshuffled_noise_multiplier is not None:
            raise ValueError(
                "unshuffled_noise_multiplier is what make_private_with_epsilon finds: leave it out"
            )
        one_of("bound", budget.bound, bounds_of(ShuffledWeights))
        self.check_request(request)
        spec = self.find_spec(request)
        clipping = self.plan_batch_clip(request, spec)
        run = Run(request, self.plan_sampling(request), 1.0, spec, clipping)
        step, steps = self.mechanism(run, 1.0), budget.epochs * run.sampling.steps_per_epoch
        sigma, plain = calibrated_noise(step, steps, budget)
        published = budget.bound == "published"
        if spec is not None and published and sigma >= plain * (1 - 1e-6):
            warnings.warn(
                f"shuffling asks for noise_multiplier {sigma:.4g}, plain DP-SGD for {plain:.4g}: "
                "WS Algorithm 1 falls back to plain DP-SGD, with no shuffling and no clipping of "
                "sums (a smaller batch_clip asks for less)",
                stacklevel=3,
            )
            return {"noise_multiplier": plain, "shuffle_weights": WeightShuffling(groups=False)}
        ratio = None
        if budget.bound != "certified" and clipping.unshuffled_noise_ratio is not None:
            ratio = max(1.0, plain / sigma)

        def rounds(sigma: float) -> list[tuple[Mechanism, int]]:
            more = None if ratio is None else noise_ratio(sigma, sigma * ratio)
            return [(_with_noise(step, sigma, more), steps)]

        # The ratio was found apart from sigma, so rounding may exceed the budget.
        if ratio is not None and budget.spent(rounds(sigma)).epsilon > budget.target_epsilon:
            sigma = budget.smallest_noise(rounds)
        self.warn_of_assumption(rounds(sigma), budget)
        if spec is None:
            return {"noise_multiplier": sigma}
        unshuffled = None if ratio is None else sigma * ratio
        shuffling = dataclasses.replace(
            request.shuffling, groups=spec, unshuffled_noise_multiplier=unshuffled
        )
        return {"noise_multiplier": sigma, "shuffle_weights": shuffling}

    def mechanism(self, run: Run, noise_multiplier: float, batches: int = 1) -> ShuffledWeights:
        """Returns the mechanism of one step."""
        plan = run.batch_clip
        assert plan is not None
        step = ShuffledWeights(
            noise_multiplier=noise_multiplier,
            num_users=run.sampling.num_users,
            sample_rate=min(1.0, run.sampling.sample_rate * batches),
            dimension=plan.dimension,
            clip=plan.clip,
            batch_clip=plan.batch_clip,
            orbit=plan.orbit,
        )
        return _with_noise(step, noise_multiplier, plan.unshuffled_noise_ratio)

    def round(self, run: Run, optimizer: PrivateOptimizer) -> Mechanism:
        """Returns the mechanism of a step; refuses if parameters or norms have changed."""
        mechanism, plan = super().round(run, optimizer), run.batch_clip
        if plan is not None and plan.parameters:
            trained, shuffled = set(map(id, optimizer.params)), frozenset(map(id, plan.parameters))
            told = (optimizer.batch_clip, optimizer.unshuffled_noise_ratio, optimizer.shuffled)
            stays = plan.unshuffled_noise_ratio is not None
            as_planned = (plan.batch_clip, plan.unshuffled_noise_ratio or 1.0, shuffled)
            if told != as_planned or not shuffled <= trained or stays != bool(trained - shuffled):
                raise ValueError(
                    "parameters were frozen or thawed, or the optimizer's batch_clip or "
                    "unshuffled_noise_ratio set, after make_private: shuffled_fw accounts for what "
                    "make_private found; call it on a new engine"
                )
        return mechanism


def calibrated_noise(step: ShuffledWeights, steps: int, budget: Budget) -> tuple[float, float]:
    """Finds σ and σ₀, with shuffling and without, by one bound (WS Algorithm 1, lines 2 and 3).

    σ₀ is that of one dimension. Proved bounds ask for the same noise with and without shuffling.
    """

    def smallest(step: ShuffledWeights) -> float:
        return budget.smallest_noise(lambda sigma: [(_with_noise(step, sigma), steps)])

    shuffled = smallest(step)
    # What is not shuffled is not clipped as a batch either: one record may move it by c, even if c′
    # is less.
    plain = dataclasses.replace(step, dimension=1, batch_clip=math.inf, orbit=None)
    return shuffled, smallest(plain) if budget.bound != "certified" else shuffled


def _with_noise(step: ShuffledWeights, sigma: float, ratio: float | None = None) -> ShuffledWeights:
    """Returns the same step at another noise, with σ₀/σ = ``ratio``."""
    stays = None if ratio is None else max(sigma, sigma * ratio)
    return dataclasses.replace(step, noise_multiplier=sigma, unshuffled_noise_multiplier=stays)
