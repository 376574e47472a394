"""Sums of vectors: what the adversary sees, outcome by outcome; and that messages, simulation and formula agree in law.

The first half builds the law of every coordinate's count from scratch (neighbouring binomial probabilities, the user's random
rounding, sums over all outcomes) and asks whether (ε, δ) is true. Outcomes left out of a window count in full towards δ. The
second half draws answers and compares them with such exact laws by χ² tests with fixed seeds; a right implementation would fail
one test in a million.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import fftconvolve
from scipy.stats import chi2

from opacus_shuffle.accountants.bounds import Guarantee
from opacus_shuffle.analysis import binomial_sums
from opacus_shuffle.sco import grid_sum
from opacus_shuffle.sco.calibration import GridPlan
from opacus_shuffle.sco.messages import Messages
from opacus_shuffle.sco.vector_sum import ShuffleVectorSum

UNLIKELY = 1e-6
REACH = 7.0


# ---- exact laws -------------------------------------------------------------------------------------------------------------


def binomial_law(trials, probability):
    """(first, probabilities) of all outcomes within 14 standard deviations; beyond lies less than 1e-40."""
    mean, deviation = trials * probability, math.sqrt(trials * probability * (1 - probability))
    first, last = max(0, math.floor(mean - 14 * deviation)), min(trials, math.ceil(mean + 14 * deviation))
    y = np.arange(first, last)
    logs = np.concatenate([[0.0], np.cumsum(np.log((trials - y) / (y + 1)) + math.log(probability / (1 - probability)))])
    masses = np.exp(logs - logs.max())
    return first, masses / masses.sum()


def rounded(masses, value, low, size):
    """The law of noise and one rounded value, on the outcomes low, low + 1, …"""
    whole, fraction = math.floor(value), value - math.floor(value)
    law = np.zeros(size)
    law[whole - low : whole - low + len(masses)] += (1 - fraction) * masses
    if fraction:
        law[whole - low + 1 : whole - low + 1 + len(masses)] += fraction * masses
    return law


def views(protocol, x, other, *, rest=(), reports=None):
    """Per coordinate in which x and the other vector differ: the two laws of the count, noise of ``reports`` users."""
    reports = math.ceil(protocol.honest_fraction * protocol.num_users - 1e-9) if reports is None else reports
    _, noise = binomial_law(reports * protocol.noise_bits, protocol.bit_probability)
    pairs = []
    for j, (one, two) in enumerate(zip(x, other, strict=True)):
        if one == two:
            continue
        ends = [(value + protocol.max_norm) * protocol.granularity / (2 * protocol.max_norm) for value in (one, two)]
        masses = noise
        for row in rest:
            place = (row[j] + protocol.max_norm) * protocol.granularity / (2 * protocol.max_norm)
            fraction = place - math.floor(place)
            masses = np.convolve(masses, [1 - fraction, fraction])
        low = min(math.floor(end) for end in ends)
        size = len(masses) + max(math.floor(end) for end in ends) - low + 1
        pairs.append(tuple(rounded(masses, end, low, size) for end in ends))
    return pairs


def windowed(p, q, budget):
    """Both laws where they are likely, and what the first has elsewhere."""
    both = np.maximum(p, q)
    start = int(np.searchsorted(np.cumsum(both), budget))
    end = len(both) - int(np.searchsorted(np.cumsum(both[::-1]), budget))
    return p[start:end], q[start:end], float(p[:start].sum() + p[end:].sum())


def one_way(pairs, epsilon, budget):
    """δ(ε) of up to three coordinates: outer products, the last one by cumulative sums over its losses."""
    left_out, kept = 0.0, []
    for p, q in pairs:
        p, q, outside = windowed(p, q, budget)
        left_out += outside
        kept.append((p, q))
    if not kept:
        return 0.0
    *first, (p, q) = kept
    left, right = np.ones(()), np.ones(())
    for a, b in first:
        left, right = np.multiply.outer(left, a).ravel(), np.multiply.outer(right, b).ravel()
    left, right = np.atleast_1d(left), np.atleast_1d(right)
    with np.errstate(divide="ignore"):
        ratio, cut = p / q, math.exp(epsilon) * right / left
    order = np.argsort(ratio)
    above_p = np.append(np.cumsum(p[order][::-1])[::-1], 0)
    above_q = np.append(np.cumsum(q[order][::-1])[::-1], 0)
    index = np.searchsorted(ratio[order], cut)
    return float(np.maximum(left * above_p[index] - math.exp(epsilon) * right * above_q[index], 0).sum()) + left_out


def exact_delta(pairs, epsilon, budget=1e-9):
    """The larger of both directions; nothing is left out that is not counted."""
    return max(one_way(pairs, epsilon, budget), one_way([(q, p) for p, q in pairs], epsilon, budget))


def test_the_enumeration_agrees_with_a_sum_over_every_pair_of_outcomes():
    protocol = ShuffleVectorSum(2, 2, 1.0, 1.0, 0.1, "tight")
    protocol._plan = GridPlan(5, 40, 0.3, 2)
    pairs = views(protocol, [0.6, -0.3], [-0.4, 0.55])
    (p, q), (r, s) = pairs
    for epsilon in (0.0, 0.5, 2.0):
        direct = np.maximum(np.multiply.outer(p, r) - math.exp(epsilon) * np.multiply.outer(q, s), 0).sum()
        assert direct <= one_way(pairs, epsilon, 1e-12) <= direct + 1e-11
        assert composed_delta(pairs, epsilon, 1e-4, 1) == pytest.approx(direct, rel=1e-3, abs=1e-9)


def neighbours(dimension, rng):
    """Pairs of vectors in the unit ball that one user may hold."""
    e = np.eye(dimension)
    diagonal = np.ones(dimension) / math.sqrt(dimension)
    signs = np.where(np.arange(dimension) % 2, -1.0, 1.0) / math.sqrt(dimension)
    tilted = np.linspace(1, 0.2, dimension) / np.linalg.norm(np.linspace(1, 0.2, dimension))
    pairs = [
        (e[0], -e[0]),
        (-e[0], e[0]),
        (diagonal, -diagonal),
        (signs, -signs),
        (tilted, -tilted),
        (e[0], np.zeros(dimension)),
        (0.9999 * e[0], -0.99995 * e[0]),
        (0.003 * diagonal, -0.0041 * diagonal),
        (0.5 * e[0], 0.5 * e[0] - 0.013 * diagonal),
    ]
    if dimension > 1:
        pairs += [(e[0], e[1]), (e[0], -tilted)]
    for _ in range(3):
        ends = rng.standard_normal((2, dimension))
        ends /= np.linalg.norm(ends, axis=1, keepdims=True)
        pairs.append(tuple(ends * rng.uniform(0.3, 1, (2, 1))))
    return pairs


CASES = [
    # users, dimension, ε, δ, fraction
    (10, 1, 1.0, 1e-2, 1.0),
    (3, 1, 0.5, 1e-3, 1 / 3),
    (1, 1, 3.0, 1e-2, 1.0),
    (7, 2, 1.0, 1e-2, 1.0),
    (10, 2, 3.0, 1e-3, 0.55),
    (5, 2, 0.5, 2e-2, 1 / 3),
    (12, 3, 2.0, 1e-2, 1.0),
    (9, 3, 1.0, 2e-2, 0.4),
]


@pytest.mark.parametrize(("users", "dimension", "epsilon", "delta", "fraction"), CASES)
def test_no_two_neighbours_are_told_apart_better_than_promised_when_tight(users, dimension, epsilon, delta, fraction):
    protocol = ShuffleVectorSum(users, dimension, 1.0, epsilon, delta, "tight", fraction)
    rng = np.random.default_rng(users)
    pairs = neighbours(dimension, rng)
    if dimension == 3:
        pairs = pairs[:5] + pairs[-2:]
    worst = [exact_delta(views(protocol, x, other), epsilon, budget=delta * 1e-5) for x, other in pairs]
    assert max(worst) <= delta
    # Moving from end to end of one coordinate nearly takes it all: 5 % in variance, and what a lattice leaves.
    assert worst[0] >= 0.75 * delta


@pytest.mark.parametrize(("users", "dimension", "epsilon", "delta", "fraction"), CASES)
def test_the_tight_noise_would_not_do_for_six_per_cent_more(users, dimension, epsilon, delta, fraction):
    protocol = ShuffleVectorSum(users, dimension, 1.0, epsilon, delta, "tight", fraction)
    _, noise = binomial_law(math.ceil(fraction * users - 1e-9) * protocol.noise_bits, 0.5)
    # OVERHEAD is 5 % of the variance, 2.5 % of the steps; the rest is for the binomial's lighter tails and whole steps.
    more = math.ceil(1.06 * protocol.granularity)
    size = len(noise) + more + 1
    assert exact_delta([(rounded(noise, 0, 0, size), rounded(noise, more, 0, size))], epsilon, budget=1e-12) > delta


@pytest.mark.parametrize(
    ("users", "dimension", "epsilon", "delta", "fraction"),
    [(3, 1, 1.0, 0.1, 1.0), (2, 2, 8.0, 0.2, 1.0), (6, 2, 2.0, 0.4, 0.5), (1, 1, 15.0, 0.49, 1.0), (9, 3, 15.0, 0.3, 1.0)],
)
def test_no_two_neighbours_are_told_apart_better_than_promised_by_the_paper(users, dimension, epsilon, delta, fraction):
    protocol = ShuffleVectorSum(users, dimension, 0.5, epsilon, delta, "paper", fraction)
    for x, other in neighbours(dimension, np.random.default_rng(users))[:6]:
        pairs = views(protocol, 0.5 * x, 0.5 * other)
        if dimension == 3:
            pairs = pairs[:2]  # with noise as large as this, two coordinates are as many outcomes as memory holds
        assert exact_delta(pairs, epsilon, budget=1e-6) <= delta * 1e-2 + 6e-6


@pytest.mark.parametrize("reports", [4, 7, 10])
def test_who_stays_is_protected_whoever_drops_out(reports):
    protocol = ShuffleVectorSum(10, 2, 1.0, 1.0, 1e-2, "tight", 0.4)
    found = [exact_delta(views(protocol, x, y, reports=reports), 1.0, 1e-7) for x, y in neighbours(2, np.random.default_rng(1))]
    assert max(found) <= 1e-2
    assert reports > 4 or max(found) >= 0.75e-2


def test_other_users_rounding_only_hides_more():
    protocol = ShuffleVectorSum(5, 2, 1.0, 1.0, 1e-2, "tight")
    rng = np.random.default_rng(4)
    rest = rng.uniform(-0.7, 0.7, (4, 2))
    for x, other in neighbours(2, rng):
        alone = exact_delta(views(protocol, x, other), 1.0, budget=1e-9)
        assert exact_delta(views(protocol, x, other, rest=rest), 1.0, budget=1e-9) <= alone + 1e-8


def composed_delta(pairs, epsilon, step, repeats):
    """Above δ(ε) of independent coordinates, each so many times: losses rounded up to ``step`` and convolved."""
    infinite, total = 0.0, None
    for p, q in pairs:
        seen = (p > 0) & (q > 0)
        infinite += repeats * float(p[~seen].sum())
        cells = np.ceil(np.log(p[seen] / q[seen]) / step).astype(np.int64)
        low, law = int(cells.min()), np.bincount(cells - cells.min(), p[seen])
        for _ in range(repeats):
            if total is None:
                first, total = low, law
                continue
            first, total = first + low, np.maximum(fftconvolve(total, law), 0)
            start = int(np.searchsorted(np.cumsum(total), 1e-13))
            end = len(total) - int(np.searchsorted(np.cumsum(total[::-1]), 1e-13))
            infinite += float(total[end:].sum()) + 1e-12  # the FFT's own error
            left = float(total[:start].sum())
            first, total = first + start, total[start:end]
            total[0] += left
    at = (first + np.arange(len(total))) * step
    return float(total @ np.maximum(-np.expm1(np.minimum(epsilon - at, 0.0)), 0.0)) + infinite


@pytest.mark.parametrize("dimension", [5, 30])
def test_moves_along_many_coordinates_stay_within_delta(dimension):
    protocol = ShuffleVectorSum(20, dimension, 1.0, 1.0, 1e-3, "tight")
    rng = np.random.default_rng(dimension)
    diagonal = np.ones(dimension) / math.sqrt(dimension)
    ends = rng.standard_normal(dimension)
    ends /= np.linalg.norm(ends)
    for x, other in ((diagonal, -diagonal), (ends, -ends), (ends, -0.8 * diagonal)):
        pairs = views(protocol, x, other)
        for way in (pairs, [(q, p) for p, q in pairs]):
            assert composed_delta(way, 1.0, 1e-4 if dimension == 5 else 3e-5, 1) <= 1e-3


@pytest.mark.parametrize("calibration", ["tight", "paper"])
@pytest.mark.parametrize("rounds", [2, 10])
def test_rounds_with_the_same_users_stay_within_delta_together(calibration, rounds):
    epsilon, delta = 1.0, 1e-3
    protocol = ShuffleVectorSum.for_rounds(8, 2, 1.0, epsilon, delta, rounds=rounds, calibration=calibration)
    if calibration == "paper":
        # Noise this large has too many outcomes to list: the proved upper value at a far smaller ε instead.
        assert binomial_sums.compute_epsilon([(protocol.sum_round, rounds)], delta=delta) <= 0.1 * epsilon
        assert protocol.round_epsilon == pytest.approx(epsilon / (2 * math.sqrt(2 * rounds * math.log(1 / delta))))
        assert protocol.round_delta == delta / (rounds + 1)
        return
    step = 1e-3 / rounds
    for x, other in (([1.0, 0.0], [-1.0, 0.0]), ([0.6, 0.8], [-0.6, -0.8])):
        pairs = views(protocol, x, other)
        for way in (pairs, [(q, p) for p, q in pairs]):
            found = composed_delta(way, epsilon, step, rounds)
            assert found <= delta
            assert found >= 0.7 * delta
    lower, upper = protocol.exact_epsilon()
    pairs = views(protocol, [1.0, 0.0], [-1.0, 0.0])
    assert 0.9 < lower <= upper <= epsilon
    assert composed_delta(pairs, upper, step, rounds) <= delta <= composed_delta(pairs, lower, step, rounds)
    # More rounds than it was made for cost more, and that is not cut off at the protocol's ε.
    assert protocol.exact_epsilon(rounds=4 * rounds)[0] > epsilon


@pytest.mark.parametrize("calibration", ["tight", "paper"])
def test_exact_epsilon_brackets_the_enumerated_value(calibration):
    protocol = ShuffleVectorSum(6, 2, 1.0, 4.0, 0.05, calibration)
    for delta in (0.05, 1e-3):
        lower, upper = protocol.exact_epsilon(delta)
        assert 0 <= lower <= upper
        pairs = views(protocol, [1.0, 0.0], [-1.0, 0.0])
        assert exact_delta(pairs, lower, 1e-12) >= delta * (1 - 1e-6) or lower == 0
        assert exact_delta(pairs, upper, 1e-12) <= delta
    assert protocol.exact_epsilon()[1] <= protocol.epsilon


def test_one_round_is_the_constructor():
    one = ShuffleVectorSum(100, 5, 2.0, 1.0, 1e-5, "tight")
    two = ShuffleVectorSum.for_rounds(100, 5, 2.0, 1.0, 1e-5, rounds=1, calibration="tight")
    assert (one.granularity, one.noise_bits, one.round_epsilon, one.round_delta) == (
        two.granularity,
        two.noise_bits,
        two.round_epsilon,
        two.round_delta,
    )


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.01])
def test_no_statement_claims_less_than_one_pair_of_data_sets_shows(rate):
    protocol = ShuffleVectorSum.for_rounds(1000, 10, 1.0, 1.0, 1e-6, rounds=10, calibration="tight", sample_rate=rate)
    shown = binomial_sums.lower_epsilon([(protocol.sum_round, 10)], delta=1e-6, sample_rate=rate)
    assert shown > 0.9
    assert protocol.exact_epsilon()[1] >= shown
    statement = protocol.statement()
    assert statement.guarantee is not Guarantee.PROVED or statement.epsilon >= shown


# ---- the paper's numbers, the statement -------------------------------------------------------------------------------------


def test_the_papers_protocol_has_theorem_a6s_numbers():
    protocol = ShuffleVectorSum(1000, 50, 1.5, 2.0, 1e-4)
    share = 1e-4 / 51
    small = 2.0 / (18 * math.sqrt(math.log(1 / share)))
    g = math.ceil(2 * 1.5 * math.sqrt(1000))
    assert protocol.granularity == g
    b = math.floor(180 * g**2 * math.log(2 / share) / (small**2 * 1000)) + 1
    assert protocol.noise_bits == b
    p = 90 * g**2 * math.log(2 / share) / (b * small**2 * 1000)
    assert protocol.bit_probability == pytest.approx(p, rel=1e-12)
    assert protocol.bits_per_user == 50 * (g + b)
    assert protocol.variance == pytest.approx((3.0 / g) ** 2 * 1000 * (0.25 + b * p * (1 - p)))
    assert ShuffleVectorSum(1, 2, 1.0, 1.0, 0.1).granularity == 4
    assert ShuffleVectorSum(1, 101, 1.0, 1.0, 0.1).granularity == 11


def test_the_statement_says_what_a_user_sends_and_gets():
    protocol = ShuffleVectorSum.for_rounds(90, 4, 1.0, 1.0, 1e-5, rounds=6, calibration="tight", honest_fraction=0.5)
    statement = protocol.statement(rounds=20, rounds_per_user=3, num_users=400, interaction="full")
    assert (statement.epsilon, statement.delta, statement.rounds, statement.rounds_per_user) == (1.0, 1e-5, 20, 3)
    assert statement.bits_per_user == 3 * 4 * (protocol.granularity + protocol.noise_bits)
    assert (statement.num_users, statement.honest_fraction, statement.calibration) == (400, 0.5, "tight")
    assert (statement.adjacency, statement.guarantee) == ("replace", Guarantee.PROVED)
    text = str(statement)
    for part in ("epsilon = 1", "1e-05", "replaced", "400 users", "shuffler", "at least 0.5", "20", "tight"):
        assert part in text
    assert protocol.statement().rounds_per_user == 6
    with pytest.raises(ValueError, match=r"rounds_per_user=7.*for_rounds"):
        protocol.statement(rounds_per_user=7)


def test_a_statement_refuses_an_unknown_interaction():
    protocol = ShuffleVectorSum(90, 4, 1.0, 1.0, 1e-5, "tight")
    with pytest.raises(ValueError, match="interaction"):
        str(protocol.statement(interaction="some"))


def test_no_user_takes_part_in_more_rounds_than_there_are():
    protocol = ShuffleVectorSum.for_rounds(90, 4, 1.0, 1.0, 1e-5, rounds=5, calibration="tight")
    assert protocol.statement(rounds=2).rounds_per_user == 2
    with pytest.raises(ValueError, match="rounds_per_user=3"):
        protocol.statement(rounds=2, rounds_per_user=3)


# ---- laws -------------------------------------------------------------------------------------------------------------------

PLAN = GridPlan(41, 6, 0.3, 4)


def small_protocol(dimension, users=4, plan=PLAN, fraction=1.0):
    """A protocol with a grid coarse and noise small enough to see every rounding."""
    protocol = ShuffleVectorSum(users, dimension, 1.0, 1.0, 1e-2, "tight", fraction)
    protocol._plan = dataclasses.replace(plan, honest_users=math.ceil(users * fraction - 1e-9))
    return protocol


def count_law(values, plan, reports):
    """(first, probabilities) of a coordinate's count: everybody's rounding, and the noise."""
    first, law = binomial_law(reports * plan.noise_bits, plan.bit_probability)
    for value in values:
        place = (value + 1) * plan.granularity / 2
        first += math.floor(place)
        law = np.convolve(law, [1 - (place - math.floor(place)), place - math.floor(place)])
    return first, law


def assert_of_law(counts, first, law):
    """χ² over the outcomes, those expected fewer than 10 times together."""
    counts = np.asarray(counts).ravel()
    assert counts.min() >= first
    assert counts.max() < first + len(law)
    seen = np.bincount(counts - first, minlength=len(law)).astype(float)
    expected = len(counts) * law / law.sum()
    rare = expected < 10
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:
        assert seen[-1] <= 12
        seen, expected = seen[:-1], expected[:-1]
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, len(seen) - 1) > UNLIKELY


def assert_mean_and_variance(counts, first, law):
    counts = np.asarray(counts, dtype=float).ravel()
    outcomes = first + np.arange(len(law))
    mean = float(law @ outcomes)
    variance = float(law @ (outcomes - mean) ** 2)
    fourth = float(law @ (outcomes - mean) ** 4)
    assert abs(counts.mean() - mean) <= 5 * math.sqrt(variance / len(counts))
    assert abs(counts.var() - variance) <= 5 * math.sqrt((fourth - variance**2) / len(counts))


WIDE = 2000
USERS = np.array([0.9, -0.55, 0.02, -1.0]) / math.sqrt(WIDE)  # every coordinate of user i, norms up to 1


def answers_as_counts(protocol, answer, reports):
    """The number of ones that the analyzer's answer came from."""
    counts = (answer + reports * protocol.max_norm) * protocol.granularity / (2 * protocol.max_norm)
    counts = counts + reports * protocol.noise_bits * protocol.bit_probability
    np.testing.assert_allclose(counts, counts.round(), atol=1e-6)
    return counts.round().to(torch.int64).numpy()


def shapes():
    """The same four users' rows in every form that is taken."""
    rows = torch.tensor(USERS).unsqueeze(1).expand(4, WIDE).contiguous()
    return {
        "float64": lambda: rows,
        "numpy": lambda: rows.numpy(),
        "blocks": lambda: (rows[k : k + 3] for k in (0, 3)),
        "list of blocks": lambda: [rows[:1], rows[1:2].numpy(), rows[2:]],
        "column-major": lambda: rows.T.contiguous().T,
        "coo": lambda: rows.to_sparse(),
        "csr": lambda: rows.to_sparse_csr(),
        "uncoalesced": lambda: torch.sparse_coo_tensor(
            torch.cat([rows.to_sparse().indices()] * 2, 1),
            torch.cat([0.25 * rows.flatten(), 0.75 * rows.flatten()]),
            rows.shape,
        ),
        "requires grad": lambda: rows.clone().requires_grad_(),
        "row by row, expanded": lambda: [row.unsqueeze(0).expand(1, WIDE) for row in rows],
    }


@pytest.mark.parametrize("shape", list(shapes()))
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_simulated_counts_have_the_exact_law(shape):
    protocol = small_protocol(WIDE)
    generator = torch.Generator().manual_seed(20)
    counts = []
    for _ in range(8):
        answer = protocol.simulate(shapes()[shape](), generator)
        assert answer.dtype == torch.float64
        assert answer.shape == (WIDE,)
        counts.append(answers_as_counts(protocol, answer, 4))
    law = count_law(USERS, PLAN, 4)
    assert_of_law(counts, *law)
    assert_mean_and_variance(counts, *law)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_single_and_half_precision_have_the_law_of_their_values(dtype):
    protocol = small_protocol(WIDE)
    rows = (0.99 * torch.tensor(USERS)).to(dtype).unsqueeze(1).expand(4, WIDE).contiguous()
    generator = torch.Generator().manual_seed(21)
    counts = [answers_as_counts(protocol, protocol.simulate(rows, generator), 4) for _ in range(8)]
    assert_of_law(counts, *count_law(rows[:, 0].double().tolist(), PLAN, 4))


@pytest.mark.parametrize("users", [1, 2, 4, 60])
@pytest.mark.parametrize("value", [0.7, -0.31, 1.0, 0.0])
def test_an_expanded_row_has_the_law_of_its_copies(users, value):
    value = value / math.sqrt(WIDE)
    protocol = small_protocol(WIDE, users)
    generator = torch.Generator().manual_seed(22)
    row = torch.full((1, WIDE), value, dtype=torch.float64).expand(users, WIDE)
    broadcast = np.broadcast_to(row[0].numpy(), (users, WIDE))
    counts = [answers_as_counts(protocol, protocol.simulate(row, generator), users) for _ in range(8)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's about arrays that are not writable
        counts += [answers_as_counts(protocol, protocol.simulate(broadcast, generator), users) for _ in range(4)]
    assert_of_law(counts, *count_law([value] * users, PLAN, users))


def test_sparse_rows_with_zeros_have_the_exact_law():
    protocol = small_protocol(WIDE)
    dense = torch.zeros(4, WIDE, dtype=torch.float64)
    dense[0] = USERS[0]
    dense[1, ::2] = USERS[1]
    for sparse in (dense.to_sparse(), dense.to_sparse_coo()):
        generator = torch.Generator().manual_seed(23)
        counts = np.array([answers_as_counts(protocol, protocol.simulate(sparse, generator), 4) for _ in range(8)])
        assert_of_law(counts[:, ::2], *count_law([USERS[0], USERS[1], 0, 0], PLAN, 4))
        assert_of_law(counts[:, 1::2], *count_law([USERS[0], 0, 0, 0], PLAN, 4))


@pytest.mark.parametrize("even", [False, True])
def test_all_zero_sparse_rows_have_the_exact_law(even):
    plan = dataclasses.replace(PLAN, granularity=40 if even else 41)
    protocol = small_protocol(WIDE, plan=plan)
    generator = torch.Generator().manual_seed(24)
    empty = torch.zeros(4, WIDE).to_sparse()
    counts = [answers_as_counts(protocol, protocol.simulate(empty, generator), 4) for _ in range(8)]
    assert_of_law(counts, *count_law([0.0] * 4, plan, 4))


@pytest.mark.parametrize("reports", [4, 3, 2])
def test_messages_have_the_exact_law_and_are_unbiased_for_those_who_sent(reports):
    protocol = small_protocol(WIDE, fraction=0.5)
    generator = torch.Generator().manual_seed(25)
    counts, answers = [], []
    for _ in range(8):
        sent = [
            protocol.randomize(torch.full((WIDE,), float(value), dtype=torch.float64), generator) for value in USERS[:reports]
        ]
        shuffled = protocol.shuffle(sent, generator)
        assert shuffled.num_reports == reports
        answer = protocol.analyze(shuffled)
        answers.append(answer)
        counts.append(answers_as_counts(protocol, answer, reports))
        np.testing.assert_array_equal(counts[-1], shuffled.ones())
    law = count_law(USERS[:reports], PLAN, reports)
    assert_of_law(counts, *law)
    assert_mean_and_variance(counts, *law)
    answers = torch.stack(answers).flatten()
    error = answers.std() / math.sqrt(len(answers))
    assert abs(answers.mean() - USERS[:reports].sum()) <= 5 * error
    assert answers.var() <= protocol.variance * (1 + 5 * math.sqrt(3 / len(answers)))


def test_one_users_messages_are_a_rounded_value_and_binomial_noise_in_so_many_bits():
    protocol = small_protocol(WIDE)
    generator = torch.Generator().manual_seed(26)
    counts = []
    for _ in range(10):
        messages = protocol.randomize(torch.full((WIDE,), USERS[0], dtype=torch.float64), generator)
        assert isinstance(messages, Messages)
        assert (messages.num_reports, messages.bits_per_report) == (1, 41 + 6)
        assert messages.bits.shape == (WIDE, 6)
        assert protocol.bits_per_user == WIDE * 47
        counts.append(messages.ones())
    assert_of_law(counts, *count_law(USERS[:1], PLAN, 1))


def test_coordinates_and_rounds_are_independent_of_each_other():
    protocol = small_protocol(WIDE)
    generator = torch.Generator().manual_seed(27)
    rows = torch.tensor(USERS).unsqueeze(1).expand(4, WIDE).contiguous()
    draws = torch.stack([protocol.simulate(rows, generator) for _ in range(40)])
    draws = (draws - draws.mean()) / draws.std()
    # Products of independent standardised numbers: mean 0, standard error about 1/√count.
    for products in (draws[:, 1:] * draws[:, :-1], draws[1:] * draws[:-1], draws[:, 16:] * draws[:, :-16]):
        assert abs(products.mean()) <= 5 / math.sqrt(products.numel())


def test_the_parts_of_a_simulation_add_up():
    protocol = small_protocol(WIDE)
    rows = torch.tensor(USERS).unsqueeze(1).expand(4, WIDE).contiguous()
    generator = torch.Generator().manual_seed(28)
    counts = []
    for _ in range(8):
        encoded, noise = protocol.encode(rows, generator), protocol.draw_noise(4, generator)
        assert encoded.dtype == noise.dtype == torch.int64
        assert encoded.shape == noise.shape == (WIDE,)
        counts.append(answers_as_counts(protocol, protocol.decode(encoded + noise, 4), 4))
        np.testing.assert_array_equal(counts[-1], encoded + noise)
    assert_of_law(counts, *count_law(USERS, PLAN, 4))


def test_a_seed_repeats_a_simulation_and_no_seed_does_not():
    protocol = ShuffleVectorSum(50, 20, 1.0, 1.0, 1e-3, "tight")
    rows = torch.zeros(50, 20)
    one, two = (protocol.simulate(rows, torch.Generator().manual_seed(1)) for _ in range(2))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    torch.manual_seed(0)
    first = protocol.simulate(rows)
    torch.manual_seed(0)
    assert not torch.equal(first, protocol.simulate(rows))


@given(
    fraction=st.one_of(
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 2.0**-16),
        st.floats(1 - 2.0**-16, 1, exclude_max=True),
        st.integers(0, 65535).map(lambda k: k / 65536),
        st.sampled_from([0.0, 2.0**-20, 1e-9, 0.5, 1 - 2.0**-30]),
    ),
    whole=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_rounding_by_sixteen_bits_and_a_tie_break_keeps_the_mean_exactly(fraction, whole):
    protocol = small_protocol(1)
    place = torch.full((65_536, 1), whole + fraction, dtype=torch.float64)
    exact = float(place[0, 0]) - whole  # what the sum above can hold
    coarse = math.floor(exact * 65_536)
    rest = exact * 65_536 - coarse
    asked = []

    def later_bits(value):
        def draw(count, *, generator, dtype):
            asked.append(count)
            return torch.full((count,), value, dtype=dtype)

        return draw

    ups = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "_place", lambda points: points.clone())
        patch.setattr(grid_sum, "_sixteen_bits", lambda draws, count: np.arange(count, dtype=np.uint16))
        for value in {0.0, max(1 - rest - 2.0**-40, 0.0), min(1 - rest, 1 - 2.0**-53), 1 - 2.0**-53}:
            patch.setattr(torch, "rand", later_bits(value))
            result = protocol._round(place, torch.Generator().manual_seed(0))
            assert set(result.unique().tolist()) <= {whole, whole + 1}
            ups[value] = int((result == whole + 1).sum())
    # Of the 2^16 draws so many decide for above whatever the rest is, and one asks for it: P(above) is (coarse + rest)/2^16.
    assert set(asked) == {1}
    for value, count in ups.items():
        assert count == coarse + (value >= 1 - rest)


def test_the_sixteen_bits_are_uniform():
    draws = grid_sum._sixteen_bits(np.random.Generator(np.random.PCG64DXSM(5)), 1_000_003)
    assert draws.dtype == np.uint16
    assert draws.shape == (1_000_003,)
    counts = np.bincount(draws >> 6, minlength=1024)
    assert chi2.sf(float(((counts - 1_000_003 / 1024) ** 2).sum() / (1_000_003 / 1024)), 1023) > UNLIKELY
    counts = np.bincount(draws & 1023, minlength=1024)
    assert chi2.sf(float(((counts - 1_000_003 / 1024) ** 2).sum() / (1_000_003 / 1024)), 1023) > UNLIKELY


def test_whole_numbers_and_the_ends_of_the_range_are_not_rounded():
    protocol = small_protocol(1)
    generator = torch.Generator().manual_seed(2)
    ends = torch.tensor([[-1.0], [1.0]]).double()
    for _ in range(50):
        assert protocol.encode(ends[:1].expand(4, 1), generator).item() == 0
        assert protocol.encode(ends[1:].expand(4, 1), generator).item() == 4 * 41
        assert protocol.encode(ends.repeat(2, 1), generator).item() == 2 * 41
        assert protocol.encode(ends.repeat(2, 1).to_sparse(), generator).item() == 2 * 41


def test_the_real_protocols_answers_are_unbiased_with_its_variance():
    protocol = ShuffleVectorSum(200, 300, 2.0, 1.0, 1e-3, "tight")
    generator = torch.Generator().manual_seed(3)
    rows = 2 * torch.nn.functional.normalize(torch.randn(200, 300, generator=generator, dtype=torch.float64), dim=1)
    errors = torch.stack([protocol.simulate(rows, generator) - rows.sum(0) for _ in range(60)]).flatten()
    count = len(errors)
    assert abs(errors.mean()) <= 5 * math.sqrt(protocol.variance / count)
    # At most as announced, and no less than the noise alone.
    noise = (4.0 / protocol.granularity) ** 2 * 200 * protocol.noise_bits / 4
    assert noise * (1 - 5 * math.sqrt(2 / count)) <= errors.var() <= protocol.variance * (1 + 5 * math.sqrt(2 / count))
    assert protocol.mean_squared_error == pytest.approx(300 * protocol.variance)


def test_a_hundred_thousand_users_and_coordinates_need_little_memory():
    protocol = ShuffleVectorSum(10**5, 10**5, 1.0, 1.0, 1e-6, "tight")
    row = torch.zeros(1, 10**5)
    row[0, 0] = 1.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = protocol.simulate(row.expand(10**5, -1), torch.Generator().manual_seed(4))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20  # KiB: less than 1 GiB more
    deviation = math.sqrt(protocol.variance)
    assert abs(answer[0] - 10**5) <= 6 * deviation
    assert answer[1:].abs().max() <= 7 * deviation
    assert answer[1:].std() == pytest.approx(deviation, rel=0.05)


# ---- edges and refusals -----------------------------------------------------------------------------------------------------

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
        ([], "got 0"),
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
    ids=["short", "matrix", "long", "nan", "inf", "string", "None", "bool tensor", "bools", "complex"],
)
def test_a_vector_that_does_not_fit_is_refused(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"."):
            HELD.randomize(x)


class ElsewhereGenerator(torch.Generator):
    device = torch.device("cuda")


@pytest.mark.parametrize("generator", [3, "seed", np.random.default_rng(0), True, ElsewhereGenerator()])
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


def test_messages_of_another_protocol_or_crowd_are_refused():
    x = torch.zeros(3)
    mine = [HELD.randomize(x) for _ in range(50)]
    other = ShuffleVectorSum(60, 3, 1.0, 1.0, 1e-2, "tight")
    with pytest.raises(ValueError, match="another protocol"):
        HELD.shuffle([*mine[:-1], other.randomize(x)])
    with pytest.raises(ValueError, match="another protocol"):
        HELD.analyze(other.shuffle([other.randomize(x)] * 60))
    with pytest.raises(ValueError, match="another protocol"):
        HELD.shuffle([ShuffleVectorSum(50, 2, 1.0, 1.0, 1e-2, "tight").randomize(x[:2])] * 50)
    for few in (mine[:49], [*mine, mine[0]]):
        with pytest.raises(ValueError, match=rf"50 users.*got {len(few)}"):
            HELD.shuffle(few)
    with pytest.raises(ValueError, match="at least one"):
        HELD.shuffle([])
    with pytest.raises(ValueError, match="Messages, got str"):
        HELD.shuffle(["bits"] * 50)
    with pytest.raises(ValueError, match="Messages, got ndarray"):
        HELD.analyze(np.zeros(3))
    with pytest.raises(ValueError, match=r"50 users.*got 1"):
        HELD.analyze(mine[0])


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
    good = {"num_users": 9, "dimension": 2, "max_norm": 1.0, "epsilon": 1.0, "delta": 0.1, "calibration": "tight", "rounds": 2}
    with pytest.raises(ValueError, match=name) as raised:
        ShuffleVectorSum.for_rounds(**{**good, name: value})
    assert repr(value) in str(raised.value)
    if name not in ("rounds", "sample_rate"):
        del good["rounds"]
        with pytest.raises(ValueError, match=name):
            ShuffleVectorSum(**{**good, name: value})


@pytest.mark.parametrize("way", [{"calibration": "paper"}, {"calibration": "tight", "honest_fraction": 0.5}])
def test_what_sampling_gains_is_for_the_tight_calibration_and_honest_users(way):
    with pytest.raises(ValueError, match=r"sample_rate=0.5.*tight.*honest_fraction=1"):
        ShuffleVectorSum.for_rounds(9, 2, 1.0, 1.0, 0.1, rounds=2, sample_rate=0.5, **way)
