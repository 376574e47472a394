"""The quick sum of roundings decides as double precision does, with the exact distribution."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.count_distributions import (
    PLAN,
    assert_of_distribution,
    count_distribution,
    small_protocol,
)

from opacus_shuffle.core.randomness import SecretGenerator, stream_of
from opacus_shuffle.protocols.sums_of_roundings import FINEST, sum_of_roundings

WIDE = 2000
USERS = np.array([0.9, -0.55, 0.02, -1.0]) / math.sqrt(WIDE)


@pytest.mark.parametrize("granularity", [40, 41, FINEST + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_scaled_pieces_have_the_exact_distribution(granularity, dtype):
    """Of records in pieces of different widths, each with a factor of its own."""
    plan = dataclasses.replace(PLAN, granularity=granularity)
    protocol = small_protocol(WIDE, plan=plan)
    factors = torch.tensor([0.25, 1.0, 2.0**-10, 0.9], dtype=torch.float64)
    given = (torch.tensor(USERS) / factors).to(dtype)
    pieces = [
        given[:, None, None].expand(4, *shape).contiguous()
        for shape in ((3, 5), (85, 1), (1900, 1))
    ]
    if dtype == torch.float16:
        pieces[1] = pieces[1].double()  # parameters need not be of one type
    values = (given.double() * factors).tolist()
    generators = (torch.Generator().manual_seed(5), SecretGenerator())
    counts = [
        protocol.encode_scaled(pieces, factors, generator) + protocol.draw_noise(4, generator)
        for generator in generators
        for _ in range(4)
    ]
    assert counts[0].dtype == torch.int64
    assert_of_distribution(torch.stack(counts).numpy(), *count_distribution(values, plan, 4))


def test_scales_that_single_precision_does_not_hold_are_worked_out_in_double():
    source = stream_of(torch.Generator().manual_seed(1))
    rows = torch.tensor([[1e-38] * 4000, [1e38] * 4000])
    found = sum_of_roundings(
        rows, torch.tensor([2e37, -2e-38], dtype=torch.float64), granularity=8, source=source
    )
    # 4 + 0.2 and 4 - 2: between 6 and 7, on average 6.2 within five standard errors
    assert abs(float(found.double().mean()) - 6.2) <= 5 * math.sqrt(0.16 / 4000) + 1e-6
    assert set(found.tolist()) == {6, 7}


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5000, 3), (70, 5000), (2, 300_000)])
def test_rows_of_whole_steps_are_summed_exactly_whatever_the_shape(shape):
    rows = torch.randint(-60, 61, shape, generator=torch.Generator().manual_seed(2)).float()
    source = stream_of(torch.Generator().manual_seed(1))
    found = sum_of_roundings(rows, torch.ones(shape[0]), granularity=120, source=source)
    assert torch.equal(found, rows.long().sum(0) + 60 * shape[0])


@pytest.mark.parametrize("granularity", [40, 41])
def test_zeros_have_the_distribution_of_zeros_that_are_rounded(granularity):
    plan = dataclasses.replace(PLAN, granularity=granularity)
    protocol = small_protocol(WIDE, plan=plan)
    generator = torch.Generator().manual_seed(4)
    counts = [
        protocol.encode_zeros(4, generator) + protocol.draw_noise(4, generator) for _ in range(8)
    ]
    assert_of_distribution(torch.stack(counts).numpy(), *count_distribution([0.0] * 4, plan, 4))
