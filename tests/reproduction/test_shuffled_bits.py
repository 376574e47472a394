"""The paper's bits, one by one: as many as announced, the right number of ones, mixed at random."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from shuffled_bits import Messages, randomize, shuffle

from opacus_shuffle import ShuffleVectorSum

# The seeds are fixed; a right shuffler would fail for one seed in a million.
UNLIKELY = 1e-6


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def unpacked(messages):
    """The bits as 0 and 1, shape (d, bits)."""
    count = messages.num_reports * messages.bits_per_report
    return np.unpackbits(messages.bits, axis=1, count=count)


def report(ones, bits=10):
    return Messages.of(np.asarray(ones, np.int64), bits_per_report=bits)


def rows(bits, users):
    row = st.lists(st.integers(0, bits), min_size=3, max_size=3)
    return st.lists(row, min_size=users, max_size=users)


@given(bits=st.integers(1, 70), users=st.integers(1, 6), data=st.data())
@settings(max_examples=100)
def test_shuffling_keeps_the_announced_bits_and_every_coordinates_ones(bits, users, data):
    ones = np.array(data.draw(rows(bits, users)))
    sent = [report(of_user, bits) for of_user in ones]
    for messages, expected in ((sent[0], ones[0]), (shuffle(sent), ones.sum(axis=0))):
        total = messages.num_reports * bits
        assert messages.bits.shape == (3, -(-total // 8))
        np.testing.assert_array_equal(messages.ones(), expected)
        # No ones after the last bit.
        np.testing.assert_array_equal(unpacked(messages).sum(axis=1), expected)
    assert shuffle(sent).num_reports == users


# SCO Definition 2.5.
@pytest.mark.parametrize("split", [[3, 0], [0, 3], [2, 1]])
def test_every_arrangement_of_the_bits_is_equally_likely(split):
    reports, generator = [report([ones], bits=4) for ones in split], seeded(17)
    arrangements = {chosen: k for k, chosen in enumerate(itertools.combinations(range(8), 3))}
    counts = np.zeros(len(arrangements))
    for _ in range(6000):
        counts[arrangements[tuple(np.flatnonzero(unpacked(shuffle(reports, generator))[0]))]] += 1
    assert chisquare(counts).pvalue > UNLIKELY


def test_coordinates_are_permuted_independently_of_each_other():
    reports, generator = [report([1, 1], bits=3), report([0, 0], bits=3)], seeded(5)
    table = np.zeros((6, 6))
    for _ in range(12_000):
        bits = unpacked(shuffle(reports, generator))
        table[bits[0].argmax(), bits[1].argmax()] += 1
    assert chisquare(table.ravel()).pvalue > UNLIKELY


# SCO Algorithm 2.
def test_a_users_messages_have_as_many_ones_as_the_package_sends():
    protocol = ShuffleVectorSum(3, 50, 1.0, 1.0, 1e-2)
    vector = torch.ones(50) / 8
    messages = randomize(protocol, vector, seeded(1))
    assert messages.bits_per_report * 50 == protocol.bits_per_user
    assert messages.ones().tolist() == protocol.randomize(vector, seeded(1)).tolist()
