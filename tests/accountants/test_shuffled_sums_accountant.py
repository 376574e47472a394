"""ε of shuffled sums on secret samples: the distribution of one round, its composition, the bounds, and the accountant."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import create_accountant
from scipy.integrate import quad
from scipy.stats import norm

import opacus_shuffle
from opacus_shuffle.accountants import ShuffledSumsAccountant, bounds_of
from opacus_shuffle.accountants.bounds.registry import Guarantee, compute_baseline, compute_bound
from opacus_shuffle.accountants.bounds.shuffled_sums import round_epsilon
from opacus_shuffle.accountants.mechanisms import MECHANISMS, ShuffledSums
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.sampled_sums import SampledRound, compute_epsilon, largest_mu, sampled_distribution
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

TIGHT = ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=1e-6, calibration="tight")
PAPER = ShuffleVectorSum(50, 200, 1.0, epsilon=2.0, delta=1e-5, rounds=20, calibration="published")


def gaussian_stick(mu, alpha):
    """H_α of N(μ, 1) against N(0, 1)."""
    return norm.cdf(mu / 2 - np.log(alpha) / mu) - alpha * norm.cdf(-mu / 2 - np.log(alpha) / mu)


def profile(mu, rate, alpha):
    """h of the module's text."""
    if alpha >= 1:
        return rate * gaussian_stick(mu, 1 + (alpha - 1) / rate)
    return alpha * profile(mu, rate, 1 / alpha) + 1 - alpha


def accountant_of(protocol, *, users=1000, steps=20):
    accountant = ShuffledSumsAccountant(num_users=users, aggregator=protocol)
    accountant.history = [(accountant.noise_multiplier, protocol.num_users / users, steps)]
    return accountant


# --- one round ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    mu=st.floats(0.01, 6.0),
    rate=st.floats(1e-4, 1.0),
    share=st.floats(0.0, 3.0),
)
def test_the_law_s_sticks_are_just_above_the_profile_in_both_directions(mu, rate, share):
    distribution = sampled_distribution(mu=mu, sample_rate=rate)
    epsilon = share * math.log1p(rate * math.expm1(mu))
    true = profile(mu, rate, math.exp(epsilon))
    for found in (distribution.hockey_stick(epsilon), distribution.reverse_hockey_stick(epsilon)):
        assert found >= true * (1 - 1e-9) - 1e-15
        # The distribution's stick is the chord between grid points: above it by at most width²/8 times the density of R. A step
        # of 0.03μ (half as much more 9 deviations out) in log W, W of density φ(z)/(μw): rate·μ·(1.5·0.03)²·w·φ(z)/8, w·φ(z)
        # being at most 0.4 times e^{0.06μ} from one end of a cell to the other.
        assert found <= true + rate * mu * 0.045**2 * 0.4 / 8 * math.exp(0.06 * mu)


@pytest.mark.parametrize("mu", [0.05, 0.8, 3.0])
@pytest.mark.parametrize("rate", [1.0, 0.3, 0.001])
def test_the_law_is_one_in_mass_and_mean_and_has_the_atom_at_one(mu, rate):
    distribution = sampled_distribution(mu=mu, sample_rate=rate)
    ratios = distribution.offsets + distribution.centre
    assert np.all(np.diff(distribution.offsets) > 0)
    assert np.all(distribution.masses >= 0)
    zero = distribution.masses[ratios == 0].sum()
    assert distribution.masses.sum() == pytest.approx(1, abs=1e-12)
    assert distribution.masses @ ratios + distribution.infinite == pytest.approx(1, abs=1e-12)
    assert zero == pytest.approx(distribution.infinite, abs=1e-15)
    atom = distribution.masses[np.argmin(np.abs(ratios - 1))]
    assert atom >= (1 - rate) * (2 * norm.cdf(mu / 2) - 1) - 1e-12


@pytest.mark.parametrize("rate", [0.5, 0.05])
def test_the_profile_covers_a_pair_that_sampling_really_has(rate):
    """Others at −1, the record at +1 or −1, unit noise of mean shift μ: (1 − γ)N(0) + γN(μ) against N(0), both ways."""
    mu, z = 1.3, np.linspace(-12, 14, 400_001)
    stayed, moved = norm.pdf(z), (1 - rate) * norm.pdf(z) + rate * norm.pdf(z - mu)
    for alpha in (1.0, 1.02, 1.2, 2.0):
        for p, q in ((stayed, moved), (moved, stayed)):
            stick = np.trapezoid(np.maximum(p - alpha * q, 0), z)
            assert stick <= profile(mu, rate, alpha) + 1e-9
    # and with replacement and sampling in both data sets: the record is +1 in one, −1 in the other, the rest at 0
    left = (1 - rate) * norm.pdf(z) + rate * norm.pdf(z + mu / 2)
    right = (1 - rate) * norm.pdf(z) + rate * norm.pdf(z - mu / 2)
    for alpha in (1.0, 1.02, 1.2):
        assert np.trapezoid(np.maximum(left - alpha * right, 0), z) <= profile(mu, rate, alpha) + 1e-9


# --- composition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "rate", "epsilon"), [(1.0, 0.3, 0.2), (2.5, 0.1, 0.4), (0.4, 0.7, 0.1), (1.0, 1.0, 1.0)])
def test_two_rounds_are_the_composition_of_the_profile_by_quadrature(mu, rate, epsilon):
    """H_α of a product is the integral of r·h(α/r) over the other factor's distribution of R."""
    alpha = math.exp(epsilon)

    def integrand(z):  # above 1: R = r at z ~ N(0, 1); below 1: R = 1/r with density r·φ(z)
        r = 1 - rate + rate * math.exp(mu * z - mu**2 / 2)
        return norm.pdf(z) * (r * profile(mu, rate, alpha / r) + profile(mu, rate, alpha * r))

    value, error = quad(integrand, mu / 2, mu + 12, limit=400, epsabs=1e-13, epsrel=1e-10)
    delta = value + (1 - rate) * (2 * norm.cdf(mu / 2) - 1) * profile(mu, rate, alpha)
    if rate == 1:
        assert math.log(delta) == pytest.approx(gaussian.log_delta(mu=mu * math.sqrt(2), epsilon=epsilon), abs=1e-8)
    found = compute_epsilon([(SampledRound(mu=mu, sample_rate=rate), 2)], delta=delta - error)
    # The two grids' steps, 0.03 and 0.05 standard deviations, add (0.03² + 0.05²)/6 = 6e-4 to the variance of the loss, 3e-4 to
    # its deviation; ε at a fixed δ grows by a few times that.
    assert epsilon * (1 - 1e-7) <= found <= epsilon * 1.01


@pytest.mark.parametrize("steps", [1, 7])
def test_a_sample_of_everyone_is_the_gaussian_mechanism(steps):
    expected = gaussian.compute_epsilon(mu=0.7 * math.sqrt(steps), delta=1e-5)
    assert compute_epsilon([(SampledRound(mu=0.7), steps)], delta=1e-5) == expected
    nearly = compute_epsilon([(SampledRound(mu=0.7, sample_rate=1 - 1e-9), steps)], delta=1e-5)
    assert expected * (1 - 1e-6) <= nearly <= expected * 1.005


def test_lost_counts_with_the_sampling_rate_and_never_leaks_infinity():
    plain = compute_epsilon([(SampledRound(mu=0.5, sample_rate=0.1), 10)], delta=1e-5)
    lossy = compute_epsilon([(SampledRound(mu=0.5, sample_rate=0.1, lost=5e-6), 10)], delta=1e-5)
    smaller = compute_epsilon([(SampledRound(mu=0.5, sample_rate=0.1), 10)], delta=1e-5 - 10 * 0.1 * 5e-6 * 1.0001)
    assert plain < lossy == pytest.approx(smaller, rel=1e-3)
    sums = ShuffledSums(
        noise_multiplier=4.0,
        num_users=100,
        sample_rate=1.0,
        dimension=1,
        granularity=1,
        noise_trials=100,
        lost=1e-6,
        epsilon=1.0,
        delta=1e-5,
    )
    with pytest.raises(ValueError, match="larger delta"):
        compute_bound([(sums, 10)], delta=1e-6, bound="certified")


@settings(max_examples=10, deadline=None)
@given(mu=st.floats(0.05, 2.0), rate=st.floats(0.001, 0.9), steps=st.integers(1, 300))
def test_epsilon_grows_with_rounds_rate_and_mu(mu, rate, steps):
    def spent(mu, rate, steps):
        return compute_epsilon([(SampledRound(mu=mu, sample_rate=rate), steps)], delta=1e-5)

    here = spent(mu, rate, steps)
    grid = 1.005  # each value is an upper bound within half a percent
    assert here <= spent(mu, rate, 2 * steps) * grid
    assert here <= spent(mu, min(1.0, 1.1 * rate), steps) * grid
    assert here <= spent(1.1 * mu, rate, steps) * grid
    assert here <= gaussian.compute_epsilon(mu=mu * math.sqrt(steps), delta=1e-5) * grid


@pytest.mark.parametrize("rate", [1.0, 0.02])
def test_the_largest_mu_meets_the_budget_and_a_little_more_does_not(rate):
    mu = largest_mu(epsilon=1.0, delta=1e-6, rounds=100, sample_rate=rate)
    assert compute_epsilon([(SampledRound(mu=mu, sample_rate=rate), 100)], delta=1e-6) <= 1.0
    assert compute_epsilon([(SampledRound(mu=mu * 1.001, sample_rate=rate), 100)], delta=1e-6) > 1.0


def test_bad_rounds_are_refused():
    for bad, named in (
        ({"mu": 0.0}, "mu"),
        ({"mu": 1.0, "sample_rate": 0}, "sample_rate"),
        ({"mu": 1.0, "lost": 1.0}, "lost"),
    ):
        with pytest.raises(ValueError, match=named):
            SampledRound(**bad)
    assert compute_epsilon([], delta=0.1) == 0.0
    with pytest.raises(ValueError, match="delta"):
        compute_epsilon([], delta=0)
    with pytest.raises(ValueError, match="larger delta"):
        largest_mu(epsilon=1.0, delta=1e-6, rounds=10, sample_rate=0.1, lost=1e-6)


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [TIGHT, PAPER], ids=["tight", "published"])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
@pytest.mark.parametrize("users", [50, 1000])
def test_every_bound_is_proved_and_certified_is_the_smaller(protocol, adjacency, users):
    accountant = accountant_of(protocol, users=users)
    answers = {name: accountant.bound(1e-5, bound=name, adjacency=adjacency) for name in bounds_of(ShuffledSums)}
    assert set(answers) == {"published", "certified"}
    for answer in answers.values():
        assert answer.guarantee is Guarantee.PROVED
        assert answer.adversary.startswith("sees every shuffled message")
        assert answer.trusted == "the shuffler"
        assert answer.meaning
        assert math.isfinite(answer.epsilon)
    assert answers["certified"].epsilon <= answers["published"].epsilon
    server = compute_baseline(accountant.rounds(), delta=1e-5, baseline="central", adjacency=adjacency)
    assert server.trusted == "the server"
    assert server.epsilon <= answers["certified"].epsilon * 1.005


@pytest.mark.parametrize("users", [50, 1000])
def test_a_pair_of_data_sets_is_never_above_and_nearly_reaches_the_certificate(users):
    answer = accountant_of(TIGHT, users=users, steps=200).bound(1e-5, bound="certified", adjacency="replace")
    assert answer.lower is not None
    assert 0.85 * answer.epsilon <= answer.lower <= answer.epsilon


def test_zeroing_is_half_a_replacement_where_everyone_takes_part():
    accountant = accountant_of(TIGHT, users=50, steps=5)
    half = gaussian.compute_epsilon(mu=TIGHT.mu / 2 * math.sqrt(5), delta=1e-5 - 5 * TIGHT.lost)
    whole = gaussian.compute_epsilon(mu=TIGHT.mu * math.sqrt(5), delta=1e-5 - 5 * TIGHT.lost)
    for adjacency, expected in (("zero_out", half), ("replace", whole)):
        assert accountant.bound(1e-5, bound="certified", adjacency=adjacency).epsilon == pytest.approx(expected, rel=1e-7)


def test_one_round_of_the_paper_s_protocol_is_what_it_was_made_for():
    protocol = ShuffleVectorSum(50, 200, 1.0, epsilon=1.0, delta=1e-6, calibration="published")
    (mechanism, _), = accountant_of(protocol, users=50, steps=1).rounds()  # fmt: skip
    assert compute_bound([(mechanism, 1)], delta=1e-6).epsilon == 1.0
    # At another δ the same noise is that of the protocol made for the ε found.
    other = round_epsilon(mechanism, 1e-8)
    again = ShuffleVectorSum(50, 200, 1.0, epsilon=other, delta=1e-8, calibration="published")
    assert again.noise_bits * again.bit_probability == pytest.approx(protocol.noise_bits * protocol.bit_probability, rel=1e-9)
    assert again.granularity == protocol.granularity


def test_the_paper_s_rounds_meet_the_budget_they_were_made_for_at_any_number_of_steps():
    for steps in (2, 20, 500):
        protocol = ShuffleVectorSum(50, 200, 1.0, epsilon=2.0, delta=1e-5, rounds=steps, calibration="published")
        spent = accountant_of(protocol, steps=steps).bound(1e-5, bound="published").epsilon
        assert spent <= 2.0
        each, share = protocol.round_epsilon, 1e-5 / (steps + 1)
        advanced = steps * each**2 / 2 + each * math.sqrt(2 * steps * math.log(1 / share))
        assert spent == pytest.approx(min(steps * each, advanced), rel=1e-9)


def test_a_delta_beyond_the_rounds_own_still_has_a_value():
    # 20 rounds of δ = 1e-6 each are more than the 1e-6 asked for: their ε is taken at a smaller share
    for name in bounds_of(ShuffledSums):
        assert math.isfinite(accountant_of(TIGHT).bound(1e-6, bound=name).epsilon)
        assert math.isfinite(accountant_of(PAPER).bound(1e-9, bound=name).epsilon)


@settings(max_examples=10, deadline=None)
@given(steps=st.integers(1, 500), more=st.integers(1, 100))
def test_more_steps_and_smaller_deltas_cost_more(steps, more):
    for name in ("published", "certified"):
        few, many = (accountant_of(TIGHT, steps=count) for count in (steps, steps + more))
        assert few.bound(1e-5, bound=name).epsilon <= many.bound(1e-5, bound=name).epsilon * 1.005
        assert few.bound(1e-5, bound=name).epsilon <= few.bound(1e-7, bound=name).epsilon * 1.005


# --- the accountant -------------------------------------------------------------------------------------------------


def test_it_is_registered_and_knows_no_tight_bound():
    accountant = create_accountant("shuffled_sums")
    assert isinstance(accountant, ShuffledSumsAccountant)
    assert accountant.get_epsilon(1e-5) == 0.0
    assert MECHANISMS["shuffled_sums"] is ShuffledSums
    with pytest.raises(ValueError, match="'published', 'certified'"):
        accountant.get_epsilon(1e-5, bound="tight")
    with pytest.raises(ValueError, match="orders"):
        accountant_of(TIGHT).get_epsilon(1e-5, orders=[2.0])


def test_the_history_is_opacus_s_and_a_checkpoint_restores_everything():
    accountant = ShuffledSumsAccountant(num_users=1000, aggregator=TIGHT)
    for _ in range(3):
        accountant.step(noise_multiplier=accountant.noise_multiplier, sample_rate=0.05)
    assert accountant.history == [(accountant.noise_multiplier, 0.05, 3)]
    assert len(accountant) == 3
    saved = json.loads(json.dumps(accountant.state_dict()))
    restored = create_accountant("shuffled_sums")
    restored.load_state_dict(saved)
    assert restored.protocol == accountant.protocol
    for name in bounds_of(ShuffledSums):
        assert restored.get_epsilon(1e-5, bound=name) == accountant.get_epsilon(1e-5, bound=name)


def test_mu_is_never_understated():
    for protocol in (TIGHT, PAPER):
        (mechanism, _), = accountant_of(protocol).rounds()  # fmt: skip
        assert protocol.mu <= mechanism.mu <= protocol.mu * (1 + 1e-12)
        assert mechanism.noise_std == pytest.approx(
            2
            * math.sqrt(mechanism.noise_trials * protocol.bit_probability * (1 - protocol.bit_probability))
            / protocol.granularity
        )


@pytest.mark.parametrize("spoil", ["missing", "unknown field", "another", "sigma", "rate", "none"])
def test_state_that_is_no_such_run_s_is_refused_and_changes_nothing(spoil):
    accountant = accountant_of(TIGHT)
    saved = accountant.state_dict()
    if spoil == "missing":
        del saved["protocol"]
    elif spoil == "unknown field":
        saved["protocol"]["sigma"] = 1
    elif spoil == "another":
        saved["protocol"] = accountant_of(PAPER).protocol
    elif spoil == "sigma":
        saved["history"] = [(1.0, 0.05, 1)]
    elif spoil == "rate":
        saved["history"] = [(accountant.noise_multiplier, 0.5, 1)]
    else:
        saved["protocol"] = None
    before = (accountant.protocol, accountant.history)
    with pytest.raises(ValueError, match=r"protocol|noise_multiplier|sample_rate"):
        accountant.load_state_dict(saved)
    assert (accountant.protocol, accountant.history) == before


def test_a_second_protocol_is_refused():
    accountant = accountant_of(TIGHT)
    with pytest.raises(ValueError, match="one protocol"):
        accountant.describe_protocol(PAPER)
    fresh = ShuffledSumsAccountant(aggregator=TIGHT)
    with pytest.raises(ValueError, match="one protocol"):
        fresh.describe_protocol(PAPER, once=True)
    fresh.describe_protocol(PAPER)
    assert fresh.protocol == accountant_of(PAPER).protocol


def test_what_needs_a_protocol_says_so():
    with pytest.raises(ValueError, match="aggregator=ShuffleVectorSum"):
        _ = ShuffledSumsAccountant().noise_multiplier
    with pytest.raises(ValueError, match="local_noise"):
        ShuffledSumsAccountant(local_noise=True)
    numbers = {"num_users": 1000, "steps": 3, "sample_rate": 0.1}
    with pytest.raises(ValueError, match="ShuffleVectorSum"):
        opacus_shuffle.compute_epsilon("shuffled_sums", noise_multiplier=1.0, delta=1e-5, **numbers)
    with pytest.raises(ValueError, match="ShuffleVectorSum"):
        opacus_shuffle.compute_noise_multiplier("shuffled_sums", target_epsilon=1.0, target_delta=1e-5, **numbers)


def test_the_report_names_the_adversary_and_quotes_the_certificate():
    report = accountant_of(TIGHT).report(1e-5)
    assert [bound.bound for bound in report.bounds] == ["certified", "published", "central"]
    assert report.best.bound == "certified"
    printed = " ".join(str(report).split())
    assert "one record's gradient is zero" in printed
    assert "all the shuffled messages" in printed
    assert "simulated" in printed
    found = json.loads(json.dumps(report.to_dict()))
    assert found["settings"][0]["noise_trials"] == TIGHT.sum_round.noise.trials
    assert len(accountant_of(TIGHT).report(1e-5, adjacency="replace").bounds) == 3
