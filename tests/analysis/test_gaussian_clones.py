"""The certificate against the true mechanism: every data set tried here is one that it must hold for.

True values come from what an adversary can compute, with no part of the library:
    * Cutting the line into cells and looking at the cells only is post-processing, so δ of the shuffled *cells* is at most the
      true δ. It is a finite sum, so a certificate that it exceeds is wrong: no tolerance but ``ROUNDING``.
    * With the other records all at v, the adversary adds up a score of whole numbers over the reports (modulo a power of two)
      and looks at the sum only: post-processing again, its distribution is a power of one FFT, for any n.
    * In two and three dimensions the likelihood ratio of the shuffled reports is a quotient of permanents; δ is then a mean
      over random reports, with its standard error.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from opacus_shuffle.analysis import gaussian_clones
from opacus_shuffle.analysis.gaussian_clones import clone_probability, compute_epsilon
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, pair_epsilon, unshuffled_epsilon

KINDS = ("mended", "truncated")
DELTAS = (0.1, 0.03, 0.01, 1e-3, 1e-5)
SAMPLINGS = (None, "poisson", "fixed_size")

# Sums of at most 2²⁰ terms that add up to 1: rounding is below 2²⁰·2⁻⁵³ even if it never cancels.
ROUNDING = 2.0**-33
# A mean of N independent terms lies within this many standard errors but for 6e-5 (the seeds are fixed).
ERRORS = 4

both_kinds = pytest.mark.parametrize("clones", KINDS)


def one_round(sigma, users, rate=1.0, sampling=None, repetitions=1):
    return [(ShuffledRound(noise_multiplier=sigma, num_users=users, sample_rate=rate, sampling=sampling), repetitions)]


# ---- the true mechanism, cell by cell ---------------------------------------------------------------------------------------


def cell_masses(cuts, mean, sigma):
    """Probabilities of the cells between the cuts, and beyond them, under N(mean, σ²)."""
    z = (np.concatenate([[-np.inf], cuts, [np.inf]]) - mean) / sigma
    low, high = z[:-1], z[1:]
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


def shuffled_cells(records, sigma):
    """The distribution of the shuffled cells of all records' reports, one axis per report."""
    cells = {0: 1, 1: 400, 2: 400, 3: 64}[len(records)]
    cuts = np.linspace(-1 - 8 * sigma, 1 + 8 * sigma, cells - 1)
    distributions = {record: cell_masses(cuts, record, sigma) for record in records}
    orders = Counter(itertools.permutations(records))
    total = np.zeros((cells,) * len(records))
    for order, times in orders.items():
        total += times * functools.reduce(np.multiply.outer, [distributions[record] for record in order], np.ones(()))
    return total / sum(orders.values())


def view_cells(records, sigma, rate, sampling):
    """As ``shuffled_cells``, flat, for a random set of participants: the number of reports is seen, too."""
    users = len(records)
    if sampling is None:
        chances = {users: 1.0}
    elif sampling == "fixed_size":
        chosen = round(rate * users)
        chances = {chosen: 1 / math.comb(users, chosen)}
    else:
        chances = {k: rate**k * (1 - rate) ** (users - k) for k in range(users + 1)}
    return np.concatenate(
        [
            chance * sum(shuffled_cells(chosen, sigma).ravel() for chosen in itertools.combinations(records, count))
            for count, chance in chances.items()
        ]
    )


def hockey_stick(moved, still, epsilon):
    """The larger direction of δ(ε)."""
    scale = math.exp(epsilon)
    return max(float(np.maximum(a - scale * b, 0.0).sum()) for a, b in ((moved, still), (still, moved)))


def assert_certified(moved, still, rounds, *, adjacency="zero_out", deltas=DELTAS, clones):
    for delta in deltas:
        epsilon = compute_epsilon(rounds, delta=delta, adjacency=adjacency, clones=clones)
        assert hockey_stick(moved, still, epsilon) <= delta + ROUNDING, (rounds, delta, epsilon)


def other_records(users):
    random = np.random.default_rng(users).uniform(-1, 1, (2, users - 1))
    return [*itertools.combinations_with_replacement((-1.0, 0.0, 1.0), users - 1), *map(tuple, random.tolist())]


@pytest.mark.parametrize(("users", "deltas"), [(2, (1e-2, 1e-3, 1e-5)), (3, (0.03, 1e-3, 1e-5))])
@both_kinds
def test_the_certificate_is_put_to_the_test_with_two_and_three_users(users, deltas, clones):
    # Below the unshuffled bound: otherwise the brute force that follows would only test that.
    for delta in deltas:
        rounds = one_round(10.0, users)
        assert compute_epsilon(rounds, delta=delta, clones=clones) < unshuffled_epsilon(rounds, delta=delta)


@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("users", [2, 3])
def test_zero_out_is_certified_for_two_and_three_users(users, sigma):
    rounds = one_round(sigma, users)
    for others in other_records(users):
        moved, still = (shuffled_cells((record, *others), sigma) for record in (1.0, 0.0))
        for clones in KINDS:
            assert_certified(moved, still, rounds, clones=clones)


@pytest.mark.parametrize("sigma", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("users", [2, 3])
def test_replacement_is_certified_for_two_and_three_users(users, sigma):
    rounds = one_round(sigma, users)
    for others in other_records(users):
        moved, still = (shuffled_cells((record, *others), sigma) for record in (1.0, -1.0))
        for clones in KINDS:
            assert_certified(moved, still, rounds, adjacency="replace", clones=clones)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
@pytest.mark.parametrize("rate", [0.3, 0.7])
@pytest.mark.parametrize("users", [2, 3])
def test_random_participants_are_certified_for_two_and_three_users(users, rate, sampling):
    for sigma in (3.0, 10.0):
        rounds = one_round(sigma, users, rate, sampling)
        for others in ((-1.0,) * (users - 1), (0.0,) * (users - 1), other_records(users)[-1]):
            for stays, adjacency in ((0.0, "zero_out"), (-1.0, "replace")):
                moved, still = (view_cells((record, *others), sigma, rate, sampling) for record in (1.0, stays))
                for clones in KINDS:
                    assert_certified(moved, still, rounds, adjacency=adjacency, clones=clones)


@both_kinds
def test_two_adaptive_rounds_are_certified(clones):
    # δ of two rounds is Σ_j P_j·h(e^ε·Q_j/P_j), h(τ) = Σ_k (P_k − τQ_k)₊ of the second round's data, which may depend on j.
    users = 2
    for sigma in (1.0, 3.0, 10.0, 30.0):
        rounds = one_round(sigma, users, repetitions=2)
        data = [((moved, other), (0.0, other)) for moved, other in itertools.product((1.0, -1.0), (-1.0, 0.3))]
        views = [tuple(view_cells(records, sigma, 1.0, None) for records in pair) for pair in data]
        for delta in (0.03, 1e-2, 1e-3, 1e-5):
            scale = math.exp(compute_epsilon(rounds, delta=delta, clones=clones))
            for direction in (1, -1):
                first_p, first_q = views[0][::direction]
                second = [one_more_round(*view[::direction], first_p, scale * first_q) for view in views]
                assert np.max(second, axis=0).sum() <= delta + ROUNDING, (sigma, delta, direction)


def one_more_round(p, q, mass, scaled):
    """Σ_k (mass_j·p_k − scaled_j·q_k)₊ for every j, by sorting."""
    some = (p > 0) & (q > 0)  # leaving cells out only lowers δ
    order = np.argsort(p[some] / q[some])
    ratios = (p[some] / q[some])[order]
    above_p, above_q = (np.append(np.cumsum(distribution[some][order][::-1])[::-1], 0.0) for distribution in (p, q))
    with np.errstate(divide="ignore", invalid="ignore"):
        start = np.searchsorted(ratios, np.where(mass > 0, scaled / mass, np.inf))
    return np.maximum(mass * above_p[start] - scaled * above_q[start], 0.0)


# ---- the other records all in one place -------------------------------------------------------------------------------------


def attack(epsilon, *, sigma, users, others, moved=1.0, still=0.0, rate=1.0, sampling=None, points=2**16):
    """At most δ(ε), both directions: the sum of a score over the reports, modulo ``points``, is all that is looked at.

    The score is the rounded W = LR_moved − e^ε·LR_still, whose sum's sign the best adversary goes by.
    """
    scale = math.exp(epsilon)
    ends = np.array([-9, 9]) * sigma + sorted((moved, still, others))[::2]
    base, *pair = (cell_masses(np.linspace(*ends, 4000), mean, sigma) for mean in (others, moved, still))

    def one_way(a, b):
        best = (a - scale * b) / np.maximum(base, 1e-300)
        limit = np.inf
        for _ in range(30):  # a report whose score outweighs all others need not score more
            clipped = np.clip(best, -limit, limit)
            mean = float(base @ clipped)
            deviation = math.sqrt(users * float(base @ (clipped - mean) ** 2))
            limit = min(limit, 1.5 * users * (scale - 1) + 8 * deviation)
        step = (4 * limit + 24 * deviation) / points
        score = np.rint(np.clip(best, -limit, limit) / step).astype(np.int64) % points

        def spectrum(distribution):
            return np.fft.rfft(np.bincount(score, distribution, minlength=points))

        reports = users
        other, p, q = map(spectrum, (base, a, b))
        if sampling == "fixed_size":
            reports = round(rate * users)
            there = reports / users
            p, q = (there * own + (1 - there) * other for own in (p, q))
        elif sampling == "poisson":  # who is absent scores 1 − e^ε, so that the sum depends on the view alone
            absent = np.zeros(points)
            absent[round((1 - scale) / step) % points] = 1.0
            other, p, q = (rate * distribution + (1 - rate) * np.fft.rfft(absent) for distribution in (other, p, q))
        gain = np.fft.irfft(other ** (reports - 1) * (p - scale * q), points)
        typical = round(reports * mean / step)
        return float(np.cumsum(np.roll(gain, points // 2 - typical)[::-1]).max())

    return max(one_way(*pair), one_way(*pair[::-1]))


def test_the_attack_shows_what_the_theory_says():
    setting = {"sigma": 3.0, "users": 50, "others": -1.0}
    assert attack(0.2, **setting) == pytest.approx(3.03e-5, abs=0.005e-5)
    # One report is the Gaussian mechanism; a score rounded to 2⁻¹⁶ of its range loses next to nothing.
    epsilon = unshuffled_epsilon(one_round(2.0, 1), delta=1e-3)
    assert attack(epsilon, sigma=2.0, users=1, others=0.0) == pytest.approx(1e-3, rel=1e-2)
    assert attack(epsilon, sigma=2.0, users=1, others=0.0) <= 1e-3 + ROUNDING


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_the_attack_agrees_with_brute_force_for_random_participants(sampling):
    sigma, rate, others, epsilon = 2.0, 0.7, -1.0, 0.1
    moved, still = (view_cells((record, others), sigma, rate, sampling) for record in (1.0, 0.0))
    # Both are below the truth. 400 cells are 0.043 σ wide: they hide a share of the order 0.043² of what there is to see.
    attacked = attack(epsilon, sigma=sigma, users=2, others=others, rate=rate, sampling=sampling)
    assert attacked == pytest.approx(hockey_stick(moved, still, epsilon), rel=0.043**2)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("users", [50, 1000, 10_000])
@both_kinds
def test_no_attack_on_identical_others_beats_the_certificate(users, sampling, clones):
    rate = 1.0 if sampling is None else 0.3
    for sigma, delta in itertools.product((0.8, 1.0, 3.0, 10.0), (1e-2, 1e-3, 1e-5)):
        rounds = one_round(sigma, users, rate, sampling)
        epsilon = compute_epsilon(rounds, delta=delta, clones=clones)
        if epsilon == unshuffled_epsilon(rounds, delta=delta):
            continue
        for others, moved in ((-1.0, 1.0), (0.0, 1.0), (0.5, -1.0)):
            shown = attack(
                epsilon, sigma=sigma, users=users, others=others, moved=moved, rate=rate, sampling=sampling, points=2**15
            )
            assert shown <= delta + ROUNDING, (sigma, delta, others, epsilon)


@pytest.mark.parametrize("users", [50, 10_000])
@both_kinds
def test_no_attack_on_a_replaced_record_beats_the_certificate(users, clones):
    for sigma, delta in ((1.25, 1e-2), (2.0, 1e-5), (3.0, 1e-2), (10.0, 1e-5)):
        epsilon = compute_epsilon(one_round(sigma, users), delta=delta, adjacency="replace", clones=clones)
        for others in (-1.0, 0.0, 0.5):
            shown = attack(epsilon, sigma=sigma, users=users, others=others, still=-1.0, points=2**15)
            assert shown <= delta + ROUNDING, (sigma, delta, others, epsilon)


@pytest.mark.parametrize(
    ("sigma", "users", "delta"),
    [(1.0, 10_000, 1e-5), (1.0, 60_000, 1e-5), (1.0, 60_000, 1e-7), (0.85, 60_000, 1e-5), (0.7, 60_000, 1e-3)],
)
@both_kinds
def test_one_report_far_from_all_others_is_certified(sigma, users, delta, clones):
    # Others at −1, user 1 at 1 or 0. The adversary only asks: is any report above c? A report of user 1's that lies where
    # clones of zero cannot is what the truncated clones' slack has to pay for, Φ(1/σ − t) of it.
    epsilon = compute_epsilon(one_round(sigma, users), delta=delta, clones=clones)
    c = np.linspace(0, 9, 901)
    no_other = (users - 1) * np.log1p(-ndtr(-(c + 1) / sigma))
    moved, still = (-np.expm1(no_other + np.log1p(-ndtr(-(c - record) / sigma))) for record in (1, 0))
    shown = float(np.max(moved - math.exp(epsilon) * still))
    assert shown <= delta + ROUNDING * delta, epsilon


@pytest.mark.parametrize(
    ("sigma", "users", "delta", "lower", "upper"),
    [
        (9.48, 60_000, 1 / 60_000, 0.000613, 0.000983),
        (3.0, 10_000, 1e-6, 0.01338, 0.0393),
        (2.0, 60_000, 1e-5, 0.00824, 0.0332),
        (1.0, 60_000, 1e-5, None, 0.900),
    ],
)
@both_kinds
def test_the_certificate_lies_between_others_at_minus_one_and_the_table(sigma, users, delta, lower, upper, clones):
    epsilon = compute_epsilon(one_round(sigma, users), delta=delta, clones=clones)
    assert epsilon <= upper
    if lower is not None:
        below = lower - 10 ** -len(f"{lower}".split(".")[1])  # the table rounds up
        setting = {"sigma": sigma, "users": users, "others": -1.0, "points": 2**18}
        assert attack(below, **setting) > delta > attack(lower, **setting)
        assert epsilon >= below


@both_kinds
def test_a_thousand_rounds_are_certified_as_in_the_table(clones):
    rounds = one_round(9.48, 60_000, repetitions=1000)
    epsilon = compute_epsilon(rounds, delta=1 / 60_000, clones=clones)
    assert pair_epsilon(rounds, delta=1 / 60_000)[0] < epsilon <= 0.0584


# ---- two and three dimensions -----------------------------------------------------------------------------------------------


def likelihoods(reports, point, sigma):
    """N(point)/N(0) at the reports, shape (samples, users)."""
    return np.exp((2 * reports @ point - point @ point) / (2 * sigma**2))


def shuffled_ratio(reports, moved, still, others, sigma):
    """P/Q of shuffled reports: quotient of permanents, by all orders of the other records."""
    slots = range(reports.shape[1])
    rows = [likelihoods(reports, point, sigma) for point in others]
    own = [likelihoods(reports, point, sigma) for point in (moved, still)]
    totals = [np.zeros(len(reports)), np.zeros(len(reports))]
    for slot in slots:
        rest = [j for j in slots if j != slot]
        minor = sum(math.prod(row[:, j] for row, j in zip(rows, order, strict=True)) for order in itertools.permutations(rest))
        totals = [total + likelihood[:, slot] * minor for total, likelihood in zip(totals, own, strict=True)]
    return totals[0] / totals[1]


def shuffled_ratio_of_groups(reports, moved, still, groups, sigma):
    """As ``shuffled_ratio`` for others in two places: [(point, number of users), (point, number of users)]."""
    (here, many), (there, _) = groups
    at_here, at_there = (likelihoods(reports, point, sigma) for point in (here, there))
    totals = []
    for own in (moved, still):
        at_own = likelihoods(reports, own, sigma)
        # state[u, c]: the reports so far hold user 1 u times and c users of the first group
        state = np.zeros((2, many + 1, len(reports)))
        state[0, 0] = 1.0
        for j in range(reports.shape[1]):
            following = state * at_there[:, j]
            following[:, 1:] += state[:, :-1] * at_here[:, j]
            following[1] += state[0] * at_own[:, j]
            state = following
        totals.append(state[1, many])
    return totals[0] / totals[1]


def sampled_delta(ratio, own, other, records, epsilon, sigma, samples, seed):
    """δ(ε) of own ‖ other, by reports drawn with user 1 at ``own``: the estimate and its standard error."""
    means = np.vstack([own, *records])
    reports = means + sigma * np.random.default_rng(seed).standard_normal((samples, *means.shape))
    values = np.maximum(1 - math.exp(epsilon) / ratio(reports, own, other), 0.0)
    return values.mean(), values.std() / math.sqrt(samples)


def test_the_three_likelihood_ratios_agree():
    sigma, epsilon, samples = 2.0, 0.05, 40_000
    moved, still, place = np.array([1.0]), np.array([0.0]), np.array([-1.0])
    exact = attack(epsilon, sigma=sigma, users=6, others=-1.0, points=2**18)
    for ratio in (
        lambda reports, p, q: shuffled_ratio(reports, p, q, [place] * 5, sigma),
        lambda reports, p, q: shuffled_ratio_of_groups(reports, p, q, [(place, 2), (place, 3)], sigma),
    ):
        estimates = [
            sampled_delta(ratio, p, q, [place] * 5, epsilon, sigma, samples, seed=5)
            for p, q in ((moved, still), (still, moved))
        ]
        estimate, error = max(estimates)
        assert abs(estimate - exact) <= ERRORS * error


def on_the_sphere(rng, count, dimensions):
    points = rng.standard_normal((count, dimensions))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_five_others_anywhere_on_the_sphere_are_certified(dimensions):
    rng = np.random.default_rng(dimensions)
    zero = np.zeros(dimensions)
    for sigma, delta in ((3.0, 0.03), (10.0, 0.01)):
        rounds = one_round(sigma, 6)
        others = on_the_sphere(rng, 5, dimensions)
        centre = others.mean(axis=0)
        moved = -centre / np.linalg.norm(centre)
        for p, q in ((moved, zero), (zero, moved)):
            for clones in KINDS:
                epsilon = compute_epsilon(rounds, delta=delta, clones=clones)
                assert epsilon < unshuffled_epsilon(rounds, delta=delta)
                estimate, error = sampled_delta(
                    lambda reports, p, q, others=others, sigma=sigma: shuffled_ratio(reports, p, q, others, sigma),
                    *(p, q, others, epsilon, sigma),
                    samples=10_000,
                    seed=7,
                )
                assert estimate - ERRORS * error <= delta, (sigma, delta, clones)


@pytest.mark.parametrize("dimensions", [2, 3])
@both_kinds
def test_fifty_users_in_two_places_on_the_sphere_are_certified(dimensions, clones):
    rng = np.random.default_rng(dimensions)
    zero = np.zeros(dimensions)
    for sigma, delta in ((1.5, 0.01), (3.0, 0.01), (3.0, 1e-3)):
        rounds = one_round(sigma, 50)
        here, there = on_the_sphere(rng, 2, dimensions)
        groups = [(here, 12), (there, 37)]
        others = [here] * 12 + [there] * 37
        moved = -(here + there) / np.linalg.norm(here + there)
        epsilon = compute_epsilon(rounds, delta=delta, clones=clones)
        assert epsilon < unshuffled_epsilon(rounds, delta=delta)
        for p, q in ((moved, zero), (zero, moved)):
            estimate, error = sampled_delta(
                lambda reports, p, q, groups=groups, sigma=sigma: shuffled_ratio_of_groups(reports, p, q, groups, sigma),
                *(p, q, others, epsilon, sigma),
                samples=2500,
                seed=7,
            )
            assert estimate - ERRORS * error <= delta, (sigma, delta, clones)


# ---- properties -------------------------------------------------------------------------------------------------------------

# δ far below the reports' total variation, so that ε is not next to zero, where relative changes mean nothing.
sigmas = st.floats(0.6, 10.0)
populations = st.integers(1, 500).map(lambda tens: 10 * tens)  # so that a rate of 0.3 is one
deltas = st.floats(-9, -5).map(lambda exponent: 10**exponent)
samplings = st.sampled_from([(1.0, None), (0.3, "poisson"), (0.3, "fixed_size")])
kinds = st.sampled_from(KINDS)
few = settings(deadline=None, max_examples=6, derandomize=True)

# Pool sizes are rounded down to 7 bits, by 1.6 % at most and 0.6 % on average, ε by half of that; the margin t is searched for
# by an approximation. Neither is monotone; both only ever raise ε.
WIGGLE = 1.005


@few
@given(sigmas, populations, deltas, samplings, st.integers(1, 5), kinds)
def test_the_certificate_lies_between_the_pair_and_the_unshuffled_reports(sigma, users, delta, sampled, repetitions, clones):
    rounds = one_round(sigma, users, *sampled, repetitions=repetitions)
    epsilon = compute_epsilon(rounds, delta=delta, clones=clones)
    assert 0 <= pair_epsilon(rounds, delta=delta)[0] <= epsilon <= unshuffled_epsilon(rounds, delta=delta) < math.inf
    replaced = compute_epsilon(rounds, delta=delta, adjacency="replace", clones=clones)
    assert epsilon <= replaced <= unshuffled_epsilon(rounds, delta=delta, distance=2.0) < math.inf


@few
@given(sigmas, populations, deltas, samplings, st.integers(1, 5), kinds, st.sampled_from(["zero_out", "replace"]))
def test_the_certificate_falls_with_users_noise_and_delta_and_rises_with_rounds(
    sigma, users, delta, sampled, repetitions, clones, adjacency
):
    def epsilon(sigma, users, delta, repetitions):
        rounds = one_round(sigma, users, *sampled, repetitions=repetitions)
        return compute_epsilon(rounds, delta=delta, adjacency=adjacency, clones=clones)

    here = epsilon(sigma, users, delta, repetitions)
    assert epsilon(sigma, 2 * users, delta, repetitions) <= here * WIGGLE
    assert epsilon(1.1 * sigma, users, delta, repetitions) <= here * WIGGLE
    assert epsilon(sigma, users, 2 * delta, repetitions) <= here * WIGGLE
    assert here <= epsilon(sigma, users, delta, repetitions + 1) * WIGGLE


@both_kinds
def test_one_user_is_the_unshuffled_gaussian(clones):
    rounds = one_round(2.0, 1)
    assert compute_epsilon(rounds, delta=1e-5, clones=clones) == unshuffled_epsilon(rounds, delta=1e-5)
    assert compute_epsilon([], delta=1e-5, clones=clones) == 0.0


@both_kinds
def test_equal_rounds_may_be_listed_apart(clones):
    [(each, _)] = one_round(3.0, 500)
    together = compute_epsilon([(each, 3)], delta=1e-5, clones=clones)
    assert compute_epsilon([(each, 1), (each, 2)], delta=1e-5, clones=clones) == together


# ---- the distribution that is certified -------------------------------------------------------------------------------------


def pools_of(users, rate, sampling, margin, budget=1e-10, sigma=3.0):
    [(each, _)] = one_round(sigma, users, rate, sampling)
    return each, list(gaussian_clones._pools(each, clone_probability(sigma, margin), budget))


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 100_000), st.floats(0.01, 1.0), st.sampled_from(SAMPLINGS), st.floats(0.5, 9.0), st.floats(0.5, 30.0))
def test_pool_sizes_have_probabilities_that_add_up_to_one(users, rate, sampling, margin, sigma):
    rate = 1.0 if sampling is None else rate
    if sampling == "fixed_size" and round(rate * users) < 1:
        return
    each, pools = pools_of(users, rate, sampling, margin, sigma=sigma)
    assert sum(weight for weight, _, _ in pools) == pytest.approx(1, abs=1e-9)
    for weight, pool, splits in pools:
        assert weight >= 0
        if pool == 0:
            continue
        assert sum(share for share, _ in splits) == pytest.approx(1, abs=1e-9)
        for share, (largest, membership) in splits:
            assert share > 0
            assert 0 <= membership <= 1
            assert pool <= max(largest, 1) <= pool * (1 + 2**-6)  # rounded down to 7 bits
    # User 1 is in the pool when taking part: of all the probabilities π, the mean is γ.
    mean = sum(weight * share * membership for weight, _, splits in pools for share, (_, membership) in splits)
    assert mean == pytest.approx(each.sample_rate, abs=1e-9)


@pytest.mark.parametrize(("users", "rate"), [(1, 0.5), (30, 0.3), (3000, 0.05)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_mixture_is_a_likelihood_ratio(users, rate, sampling):
    rate = 1.0 if sampling is None else rate
    if round(rate * users) < 1:
        users = 3
    for sigma in (0.8, 3.0):
        [(each, _)] = one_round(sigma, users, rate, sampling)
        mixture = gaussian_clones._mixture(each, 4.0, "mended", 1e-10, 9.0)
        distributions = [
            (weight, distribution.masses, distribution.offsets + distribution.centre, distribution.infinite)
            for weight, distribution in mixture.parts
        ]
        probability = mixture.lost + sum(weight * masses.sum() for weight, masses, _, _ in distributions)
        assert probability == pytest.approx(1, abs=1e-9)
        mean = mixture.lost + sum(weight * (masses @ ratios + infinite) for weight, masses, ratios, infinite in distributions)
        assert mean == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"adjacency": "add_remove"}, "adjacency"),
        ({"adjacency": None}, "adjacency"),
        ({"clones": "Mended"}, "clones"),
        ({"clones": None}, "clones"),
        ({"delta": 0}, "delta"),
        ({"delta": 1}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"delta": "small"}, "delta"),
        ({"repetitions": 0}, "repetitions"),
        ({"repetitions": 1.5}, "repetitions"),
        ({"noise_multiplier": 0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"num_users": 0}, "num_users"),
        ({"num_users": 2.5}, "num_users"),
        ({"sample_rate": 0.5}, "sampling"),
        ({"sample_rate": 0.0, "sampling": "poisson"}, "sample_rate"),
        ({"sample_rate": 1.5, "sampling": "poisson"}, "sample_rate"),
        ({"sample_rate": 1e-3, "sampling": "fixed_size"}, "sample_rate"),
        ({"sampling": "with_replacement"}, "sampling"),
    ],
)
def test_bad_arguments_are_named(change, named):
    arguments = {"delta": 1e-5, "repetitions": 1, "noise_multiplier": 3.0, "num_users": 10, **change}
    keywords = {key: arguments.pop(key) for key in ("delta", "adjacency", "clones") if key in arguments}
    repetitions = arguments.pop("repetitions")
    with pytest.raises(ValueError, match=named):
        compute_epsilon([(ShuffledRound(**arguments), repetitions)], **keywords)


@pytest.mark.parametrize("sigma", [1e-6, 1e-3, 0.04, 1e6])
@both_kinds
def test_extreme_noise_stays_certified_by_the_unshuffled_bound(sigma, clones):
    for adjacency, distance in (("zero_out", 1.0), ("replace", 2.0)):
        rounds = one_round(sigma, 1000)
        epsilon = compute_epsilon(rounds, delta=1e-5, adjacency=adjacency, clones=clones)
        assert 0 <= epsilon <= unshuffled_epsilon(rounds, delta=1e-5, distance=distance) < math.inf
