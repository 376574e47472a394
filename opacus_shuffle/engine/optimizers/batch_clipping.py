"""Clips the sum of a batch before the noise, and adds more noise to parameters that are not shuffled.

That is Yang, Ji and Xiang's weight shuffling (WS), Algorithm 1, lines 12 to 16, with their c′ as ``batch_clip``.

Projecting the sum on a ball brings no two sums further apart, so batch clipping costs no ε; more noise on some parameters costs
none either. Both happen just before the noise, once per logical batch.

>>> weight = torch.nn.Parameter(torch.zeros(2))
>>> sgd = torch.optim.SGD([weight], lr=1.0)
>>> optimizer = BatchClipping(sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1)
>>> optimizer.clip_batch([weight], batch_clip=1.0)
>>> weight.summed_grad = torch.tensor([3.0, 4.0])
>>> optimizer.add_noise()
>>> weight.grad.norm().item()
1.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed
from opacus.optimizers import DistributedDPOptimizer, DistributedDPOptimizerFastGradientClipping, DPOptimizer

from opacus_shuffle.core.opacus_compat import gaussian_noise


class BatchClipping(DPOptimizer):
    """Mixin for any Opacus optimizer; does nothing until :meth:`clip_batch` is called.

    Attributes:
        batch_clip: c′, absolute; None for no clipping of sums.
        unshuffled_noise_ratio: σ₀/σ of the parameters that are not clipped.
        shuffled: Identities of the parameters whose sum is clipped.
        rank: Of several processes, which one this is; the first one clips and adds the noise.
    """

    batch_clip: float | None = None
    rank: int = 0
    unshuffled_noise_ratio: float = 1.0
    shuffled: frozenset[int] = frozenset()

    def clip_batch(self, parameters: Iterable[torch.Tensor], *, batch_clip: float, unshuffled_noise_ratio: float = 1.0) -> None:
        """From now on clip the sum over ``parameters`` together to ``batch_clip``, and add more noise to the others."""
        self.shuffled = frozenset(map(id, parameters))
        self.batch_clip, self.unshuffled_noise_ratio = batch_clip, unshuffled_noise_ratio

    def add_noise(self) -> None:
        """Clip the shuffled parameters' sum, then add the noise."""
        if self.batch_clip is None:
            super().add_noise()
            return
        sums = [parameter.summed_grad for parameter in self.params if id(parameter) in self.shuffled]
        if self.batch_clip != math.inf:
            self._bring_to_the_first(sums)
        if sums and self.batch_clip != math.inf:
            # In double precision: where a norm over- or underflows, this would be no projection, and certify nothing.
            norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in sums]
            factor = torch.clamp(self.batch_clip / torch.linalg.vector_norm(torch.stack(norms)), max=1.0)
            for each in sums:
                each.mul_(factor)
        super().add_noise()
        if self.unshuffled_noise_ratio > 1 and self.rank == 0:
            more = math.sqrt(self.unshuffled_noise_ratio**2 - 1) * self.noise_multiplier * self.max_grad_norm
            for parameter in self.params:
                if id(parameter) not in self.shuffled:
                    parameter.grad += gaussian_noise(
                        std=more, reference=parameter.grad, generator=self.generator, secure_mode=self.secure_mode
                    )

    def _bring_to_the_first(self, sums: list[torch.Tensor]) -> None:
        """Adds up what several processes have summed, on the first one, where the whole sum can be clipped."""
        if isinstance(self, DistributedDPOptimizer | DistributedDPOptimizerFastGradientClipping):
            for each in sums:
                torch.distributed.all_reduce(each)
                if self.rank:
                    each.zero_()
