"""The quick sum of roundings decides as double precision does, for every draw, and has the distribution worked out by hand."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.core.randomness import SecretGenerator, stream_of
from opacus_shuffle.protocols.sums_of_roundings import FINEST, sum_of_roundings

WIDE = 2000
USERS = np.array([0.9, -0.55, 0.02, -1.0]) / math.sqrt(WIDE)


class AllBeginnings:
    """Words in which the ten bits of 1,024 entries are every number once; the later bits are all the same."""

    def __init__(self, later):
        self.later, self.asked = later, []

    def words(self, count):
        self.asked.append(count)
        if len(self.asked) > 1:
            return np.full(count, self.later << 11, dtype=np.uint64)
        third = -(-1024 // 3)
        lanes = np.resize(np.arange(1024, dtype=np.uint32), 3 * third).reshape(3, third)
        drawn = lanes[0] | lanes[1] << np.uint32(10) | lanes[2] << np.uint32(20)
        return np.append(drawn, np.zeros(2 * count - third, dtype=np.uint32)).view(np.uint64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    share=st.one_of(
        st.floats(-1, 1),
        st.sampled_from([-1.0, 1.0, 0.0, 1e-30, -1e-9, 1 / 234, -3 / 234, 2 / 1024]),
    ),
    granularity=st.sampled_from([1, 2, 7, 234, 1023, FINEST]),
    later=st.sampled_from([0, 1, 2**52, 2**53 - 1]),
)
@settings(max_examples=60, deadline=None)
def test_every_draw_is_decided_as_by_whole_numbers(dtype, share, granularity, later):
    value, steps = torch.tensor(share, dtype=dtype), granularity / 2
    source = AllBeginnings(later)
    rows, scales = value.expand(1, 1024).contiguous(), torch.full((1,), steps, dtype=torch.float64)
    found = sum_of_roundings(rows, scales, granularity=granularity, source=source)
    units = float(value) * (
        1024 * steps
    )  # and what follows is exact, but for what double precision makes of a fraction
    up = later * 2.0**-53 >= 1 - (units - math.floor(units))
    exact = [(math.floor(units) + 512 * granularity + begin + up) // 1024 for begin in range(1024)]
    assert found.tolist() == exact
    assert sum(source.asked[1:]) <= 3  # of 1,024


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
