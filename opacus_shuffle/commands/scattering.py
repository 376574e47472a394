"""Features of images that do not depend on data: a wavelet scattering transform of two scales.

The features are normalised within each record.

Private training of a linear model on such features needs far less noise than training a network
that learns its own features (Tramèr and Boneh, *Differentially private learning needs better
features*, ICLR 2021). The transform is that of Bruna and Mallat (*Invariant scattering convolution
networks*, 2013) with two scales and eight angles. It consists of local averages of the image and of
the moduli of its wavelet coefficients, 1 + 16 = 17 numbers for each channel at every fourth pixel.
The 64 coefficients of second order are omitted. They would increase the size of what a user sends,
and they hardly improve accuracy at small ε.

>>> scattering_features(torch.zeros(2, 1, 28, 28)).shape
torch.Size([2, 833])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch.nn import functional

SCALES = 2
ANGLES = 8
STRIDE = 2**SCALES
"""The distance in pixels between two averages."""


BLOCK = 100
"""The number of images that are transformed at a time, which limits memory."""


def scattering_features(
    images: torch.Tensor, *, progress: Callable[[str], None] | None = None
) -> torch.Tensor:
    """Returns the normalised scattering coefficients of each image, a row of Euclidean length 1.

    The row of an image without edges is 0. Each row depends on its own image alone, so training on
    rows is as private as training on images.

    Args:
        images: Shape (records, channels, height, width). Height and width are multiples of 4 above
            4.
        progress: Receives progress messages.

    Returns:
        Shape (records, channels·17·height/4·width/4), float32.

    Raises:
        ValueError: If the images have another shape.
    """
    blocks = []
    for number, block in enumerate(torch.split(images, BLOCK)):
        if progress is not None:
            progress(f"features, image {BLOCK * number:,} of {len(images):,}")
        coefficients = scattering(block).flatten(1, 2)
        normalised = functional.instance_norm(coefficients).flatten(1)
        blocks.append(functional.normalize(normalised, dim=1))
    return torch.cat(blocks)


def scattering(images: torch.Tensor) -> torch.Tensor:
    """Returns the scattering coefficients without normalisation.

    The image is reflected at its edges. If its border is empty, the energy of the coefficients is
    at most that of the image.

    Args:
        images: As for :func:`scattering_features`.

    Returns:
        Shape (records, channels, 17, height/4, width/4).

    Raises:
        ValueError: If the images have another shape.
    """
    if images.ndim != 4 or any(side % STRIDE or side <= STRIDE for side in images.shape[2:]):
        raise ValueError(
            "images must have shape (records, channels, height, width), sides multiples of "
            f"{STRIDE} above {STRIDE}, got "
            f"{tuple(images.shape)}: pad them"
        )
    padded = functional.pad(images, (STRIDE,) * 4, mode="reflect")
    rows, columns, wavelets = filters(padded.shape[-2], padded.shape[-1])
    padded = padded.unsqueeze(2)
    moduli = torch.fft.ifft2(torch.fft.fft2(padded) * wavelets).abs()
    return torch.cat([rows @ values @ columns.T for values in (padded, moduli)], dim=2)


@functools.cache
def filters(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the filters in the Fourier domain.

    Together the filters are a contraction. At every frequency, the squared response of the average
    and half of the squared responses of the wavelets at this and at the opposite frequency add up
    to at most 1. The wavelets are scaled accordingly.

    Args:
        height: The height in pixels.
        width: The width in pixels.

    Returns:
        The average as two matrices to multiply an image with, of shapes (height/4 - 2, height) and
        (width/4 - 2, width), without the first and the last position; and the responses of the
        wavelets, of shape (scales·angles, height, width). All are real.
    """
    deviation = 0.8 * 2 ** (SCALES - 1)
    rows, columns = _averages(height, deviation), _averages(width, deviation)
    low = torch.fft.fft(rows[0]).abs().view(-1, 1) * torch.fft.fft(columns[0]).abs()
    shapes = [
        _wavelet(
            height,
            width,
            0.8 * 2**scale,
            angle * math.pi / ANGLES,
            4 / ANGLES,
            0.75 * math.pi / 2**scale,
        )
        for scale in range(SCALES)
        for angle in range(ANGLES)
    ]
    responses = torch.fft.fft2(torch.stack(shapes)).real
    opposite = responses.flip(-2, -1).roll((1, 1), (-2, -1))
    both = (responses**2 + opposite**2).sum(0) / 2
    seen = both > 1e-9
    scaled = responses * ((1 - low**2)[seen] / both[seen]).min().clamp(min=0).sqrt()
    inner = slice(STRIDE, -STRIDE, STRIDE)
    return rows[inner].float(), columns[inner].float(), scaled.float()


def _averages(length: int, deviation: float) -> torch.Tensor:
    """Returns a periodic Gaussian of sum 1 around each pixel of a line: shape (length, length)."""
    positions = torch.arange(-2 * length, 3 * length, dtype=torch.float64)
    bell = torch.exp(-(positions**2) / (2 * deviation**2)).view(5, length).sum(0)
    return torch.stack([bell.roll(shift) for shift in range(length)]) / bell.sum()


def _wavelet(
    height: int, width: int, deviation: float, angle: float, slant: float, frequency: float
) -> torch.Tensor:
    """Returns a Morlet wavelet: a Gabor function minus a multiple of its envelope, with sum 0."""
    wave = _gabor(height, width, deviation, angle, slant, frequency)
    bell = _gabor(height, width, deviation, angle, slant, 0.0)
    return wave - bell * (wave.sum() / bell.sum())


def _gabor(
    height: int, width: int, deviation: float, angle: float, slant: float, frequency: float
) -> torch.Tensor:
    """Returns a Gaussian of sum about 1 times a plane wave, periodic and complex.

    Args:
        height: The height in pixels.
        width: The width in pixels.
        deviation: The standard deviation along the wave, in pixels.
        angle: The direction of the wave, in radians.
        slant: The standard deviation along the wave divided by the one across it.
        frequency: The frequency in radians per pixel.
    """
    rows = torch.arange(-2 * height, 3 * height, dtype=torch.float64).view(-1, 1)
    columns = torch.arange(-2 * width, 3 * width, dtype=torch.float64).view(1, -1)
    along = rows * math.cos(angle) + columns * math.sin(angle)
    across = columns * math.cos(angle) - rows * math.sin(angle)
    bell = (
        torch.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
        * slant
        / (2 * math.pi * deviation**2)
    )
    wave = torch.polar(bell, frequency * along)
    return wave.view(5, height, 5, width).sum((0, 2))
