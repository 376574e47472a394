"""``subsampled_shuffle``: every step draws exactly m of the n users without replacement (SG Theorem 2)."""

from __future__ import annotations

from typing import ClassVar

from opacus_shuffle.accountants.base import ShuffleAccountant
from opacus_shuffle.accountants.mechanisms import Mechanism, SubsampledShuffle


class SubsampledShuffleAccountant(ShuffleAccountant):
    """SG ICLR Theorem 2 (``bound="published"``) or the exact RDP of the same pair (``"pair"``) per step.

    Goes with :class:`opacus_shuffle.engine.sampling.FixedSizeSampler`, which ``opacus_shuffle.PrivacyEngine`` installs. On a stock
    engine nothing checks the sampler.

    >>> accountant = SubsampledShuffleAccountant(num_users=60_000, local_noise=True)
    >>> accountant.history = [(0.86, 0.001, 50_000)]
    >>> [round(accountant.bound(1e-5, bound=name).epsilon, 3) for name in ("published", "pair")]
    [0.635, 0.157]
    """

    mechanism_class: ClassVar[type[Mechanism]] = SubsampledShuffle
