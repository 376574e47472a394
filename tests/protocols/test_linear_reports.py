"""Linear and step reports are drawn by the law that is accounted, one by one or many at once.

Proofs: docs/proofs/13_linear_reports.md. All is compared exactly: nothing is drawn.
"""

import pytest
import torch
from helpers.report_ratios import FAR, RATIOS, integral

from opacus_shuffle.protocols.linear_reports import report_along, summed_reports, tilted

every_tilt = pytest.mark.parametrize("report", ["linear", "step"])


def signed(larger: torch.Tensor) -> torch.Tensor:
    """What ``tilted`` takes for these chances of a larger part."""
    return torch.where(larger < 0.5, 2 * larger, -2 * (1 - larger))


@every_tilt
@pytest.mark.parametrize("sigma", [0.2, 0.7, 1.2, 1.3, 3.0, 7.999, 8.0, 1e3])
def test_parts_along_a_vector_have_the_tilted_law(report, sigma):
    """The chance of more than the part is the one that it was made of."""
    chances = torch.linspace(1e-9, 1, 1001, dtype=torch.float64)
    ratio = RATIOS[report](sigma)
    parts = tilted(signed(chances), sigma, report)
    assert (parts.diff() <= 0).all()
    # Parts are found to 13·2⁻²⁴, or far better; next to t the chance grows with their square.
    assert ratio.above(parts.numpy()) == pytest.approx(chances.numpy(), rel=1e-11, abs=1e-11)
    ends = tilted(torch.tensor([0.0, 2.0**-108, -(2.0**-108), -1, 1]).double(), sigma, report)
    assert torch.isfinite(ends).all()
    lowest = ratio.threshold if float(ratio.tilt(-FAR)) == 0 else -13
    assert float(ends.min()) >= max(lowest, -13) - 1e-9
    assert tilted(torch.empty(0, dtype=torch.float64), sigma).shape == (0,)


@every_tilt
@pytest.mark.parametrize("sigma", [0.2, 0.7, 1.3, 3.0, 20.0, 1e3])
@pytest.mark.parametrize("bits", [1, 20, 53, 54, 80, 107])
def test_both_tails_of_a_part_are_drawn_to_the_last_bit(report, sigma, bits):
    """The chance of what lies beyond, by Gauss and Legendre's rule over the tail alone.

    Up to 107 bits: from a uniform number of 53 bits in [0, 1) the tails would be a few numbers.
    """
    ratio, chance = RATIOS[report](sigma), 2.0**-bits
    above, below = tilted(torch.tensor([2 * chance, -2 * chance]).double(), sigma, report).tolist()
    kinks = (ratio.threshold,)
    assert integral(ratio.tilt, above, above + 9, kinks) == pytest.approx(chance, rel=1e-10)
    # A law with an end has no tail there, and is met as well as above.
    error = 1e-11 if float(ratio.tilt(-FAR)) == 0 else 0.0
    beyond = integral(ratio.tilt, below - 9, below, kinks)
    assert beyond == pytest.approx(chance, rel=1e-10, abs=error)


def vectors(users, dimension, *, alike=0.0):
    """Unit vectors; the more alike, the nearer is the Gram matrix to rank one."""
    draws = torch.Generator().manual_seed(users)
    rows = torch.randn(users, dimension, generator=draws, dtype=torch.float64)
    rows = alike * rows[:1] + (1 - alike) * rows
    return rows / rows.norm(dim=1, keepdim=True)


CASES = [(1, 6, 0.0), (3, 6, 0.0), (6, 6, 0.9), (5, 2, 0.0), (4, 5, 1.0), (16, 1, 0.0)]


@pytest.mark.parametrize(("users", "dimension", "alike"), CASES)
def test_a_sum_of_reports_has_the_law_of_one_by_one(users, dimension, alike):
    """Both are linear in independent normal numbers and the parts: by their matrices.

    The sum is √k·w + Uᵀ(z − A·w), whose part of w has to have the covariance k·I − UᵀU.
    """
    units = vectors(users, dimension, alike=alike)
    cut = dimension // 2
    lengths = torch.logspace(-3, 3, users, dtype=torch.float64)
    rows = lengths[:, None] * units

    def summed(parts, normals):
        pieces = [rows[:, :cut], rows[:, cut:]]
        coefficients = summed_reports(pieces, lengths, parts, [normals[:cut], normals[cut:]])
        return users**0.5 * normals + rows.T @ coefficients

    nothing, none = torch.zeros(dimension, dtype=torch.float64), torch.zeros(users).double()
    of_normals = torch.stack([summed(none, row) for row in torch.eye(dimension).double()])
    of_parts = torch.stack([summed(row, nothing) for row in torch.eye(users).double()])
    expected = users * torch.eye(dimension) - units.T @ units
    # The eigenvalues of k·I − UᵀU that are 0 are found to 1e-15·k, and are squared roots.
    torch.testing.assert_close(of_normals.T @ of_normals, expected.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(of_parts, units)


def test_one_report_is_normal_across_its_vector_and_has_its_part_along():
    (unit,), normals = vectors(1, 7), torch.randn(7, dtype=torch.float64)
    part = torch.tensor(2.5).double()
    report = report_along(unit, part, normals)
    torch.testing.assert_close(unit @ report, part)
    across = torch.eye(7).double() - torch.outer(unit, unit)
    torch.testing.assert_close(across @ report, across @ normals)
    together = normals + unit * summed_reports([unit[None]], torch.ones(1), part[None], [normals])
    torch.testing.assert_close(together, report)


@every_tilt
def test_parts_have_the_mean_that_makes_the_sum_unbiased(report):
    """The mean of z is 1/σ: by the midpoint rule over u, whose tails cost less than 1e-3."""
    for sigma in (0.5, 2.0, 20.0):
        count = 20_000
        uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        assert float(tilted(signed(uniforms), sigma, report).mean()) == pytest.approx(
            1 / sigma, abs=1e-3
        )
