"""Gaussian noise for tensors: in single precision, or in secure mode on a grid.

By default noise is float32, like PyTorch's. With floating-point numbers the last bits of data +
noise reveal something about the size of the data, whatever the generator (Mironov 2012).
``secure_mode`` prevents that: each number is half the sum of four draws in double precision, and
the noisy sum is rounded to a grid of 2⁻²⁰ of the noise's scale, which does not depend on the data.

>>> zeros = torch.zeros(10_000)
>>> released = zeros + draw_noise(2.0, zeros, SecretGenerator(secure=True))
>>> round(float(released.std())), released.dtype
(2, torch.float32)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from opacus_shuffle.core.randomness import SecretGenerator

_GRID_BITS = 20
_BLOCK = 2**16
"""Numbers per block: as many as the stream draws at a time."""


class GridNoise:
    """Gaussian noise to add to a tensor: in double precision, with the sum rounded to a grid.

    Args:
        std: Standard deviation.
        generator: The generator of the noise, on the CPU. It is drawn when it is added.
    """

    def __init__(self, std: float, generator: SecretGenerator) -> None:
        self.std, self.generator = std, generator
        self.step = 2.0 ** (math.frexp(std)[1] - _GRID_BITS)

    def __radd__(self, total: Any) -> torch.Tensor:
        """Returns the noisy sum, with the type and shape of the data."""
        exact = torch.as_tensor(total)
        dtype = exact.dtype if isinstance(total, torch.Tensor) else torch.get_default_dtype()
        released = torch.empty(exact.numel(), dtype=dtype, device=exact.device)
        pairs = zip(
            torch.split(exact.reshape(-1), _BLOCK), torch.split(released, _BLOCK), strict=True
        )
        for data, target in pairs:
            noise = self.generator.precise_normals(len(data)).to(exact.device)
            # Dividing by the step, a power of two, does not round.
            noise.mul_(self.std / self.step).add_(data, alpha=1 / self.step)
            target.copy_(noise.round_().mul_(self.step))
        return released.view(exact.shape)


def draw_noise(std: float, reference: torch.Tensor, generator: SecretGenerator) -> Any:
    """Draws N(0, std²) for every entry of a tensor.

    Args:
        std: Standard deviation, absolute, at least 0.
        reference: The tensor; the noise has its shape, type and device.
        generator: On the CPU, from where the numbers are copied; or on the reference's GPU.

    Returns:
        The noise to add to the tensor: a tensor or a :class:`GridNoise`.
    """
    if std == 0:
        return torch.zeros_like(reference)
    if generator.device.type != "cpu":  # PyTorch's Philox, with a key from the stream
        shape, where = reference.shape, reference.device
        # Normal numbers from 32 bits are at most 6.76; from the 53 bits of double precision, 8.65.
        dtype = torch.float64 if where.type == "cuda" else reference.dtype
        return torch.normal(
            0.0, std, shape, generator=generator.of_pytorch, device=where, dtype=dtype
        ).to(reference.dtype)
    if generator.secure:
        return GridNoise(std, generator)
    double = reference.dtype == torch.float64
    draw = generator.precise_normals if double else generator.normals
    return draw(reference.numel()).view(reference.shape).mul_(std).to(reference)
