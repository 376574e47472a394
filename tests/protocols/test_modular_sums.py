"""Counts modulo a power of two are found again near those of zero vectors, and wrap elsewhere."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from opacus_shuffle import ShuffleVectorSum
from opacus_shuffle.protocols.modular_sums import smallest_modulus, unwrapped

PROTOCOL = ShuffleVectorSum.with_noise_multiplier(
    500, 4, 2.0, 1.5, delta=1e-6, zero_on_grid=True, rate=0.1, honest_fraction=0.8
)

EVERY_SUM = 500 * (PROTOCOL.granularity + PROTOCOL.noise_bits)


@given(
    bits=st.integers(1, 20),
    offsets=st.lists(st.floats(-1, 1, exclude_max=True), min_size=4, max_size=4),
    reports=st.just(450),
)
def test_a_sum_within_half_the_modulus_is_found_again(bits, offsets, reports):
    modulus = min(1 << bits, EVERY_SUM // 2)
    middle = round(PROTOCOL.expected_ones(reports))
    zero = PROTOCOL.decode(torch.full((4,), middle), reports)
    assert float(zero.abs().max()) <= PROTOCOL.grid_step / 2 * (1 + 1e-9)
    counts = torch.tensor([middle + math.floor(offset * modulus / 2) for offset in offsets])
    assert torch.equal(unwrapped(PROTOCOL, counts % modulus, reports, modulus), counts)
    beyond = counts + modulus
    assert torch.equal(unwrapped(PROTOCOL, beyond % modulus, reports, modulus), counts)


@given(st.floats(0, 1e4))
def test_the_modulus_leaves_room_for_the_largest_sum_and_six_deviations_and_no_more(largest):
    modulus = smallest_modulus(PROTOCOL, largest)
    need = (largest + 6 * math.sqrt(PROTOCOL.variance)) / PROTOCOL.grid_step
    assert modulus / 2 >= need or modulus > EVERY_SUM
    assert modulus.bit_count() == 1
    assert modulus / 4 < need + 2
    assert modulus <= 2 * EVERY_SUM


def sums_of(users, bits):
    """The protocol with so many users, who send so many bits a coordinate."""
    protocol = copy.copy(PROTOCOL)
    protocol.num_users, protocol.noise_bits = users, bits - PROTOCOL.granularity
    assert protocol.noise_bits >= 0
    return protocol


@given(st.integers(1, 2000), st.integers(PROTOCOL.granularity, 5000))
@example(1, 255)
@example(1, 256)
@example(64, 1024)
def test_the_default_modulus_is_the_smallest_power_of_two_above_every_sum(users, bits):
    """Where the largest sum is a power of two, that is none: its residue is that of no ones."""
    protocol, largest = sums_of(users, bits), users * bits
    modulus = smallest_modulus(protocol)
    assert modulus.bit_count() == 1
    assert modulus // 2 <= largest < modulus
    powers = [2**power for power in range(largest.bit_length())]
    for first in range(0, len(powers), 3):
        counts = torch.tensor([largest, *powers[first : first + 3], 0, 0, 0][:4])
        assert torch.equal(unwrapped(protocol, counts % modulus, users, modulus), counts)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: smallest_modulus(PROTOCOL, -1.0), "largest_coordinate"),
        (lambda: smallest_modulus(PROTOCOL, math.nan), "largest_coordinate"),
        (lambda: unwrapped(PROTOCOL, torch.zeros(3, dtype=torch.int64), 450, 64), "residues"),
        (lambda: unwrapped(PROTOCOL, torch.zeros(4), 450, 64), "residues"),
        (lambda: unwrapped(PROTOCOL, torch.zeros(4, dtype=torch.int64), 450, 0), "modulus"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
