"""``ShuffleVectorSum``: the paper's constants, what it says of itself, and what it refuses."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core.guarantees import Guarantee, PrivacyBound
from opacus_shuffle.protocols.calibration import OVERHEAD, SumBudget
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


def test_the_statement_says_what_a_user_sends_and_gets():
    protocol = ShuffleVectorSum(90, 4, 1.0, 1.0, 1e-5, rounds=6, honest_fraction=0.5)
    statement = protocol.statement()
    assert isinstance(statement, PrivacyBound)
    said = {
        "epsilon": 1.0,
        "delta": 1e-5,
        "rounds": 6,
        "rounds_per_user": 6,
        "bits_per_user": 6 * 4 * (protocol.granularity + protocol.noise_bits),
        "num_users": 90,
        "honest_fraction": 0.5,
        "adjacency": "replace",
        "guarantee": Guarantee.PROVED,
        "bound": "certified",
        "trusted": "the shuffler",
    }
    assert {name: getattr(statement, name) for name in said} == said
    text = str(statement)
    for part in ("epsilon = 1", "1e-05", "replaced", "90 users", "shuffler", "at least 0.5", "6"):
        assert part in text


HELD = ShuffleVectorSum(50, 3, 1.0, 1.0, 1e-2)
X = torch.zeros(3)
GOOD = {"num_users": 9, "dimension": 2, "max_norm": 1.0, "epsilon": 1.0, "delta": 0.1, "rounds": 2}
MULTIPLIER = {
    **{name: GOOD[name] for name in ("num_users", "dimension", "max_norm", "delta")},
    "noise_multiplier": 1.0,
}


def test_a_norm_above_by_rounding_is_taken_back_to_the_ball():
    long = torch.tensor([[1.0 + 9e-6, 0.0, 0.0]], dtype=torch.float64).repeat(50, 1)
    assert HELD.encode(long, torch.Generator().manual_seed(0))[0] == 50 * HELD.granularity
    far = torch.tensor([[1.0 + 1.1e-5, 0.0, 0.0]], dtype=torch.float64).repeat(50, 1)
    with pytest.raises(ValueError, match=r"max_norm is 1, got a vector of norm 1.00001.*clip"):
        HELD.simulate(far)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    rows = torch.zeros(50, 3, dtype=torch.float64)
    rows[31, 1] = bad
    for given_rows in (rows, [rows[:20], rows[20:]]):
        with pytest.raises(ValueError, match="finite"):
            HELD.simulate(given_rows)


@pytest.mark.parametrize(
    ("given_rows", "message"),
    [
        (torch.zeros(49, 3), r"50 users.*got 49"),
        (torch.zeros(51, 3), r"50 users.*got 51"),
        (torch.zeros(50, 2), r"\(n, 3\), got \(50, 2\)"),
        (torch.zeros(3), r"\(n, 3\), got \(3,\)"),
        (torch.zeros(50, 3, 1), r"\(n, 3\), got \(50, 3, 1\)"),
        (torch.zeros(50, 3, dtype=torch.bool), "real numbers, got torch.bool"),
        (torch.zeros(50, 3, dtype=torch.complex64), "real numbers, got torch.complex64"),
        (torch.zeros(50, 3).to_sparse(), r"X must be dense, got torch.sparse_coo.*to_dense\(\)"),
        (torch.full((50, 3), 0.9), "norm 1.5588"),
        ("rows", "got 'rows'"),
        (7, "got 7"),
        (None, "got None"),
        ([[0.0] * 3] * 50, "got a list"),
        ([], "X must hold one row per user, got none"),
        (torch.zeros(0, 3), "X must hold one row per user, got none"),
        (np.array([["a"] * 3] * 50), "X must be a tensor of real numbers"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_are_refused(given_rows, message):
    with pytest.raises(ValueError, match=message):
        HELD.simulate(given_rows)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2), r"x must have shape \(3,\), got \(2,\)"),
        (torch.zeros(3, 1), r"x must have shape \(3,\), got \(3, 1\)"),
        (torch.ones(3), "max_norm is 1, got a vector of norm 1.7"),
        ([math.nan, 0.0, 0.0], "finite"),
        ("abc", "x must be a tensor of real numbers"),
        (None, "x must be a tensor of real numbers"),
        ([True, False, False], "x must hold real numbers"),
    ],
)
def test_a_vector_that_does_not_fit_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        HELD.randomize(x)


class ElsewhereGenerator(torch.Generator):
    device = torch.device("cuda")


@pytest.mark.parametrize("generator", [3, np.random.default_rng(0), ElsewhereGenerator()])
@pytest.mark.parametrize(
    "call",
    [
        lambda generator: HELD.randomize(X, generator),
        lambda generator: HELD.simulate(X.expand(50, 3), generator),
    ],
)
def test_other_generators_are_refused(call, generator):
    with pytest.raises(ValueError, match="generator"):
        call(generator)


@pytest.mark.parametrize("total", [torch.zeros(3), torch.zeros(2, 1), torch.tensor([1, math.nan])])
def test_a_total_of_another_shape_or_not_finite_is_refused(total):
    with pytest.raises(ValueError, match=r"total must hold 2 finite numbers, in shape \(2,\)"):
        ShuffleVectorSum(10, 2, 1.0, 1.0, 1e-2).release_sum(total, 10)


def test_drop_outs_are_taken_down_to_the_honest_fraction_and_no_further():
    protocol = ShuffleVectorSum(10, 2, 1.0, 1.0, 1e-2, honest_fraction=0.35)
    for reports in (4, 7, 10):
        assert protocol.simulate(torch.zeros(reports, 2)).shape == (2,)
    for reports in (3, 11):
        for act in (
            lambda n: protocol.simulate(torch.zeros(n, 2)),
            lambda n: protocol.release_sum(torch.zeros(2), n),
            lambda n: protocol.decode(torch.zeros(2, dtype=torch.int64), n),
        ):
            with pytest.raises(ValueError, match=f"4 to 10 users.*got {reports}"):
                act(reports)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: HELD.exact_epsilon(1e-300), "delta=1e-300 is smaller than"),
        (lambda: ShuffleVectorSum(50, 3, 1.0, 1.0, 1e-250), "delta must be at least 1e-200"),
        (
            lambda: ShuffleVectorSum(50, 3, 1e200, 1.0, 1e-2),
            "max_norm must be positive and lie in .* another unit",
        ),
        (
            lambda: ShuffleVectorSum(**GOOD, sample_rate=0.5, honest_fraction=0.5),
            r"sample_rate=0.5 requires honest_fraction=1",
        ),
    ],
)
def test_what_is_not_covered_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_users", value) for value in (0, -3, 2.5, True, "3")),
        *(("dimension", value) for value in (0, math.nan, None)),
        *(("max_norm", value) for value in (0.0, -1.0, math.nan, math.inf, "1", True)),
        *(("rounds", value) for value in (0, 1.5, True)),
        *(("sample_rate", value) for value in (0.0, 1.5)),
        *(("noise_multiplier", value) for value in (0.0, 0.099, None)),
        *(("rounding_share", value) for value in (0.0, 1.5)),
        *(("rate", value) for value in (0.5, 1.5)),
    ],
)
def test_bad_arguments_are_refused_with_their_name_and_value(name, value):
    make, good = ShuffleVectorSum, GOOD
    if name in ("noise_multiplier", "rounding_share", "rate"):
        make, good = ShuffleVectorSum.with_noise_multiplier, MULTIPLIER
    with pytest.raises(ValueError, match=name) as raised:
        make(**{**good, name: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("delta", [1e-6, 1e-30, 1e-120])
def test_epsilon_is_finite_at_tiny_deltas(delta):
    lower, upper = HELD.exact_epsilon(delta)
    assert 0 <= lower <= upper < math.inf


@pytest.mark.parametrize(
    "users",
    [pytest.param(1, marks=pytest.mark.slow), 50, pytest.param(4000, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("noise_multiplier", "share"), [(0.1, 0.1), (0.5, 0.02), (1.1, 0.3), (8.0, 0.1), (300.0, 0.05)]
)
def test_a_protocol_made_for_a_noise_multiplier_has_it_or_a_little_more(
    noise_multiplier, users, share
):
    protocol = ShuffleVectorSum.with_noise_multiplier(
        users, 26_010, 2.0, noise_multiplier, delta=1e-6, rounding_share=share
    )
    most = noise_multiplier * math.sqrt(1 + share)
    assert noise_multiplier <= protocol.noise_multiplier <= most
    assert protocol.mu <= 2 / noise_multiplier
    assert protocol.lost <= 1e-12
    # What the sum's noise and rounding have is never less than the Gaussian's, and more by their
    # share at most.
    deviation = protocol.variance**0.5 / 2.0
    assert protocol.noise_multiplier <= deviation <= most * (1 + 1e-9)
    assert (
        protocol.epsilon
        == protocol.exact_epsilon()[1]
        == gaussian.compute_epsilon(mu=protocol.mu, delta=1e-6 - protocol.lost)
    )


def test_a_noise_multiplier_is_reached_almost_exactly_and_never_from_below():
    """Grids are coarse, but some of so many multipliers are met to one part in 10,000."""
    asked = [float(multiplier) for multiplier in np.geomspace(0.1, 300, 40)]
    made = [ShuffleVectorSum.with_noise_multiplier(50, 30, 2.0, s, delta=1e-6) for s in asked]
    over = [protocol.noise_multiplier / s for protocol, s in zip(made, asked, strict=True)]
    assert 1 <= min(over) <= 1 + 1e-4
    assert all(Fraction(each.noise_multiplier) * Fraction(each.mu) <= 2 for each in made)


@pytest.mark.parametrize(
    ("epsilon", "rounds", "fraction"), [(1.0, 1, 1.0), (4.0, 100, 1.0), (2.0, 7, 0.5)]
)
def test_the_noise_multiplier_that_a_budget_buys_keeps_it_with_no_more_noise(
    epsilon, rounds, fraction
):
    bought = ShuffleVectorSum(200, 30, 1.0, epsilon, 1e-6, honest_fraction=fraction, rounds=rounds)
    multiplier = 2 / SumBudget(epsilon, 1e-6, rounds=rounds).round_mu
    asked = ShuffleVectorSum.with_noise_multiplier(
        200,
        30,
        1.0,
        multiplier,
        delta=1e-6,
        honest_fraction=fraction,
        rounds=rounds,
        rounding_share=OVERHEAD,
    )
    assert asked.variance <= (1 + OVERHEAD) * bought.variance
    assert asked.rounds == rounds
    assert asked.epsilon <= epsilon
    assert asked.statement().rounds_per_user == rounds


@pytest.mark.parametrize(("share", "most_bits"), [(0.3, 70), (0.1, 180)])
def test_secret_check_in_takes_few_bits(share, most_bits):
    protocol = ShuffleVectorSum.with_noise_multiplier(
        4000, 26_010, 1.0, 1.55, delta=1e-9, zero_on_grid=True, rate=0.1, rounding_share=share
    )
    assert protocol.granularity % 2 == 0
    assert protocol.bits_per_user <= most_bits * 26_010
    noise = protocol.noise_bits * protocol.bit_probability * (1 - protocol.bit_probability)
    spread = (
        protocol.num_users * (0.1 / 4 + noise) * (2 / protocol.granularity) ** 2
    )  # 0.1 of them round
    assert protocol.noise_multiplier <= math.sqrt(spread) <= 1.55 * math.sqrt(1 + share)
