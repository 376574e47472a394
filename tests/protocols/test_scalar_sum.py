"""Sums of numbers: (ε, δ) by sums over all outcomes, draws against their exact distribution."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.binomial_enumeration import both_ways, moved_pair
from helpers.count_distributions import (
    assert_of_distribution,
    binomial_distribution,
    count_distribution,
)
from published_sums import published_scalar_sum, with_plan

from opacus_shuffle.protocols.calibration import GridPlan
from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum


def exact_delta(protocol, places, epsilon):
    """δ(ε) between a user at one place of the grid and another, by the honest users' noise."""
    honest = math.ceil(protocol.honest_fraction * protocol.num_users - 1e-9)
    noise = binomial_distribution(honest * protocol.noise_bits, protocol.bit_probability)
    return both_ways([moved_pair(noise, *places)[1:]], epsilon)


CASES = [
    (10, 1.0, 1e-2, 1.0),
    (3, 0.5, 1e-3, 1 / 3),
    (1, 3.0, 1e-2, 1.0),
    (40, 1.0, 1e-6, 0.5),
    (5, 15.0, 1e-3, 1.0),
    (200, 0.1, 0.3, 0.8),
]


# SCO Lemma 3.1: privacy.
@pytest.mark.parametrize("make", [ShuffleScalarSum, published_scalar_sum])
@pytest.mark.parametrize(("users", "epsilon", "delta", "fraction"), CASES)
def test_no_two_values_are_told_apart_better_than_promised(make, users, epsilon, delta, fraction):
    protocol = make(users, 1.0, epsilon, delta, honest_fraction=fraction)
    g = protocol.granularity
    values = np.random.default_rng(3).uniform(0, 1, (6, 2)).tolist()
    for pair in [
        (0.0, 1.0),
        (1.0, 0.0),
        (0.0, 0.5),
        (0.31, 0.31 + 0.2 / g),
        (1e-9, 1 - 1e-9),
        *values,
    ]:
        assert exact_delta(protocol, [value * g for value in pair], epsilon) <= delta * (1 + 1e-11)
    if make is ShuffleScalarSum:
        assert exact_delta(protocol, (0, g + 1), epsilon) > delta
        lower, upper = protocol.exact_epsilon()
        assert 0 <= lower <= upper <= epsilon


# ---- distributions

PLAN = GridPlan(7, 5, 0.4, 3)
VALUES = np.array([0.1, 1.37, 2.0])
COLUMN = torch.tensor(VALUES)
FORMS = {
    "float64": lambda: COLUMN,
    "numpy": lambda: VALUES,
    "list": lambda: VALUES.tolist(),
}


def small_protocol(fraction=1.0):
    protocol = ShuffleScalarSum(3, 2.0, 1.0, 1e-2, honest_fraction=fraction)
    plan = dataclasses.replace(PLAN, honest_users=math.ceil(3 * fraction - 1e-9))
    return with_plan(protocol, plan)


def assert_counts_of(answers, reports):
    """χ² of the counts behind the answers; the helper takes values from −1 to 1."""
    counts = np.asarray(answers) * 7 / 2 + reports * 5 * 0.4
    np.testing.assert_allclose(counts, counts.round(), atol=1e-9)
    assert_of_distribution(
        counts.round().astype(np.int64), *count_distribution(VALUES[:reports] - 1, PLAN, reports)
    )


@pytest.mark.parametrize("shape", ["float64", pytest.param("numpy", marks=pytest.mark.zoo), "list"])
def test_simulated_answers_have_the_exact_distribution(shape):
    protocol, generator = small_protocol(), torch.Generator().manual_seed(1)
    answers = [protocol.simulate(FORMS[shape](), generator) for _ in range(300)]
    assert isinstance(answers[0], float)
    assert_counts_of(answers, 3)


# SCO Algorithm 1.
@pytest.mark.parametrize("reports", [3, 2])
def test_reports_have_the_exact_distribution_for_those_who_sent(reports):
    protocol, generator = small_protocol(fraction=0.5), torch.Generator().manual_seed(3)
    answers = [
        protocol.decode(sum(protocol.randomize(x, generator) for x in VALUES[:reports]), reports)
        for _ in range(200)
    ]
    assert_counts_of(torch.cat(answers), reports)


# ---- refusals

HELD = ShuffleScalarSum(50, 1.0, 1.0, 1e-2)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, -math.inf])
def test_numbers_out_of_range_are_refused_with_their_value(value):
    column = torch.full((50,), 0.5)
    column[17] = value
    for call in (lambda: HELD.randomize(value), lambda: HELD.simulate(column)):
        with pytest.raises(ValueError, match=rf"max_value is 1, got the number {value:g}.*clip"):
            call()


def test_numbers_out_of_range_by_rounding_are_taken_back():
    for value, count in ((1 + 9e-6, 50 * HELD.granularity), (-9e-6, 0)):
        assert HELD.encode(torch.full((50, 1), value, dtype=torch.float64)).item() == count


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ("0.5", "x must be a tensor of real numbers"),
        (None, "x must be a tensor of real numbers"),
        ([0.1, 0.2], r"x must have shape \(1,\), got \(2,\)"),
        ([], "x must have shape"),
        (True, "x must hold real numbers"),
        (0.5j, "x must hold real numbers"),
    ],
)
def test_what_is_not_one_number_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        HELD.randomize(x)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ("numbers", "x must be a tensor of real numbers"),
        (0.5, r"x must have shape \(n,\)"),
        ([True] * 50, "x must hold real numbers"),
        (torch.zeros(50, 1), r"x must have shape \(n,\)"),
        (torch.zeros(50).to_sparse(), "x must be dense"),
        ([0.5] * 49, "50 users.*got 49"),
        ([0.5] * 51, "50 users.*got 51"),
        ([], "got none"),
    ],
    ids=str,
)
def test_what_is_not_one_number_per_user_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        HELD.simulate(x)
