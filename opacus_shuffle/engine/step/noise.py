"""Adds noise to a clipped sum before it is released.

A noise is a strategy of :class:`~opacus_shuffle.engine.step.private_optimizer.PrivateOptimizer`. A
new mechanism derives one from :class:`Noise` and returns it from its scheme. The optimizer accounts
for the step before it calls the strategy, so no strategy can bypass the accounting.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
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
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed

from opacus_shuffle.core.opacus_compat import check_unused, gaussian_noise, mark_as_used


class Noise:
    """A way of adding noise to a sum; derived classes :meth:`draw` it for each parameter."""

    on_every_rank: ClassVar[bool] = False
    """Whether every rank adds the noise of its own reports; by default only rank 0 adds noise."""

    def check_release(self, optimizer: Any) -> None:
        """Raises a ValueError if the noise does not cover the sum; called before accounting."""

    def draw(self, optimizer: Any, total: torch.Tensor) -> torch.Tensor:
        """Draws the noise for one parameter.

        Args:
            optimizer: Its ``num_records`` reports of norm ``max_grad_norm`` were summed.
            total: The sum, whose shape and device the noise has.
        """
        raise NotImplementedError

    def add(self, optimizer: Any) -> None:
        """Adds noise to ``summed_grad`` of every parameter, which becomes its ``.grad``."""
        for parameter in optimizer.params:
            total = parameter.summed_grad
            check_unused(total)
            noised = total
            if optimizer.rank == 0 or self.on_every_rank:
                noised = total + self.draw(optimizer, total)
            parameter.grad = noised.view_as(parameter).to(parameter.dtype)
            mark_as_used(total)


class GaussianNoise(Noise):
    """Adds N(0, σ²C²) to every entry of the sum, as Opacus does."""

    def multiplier(self, optimizer: Any) -> float:
        """Returns the standard deviation of the noise, divided by the clipping norm."""
        return float(optimizer.noise_multiplier)

    def draw(self, optimizer: Any, total: torch.Tensor) -> torch.Tensor:
        """Draws Gaussian noise from the optimizer's generator."""
        return draw_gaussian(optimizer, self.multiplier(optimizer) * optimizer.max_grad_norm, total)


class LocalGaussianNoise(GaussianNoise):
    """Adds the noise of k reports with N(0, σ²C²I) each: √k·σ·C on their sum.

    The sum of k independent noises is drawn at once, with the same distribution. k is the actual
    number of records in the logical batch. An empty batch has no reports, so its sum has no noise.

    Args:
        users: k if all users report, whether their records are in the batch or not.
    """

    on_every_rank: ClassVar[bool] = True

    def __init__(self, users: int | None = None) -> None:
        self.users = users

    def multiplier(self, optimizer: Any) -> float:
        """Returns √k·σ."""
        reports = optimizer.num_records if self.users is None else self.users
        return math.sqrt(reports) * float(optimizer.noise_multiplier)


class AdaptiveNoise(GaussianNoise):
    """Adds Opacus's noise of adaptive clipping: to the sum, and to the count of unclipped records.

    It follows Theorem 1 of arXiv:1905.03871, whose sensitivity is half of Opacus's. For the cost of
    a step see :mod:`~opacus_shuffle.engine.schemes.opacus_scheme`.
    """

    def multiplier(self, optimizer: Any) -> float:
        """Returns (σ⁻² − (2σ_u)⁻²)^(−1/2), with σ_u the deviation of the noise on the count."""
        sigma, count_noise = optimizer.noise_multiplier, optimizer.unclipped_num_std
        return float(sigma and (sigma ** (-2) - (2 * count_noise) ** (-2)) ** (-1 / 2))

    def add(self, optimizer: Any) -> None:
        """Adds noise to the sum, then to the count of records that were not clipped."""
        super().add(optimizer)
        count = torch.as_tensor(optimizer.unclipped_num).float()
        noise = draw_gaussian(optimizer, optimizer.unclipped_num_std, count)
        optimizer.unclipped_num = float(optimizer.unclipped_num) + noise


class ClippedSumNoise(Noise):
    """Clips a batch's sum over some parameters before the noise, and adds more noise to the others.

    Source: weight shuffling of Yang, Ji and Xiang (WS), Algorithm 1, lines 12 to 16. Projecting
    the sum onto a ball does not increase the distance between two sums, so it costs no ε. Neither
    does more noise.

    Args:
        noise: The noise that is added to the whole sum.
        parameters: The parameters whose sum is clipped, as one vector.
        batch_clip: c′, the norm to which it is clipped; infinite for no clipping.
        noise_ratio: σ₀/σ, by which the other parameters have more noise.
    """

    def __init__(
        self,
        noise: Noise,
        parameters: Iterable[torch.Tensor],
        *,
        batch_clip: float,
        noise_ratio: float = 1.0,
    ) -> None:
        self.noise, self.batch_clip, self.noise_ratio = noise, batch_clip, noise_ratio
        self.clipped = frozenset(map(id, parameters))

    def add(self, optimizer: Any) -> None:
        """Clips the sum and adds the noise, which becomes every parameter's ``.grad``."""
        if self.batch_clip < math.inf:
            sums = self.sums(optimizer)
            for total in sums if optimizer.distributed else ():  # rank 0 clips the whole sum
                torch.distributed.all_reduce(total)
                if optimizer.rank:
                    total.zero_()
            factor = self.factor(optimizer)
            for total in sums:
                total.mul_(factor)
        self.noise.add(optimizer)
        if self.noise_ratio <= 1 or optimizer.rank:
            return
        more = math.sqrt(self.noise_ratio**2 - 1)
        deviation = more * optimizer.noise_multiplier * optimizer.max_grad_norm
        for parameter in optimizer.params:
            if id(parameter) not in self.clipped:
                parameter.grad += draw_gaussian(optimizer, deviation, parameter.grad)

    def sums(self, optimizer: Any) -> list[torch.Tensor]:
        """Returns the sums of the parameters that are clipped together."""
        return [each.summed_grad for each in optimizer.params if id(each) in self.clipped]

    def factor(self, optimizer: Any) -> torch.Tensor:
        """Returns the factor that scales the current sum down to ``batch_clip``, at most 1."""
        # In double precision: with a norm that over- or underflows, this would be no projection.
        norms = [
            torch.linalg.vector_norm(total, dtype=torch.float64) for total in self.sums(optimizer)
        ]
        return (self.batch_clip / torch.linalg.vector_norm(torch.stack(norms))).clamp(max=1.0)


def draw_gaussian(optimizer: Any, deviation: float, reference: torch.Tensor) -> torch.Tensor:
    """Draws Gaussian noise of a tensor's shape, from the generator of an optimizer."""
    drawn = {"generator": optimizer.generator, "secure_mode": optimizer.secure_mode}
    return gaussian_noise(std=deviation, reference=reference, **drawn)  # type: ignore[no-any-return]
