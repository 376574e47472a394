"""``shuffle_gauss``: every training step is one round of B shuffled reports; being sampled earns nothing (SG Theorem 1)."""

from __future__ import annotations

from typing import ClassVar

from opacus_shuffle.accountants.base import ShuffleAccountant
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffleGauss, whole_reports


class ShuffleGaussAccountant(ShuffleAccountant):
    """SG ICLR Theorem 1 per step, with the B = n·γ users of the batch.

    Goes with batches of one size. A stock engine's Poisson batches vary in size: there ε is that of their expected size.

    >>> accountant = ShuffleGaussAccountant(num_users=60_000, local_noise=True)
    >>> accountant.step(noise_multiplier=9.48, sample_rate=1.0)
    >>> round(accountant.bound(1 / 60_000).epsilon, 8)
    0.00140629
    """

    mechanism_class: ClassVar[type[Mechanism]] = ShuffleGauss

    def _round(self, sigma: float, num_users: int, sample_rate: float) -> ShuffleGauss:
        return ShuffleGauss(noise_multiplier=sigma, num_users=whole_reports(num_users * sample_rate))
