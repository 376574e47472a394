"""``ShuffleVectorSum``: the paper's constants, what it says of itself, and what it refuses."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from opacus_shuffle.analysis import binomial_sums, gaussian
from opacus_shuffle.analysis.binomial_sums import BinomialNoise, gaussian_bound
from opacus_shuffle.core.guarantees import Guarantee, PrivacyBound
from opacus_shuffle.protocols.calibration import OVERHEAD, Promise
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


def test_the_statement_says_what_a_user_sends_and_gets():
    protocol = ShuffleVectorSum(
        90, 4, 1.0, 1.0, 1e-5, rounds=6, calibration="tight", honest_fraction=0.5
    )
    statement = protocol.statement()
    assert (statement.epsilon, statement.delta, statement.rounds, statement.rounds_per_user) == (
        1.0,
        1e-5,
        6,
        6,
    )
    assert statement.bits_per_user == 6 * 4 * (protocol.granularity + protocol.noise_bits)
    assert (statement.num_users, statement.honest_fraction, statement.calibration) == (
        90,
        0.5,
        "tight",
    )
    assert isinstance(statement, PrivacyBound)
    assert (statement.adjacency, statement.guarantee, statement.bound) == (
        "replace",
        Guarantee.PROVED,
        "certified",
    )
    assert statement.to_dict()["trusted"] == "the shuffler"
    text = str(statement)
    for part in (
        "epsilon = 1",
        "1e-05",
        "replaced",
        "90 users",
        "shuffler",
        "at least 0.5",
        "6",
        "tight",
    ):
        assert part in text


HELD = ShuffleVectorSum(50, 3, 1.0, 1.0, 1e-2, "tight")


def test_a_norm_above_by_rounding_is_taken_back_to_the_ball():
    long = torch.tensor([[1.0 + 9e-6, 0.0, 0.0]], dtype=torch.float64)
    for rows in (long.expand(50, 3), long.repeat(50, 1), long.repeat(50, 1).to_sparse()):
        assert HELD.encode(rows, torch.Generator().manual_seed(0))[0] == 50 * HELD.granularity
    far = torch.tensor([[1.0 + 1.1e-5, 0.0, 0.0]], dtype=torch.float64)
    for rows in (far.expand(50, 3), far.repeat(50, 1), far.repeat(50, 1).to_sparse()):
        with pytest.raises(ValueError, match=r"max_norm is 1, got a vector of norm 1.00001.*clip"):
            HELD.simulate(rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["dense", "sparse", "expanded", "blocks"])
def test_values_that_are_not_finite_are_refused(bad, form):
    rows = torch.zeros(50, 3, dtype=torch.float64)
    rows[0 if form == "expanded" else 31, 1] = bad
    given_rows = {
        "dense": rows,
        "sparse": rows.to_sparse(),
        "expanded": rows[:1].expand(50, 3),
        "blocks": [rows[:20], rows[20:]],
    }[form]
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
        (torch.full((50, 3), 0.9), "norm 1.5588"),
        ("rows", "got 'rows'"),
        (7, "got 7"),
        (None, "got None"),
        ([[0.0] * 3] * 50, "got a list"),
        ([], "got none"),
        (np.array([["a"] * 3] * 50), "points|real|number"),
        (np.array([[None] * 3] * 50), "points|real|number"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_rows_that_do_not_fit_are_refused(given_rows, message):
    with pytest.raises(ValueError, match=message):
        HELD.simulate(given_rows)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2),
        torch.zeros(3, 1),
        torch.ones(3),
        [math.nan, 0.0, 0.0],
        [math.inf, 0.0, 0.0],
        "abc",
        None,
        torch.tensor([True, False, False]),
        [True, False, False],
        torch.tensor([0.1j, 0, 0]),
    ],
    ids=[
        "short",
        "matrix",
        "long",
        "nan",
        "inf",
        "string",
        "None",
        "bool tensor",
        "bools",
        "complex",
    ],
)
def test_a_vector_that_does_not_fit_is_refused(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"."):
            HELD.randomize(x)


class ElsewhereGenerator(torch.Generator):
    device = torch.device("cuda")


@pytest.mark.parametrize(
    "generator", [3, "seed", np.random.default_rng(0), True, ElsewhereGenerator()]
)
def test_other_generators_are_refused(generator):
    x = torch.zeros(3)
    sent = [HELD.randomize(x)] * 50
    for call in (
        lambda: HELD.randomize(x, generator),
        lambda: HELD.simulate(x.expand(50, 3), generator),
        lambda: HELD.encode(x.expand(50, 3), generator),
        lambda: HELD.draw_noise(50, generator),
        lambda: HELD.shuffle(sent, generator),
    ):
        with pytest.raises(ValueError, match="generator"):
            call()


X = torch.zeros(3)
MINE = [HELD.randomize(X) for _ in range(50)]
OTHER = ShuffleVectorSum(60, 3, 1.0, 1.0, 1e-2, "tight")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: HELD.shuffle([*MINE[:-1], OTHER.randomize(X)]), "another protocol"),
        (lambda: HELD.analyze(OTHER.shuffle([OTHER.randomize(X)] * 60)), "another protocol"),
        (
            lambda: HELD.shuffle(
                [ShuffleVectorSum(50, 2, 1.0, 1.0, 1e-2, "tight").randomize(X[:2])] * 50
            ),
            "another protocol",
        ),
        (lambda: HELD.shuffle(MINE[:49]), r"50 users.*got 49"),
        (lambda: HELD.shuffle([*MINE, MINE[0]]), r"50 users.*got 51"),
        (lambda: HELD.shuffle([]), "at least one"),
        (lambda: HELD.shuffle(["bits"] * 50), "Messages, got str"),
        (lambda: HELD.analyze(np.zeros(3)), "Messages, got ndarray"),
        (lambda: HELD.analyze(MINE), "call shuffle on it first"),
        (lambda: HELD.analyze(MINE[0]), r"50 users.*got 1"),
    ],
)
def test_messages_of_another_protocol_or_crowd_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_drop_outs_are_taken_down_to_the_honest_fraction_and_no_further():
    protocol = ShuffleVectorSum(10, 2, 1.0, 1.0, 1e-2, "tight", 0.35)
    for reports in (4, 7, 10):
        assert protocol.simulate(torch.zeros(reports, 2)).shape == (2,)
    for reports in (3, 11):
        with pytest.raises(ValueError, match=f"4 to 10 users.*got {reports}"):
            protocol.simulate(torch.zeros(reports, 2))
        with pytest.raises(ValueError, match=f"got {reports}"):
            protocol.draw_noise(reports)
        with pytest.raises(ValueError, match=f"got {reports}"):
            protocol.decode(torch.zeros(2, dtype=torch.int64), reports)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_users", 0),
        ("num_users", -3),
        ("num_users", 2.5),
        ("num_users", True),
        ("num_users", "3"),
        ("dimension", 0),
        ("dimension", math.nan),
        ("dimension", None),
        ("max_norm", 0.0),
        ("max_norm", -1.0),
        ("max_norm", math.nan),
        ("max_norm", math.inf),
        ("max_norm", "1"),
        ("max_norm", True),
        ("rounds", 0),
        ("rounds", 1.5),
        ("rounds", True),
        ("sample_rate", 0.0),
        ("sample_rate", 1.5),
    ],
)
def test_bad_arguments_are_refused_with_their_name_and_value(name, value):
    good = {
        "num_users": 9,
        "dimension": 2,
        "max_norm": 1.0,
        "epsilon": 1.0,
        "delta": 0.1,
        "calibration": "tight",
        "rounds": 2,
    }
    with pytest.raises(ValueError, match=name) as raised:
        ShuffleVectorSum(**{**good, name: value})
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize(
    "way", [{"calibration": "published"}, {"calibration": "tight", "honest_fraction": 0.5}]
)
def test_what_sampling_gains_is_for_the_tight_calibration_and_honest_users(way):
    with pytest.raises(ValueError, match=r"sample_rate=0.5.*tight.*honest_fraction=1"):
        ShuffleVectorSum(9, 2, 1.0, 1.0, 0.1, rounds=2, sample_rate=0.5, **way)


@pytest.mark.parametrize("layout", ["csr", "coo"])
def test_entries_that_a_sparse_row_holds_twice_count_together_towards_its_norm(layout):
    copies, value = 64, 1 / 8  # a row of norm 8, none of whose entries shows it
    if layout == "csr":
        rows = torch.tensor([0] + [copies] * 50)
        X = torch.sparse_csr_tensor(
            rows, torch.zeros(copies).long(), torch.full((copies,), value), size=(50, 3)
        )
    else:
        where = torch.zeros(2, copies, dtype=torch.long)
        X = torch.sparse_coo_tensor(
            where, torch.full((copies,), value), size=(50, 3), is_coalesced=True
        )
    with pytest.raises(ValueError, match="norm 8"):
        HELD.simulate(X)


@pytest.mark.parametrize("max_norm", [1e-200, 5e-324, 1e200])
def test_units_in_which_squares_vanish_or_overflow_are_refused(max_norm):
    with pytest.raises(ValueError, match=r"max_norm must lie in .* another unit"):
        ShuffleVectorSum(50, 3, max_norm, 1.0, 1e-2, "tight")


@pytest.mark.parametrize("rounds", [1, 5])
def test_one_rounds_own_epsilon_is_that_of_everyone_in_it(rounds):
    protocol = ShuffleVectorSum(
        50, 3, 1.0, 1.0, 1e-3, rounds=rounds, calibration="tight", sample_rate=0.1
    )
    one = [(protocol.sum_round, 1)]
    assert (
        protocol.round_epsilon >= binomial_sums.lower_epsilon(one, delta=protocol.round_delta) > 1
    )


def test_probabilities_beyond_known_tails_are_refused():
    with pytest.raises(ValueError, match="delta must be at least 1e-200"):
        ShuffleVectorSum(50, 3, 1.0, 1.0, 1e-250, "tight")


@pytest.mark.parametrize("nobody", [torch.zeros(0, 3), []], ids=["tensor", "blocks"])
def test_a_sum_over_nobody_is_refused(nobody):
    with pytest.raises(ValueError, match="X must hold one row per user, got none"):
        HELD.simulate(nobody)


@pytest.mark.parametrize("delta", [1e-6, 1e-30, 1e-120])
def test_epsilon_is_finite_at_tiny_deltas(delta):
    lower, upper = HELD.exact_epsilon(delta)
    assert 0 <= lower <= upper < math.inf


def test_an_infinite_epsilon_is_refused_and_not_answered():
    with pytest.raises(ValueError, match="delta=1e-300 is less than"):
        HELD.exact_epsilon(1e-300)


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
    assert protocol.calibration == "tight"
    assert (
        protocol.epsilon
        == protocol.exact_epsilon()[1]
        == gaussian.compute_epsilon(mu=protocol.mu, delta=1e-6 - protocol.lost)
    )


@pytest.mark.parametrize(
    ("epsilon", "rounds", "fraction"), [(1.0, 1, 1.0), (4.0, 100, 1.0), (2.0, 7, 0.5)]
)
def test_the_noise_multiplier_that_a_budget_buys_keeps_it_with_no_more_noise(
    epsilon, rounds, fraction
):
    bought = ShuffleVectorSum(200, 30, 1.0, epsilon, 1e-6, honest_fraction=fraction, rounds=rounds)
    multiplier = 2 / Promise(epsilon, 1e-6, rounds=rounds).round_mu
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


def test_more_noise_takes_hardly_more_bits_and_mostly_fewer():
    """The share of rounding grows with coarser grids, and more noise allows coarser ones; whole bits are a small step back."""
    bits = []
    for multiplier in (10, 12, 14, 14.6, 15, 16, 17, 18, 19, 20):
        protocol = ShuffleVectorSum.with_noise_multiplier(
            4000, 8330, 0.5, multiplier, delta=1e-5, rounds=60, rate=0.5, zero_on_grid=True
        )
        bits.append(protocol.granularity + protocol.noise_bits)
    assert all(later <= 1.1 * sooner for sooner, later in itertools.pairwise(bits))
    assert bits[-1] < bits[0] <= 50


def test_many_users_have_noise_bits_that_are_seldom_one_and_a_coarser_grid():
    sizes = {"delta": 1e-9, "zero_on_grid": True, "rate": 0.001}
    many = ShuffleVectorSum.with_noise_multiplier(10**6, 10**6, 1.0, 1.1, **sizes)
    assert many.noise_bits == 1
    assert many.bit_probability < 0.1
    fair = (
        2 * math.sqrt(10**6 / 4) / many.noise_multiplier
    )  # the grid's steps with one fair bit each
    assert many.granularity < fair / 2


@settings(deadline=None, max_examples=60)
@given(
    trials=st.integers(20, 400),
    steps=st.integers(1, 8191),
    shift=st.integers(1, 12),
    epsilon=st.floats(0, 8),
    tail=st.floats(1e-12, 1e-3),
)
def test_the_covering_gaussian_covers_noise_bits_of_any_probability_in_both_directions(
    trials, steps, shift, epsilon, tail
):
    noise = BinomialNoise(trials=trials, probability=steps / 8192)
    bound = gaussian_bound(noise, shift=shift, tail=tail)
    assume(math.isfinite(bound.slope))
    masses = binom.pmf(range(-shift, trials + shift + 1), trials, steps / 8192)
    one, other = masses[shift:], masses[: len(masses) - shift]
    pairs = (one, other), (other, one)
    exact = max(float(np.maximum(a - math.exp(epsilon) * b, 0.0).sum()) for a, b in pairs)
    covered = math.exp(gaussian.log_delta(mu=bound.slope * shift, epsilon=epsilon)) + bound.lost
    assert exact <= covered * (1 + 1e-9) + 1e-13


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", 0.0),
        ("rounding_share", 0.0),
        ("rounding_share", 1.5),
        ("rate", 1.5),
        ("rate", 0.5),
        ("noise_multiplier", 0.099),
        ("noise_multiplier", None),
        ("delta", 0.5),
        ("rounds", 0),
        ("honest_fraction", 0.1),
    ],
)
def test_a_noise_multiplier_that_no_protocol_can_have_is_refused_by_name(name, value):
    good = {"num_users": 9, "dimension": 2, "max_norm": 1.0, "noise_multiplier": 1.0, "delta": 0.1}
    with pytest.raises(ValueError, match=name):
        ShuffleVectorSum.with_noise_multiplier(**{**good, name: value})
