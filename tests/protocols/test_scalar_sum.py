"""Sums of numbers: (ε, δ) of the count by sums over all outcomes, and draws against their exact distribution."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from opacus_shuffle.accountants.bounds.registry import Guarantee
from opacus_shuffle.analysis.binomial_sums import hockey_stick
from opacus_shuffle.protocols.calibration import GridPlan, Promise
from opacus_shuffle.protocols.grid_sum import GridSum
from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

# The seeds are fixed; a right implementation would fail one test in a million.
UNLIKELY = 1e-6


def binomial_distribution(trials, probability):
    """(first, probabilities) of all outcomes within 14 standard deviations; beyond lies less than 1e-40."""
    mean, deviation = trials * probability, math.sqrt(trials * probability * (1 - probability))
    first, last = max(0, math.floor(mean - 14 * deviation)), min(trials, math.ceil(mean + 14 * deviation))
    y = np.arange(first, last)
    logs = np.concatenate([[0.0], np.cumsum(np.log((trials - y) / (y + 1)) + math.log(probability / (1 - probability)))])
    masses = np.exp(logs - logs.max())
    return first, masses / masses.sum()


def count_distribution(places, trials, probability, size_of_grid):
    """Noise and everybody's randomly rounded value, on the outcomes from the noise's first on."""
    first, distribution = binomial_distribution(trials, probability)
    distribution = np.concatenate([distribution, np.zeros(len(places) * (size_of_grid + 1))])
    for place in places:
        whole, fraction = math.floor(place), place - math.floor(place)
        distribution = (1 - fraction) * np.roll(distribution, whole) + fraction * np.roll(distribution, whole + 1)
    return first, distribution


def exact_delta(p, q, epsilon):
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) for a, b in ((p, q), (q, p)))


CASES = [
    (10, 1.0, 1e-2, 1.0),
    (3, 0.5, 1e-3, 1 / 3),
    (1, 3.0, 1e-2, 1.0),
    (40, 1.0, 1e-6, 0.5),
    (5, 15.0, 1e-3, 1.0),
    (200, 0.1, 0.3, 0.8),
]


@pytest.mark.parametrize("calibration", ["tight", "published"])
@pytest.mark.parametrize(("users", "epsilon", "delta", "fraction"), CASES)
def test_no_two_values_are_told_apart_better_than_promised(calibration, users, epsilon, delta, fraction):
    protocol = ShuffleScalarSum(users, 1.0, epsilon, delta, calibration, fraction)
    g = protocol.granularity
    trials = math.ceil(fraction * users - 1e-9) * protocol.noise_bits
    values = np.random.default_rng(3).uniform(0, 1, (6, 2)).tolist()
    for one, other in [(0.0, 1.0), (1.0, 0.0), (0.0, 0.5), (0.31, 0.31 + 0.2 / g), (1e-9, 1 - 1e-9), *values]:
        distributions = [count_distribution([value * g], trials, protocol.bit_probability, g)[1] for value in (one, other)]
        assert exact_delta(*distributions, epsilon) <= delta * (1 + 1e-11)
    if calibration == "tight":
        ends = [count_distribution([place], trials, 0.5, g + 1)[1] for place in (0, g + 1)]
        assert exact_delta(*ends, epsilon) > delta
        lower, upper = protocol.exact_epsilon()
        assert 0 <= lower <= upper <= epsilon


def test_other_users_rounding_only_hides_more():
    protocol = ShuffleScalarSum(4, 1.0, 1.0, 1e-2, "tight")
    g, trials = protocol.granularity, 4 * protocol.noise_bits
    alone = exact_delta(*(count_distribution([end], trials, 0.5, g)[1] for end in (0, g)), 1.0)
    crowd = exact_delta(*(count_distribution([end, 0.4 * g, 0.77 * g, 0.031 * g], trials, 0.5, g)[1] for end in (0, g)), 1.0)
    assert crowd <= alone <= 1e-2


@given(
    users=st.integers(1, 10**5),
    top=st.floats(0.01, 50),  # a hundred would take more bits than are sent
    epsilon=st.floats(0.05, 15),
    delta=st.floats(1e-9, 0.49),
)
@settings(max_examples=100, deadline=None)
def test_the_papers_protocol_is_lemma_31_and_private(users, top, epsilon, delta):
    protocol = ShuffleScalarSum(users, top, epsilon, delta, "published")
    g, b = protocol.granularity, protocol.noise_bits
    assert g >= top * math.sqrt(users) - 1e-9
    assert b > 180 * g**2 * math.log(2 / delta) / (epsilon**2 * users) * (1 - 1e-13)
    expected = 90 * g**2 * math.log(2 / delta) / (b * epsilon**2 * users)
    assert protocol.bit_probability == pytest.approx(expected, rel=1e-12)
    alpha = epsilon / (3 * g)
    assert alpha * b * users * expected >= 2 * g
    assert hockey_stick(protocol.sum_round.noise, shift=g, epsilon=epsilon) <= delta
    assert protocol.bits_per_user == g + b
    assert protocol.variance == pytest.approx((top / g) ** 2 * users * (0.25 + b * expected * (1 - expected)))


# ---- distributions ----------------------------------------------------------------------------------------------------------

PLAN = GridPlan(7, 5, 0.4, 3)
VALUES = np.array([0.1, 1.37, 2.0])


def small_protocol(users=3, fraction=1.0):
    protocol = ShuffleScalarSum(users, 2.0, 1.0, 1e-2, "tight", fraction)
    plan = dataclasses.replace(PLAN, honest_users=math.ceil(users * fraction - 1e-9))
    GridSum.__init__(protocol, users, 1, Promise(1.0, 1e-2, "tight", fraction), plan, low=0.0, span=2.0)
    return protocol


def assert_of_distribution(answers, values, reports):
    """χ² of the counts behind the answers, outcomes expected fewer than 10 times together; mean and variance."""
    counts = np.asarray(answers) * 7 / 2 + reports * 5 * 0.4
    np.testing.assert_allclose(counts, counts.round(), atol=1e-9)
    counts = counts.round().astype(np.int64)
    first, distribution = count_distribution([value * 7 / 2 for value in values], reports * 5, 0.4, 7)
    seen = np.bincount(counts - first, minlength=len(distribution)).astype(float)
    assert len(seen) == len(distribution)
    expected = len(counts) * distribution
    rare = expected < 10
    seen, expected = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    assert chi2.sf(float(((seen - expected) ** 2 / np.maximum(expected, 1)).sum()), len(seen) - 1) > UNLIKELY
    outcomes = first + np.arange(len(distribution))
    variance = float(distribution @ outcomes**2) - float(distribution @ outcomes) ** 2
    error = math.sqrt(variance / len(counts)) * 2 / 7
    assert abs(np.mean(answers) - float(np.sum(values))) <= 5 * error


@pytest.mark.parametrize("shape", ["float64", "float32", "numpy", "list", "blocks", "generator", "sparse"])
def test_simulated_answers_have_the_exact_distribution(shape):
    protocol, generator = small_protocol(), torch.Generator().manual_seed(1)
    column = torch.tensor(VALUES)
    forms = {
        "float64": lambda: column,
        "float32": lambda: column.float(),
        "numpy": lambda: VALUES,
        "list": lambda: VALUES.tolist(),
        "blocks": lambda: [column[:2], VALUES[2:]],
        "generator": lambda: (column[k : k + 1] for k in range(3)),
        "sparse": lambda: column.to_sparse(),
    }
    answers = [protocol.simulate(forms[shape](), generator) for _ in range(800)]
    assert isinstance(answers[0], float)
    assert_of_distribution(answers, column.float().double().numpy() if shape == "float32" else VALUES, 3)


@pytest.mark.parametrize("value", [0.3, 0.0, 2.0])
def test_an_expanded_number_has_the_distribution_of_its_copies(value):
    protocol, generator = small_protocol(), torch.Generator().manual_seed(2)
    column = torch.tensor(value, dtype=torch.float64).expand(3)
    assert_of_distribution([protocol.simulate(column, generator) for _ in range(800)], [value] * 3, 3)


@pytest.mark.parametrize("reports", [3, 2])
def test_messages_have_the_exact_distribution_and_are_unbiased_for_those_who_sent(reports):
    protocol, generator = small_protocol(fraction=0.5), torch.Generator().manual_seed(3)
    answers = []
    for _ in range(500):
        sent = [protocol.randomize(value, generator) for value in VALUES[:reports]]
        assert all(each.bits_per_report == 12 and each.bits.shape == (1, 2) for each in sent)
        answers.append(protocol.analyze(protocol.shuffle(sent, generator)))
    assert isinstance(answers[0], float)
    assert_of_distribution(answers, VALUES[:reports], reports)


def test_real_answers_are_unbiased_with_the_announced_variance():
    protocol, generator = ShuffleScalarSum(500, 3.0, 1.0, 1e-4, "tight"), torch.Generator().manual_seed(4)
    column = 3 * torch.rand(500, generator=generator, dtype=torch.float64)
    errors = np.array([protocol.simulate(column, generator) for _ in range(1500)]) - float(column.sum())
    assert abs(errors.mean()) <= 5 * math.sqrt(protocol.variance / 1500)
    noise = (3 / protocol.granularity) ** 2 * 500 * protocol.noise_bits / 4
    assert noise * (1 - 5 * math.sqrt(2 / 1500)) <= errors.var() <= protocol.variance * (1 + 5 * math.sqrt(2 / 1500))


# ---- refusals ---------------------------------------------------------------------------------------------------------------

HELD = ShuffleScalarSum(50, 1.0, 1.0, 1e-2, "tight")


def test_the_statement_is_about_one_round():
    statement = HELD.statement()
    assert (statement.epsilon, statement.delta, statement.rounds, statement.guarantee) == (1.0, 1e-2, 1, Guarantee.PROVED)
    assert statement.bits_per_user == HELD.granularity + HELD.noise_bits


def test_the_remedy_offered_for_more_rounds_is_one_the_class_has():
    with pytest.raises(ValueError, match=r"rounds_per_user=2 .*make a vector protocol for as many \(rounds=2\)"):
        HELD.statement(rounds_per_user=2)
    assert ShuffleVectorSum(50, 1, 1.0, 1.0, 1e-2, rounds=2).statement(rounds_per_user=2).rounds_per_user == 2


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, -math.inf])
def test_numbers_out_of_range_are_refused_with_their_value(value):
    column = torch.full((50,), 0.5)
    column[17] = value
    for call in (
        lambda: HELD.randomize(value),
        lambda: HELD.simulate(column),
        lambda: HELD.simulate(column.to_sparse()),
        lambda: HELD.simulate([column[:20], column[20:]]),
        lambda: HELD.simulate(torch.tensor(value).expand(50)),
    ):
        with pytest.raises(ValueError, match=r"max_value is 1, got the number .*clip"):
            call()


def test_numbers_out_of_range_by_rounding_are_taken_back():
    for value, count in ((1 + 9e-6, 50 * HELD.granularity), (-9e-6, 0)):
        column = torch.full((50, 1), value, dtype=torch.float64)
        assert HELD.encode(column).item() == count
        assert HELD.encode(column[:1].expand(50, 1)).item() == count


@pytest.mark.parametrize(
    "x", ["0.5", None, [0.1, 0.2], [], True, torch.tensor(True), 0.5j, torch.tensor(0.5j), np.array(["a"])], ids=repr
)
def test_what_is_not_one_number_is_refused(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"."):
            HELD.randomize(x)


@pytest.mark.parametrize(
    "x",
    [
        "numbers",
        None,
        0.5,
        True,
        [True] * 50,
        torch.ones(50, dtype=torch.bool),
        torch.zeros(50, dtype=torch.complex64),
        torch.zeros(50, 1),
        torch.zeros(()),
        [[0.5] * 25] * 2,
        ["a"] * 50,
        [None] * 50,
        [0.5] * 49,
        [0.5] * 51,
        [],
    ],
    ids=lambda x: repr(x)[:20],
)
def test_what_is_not_one_number_per_user_is_refused(x):
    with pytest.raises(ValueError, match=r"."):
        HELD.simulate(x)


def test_messages_of_another_protocol_or_crowd_are_refused():
    sent = [HELD.randomize(0.5) for _ in range(50)]
    other = ShuffleScalarSum(20, 1.0, 1.0, 1e-2, "tight")
    with pytest.raises(ValueError, match="another protocol"):
        HELD.shuffle([other.randomize(0.5)] * 50)
    with pytest.raises(ValueError, match=r"50 users.*got 49"):
        HELD.shuffle(sent[1:])
    with pytest.raises(ValueError, match="generator"):
        HELD.shuffle(sent, np.random.default_rng(0))
    with pytest.raises(ValueError, match="generator"):
        HELD.simulate(torch.zeros(50), 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_users", 0),
        ("num_users", 2.5),
        ("num_users", True),
        ("num_users", "3"),
        ("max_value", 0.0),
        ("max_value", -1.0),
        ("max_value", math.nan),
        ("max_value", math.inf),
        ("max_value", True),
        ("max_value", None),
    ],
)
def test_bad_arguments_are_refused_with_their_name_and_value(name, value):
    with pytest.raises(ValueError, match=name) as raised:
        ShuffleScalarSum(**{"num_users": 9, "max_value": 1.0, "epsilon": 1.0, "delta": 0.1, name: value})
    assert repr(value) in str(raised.value)
