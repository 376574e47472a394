"""Secret check-in against exact integrals, and against all that users on a line can do.

Proofs: docs/proofs/12_secret_checkin.md.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from helpers.accountants import compute_baseline
from helpers.report_ratios import RATIOS, Exact
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from opacus_shuffle import SecretCheckIn, ShuffledCheckIn, compute_epsilon
from opacus_shuffle.accountants import compute_bound
from opacus_shuffle.analysis.secret_checkin import (
    SecretRound,
    replacement_epsilon,
    unshuffled,
    zero_out_epsilon,
)
from opacus_shuffle.core.guarantees import Adjacency

every_report = pytest.mark.parametrize("report", RATIOS)


def rounds_of(report, sigma, users, rate, count=1):
    kind = SecretRound(noise_multiplier=sigma, num_users=users, sample_rate=rate, report=report)
    return [(kind, count)]


# ---- one and two honest users, exactly --------------------------------------------------------


def exact_of(report, sigma, rate, users):
    """The pair that reveals how many others send noise alone, for one or two users."""
    return Exact(report, sigma, rate, (1.0,) if users == 1 else (rate, 1 - rate))


@every_report
@pytest.mark.parametrize("users", [1, 2])
@pytest.mark.parametrize(
    ("sigma", "rate", "delta"),
    [
        *((0.5, 0.8, 1e-3), (1.0, 0.3, 1e-5)),
        pytest.param(2.0, 0.1, 1e-3, marks=pytest.mark.zoo),
    ],
)
def test_one_and_two_users_cost_what_integrals_say(report, users, sigma, rate, delta):
    """Above the truth, by less than half a percent of ε; by 3 % under replacement."""
    exact, rounds = exact_of(report, sigma, rate, users), rounds_of(report, sigma, users, rate)
    lower, upper = zero_out_epsilon(rounds, delta=delta)
    assert exact.zeroed(math.exp(upper)) <= delta * (1 + 1e-6)
    assert exact.zeroed(math.exp(0.995 * upper)) > delta
    assert lower <= upper
    if users == 1:  # where the lower value's data sets are the worst
        assert exact.zeroed(math.exp(lower)) >= delta * (1 - 1e-6)
    replaced = replacement_epsilon(rounds, delta=delta)
    assert exact.replaced(math.exp(replaced)) <= delta * (1 + 1e-6)
    assert exact.replaced(math.exp(0.97 * replaced)) > delta
    assert lower <= upper <= replaced
    alone = exact_of(report, sigma, rate, 1)
    for distance, stick in ((1.0, alone.zeroed), (2.0, alone.replaced)):
        local = unshuffled(rounds, delta=delta, distance=distance)
        assert stick(math.exp(local)) <= delta * (1 + 1e-6)
        assert min(upper, replaced) <= local or distance == 2
    assert upper <= unshuffled(rounds, delta=delta)
    assert replaced <= unshuffled(rounds, delta=delta, distance=2.0)


def stepped(sigma, rate, users, tau):
    """The pair's larger hockey stick for step reports, of any number of users, by enumeration."""
    ratio = RATIOS["step"](sigma)
    sticks = np.zeros(2)  # in both orders
    for reports, weight in enumerate(binom(users - 1, 1 - rate).pmf(np.arange(users)), start=1):
        beyond = np.arange(reports + 1)  # how many of them lie beyond the threshold
        masses = weight * binom(reports, norm.sf(ratio.threshold)).pmf(beyond)
        mean = 1 - rate + rate * (ratio.low + (ratio.high - ratio.low) * beyond / reports)
        sticks += [masses @ np.maximum(mean - tau, 0), masses @ np.maximum(1 - tau * mean, 0)]
    return sticks.max()


@pytest.mark.parametrize(
    ("sigma", "rate", "users", "delta", "share"),
    [
        (0.5, 0.8, 30, 1e-3, 1.002),
        (1.3, 0.9, 10, 1e-4, 1.002),
        (1.0, 0.75, 100, 1e-5, 1.08),  # of about 25 clones: half a deviation is a tenth of them
        pytest.param(1.0, 0.75, 400, 1e-5, 1.02, marks=pytest.mark.zoo),
        pytest.param(4.0, 0.5, 300, 1e-5, 1.02, marks=pytest.mark.zoo),
        (0.5, 0.1, 300, 1e-5, 1.02),
    ],
)
def test_step_reports_of_many_users_cost_what_enumeration_says(sigma, rate, users, delta, share):
    """Above the truth: grids take some 0.1 % of ε, the rest is that of groups of clones."""
    lower, upper = zero_out_epsilon(rounds_of("step", sigma, users, rate), delta=delta)
    # The lower value is where all others hide user 1: at a rate of 0.1 nearly all do.
    assert lower > (0.9 if rate == 0.1 else 0) * upper
    assert stepped(sigma, rate, users, math.exp(upper)) <= delta * (1 + 1e-9)
    assert stepped(sigma, rate, users, math.exp(upper / share)) > delta


@pytest.mark.parametrize("rate", [0.1, 0.75, 0.99])
@pytest.mark.parametrize("sigma", [0.2, 1.0, 1.3, 50.0])
def test_step_reports_have_a_pure_local_epsilon_and_attain_it(sigma, rate):
    """Alone, at δ = 0. Rounds add up; more noise and a smaller rate make it less."""
    mechanism = SecretCheckIn(noise_multiplier=sigma, num_users=5, sample_rate=rate, report="step")
    exact = exact_of("step", sigma, rate, 1)
    for adjacency, stick in (("zero_out", exact.zeroed), ("replace", exact.replaced)):
        pure = mechanism.pure_local_epsilon(adjacency=adjacency)
        # Probabilities times e^ε are rounded.
        attained = stick(math.exp(pure * (1 - 1e-5)))
        assert stick(math.exp(pure)) <= 1e-14 * math.exp(pure) < attained
        local = compute_baseline(
            [(mechanism, 7)], baseline="local", delta=1e-300, adjacency=Adjacency(adjacency)
        )
        assert local.epsilon <= 7 * pure * (1 + 1e-9)
        smaller, larger = (
            dataclasses.replace(mechanism, **change).pure_local_epsilon(adjacency=adjacency)
            for change in ({"sample_rate": 0.9 * rate}, {"noise_multiplier": 0.9 * sigma + 0.02})
        )
        assert smaller <= pure <= larger
    always = dataclasses.replace(mechanism, sample_rate=1 - 1e-9)  # its lowest ratio is 1e-9
    assert pure < always.pure_local_epsilon(adjacency="replace") < 40
    assert dataclasses.replace(mechanism, report="linear").pure_local_epsilon() == math.inf


# ---- attacks: two and three users on a line ---------------------------------------------------

ENDS = np.array([-np.inf, *np.arange(-4.5, 6.01, 0.1), np.inf])
"""Reports are seen in cells, which is post-processing: what is found is no more than the truth."""


def view(ratio, rate, vectors):
    """Probabilities of unordered reports, each in its cell; all coins are secret."""
    singles = [(1 - rate) * ratio.masses(ENDS, 0.0) + rate * ratio.masses(ENDS, x) for x in vectors]
    orders = list(itertools.permutations(singles))
    return sum(functools.reduce(np.multiply.outer, order) for order in orders) / len(orders)


def hockey_stick(here, there, tau):
    return float(np.maximum(here - tau * there, 0).sum())


@every_report
@pytest.mark.parametrize("users", [2, pytest.param(3, marks=pytest.mark.zoo)])
@pytest.mark.parametrize(
    ("sigma", "rate", "delta"),
    [(0.7, 0.5, 0.05), pytest.param(1.5, 0.7, 0.02, marks=pytest.mark.zoo)],
)
def test_no_others_on_a_line_cost_more(report, users, sigma, rate, delta):
    ratio, rounds = RATIOS[report](sigma), rounds_of(report, sigma, users, rate)
    zeroed = [(x, 0, zero_out_epsilon(rounds, delta=delta)[1]) for x in (1, 0.6)]
    replaced = [(1, other, replacement_epsilon(rounds, delta=delta)) for other in (-1, -0.4, 0.5)]
    places = (-1.0, -0.5, 0.0, 0.4, 1.0)
    if users == 3:
        zeroed, replaced, places = zeroed[:1], replaced[:1], (-1.0, 1.0)
    worst = 0.0
    for others in itertools.combinations_with_replacement(places, users - 1):
        for one, other, epsilon in zeroed + replaced:
            here, there = (view(ratio, rate, (x, *others)) for x in (one, other))
            for pair in ((here, there), (there, here)):
                found = hockey_stick(*pair, math.exp(epsilon))
                assert found <= delta
                worst = max(worst, found)
    assert worst > 0.05 * delta


@every_report
@pytest.mark.parametrize("other", [0.0, -1.0])
def test_no_other_who_adapts_costs_more_in_two_rounds(report, other):
    """By backward induction: the other's second vector is the worst for what the first showed."""
    sigma, rate, delta = 1.0, 0.5, 0.05
    ratio, rounds = RATIOS[report](sigma), rounds_of(report, sigma, 2, rate, count=2)
    epsilon = replacement_epsilon(rounds, delta=delta)
    if other == 0:
        _, epsilon = zero_out_epsilon(rounds, delta=delta)
    choices = (-1.0, 0.0, 1.0)
    here, there = ([view(ratio, rate, (x, one)) for one in choices] for x in (1.0, other))
    worst = 0.0
    for p, q in ((here, there), (there, here)):
        # It falls with the threshold: the next one above that was computed is no more.
        thresholds = np.exp(np.linspace(-4, 4, 201))
        later = [
            max(hockey_stick(one, another, s) for one, another in zip(p, q, strict=True))
            for s in thresholds
        ]
        for one, another in zip(p, q, strict=True):
            at = np.searchsorted(thresholds, math.exp(epsilon) * another / one)
            found = float((one * np.append(later, 0.0)[at]).sum())
            assert found <= delta
            worst = max(worst, found)
    assert worst > 0.3 * delta


# ---- relations --------------------------------------------------------------------------------


@settings(max_examples=3)
@given(
    report=st.sampled_from(tuple(RATIOS)),
    sigma=st.floats(0.8, 4.0),
    users=st.integers(2, 100),
    rate=st.floats(0.05, 0.9),
    honest=st.floats(0.3, 1.0),
    rounds=st.integers(1, 30),
    delta=st.floats(math.log(1e-7), math.log(1e-2)).map(math.exp),
    adjacency=st.sampled_from(["zero_out", "replace"]),
)
def test_it_costs_less_where_more_is_hidden(
    report, sigma, users, rate, honest, rounds, delta, adjacency
):
    """Both sides are rounded up by grids, by half a percent, and by groups of numbers of clones."""

    def epsilon(count=rounds, chance=delta, **changed):
        numbers = {
            "noise_multiplier": sigma,
            "num_users": users,
            "sample_rate": rate,
            "honest_fraction": honest,
            "report": report,
        }
        history = [(SecretCheckIn(**{**numbers, **changed}), count)]
        asked = {"delta": chance, "adjacency": Adjacency(adjacency)}
        answer = compute_bound(history, **asked)
        assert (answer.lower or 0) <= answer.epsilon
        assert answer.epsilon <= compute_baseline(history, baseline="local", **asked).epsilon
        return answer.epsilon

    spent = epsilon()
    close = (1.03 if adjacency == "zero_out" else 1.06) * spent + 1e-6
    assert epsilon(noise_multiplier=1.2 * sigma) <= close
    assert epsilon(num_users=2 * users) <= close
    assert epsilon(sample_rate=0.8 * rate) <= close
    assert epsilon(honest_fraction=1.0) <= close
    assert epsilon(chance=2 * delta) <= close
    assert epsilon(count=max(1, rounds // 2)) <= close


@pytest.mark.parametrize(
    ("sigma", "users", "rate", "rounds"),
    [
        (4.0, 600, 0.1, 1),
        pytest.param(2.0, 3000, 0.9, 1, marks=pytest.mark.zoo),
        pytest.param(0.75, 4000, 0.8, 10, marks=pytest.mark.zoo),
    ],
)
def test_linear_reports_cost_least_where_hundreds_of_users_send_noise_alone(
    sigma, users, rate, rounds
):
    """R is nearly Gaussian then, and linear reports have the least variance of R (13.1)."""
    costs = {}
    for report in RATIOS:
        _, costs[report] = zero_out_epsilon(
            rounds_of(report, sigma, users, rate, rounds), delta=1e-5
        )
    assert costs["linear"] < min(costs["gaussian"], costs["step"])


def test_of_two_users_linear_reports_cost_more_than_gaussian_ones():
    """A linear report below its threshold tells as much as can be told, if nobody else hides it.

    So that linear reports cost less is no rule, though their variance is less: exactly, here.
    """
    _, gaussian = zero_out_epsilon(rounds_of("gaussian", 2.0, 2, 0.75), delta=0.007)
    assert exact_of("linear", 2.0, 0.75, 2).zeroed(math.exp(1.4 * gaussian)) > 0.007


def test_many_different_rounds_cost_no_less_than_computed_apart():
    """Twelve kinds are computed as ten: above any ten of them, and between like rounds."""

    def epsilon(rounds):
        return zero_out_epsilon(rounds, delta=1e-5)[1]

    kinds = [rounds_of("linear", 1 + 0.02 * place, 8 + place, 0.3)[0] for place in range(12)]
    mixed = epsilon(kinds)
    assert mixed >= 0.995 * epsilon(kinds[:10])
    assert mixed <= 1.005 * epsilon(rounds_of("linear", 1.0, 8, 0.3, 12))
    assert mixed >= 0.995 * epsilon(rounds_of("linear", 1.22, 19, 0.3, 12))


def test_shapes_may_change_between_rounds():
    rounds = [*rounds_of("linear", 1.0, 50, 0.3, 3), *rounds_of("gaussian", 1.0, 50, 0.3, 3)]
    lower, upper = zero_out_epsilon(rounds, delta=1e-5)
    only = [zero_out_epsilon(rounds_of(name, 1.0, 50, 0.3, 6), delta=1e-5)[1] for name in RATIOS]
    assert 0 < lower <= upper
    assert min(only) <= upper * 1.005
    assert upper <= max(only) * 1.005


EXTREMES = {
    "little noise, next to all report": (0.2, 5, 1 - 1e-9, 1, 1e-8),
    "next to all report": (1.0, 5, 1 - 1e-9, 1, 1e-5),
    "little noise": (0.2, 100, 0.5, 2, 1e-6),
    "much noise": (49.0, 100, 0.5, 2, 1e-6),
    "too much noise to tell anything": (1e6, 100, 0.5, 2, 1e-6),
    "too many rounds for a grid": (1.0, 100, 0.5, 10**9, 1e-5),
    "next to all report in many rounds": (1.0, 100, 0.999999, 10**6, 1e-200),
    "next to no delta": (1.0, 100, 0.5, 3, 1e-300),
    "reports less probable than delta": (1.0, 100, 1e-300, 3, 1e-5),
}


@pytest.mark.parametrize(
    ("report", "setting"),
    [
        pytest.param(
            *(report, setting),
            marks=pytest.mark.zoo
            if "many" in setting or ("much noise" in setting and report != "linear")
            else (),
        )
        for setting in EXTREMES
        for report in RATIOS
    ],
)
def test_at_extremes_epsilon_is_a_number_between_zero_and_that_of_a_report_alone(report, setting):
    """It is 0 where the record takes part with a probability below δ (12.7)."""
    sigma, users, rate, steps, delta = EXTREMES[setting]
    rounds = rounds_of(report, sigma, users, rate, steps)
    lower, upper = zero_out_epsilon(rounds, delta=delta)
    assert 0 <= lower <= upper <= unshuffled(rounds, delta=delta) < math.inf
    assert (upper == 0) == (rate * steps < delta or sigma == 1e6)
    if sigma >= 1 or (report == "step" and users == 5):  # for little noise it takes long
        replaced = replacement_epsilon(rounds, delta=delta)
        assert upper <= replaced < (1e-3 if sigma == 1e6 else 1 if sigma == 49 else math.inf)
        assert sigma < 49 or replaced <= unshuffled(rounds, delta=delta, distance=2.0)


def test_it_costs_half_of_check_in_in_the_setting_of_the_paper():
    """SG, Figure 1b."""
    run = {"noise_multiplier": 5.0, "num_users": 60_000, "sample_rate": 0.1}
    delta, steps = 1 / 60_000, 5540
    known = compute_epsilon("shuffled_checkin", **run, steps=steps, delta=delta)
    assert known == pytest.approx(0.1076, abs=5e-5)
    noise = ShuffledCheckIn(**run).noise_of_sum
    run["noise_multiplier"] = noise / math.sqrt(60_000)  # the same noise on the sum
    answer = compute_bound([(SecretCheckIn(**run, report="gaussian"), steps)], delta=delta)
    assert SecretCheckIn(**run).noise_of_sum == pytest.approx(noise)
    assert answer.lower <= answer.epsilon <= 0.0635
    linear = compute_bound([(SecretCheckIn(**run), steps)], delta=delta)
    assert linear.lower <= linear.epsilon < answer.epsilon


@pytest.mark.parametrize("share", [0.4, 0.6, 0.99, 1.01])
def test_a_participant_without_noise_is_seen_unless_delta_covers_its_participation(share):
    """The report of a lone user shows participation of probability q: δ < q leaves no small ε."""
    _, upper = zero_out_epsilon(rounds_of("gaussian", 0.01, 1, 0.1, 1), delta=0.1 * share)
    assert upper == 0 if share > 1 else upper > 100
