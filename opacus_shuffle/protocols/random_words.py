"""Random words of 64 bits, and NumPy's generator, from whatever generator of PyTorch's a caller has.

>>> word_source(draws_of(torch.Generator().manual_seed(1))).words(3).dtype
dtype('uint64')
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.randomness import check_generator, secret_generator
from opacus_shuffle.core.system_randomness import SystemGenerator


class WordSource(Protocol):
    """Gives random bits."""

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """So many times 64 random bits, which nobody may write to."""


class SeededWords:
    """A WordSource of NumPy's PCG64DXSM, seeded with 256 bits of PyTorch's generator."""

    def __init__(self, draws: torch.Generator) -> None:
        self._bits = numpy_draws(draws).bit_generator

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """So many times 64 random bits."""
        found: npt.NDArray[np.uint64] = self._bits.random_raw(count)
        return found


def word_source(draws: torch.Generator) -> WordSource:
    """The operating system's own bytes in secure mode, else a generator seeded by this one: make one for many numbers."""
    return draws if isinstance(draws, SystemGenerator) else SeededWords(draws)


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
