"""Cryptographic randomness: bytes of the operating system's generator, turned into the random numbers of ``secure_mode``.

The kernel's generator is maintained, reviewed and seeded by others, keeps no state in this process that could be copied, forked
or run backwards, and is asked for all numbers of a tensor at once. What is made of its bytes:

* participation: 53 random bits beside a threshold, see :mod:`opacus_shuffle.core.participation`;
* Gaussian noise: the sum of four independent draws, as Opacus does in its secure mode (Holohan and Braghin, "Secure random
  sampling in differential privacy", section 5.1), because a single draw can only be one of 2⁵³ numbers that an adversary could
  go through. The sum of data and noise is made in double precision and rounded to a grid of 2⁻²⁰ of the noise's scale, the same
  whatever the data are: else its last bits would tell how large the data had been (Mironov 2012).

>>> noise = system_noise(2.0, torch.zeros(10_000))
>>> released = torch.zeros(10_000) + noise
>>> round(float(released.std())), released.dtype
(2, torch.float32)
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.randomness import SecretGenerator

_DRAWS = 4
_GRID_BITS = 20
_BLOCK = 2**20
"""Numbers that are made at a time."""


class SystemGenerator(SecretGenerator):
    """Says that the operating system's own bytes are to be used; knows how to draw them.

    It is a ``torch.Generator``, on the CPU, for what PyTorch draws itself, which nothing depends on (seeds of workers).
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """So many times 64 random bits."""
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def normals(self, count: int) -> npt.NDArray[np.float64]:
        """Standard normal numbers, by the transform of Box and Muller, each the sum of four, halved."""
        pairs = -(-count // 2)
        total = np.zeros((2, pairs))
        for _ in range(_DRAWS):
            first, second = self.words(2 * pairs).reshape(2, pairs)
            radius = np.sqrt(-2 * np.log((first.astype(np.float64) + 0.5) * 2.0**-64))
            angle = (second >> np.uint64(11)).astype(np.float64) * (2 * np.pi * 2.0**-53)
            total += radius * np.stack([np.cos(angle), np.sin(angle)])
        return total.ravel()[:count] / math.sqrt(_DRAWS)


def uniforms(count: int, generator: torch.Generator) -> torch.Tensor:
    """Whole multiples of 2⁻⁵³ in [0, 1), all equally likely: float64."""
    if isinstance(generator, SystemGenerator):
        return torch.from_numpy((generator.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53)
    return torch.rand(count, generator=generator, dtype=torch.float64)


class SystemNoise:
    """Gaussian noise that is added to a tensor in double precision, and the sum rounded to a grid.

    Args:
        std: Standard deviation.
        values: Standard normal numbers, in the shape of what they are added to.
    """

    def __init__(self, std: float, values: torch.Tensor) -> None:
        self.values = values * std
        self.step = 2.0 ** (math.frexp(std)[1] - _GRID_BITS)

    def __radd__(self, total: Any) -> torch.Tensor:
        """The noised sum, of the sum's own type."""
        exact = torch.as_tensor(total)
        dtype = exact.dtype if isinstance(total, torch.Tensor) else torch.get_default_dtype()
        noised = exact.to(torch.float64) + self.values.to(exact.device)
        return (noised / self.step).round().mul(self.step).to(dtype)


def system_noise(std: float, reference: torch.Tensor, generator: SystemGenerator | None = None) -> SystemNoise:
    """Noise of this standard deviation for a tensor of the reference's shape.

    Args:
        std: Standard deviation, above 0.
        reference: What it is for.
        generator: By default a new one, which is as good.
    """
    draws = SystemGenerator() if generator is None else generator
    values = torch.empty(reference.numel(), dtype=torch.float64)
    for block in torch.split(values, _BLOCK):
        block.copy_(torch.from_numpy(draws.normals(len(block))))
    return SystemNoise(float(std), values.view(reference.shape))
