"""Scattering features: held against convolutions written out, and the properties that the transform is known for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from opacus_shuffle.commands.scattering import scattering, scattering_features

SIDE = 20  # of a padded image
REACH = range(-2 * SIDE, 3 * SIDE)


def wrapped(function):
    """A function of places, summed over copies of the plane that are a side apart; its origin is at index (0, 0)."""
    image = np.zeros((SIDE, SIDE), complex)
    for row in REACH:
        for column in REACH:
            image[row % SIDE, column % SIDE] += function(row, column)
    return image


def bell(deviation, angle=0.0, slant=1.0):
    def value(row, column):
        along = row * math.cos(angle) + column * math.sin(angle)
        across = column * math.cos(angle) - row * math.sin(angle)
        return math.exp(-(along**2 + slant**2 * across**2) / (2 * deviation**2))

    return value


def morlet(scale, angle):
    """A wavelet up to its scale: slant 1/2, deviation 0.8·2ʲ, frequency 3π/4·2⁻ʲ."""
    hull = wrapped(bell(0.8 * 2**scale, angle, 0.5))
    direction = (math.cos(angle), math.sin(angle))
    frequency = 0.75 * math.pi / 2**scale
    around = bell(0.8 * 2**scale, angle, 0.5)
    wave = wrapped(
        lambda row, column: (
            around(row, column)
            * np.exp(1j * frequency * (row * direction[0] + column * direction[1]))
        )
    )
    return (wave - hull * (wave.sum() / hull.sum())) / 4**scale


def convolved(image, kernel):
    """A circular convolution as the sum over places that it is."""
    return sum(
        image[row, column] * np.roll(kernel, (row, column), (0, 1))
        for row in range(SIDE)
        for column in range(SIDE)
    )


def test_coefficients_are_averages_of_moduli_of_convolutions_with_wavelets():
    image = np.random.default_rng(0).normal(size=(12, 12))
    padded = np.pad(image, 4, mode="reflect")
    average = wrapped(bell(1.6)).real
    moduli = [np.abs(convolved(padded, morlet(0, step * math.pi / 8))) for step in range(8)]
    expected = [
        convolved(each, average / average.sum())[4:-4:4, 4:-4:4] for each in (padded, *moduli)
    ]
    found = scattering(torch.tensor(image).float()[None, None])[0, 0].double().numpy()
    assert found.shape == (17, 3, 3)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    scale = found[1, 0, 0] / expected[1][0, 0]  # of all wavelets together
    np.testing.assert_allclose(found[1:9], scale * np.array(expected[1:]), atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), smoothing=st.floats(0, 3))
def test_coefficients_have_no_more_energy_than_the_image(seed, smoothing):
    inner = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(18, 18)), smoothing)
    image = torch.zeros(1, 1, 28, 28)
    image[0, 0, 5:-5, 5:-5] = torch.tensor(inner)
    assert float(scattering(image).square().sum()) <= float(image.square().sum()) * (1 + 1e-5)


def test_an_image_moved_by_four_pixels_has_its_coefficients_moved_by_one_place():
    image = torch.zeros(1, 1, 48, 48)
    image[0, 0, 18:26, 20:28] = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    moved = image.roll((4, -8), (2, 3))
    torch.testing.assert_close(
        scattering(moved), scattering(image).roll((1, -2), (3, 4)), atol=1e-5, rtol=0
    )


def test_a_row_depends_on_its_own_image_alone():
    images = torch.randn(5, 3, 16, 12, generator=torch.Generator().manual_seed(0))
    together = scattering_features(images)
    assert together.shape == (5, 3 * 17 * 4 * 3)
    for number in range(5):
        torch.testing.assert_close(
            together[number : number + 1], scattering_features(images[number : number + 1])
        )
    torch.testing.assert_close(together.norm(dim=1), torch.ones(5))


def test_an_image_of_one_grey_has_features_that_are_numbers():
    assert scattering_features(torch.full((1, 1, 8, 8), 7.0)).isfinite().all()


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 1, 30, 28), (1, 1, 4, 8)])
def test_images_whose_sides_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"sides multiples of 4 above 4"):
        scattering_features(torch.zeros(shape))
