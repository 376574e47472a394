"""Features of images that no data decide: a wavelet scattering transform of two scales.

They are normalised within each record.

Private training of a linear model on such features needs far less noise than that of a network that
must learn its own (Tramèr and Boneh, *Differentially private learning needs better features*, ICLR
2021). The transform is Bruna and Mallat's (*Invariant scattering convolution networks*, 2013) with
two scales and eight angles: averages of the image, of its wavelets' moduli, 1 + 16 = 17 numbers for
each channel at every fourth pixel. The 64 of the second order are left out: what a user sends grows
with their number, and at small ε they gain next to nothing.

>>> scattering_features(torch.zeros(2, 1, 28, 28)).shape
torch.Size([2, 833])
"""

from __future__ import annotations

import functools
import math

import torch
from torch.nn import functional

from opacus_shuffle.commands.progress import SILENT, Progress

SCALES = 2
ANGLES = 8
STRIDE = 2**SCALES
"""Pixels between two places of the averages."""


BLOCK = 100
"""Images whose wavelets memory holds at once."""


def scattering_features(images: torch.Tensor, *, progress: Progress = SILENT) -> torch.Tensor:
    """Returns each image's normalised scattering coefficients, a row of Euclidean length 1.

    (Or 0 for an image without edges.) A row depends on its own image alone, so training on rows is
    as private as training on images.

    Args:
        images: Shape (records, channels, height, width); height and width are multiples of 4, above
            4.
        progress: What says how far it is.

    Returns:
        Shape (records, channels·17·height/4·width/4), float32.

    Raises:
        ValueError: If the images have another shape.
    """
    blocks = []
    for number, block in enumerate(torch.split(images, BLOCK)):
        progress(f"features, image {BLOCK * number:,} of {len(images):,}")
        found = scattering(block).flatten(1, 2)
        blocks.append(functional.normalize(functional.instance_norm(found).flatten(1), dim=1))
    return torch.cat(blocks)


def scattering(images: torch.Tensor) -> torch.Tensor:
    """Returns the scattering coefficients as they are.

    Edges are reflected. The coefficients of an image whose border is empty have together at most
    its energy.

    Args:
        images: As of :func:`scattering_features`.

    Returns:
        Shape (records, channels, 17, height/4, width/4).

    Raises:
        ValueError: If the images' shape does not fit.
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

    Together they are a contraction: at every frequency the average's squared response and half the
    wavelets' at it and at its opposite sum to at most 1, for which the wavelets are scaled.

    Args:
        height: Pixels.
        width: Pixels.

    Returns:
        The average as matrices to multiply an image with, (height/4 - 2, height) and (width/4 - 2,
        width), which leave out the first and the last place; and the wavelets' responses,
        (scales·angles, height, width). All are real.
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
    """Returns a bell of sum 1 around each pixel of a line, wrapped: shape (length, length)."""
    places = torch.arange(-2 * length, 3 * length, dtype=torch.float64)
    bell = torch.exp(-(places**2) / (2 * deviation**2)).view(5, length).sum(0)
    return torch.stack([bell.roll(shift) for shift in range(length)]) / bell.sum()


def _wavelet(
    height: int, width: int, deviation: float, angle: float, slant: float, frequency: float
) -> torch.Tensor:
    """Returns a Morlet wavelet: a wave under a bell, less so much of the bell that the sum is 0."""
    wave = _bell(height, width, deviation, angle, slant, frequency)
    bell = _bell(height, width, deviation, angle, slant, 0.0)
    return wave - bell * (wave.sum() / bell.sum())


def _bell(
    height: int, width: int, deviation: float, angle: float, slant: float, frequency: float
) -> torch.Tensor:
    """Returns a Gaussian of sum about 1 times a plane wave, wrapped around the edges, complex.

    Args:
        height: Pixels.
        width: Pixels.
        deviation: Standard deviation along the wave, in pixels.
        angle: Of the wave, in radians.
        slant: The deviation along the wave over that across it.
        frequency: Radians per pixel.
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
