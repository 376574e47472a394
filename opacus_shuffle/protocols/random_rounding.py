"""Rounds numbers to whole ones at random, so that each one's mean is kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.randomness import SecretGenerator

_SIXTEEN_BITS = 2**16


def round_at_random(place: torch.Tensor, draws: SecretGenerator) -> torch.Tensor:
    """Returns ⌊place + U⌋, int64, with U uniform for every entry; ``place`` (float64, at least 0) is overwritten.

    The first 16 bits of U decide all but one in 65,536, and cost a quarter of what 64 do; the rest is drawn where it matters.
    """
    place = place.mul_(_SIXTEEN_BITS)
    coarse = place.floor()
    rest = place.sub_(coarse)
    coarse.add_(torch.from_numpy(_sixteen_bits(draws, coarse.numel())).view(coarse.shape))
    sums = coarse.long()
    tied = ((sums & (_SIXTEEN_BITS - 1)) == _SIXTEEN_BITS - 1).nonzero(as_tuple=True)
    sums[tied] += draws.uniforms(len(tied[0])) >= 1 - rest[tied]
    return sums >> 16


def _sixteen_bits(draws: SecretGenerator, count: int) -> npt.NDArray[np.uint16]:
    """So many whole numbers below 65,536."""
    return draws.words(-(-count // 4)).view(np.uint16)[:count]
