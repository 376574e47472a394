"""Rounds numbers to whole ones at random, so that each one's mean is kept, and the random numbers that this takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.randomness import check_generator, secret_generator
from opacus_shuffle.core.system_randomness import SystemGenerator, uniforms

_SIXTEEN_BITS = 2**16


def draws_of(generator: torch.Generator | None) -> torch.Generator:
    """Returns the generator given, or a secret one."""
    check_generator("generator", generator)
    return secret_generator("cpu") if generator is None else generator


def numpy_draws(draws: torch.Generator) -> np.random.Generator:
    """Returns NumPy's generator of binomials and permutations, seeded by PyTorch's (256 bits at every call)."""
    if isinstance(draws, SystemGenerator):
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(draws.words(4).view(np.uint32).tolist())))
    words = torch.randint(0, 2**32, (8,), generator=draws, dtype=torch.int64)
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(words.tolist())))


def round_at_random(place: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    """Returns ⌊place + U⌋, int64, with U uniform for every entry; ``place`` (float64, at least 0) is overwritten.

    The first 16 bits of U decide all but one in 65,536, and cost a quarter of what 64 do; the rest is drawn where it matters.
    """
    place = place.mul_(_SIXTEEN_BITS)
    coarse = place.floor()
    rest = place.sub_(coarse)
    coarse.add_(torch.from_numpy(_sixteen_bits(draws, coarse.numel())).view(coarse.shape))
    sums = coarse.long()
    tied = ((sums & (_SIXTEEN_BITS - 1)) == _SIXTEEN_BITS - 1).nonzero(as_tuple=True)
    sums[tied] += uniforms(len(tied[0]), draws) >= 1 - rest[tied]
    return sums >> 16


def _sixteen_bits(draws: torch.Generator, count: int) -> npt.NDArray[np.uint16]:
    """So many whole numbers below 65,536."""
    blocks = -(-count // 4)
    if isinstance(draws, SystemGenerator):
        words = draws.words(blocks).copy()  # PyTorch warns of memory that is read-only
    else:
        words = numpy_draws(draws).integers(0, 2**64 - 1, blocks, dtype=np.uint64, endpoint=True)
    return words.view(np.uint16)[:count]
