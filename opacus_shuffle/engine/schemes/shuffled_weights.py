"""Trains by DP-SGD with shuffled weights and clipped sums (Yang, Ji and Xiang, Algorithm 1)."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import ClassVar

import torch
from torch import nn

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledWeights
from opacus_shuffle.core.validation import one_of
from opacus_shuffle.engine.schemes.base import Budget, Scheme
from opacus_shuffle.engine.step.clipping import Clipping
from opacus_shuffle.engine.step.noise import ClippedSumNoise, Noise
from opacus_shuffle.networks.running import unwrap


class ShuffledDPSGD(Scheme):
    """One noised, clipped sum per step at a trusted server, and the weights permuted.

    Attributes:
        planned_step: One step as it is planned. Noise schedules keep the ratio of its two noise
            multipliers.
        shuffled: The trainable parameters that are shuffled, whose sum is clipped.
    """

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (ShuffledWeights,)
    planned_step: ShuffledWeights
    shuffled: tuple[torch.Tensor, ...] = ()

    def plan_batch_clip(self, module: nn.Module, noise_multiplier: float | None) -> None:
        """Plans to clip the sum of the shuffled parameters, by default to one record's norm.

        Warns:
            UserWarning: If no weights are shuffled.
        """
        norms = self.max_grad_norm if isinstance(self.max_grad_norm, list) else [self.max_grad_norm]
        sigma = 1.0 if noise_multiplier is None else noise_multiplier  # a budget's σ is found later
        self.planned_step = ShuffledWeights(
            noise_multiplier=sigma,
            num_users=self.sampling.num_users,
            sample_rate=self.sampling.sample_rate,
            dimension=1,
            clip=math.hypot(*norms),
            batch_clip=math.inf,
        )
        if self.spec is None:
            if self.shuffle_weights is False:
                warnings.warn(
                    "shuffled_fw without shuffle_weights is plain DP-SGD by the looser composition "
                    "of WS Theorems 1 and 2: pass shuffle_weights=True, or quote bound='certified'",
                    stacklevel=3,
                )
            return
        trained = set(map(id, self.trained))
        tensors = self.spec.tensors(unwrap(module)).items()
        moving = {key: tensor for key, tensor in tensors if id(tensor) in trained}
        if not moving:
            raise ValueError(
                "shuffle_weights permutes no trainable parameter: unfreeze some, or use another "
                "accountant"
            )
        unshuffled = self.shuffling.unshuffled_noise_multiplier
        some_stay = not trained <= set(map(id, moving.values()))
        if unshuffled is not None and not some_stay:
            raise ValueError(
                f"unshuffled_noise_multiplier={unshuffled!r} applies to parameters that stay, and "
                "all are shuffled: leave it out"
            )
        self.shuffled = tuple(moving.values())
        self.planned_step = dataclasses.replace(
            self.planned_step,
            dimension=sum(
                round(self.spec.moved_fraction(key) * tensor.numel())
                for key, tensor in moving.items()
            ),
            batch_clip=self.shuffling.batch_clip,
            unshuffled_noise_multiplier=(unshuffled or sigma) if some_stay else None,
            orbit=min(map(self.spec.smallest_orbit, moving)),
        )

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
        steps = budget.epochs * self.sampling.steps_per_epoch
        sigma, plain = calibrated_noise(self.planned_step, steps, budget)
        published = budget.bound == "published"
        if self.spec is not None and published and sigma >= plain * (1 - 1e-6):
            warnings.warn(
                f"shuffling needs noise_multiplier {sigma:.4g}, plain DP-SGD needs {plain:.4g}: "
                "WS Algorithm 1 falls back to plain DP-SGD, with no shuffling and no clipping of "
                "sums (a smaller batch_clip needs less noise)",
                stacklevel=4,
            )
            self.spec, self.shuffled = None, ()
            self.planned_step, sigma = without_shuffling(self.planned_step), plain
        elif budget.bound != "certified" and self.planned_step.unshuffled_noise_multiplier:
            self.planned_step = dataclasses.replace(
                self.planned_step,
                noise_multiplier=sigma,
                unshuffled_noise_multiplier=max(sigma, plain),
            )

        def rounds(sigma: float) -> list[tuple[Mechanism, int]]:
            return [(self.planned_step.with_noise(sigma), steps)]

        # σ and σ₀ were found one by one, so rounding may exceed the budget.
        if budget.spent(rounds(sigma)).epsilon > budget.target_epsilon:
            sigma = budget.smallest_noise(rounds)
        budget.warn_of_assumption(rounds(sigma))
        self.planned_step = self.planned_step.with_noise(sigma)
        return sigma

    def mechanism(self, noise_multiplier: float, batches: int = 1) -> ShuffledWeights:
        """Returns the mechanism of one step."""
        rate = min(1.0, self.sampling.sample_rate * batches)
        step = self.planned_step.with_noise(noise_multiplier)
        return dataclasses.replace(step, sample_rate=rate)

    def strategies(self, clipping: Clipping) -> tuple[Clipping, Noise]:
        """Returns how the optimizer clips records and the shuffled sum, and what noise it adds."""
        (clipping, noise), step = super().strategies(clipping), self.planned_step
        if self.shuffled:
            unshuffled = step.unshuffled_noise_multiplier or step.noise_multiplier
            ratio = max(1.0, unshuffled / step.noise_multiplier * (1 + 1e-12))
            noise = ClippedSumNoise(
                noise,
                self.shuffled,
                batch_clip=step.batch_clip,  # type: ignore[arg-type]  # the step has set it
                noise_ratio=ratio,
            )
        return clipping, noise


def without_shuffling(step: ShuffledWeights) -> ShuffledWeights:
    """Returns a step of plain DP-SGD, which clips no sums, with the same norm of a record."""
    return dataclasses.replace(
        step, dimension=1, batch_clip=math.inf, orbit=None, unshuffled_noise_multiplier=None
    )


def calibrated_noise(step: ShuffledWeights, steps: int, budget: Budget) -> tuple[float, float]:
    """Finds σ and σ₀, with shuffling and without, by one bound (WS Algorithm 1, lines 2 and 3).

    σ₀ is that of one dimension. Proved bounds ask for the same noise with and without shuffling.
    """

    def smallest(step: ShuffledWeights) -> float:
        return budget.smallest_noise(lambda sigma: [(step.with_noise(sigma), steps)])

    shuffled = smallest(dataclasses.replace(step, unshuffled_noise_multiplier=None))
    # Parameters that are not shuffled are not clipped as a batch either. One record may move their
    # sum by c, even if c′ is smaller.
    return shuffled, smallest(without_shuffling(step)) if budget.bound != "certified" else shuffled
