"""Shapes of one report against quadrature, and that linear ones have the least variance.

Proofs: docs/proofs/13_linear_reports.md.
"""

import itertools
import math

import numpy as np
import pytest
from helpers.report_ratios import FAR, RATIOS, call, integral
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import norm

from opacus_shuffle.analysis.report_shapes import (
    LEAST_TILTED_NOISE,
    LinearTilt,
    StepTilt,
    shape_of,
)

SIGMAS = (LEAST_TILTED_NOISE, 0.5, 1.0, math.sqrt(math.pi / 2), 2.5, 7.999, 8.0, 50.0)
every_shape = pytest.mark.parametrize(
    ("report", "sigma"), [(report, sigma) for report in RATIOS for sigma in SIGMAS]
)


def kinks(shape):
    """Where X is not smooth, on either side of 0."""
    edge = shape.levels[0] if isinstance(shape, StepTilt) else getattr(shape, "threshold", 0.0)
    return edge, -edge


def mean(shape, function, low=-FAR, high=FAR):
    """The sums of positive terms that are integrated are right to 1e-13 of their size."""
    return integral(function, low, high, kinks(shape))


@every_shape
def test_a_report_has_the_mean_and_the_ratio_the_variance_that_are_promised(report, sigma):
    shape, size = shape_of(report, sigma), 1e-12
    assert mean(shape, shape.excess) == pytest.approx(0, abs=size)
    assert mean(shape, lambda z: z * shape.excess(z)) == pytest.approx(1 / sigma, rel=1e-9)
    if report != "gaussian" or sigma >= 0.5:  # at σ = 0.2 what matters of X² lies around z = 10
        variance = mean(shape, lambda z: shape.excess(z) ** 2)
        assert math.exp(shape.log_variance) == pytest.approx(variance, rel=1e-9)
    for slope in (0.0, 0.4, 1.0) if report != "gaussian" or sigma >= 0.5 else ():
        opposed = mean(
            shape,
            lambda z, s=slope: ((1 - s) * shape.excess(z) - (1 + s) * shape.excess(-z)) ** 2 / 4,
        )
        assert shape.opposed_variance(slope) == pytest.approx(opposed, rel=1e-9)


@every_shape
def test_shapes_are_the_ratios_that_the_pages_say(report, sigma):
    shape, ratio, z = shape_of(report, sigma), RATIOS[report](sigma), np.linspace(-9, 12, 43)
    assert shape.excess(z) == pytest.approx(ratio(z) - 1, rel=1e-9, abs=1e-10)
    logs = np.linspace(-3, 3, 7)
    if report == "step":  # from which z on X is at least so much
        reached = shape.excess(z) >= np.expm1(logs)[:, None]
        assert np.array_equal(z >= shape.inverse(logs)[:, None], reached)
    else:  # at σ = 0.2 the rounding of z is multiplied by a slope of 10⁷
        assert np.log1p(shape.excess(shape.inverse(logs))) == pytest.approx(logs, abs=1e-7)


@every_shape
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_first_moments_of_cells_are_the_integrals(report, sigma, sign):
    shape = shape_of(report, sigma)
    ends = np.array([-np.inf, -4.0, -1.5, -0.3, 0.0, 0.31, 2.0, 5.5, np.inf])
    cells = zip(np.maximum(ends[:-1], -FAR), np.minimum(ends[1:], 20.0), strict=True)
    exact = [mean(shape, lambda z: shape.excess(sign * z), *cell) for cell in cells]
    if sign < 0 and sigma < 0.5:  # there the integral would have to go on to −20
        exact[0] = -sum(exact[1:])
    found = shape.moments(ends, sign=sign)
    assert found == pytest.approx(exact, rel=1e-9, abs=1e-13 / sigma)
    assert found.sum() == pytest.approx(0, abs=1e-13)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_linear_reports_have_less_variance_than_shifts_and_steps(sigma):
    """And of all steps of one mean, with any threshold, ours has the least (13.7)."""
    reports = ("linear", "gaussian", "step")
    linear, shifted, stepped = (math.exp(shape_of(name, sigma).log_variance) for name in reports)
    assert sigma**-2 <= linear * (1 + 1e-12)
    assert linear < min(shifted, stepped)
    for edge in np.linspace(-2, 6, 33):
        share = norm.sf(edge) * (1 + norm.cdf(edge) / (sigma * norm.pdf(edge)))
        if share <= 1 + 1e-12:
            other = norm.sf(edge) * norm.cdf(edge) / (sigma * norm.pdf(edge)) ** 2
            assert stepped <= other * (1 + 1e-9)


@pytest.mark.parametrize("report", RATIOS)
def test_less_noise_and_longer_vectors_tell_more_in_convex_order(report):
    """E(X − τ)₊ for every τ, by 13.3's closed form and by the shape's own cells."""
    strikes = np.exp(np.linspace(-4, 4, 33))
    tails = []
    for sigma in SIGMAS:
        shape = shape_of(report, sigma)
        edges = shape.inverse(np.log(strikes))
        beyond = [float(shape.moments(np.array([edge, np.inf]))[0]) for edge in edges]
        tails.append(np.array(beyond) + (1 - strikes) * ndtr(-edges))
        assert tails[-1] == pytest.approx(call(RATIOS[report](sigma), strikes), abs=1e-12)
    for more, less in itertools.pairwise(tails):
        assert (less <= more + 1e-12).all()
    if report != "gaussian":  # a shorter vector's ratio is a mixture of X and 1
        for share in (0.3, 0.9):
            inner = 1 + (strikes - 1) / share
            assert (share * call(RATIOS[report](sigma), inner) <= tails[-1] + 1e-12).all()


@given(st.floats(math.log(LEAST_TILTED_NOISE), math.log(1e12)).map(math.exp))
def test_linear_reports_of_any_noise_have_their_mean(sigma):
    shape = LinearTilt(max(sigma, LEAST_TILTED_NOISE))
    k = 1 / shape.noise_multiplier
    assert -shape.noise_multiplier * (1 + 1e-12) <= shape.threshold < k
    assert shape.slope * ndtr(-shape.threshold) == pytest.approx(k, rel=1e-12)
    assert k**2 <= math.exp(shape.log_variance) * (1 + 1e-12)
    for slope in (0.0, 1.0):  # X₋ is next to −X₊ where there is much noise
        assert 0.4 * k**2 < shape.opposed_variance(slope) <= 3 * math.exp(shape.log_variance)
    assert shape.moments(np.array([-np.inf, np.inf]))[0] == pytest.approx(0, abs=1e-12 * k)
