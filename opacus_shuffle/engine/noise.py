"""Noise: what is added to a clipped sum before it is released.

A strategy of :class:`~opacus_shuffle.engine.private_optimizer.PrivateOptimizer`. A mechanism of
your own derives one from :class:`Noise` and returns it from its scheme; the optimizer has accounted
for the step before it asks for the noise, so no strategy can go past that.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
>>> model = GradSampleModule(torch.nn.Linear(10_000, 1, bias=False))
>>> optimizer = PrivateOptimizer(
...     torch.optim.SGD(model.parameters(), lr=1.0), noise=LocalGaussianNoise(),
...     noise_multiplier=2.0, max_grad_norm=1.0, expected_batch_size=None, loss_reduction="sum",
...     generator=torch.Generator().manual_seed(0))
>>> (0 * model(torch.zeros(25, 10_000))).sum().backward()
>>> optimizer.step()
>>> round(float(next(model.parameters()).grad.std()))  # sqrt(25) reports · 2.0
10
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from opacus.optimizers import FSDPOptimizerFastGradientClipping
from torch.distributed.tensor.experimental import implicit_replication

from opacus_shuffle.core.opacus_compat import gaussian_noise, mark_as_used, refuse_used


class Noise:
    """One way of noising a sum: :meth:`draw` for each parameter, on the ranks that draw any."""

    on_every_rank: ClassVar[bool] = False
    """Whether all ranks add noise, that of their own reports; by default the first one alone."""

    def draw(self, optimizer: Any, total: torch.Tensor) -> torch.Tensor:
        """The noise for one parameter.

        Args:
            optimizer: Its ``num_records`` reports of norm ``max_grad_norm`` were summed.
            total: The sum, whose shape and device the noise has.
        """
        raise NotImplementedError

    def add(self, optimizer: Any) -> None:
        """Adds the noise: ``summed_grad`` of every parameter, noised, becomes its ``.grad``."""
        for parameter in optimizer.params:
            total = parameter.summed_grad
            refuse_used(total)
            noised = total
            if optimizer.rank == 0 or self.on_every_rank:
                noised = total + self.draw(optimizer, total)
            parameter.grad = noised.view_as(parameter).to(parameter.dtype)
            mark_as_used(total)


class GaussianNoise(Noise):
    """Opacus's: N(0, σ²C²) on every entry of the sum."""

    def multiplier(self, optimizer: Any) -> float:
        """The noise's standard deviation over the norm."""
        return float(optimizer.noise_multiplier)

    def draw(self, optimizer: Any, total: torch.Tensor) -> torch.Tensor:
        """Gaussian noise of the optimizer's generator."""
        return draw_gaussian(optimizer, self.multiplier(optimizer) * optimizer.max_grad_norm, total)


class LocalGaussianNoise(GaussianNoise):
    """Every record's report carries its own N(0, σ²C²I), so the sum of k of them √k·σ·C.

    The sum of k independent noises is drawn at once, which has the same distribution. k is the
    number of records really in the logical batch: an empty one sends nothing, no noise either.
    """

    on_every_rank: ClassVar[bool] = True

    def multiplier(self, optimizer: Any) -> float:
        """√k·σ."""
        return math.sqrt(optimizer.num_records) * float(optimizer.noise_multiplier)


class AdaptiveNoise(GaussianNoise):
    """Opacus's noise of adaptive clipping: on the sum, and on the count that the norm follows.

    Theorem 1 of arXiv:1905.03871: both together cost what σ alone does on the sum.
    """

    def multiplier(self, optimizer: Any) -> float:
        """(σ⁻² − (2σ_u)⁻²)^(−1/2), with σ_u the deviation of the noise on the count."""
        sigma = optimizer.noise_multiplier
        if not sigma > 0:
            return 0.0
        return float((sigma ** (-2) - (2 * optimizer.unclipped_num_std) ** (-2)) ** (-1 / 2))

    def add(self, optimizer: Any) -> None:
        """Noises the sum, then the count of records that were not clipped."""
        super().add(optimizer)
        count = torch.as_tensor(optimizer.unclipped_num).float()
        noise = draw_gaussian(optimizer, optimizer.unclipped_num_std, count)
        optimizer.unclipped_num = float(optimizer.unclipped_num) + noise


class ShardedNoise(Noise):
    """Opacus's noise for sharded networks, to the sums that :class:`ShardedClipping` keeps."""

    def add(self, optimizer: Any) -> None:
        """Adds each shard's noise."""
        with implicit_replication():  # the noise is no DTensor, the sums are
            FSDPOptimizerFastGradientClipping.add_noise(optimizer)


def noise_for(*, clipping: str, grad_sample_mode: str, local_noise: bool) -> Noise:
    """The strategy for keywords of ``make_private``."""
    if grad_sample_mode == "ghost_fsdp":
        return ShardedNoise()
    if clipping == "adaptive":
        return AdaptiveNoise()
    return LocalGaussianNoise() if local_noise else GaussianNoise()


def draw_gaussian(optimizer: Any, deviation: float, reference: torch.Tensor) -> torch.Tensor:
    """Gaussian noise of a tensor's shape, from the generator of an optimizer."""
    noise: torch.Tensor = gaussian_noise(
        std=deviation,
        reference=reference,
        generator=optimizer.generator,
        secure_mode=optimizer.secure_mode,
    )
    return noise
