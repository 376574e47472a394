"""The bits that travel: as many as announced, the right number of ones, shuffled nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from opacus_shuffle.core.randomness import seeded_generator
from opacus_shuffle.protocols.messages import Messages, shuffled

# The seeds are fixed; a right shuffler would fail for one seed in a million.
UNLIKELY = 1e-6


def stream(seed):
    return seeded_generator("cpu", seed, "messages")


def unpacked(messages):
    """The bits as 0 and 1, shape (d, bits)."""
    return np.unpackbits(
        messages.bits, axis=1, count=messages.num_reports * messages.bits_per_report
    )


def report(ones, bits=10, granularity=3):
    return Messages.of(np.asarray(ones, np.int64), bits_per_report=bits, granularity=granularity)


@given(bits=st.integers(1, 70), data=st.data())
@settings(max_examples=150)
def test_a_report_has_the_announced_bits_and_ones(bits, data):
    ones = data.draw(st.lists(st.integers(0, bits), min_size=1, max_size=5))
    messages = report(ones, bits)
    assert messages.num_reports == 1
    assert messages.bits.shape == (len(ones), -(-bits // 8))
    assert messages.bits.dtype == np.uint8
    assert messages.ones().tolist() == ones
    assert unpacked(messages).sum(axis=1).tolist() == ones
    # Nothing behind the last bit.
    assert np.unpackbits(messages.bits, axis=1)[:, bits:].sum() == 0


@given(bits=st.integers(1, 20), users=st.integers(1, 6), seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=100)
def test_shuffling_keeps_every_coordinates_ones_and_adds_no_bits(bits, users, seed, data):
    ones = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(0, bits), min_size=3, max_size=3),
                min_size=users,
                max_size=users,
            )
        )
    )
    result = shuffled([report(of_user, bits) for of_user in ones], stream(seed))
    assert result.num_reports == users
    assert (result.bits_per_report, result.granularity) == (bits, 3)
    assert result.bits.shape == (3, -(-users * bits // 8))
    np.testing.assert_array_equal(result.ones(), ones.sum(axis=0))
    assert np.unpackbits(result.bits, axis=1)[:, users * bits :].sum() == 0


# SCO Definition 2.5.
@pytest.mark.parametrize("split", [[3, 0], [0, 3], [2, 1]])
def test_every_arrangement_of_the_bits_is_equally_likely(split):
    reports = [report([ones], bits=4) for ones in split]
    generator = stream(17)
    arrangements = {chosen: k for k, chosen in enumerate(itertools.combinations(range(8), 3))}
    counts = np.zeros(len(arrangements))
    for _ in range(6000):
        counts[arrangements[tuple(np.flatnonzero(unpacked(shuffled(reports, generator))[0]))]] += 1
    assert chisquare(counts).pvalue > UNLIKELY


def test_coordinates_are_permuted_independently_of_each_other():
    reports = [report([1, 1], bits=3), report([0, 0], bits=3)]
    generator = stream(5)
    table = np.zeros((6, 6))
    for _ in range(12_000):
        bits = unpacked(shuffled(reports, generator))
        table[bits[0].argmax(), bits[1].argmax()] += 1
    assert chisquare(table.ravel()).pvalue > UNLIKELY
