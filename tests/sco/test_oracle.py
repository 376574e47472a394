"""Plain SGD's batch size and bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.sco.descent_bound import Oracle, clamp, sgd_bound


@settings(max_examples=100, deadline=None)
@given(st.floats(0.1, 10), st.integers(1, 100), st.floats(1e-3, 1e4), st.integers(1, 10_000))
def test_the_sgd_batch_size_minimises_its_bound(lipschitz, dimension, variance, users):
    oracle = Oracle(lipschitz=lipschitz, dimension=dimension, variance=variance)

    def value(size):  # D L_G / √T, squared, but for D² and with T = n/b
        return oracle.second_moment(size) * size

    chosen = clamp(oracle.ratio, users)
    assert 1 <= chosen <= users
    neighbours = [size for size in (chosen - 1, chosen + 1) if 1 <= size <= users]
    # b = s rounded: b + s²/b is flat there, its neighbours at most (1/2)²/(s b) better
    assert all(value(chosen) <= value(size) * (1 + 0.25 / chosen**2) for size in neighbours)


def test_the_sgd_bound_is_lemma_4_2_and_least_at_the_default_step():
    def bound(step):
        return sgd_bound(rounds=100, step_size=step, second_moment=4.0, distance=3.0)

    best = 3.0 / math.sqrt(4.0 * 100)
    assert bound(best) == pytest.approx(3.0 * 2.0 / 10)
    assert bound(best) < min(bound(0.9 * best), bound(1.1 * best))
    assert (
        sgd_bound(
            rounds=100, step_size=best, second_moment=4.0, distance=3.0, diameter=6.0, bias=0.5
        )
        == bound(best) + 3
    )
