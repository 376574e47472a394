"""Gaussian noise for tensors: one draw in single precision, or in secure mode four on a grid.

By default noise is float32, as PyTorch's is. Floating-point numbers have a fault that no generator
mends: the last bits of data + noise tell how large the data were (Mironov 2012). ``secure_mode``
is against that: the sum is made in double precision of four draws and rounded to a grid of 2⁻²⁰ of
the noise's scale, the same whatever the data are.

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
"""Numbers that are noised at a time: what the stream makes at a time."""


class GridNoise:
    """Gaussian noise that is added to a tensor in double precision, and the sum rounded to a grid.

    Args:
        std: Standard deviation.
        generator: Of the noise, which is drawn as it is added, on the CPU.
    """

    def __init__(self, std: float, generator: SecretGenerator) -> None:
        self.std, self.generator = std, generator
        self.step = 2.0 ** (math.frexp(std)[1] - _GRID_BITS)

    def __radd__(self, total: Any) -> torch.Tensor:
        """Returns the noised sum, of the sum's own type and shape."""
        exact = torch.as_tensor(total)
        dtype = exact.dtype if isinstance(total, torch.Tensor) else torch.get_default_dtype()
        released = torch.empty(exact.numel(), dtype=dtype, device=exact.device)
        pairs = zip(
            torch.split(exact.reshape(-1), _BLOCK), torch.split(released, _BLOCK), strict=True
        )
        for data, place in pairs:
            noise = self.generator.precise_normals(len(data)).to(exact.device)
            # The step is a power of two: to count in steps rounds nothing.
            noise.mul_(self.std / self.step).add_(data, alpha=1 / self.step)
            place.copy_(noise.round_().mul_(self.step))
        return released.view(exact.shape)


def draw_noise(std: float, reference: torch.Tensor, generator: SecretGenerator) -> Any:
    """Draws N(0, std²) for every entry of a tensor.

    Args:
        std: Standard deviation, absolute, at least 0.
        reference: What it is for; shape, type and device of the noise are its own.
        generator: On the CPU, from where the numbers go to the reference's device; or on that GPU.

    Returns:
        What to add to the tensor: a tensor or a :class:`GridNoise`.
    """
    if std == 0:
        return torch.zeros_like(reference)
    if generator.device.type != "cpu":  # Philox, keyed by the stream
        shape, where = reference.shape, reference.device
        # Normal numbers of 32 bits end at 6.76, those of the 53 of double precision at 8.65.
        dtype = torch.float64 if where.type == "cuda" else reference.dtype
        return torch.normal(
            0.0, std, shape, generator=generator.of_pytorch, device=where, dtype=dtype
        ).to(reference.dtype)
    if generator.secure:
        return GridNoise(std, generator)
    double = reference.dtype == torch.float64
    draw = generator.precise_normals if double else generator.normals
    return draw(reference.numel()).view(reference.shape).mul_(std).to(reference)
