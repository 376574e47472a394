"""Scattering features against explicit convolutions, and properties of the transform."""

import math

import numpy as np
import pytest
import torch

from opacus_shuffle.commands.scattering import scattering, scattering_features

SIDE = 20  # of a padded image


def bell(deviation, angle=0.0, slant=1.0, frequency=0.0):
    """Returns the periodic sum of a Gaussian times a plane wave of this frequency."""
    image = np.zeros((SIDE, SIDE), complex)
    for row in range(-2 * SIDE, 3 * SIDE):
        for column in range(-2 * SIDE, 3 * SIDE):
            along = row * math.cos(angle) + column * math.sin(angle)
            across = column * math.cos(angle) - row * math.sin(angle)
            hull = math.exp(-(along**2 + slant**2 * across**2) / (2 * deviation**2))
            image[row % SIDE, column % SIDE] += hull * np.exp(1j * frequency * along)
    return image


def convolved(image, kernel):
    """Returns a circular convolution by its definition as a sum."""
    return sum(
        image[row, column] * np.roll(kernel, (row, column), (0, 1))
        for row in range(SIDE)
        for column in range(SIDE)
    )


def test_coefficients_are_averages_of_moduli_of_convolutions_with_wavelets():
    """The finer scale has slant 1/2, deviation 0.8, frequency 3π/4 and mean 0."""
    image = np.random.default_rng(0).normal(size=(12, 12))
    padded, average = np.pad(image, 4, mode="reflect"), bell(1.6).real
    values = [padded]
    for angle in np.arange(8) * math.pi / 8:
        wave, hull = bell(0.8, angle, 0.5, 0.75 * math.pi), bell(0.8, angle, 0.5)
        values.append(np.abs(convolved(padded, wave - hull * (wave.sum() / hull.sum()))))
    expected = [convolved(image, average / average.sum())[4:-4:4, 4:-4:4] for image in values]
    coefficients = scattering(torch.tensor(image).float()[None, None])[0, 0].double().numpy()
    assert coefficients.shape == (17, 3, 3)
    np.testing.assert_allclose(coefficients[0], expected[0], atol=1e-6)
    scale = coefficients[1, 0, 0] / expected[1][0, 0]  # of all wavelets together
    np.testing.assert_allclose(coefficients[1:9], scale * np.array(expected[1:]), atol=1e-5)


def test_a_row_depends_on_its_own_image_alone():
    """This includes several blocks of images, and an image of constant grey."""
    images = torch.randn(105, 3, 16, 12, generator=torch.Generator().manual_seed(0))
    images[3] = 7.0
    together = scattering_features(images)
    assert together.shape == (105, 3 * 17 * 4 * 3)
    for number in (0, 3, 99, 100, 104):
        alone = scattering_features(images[number : number + 1])
        torch.testing.assert_close(together[number : number + 1], alone)
    lengths = together.norm(dim=1)
    assert torch.allclose(lengths[torch.arange(105) != 3], torch.ones(104))
    assert lengths.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 1, 30, 28), (1, 1, 4, 8)])
def test_images_whose_sides_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"sides multiples of 4 above 4"):
        scattering_features(torch.zeros(shape))
