"""The conformance suite that every accountant passes, and what is particular to each."""

from __future__ import annotations

import copy
import dataclasses
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
from helpers.toy import ONE_NOISE
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import create_accountant, register_accountant
from opacus.accountants.utils import get_noise_multiplier

import opacus_shuffle
from opacus_shuffle import Guarantee, PrivacyAssumptionWarning
from opacus_shuffle.accountants import ShuffledWeightsAccountant, ShuffleGaussAccountant, bounds_of
from opacus_shuffle.analysis import composition, mean_ratio
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.rounding import round_up

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")

DELTA = 1e-5
WEIGHTS = {"dimension": 1000, "batch_clip": 50.0}
"""What is permuted, and a clipping of sums with which WS's estimate is positive up to σ = 2: it says 0 where σ² exceeds c′."""

# shuffled_sums is described by its protocol (tests/accountants/test_shuffled_sums_accountant.py), the others by plain numbers.
ACCOUNTANTS = [opacus_shuffle.accountants.ACCOUNTANTS[name] for name in ONE_NOISE]
# The reports of this family are shuffled, so n and a report's own noise matter; shuffled_fw shuffles weights, and the server
# adds the noise. What is about reports is asked of the family alone.
FAMILY = [accountant for accountant in ACCOUNTANTS if accountant is not ShuffledWeightsAccountant]
every_accountant = pytest.mark.parametrize("accountant_class", ACCOUNTANTS, ids=lambda c: c.mechanism())
every_shuffler_of_reports = pytest.mark.parametrize("accountant_class", FAMILY, ids=lambda c: c.mechanism())


def every_bound_named(beginning):
    return pytest.mark.parametrize(
        ("accountant_class", "bound"),
        [(c, b) for c in ACCOUNTANTS for b in bounds_of(c.mechanism_class) if b.startswith(beginning)],
        ids=lambda value: value if isinstance(value, str) else value.mechanism(),
    )


every_bound = every_bound_named("")


def weights_of(accountant_class):
    """What only shuffled_fw needs to know."""
    return WEIGHTS if accountant_class is ShuffledWeightsAccountant else {}


def accountant_of(accountant_class, history=(), *, num_users=1000, local_noise=None, **options):
    """An accountant that knows what it needs, with local noise if it has any."""
    local_noise = accountant_class in FAMILY if local_noise is None else local_noise
    options = weights_of(accountant_class) | options
    accountant = accountant_class(num_users=num_users, local_noise=local_noise, **options)
    accountant.history = list(history)
    return accountant


def spent(accountant_class, history, *, delta=DELTA, bound="certified", num_users=1000, local_noise=None, **options):
    accountant = accountant_of(accountant_class, history, num_users=num_users, local_noise=local_noise)
    return accountant.get_epsilon(delta, bound=bound, **options)


# --- conformance ---------------------------------------------------------------------------------------------------


@every_accountant
def test_opacus_creates_it_by_name(accountant_class):
    assert type(create_accountant(accountant_class.mechanism())) is accountant_class


@every_accountant
def test_it_has_the_three_bounds_and_the_certified_ones_are_proved(accountant_class):
    accountant = accountant_of(accountant_class, [(2.0, 0.1, 5)])
    names = bounds_of(accountant_class.mechanism_class)
    guarantees = {name: accountant.bound(DELTA, bound=name).guarantee for name in names}
    assert {"published", "pair", "certified"} <= set(guarantees)
    proved = {name for name, worth in guarantees.items() if worth is Guarantee.PROVED}
    assert proved == {"certified"}


@every_bound
def test_nothing_ran_costs_nothing(accountant_class, bound):
    with pytest.raises(ValueError, match="bound"):
        accountant_class().get_epsilon(DELTA, bound="bogus")
    assert spent(accountant_class, [], bound=bound) == 0.0
    assert accountant_class().get_epsilon(DELTA, bound=bound) == 0.0
    assert len(accountant_class()) == 0


@every_bound
@settings(deadline=None, max_examples=2)
@given(sigma=st.floats(0.3, 20), rate=st.floats(0.01, 1.0), steps=st.integers(1, 10**6), users=st.integers(100, 10**6))
def test_epsilon_is_finite_and_positive(accountant_class, bound, sigma, rate, steps, users):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", composition.OrderCapWarning)
        epsilon = spent(accountant_class, [(sigma, rate, steps)], bound=bound, num_users=users)
    assert math.isfinite(epsilon)
    assert epsilon >= 0
    # At σ = 2 and with 10⁴ users δ(0) is at least about 0.4·γ·√(Var X / n) = 2e-5, and less noise or fewer users leave more.
    assert epsilon > 0 or sigma > 2 or users > 10**4


@every_bound
def test_more_noise_fewer_rounds_and_a_larger_delta_cost_less(accountant_class, bound):
    base = spent(accountant_class, [(2.0, 0.1, 50)], bound=bound)
    assert spent(accountant_class, [(2.2, 0.1, 50)], bound=bound) < base
    assert spent(accountant_class, [(2.0, 0.1, 49)], bound=bound) < base
    assert spent(accountant_class, [(2.0, 0.1, 50)], bound=bound, delta=1e-4) < base


@pytest.mark.zoo
@every_shuffler_of_reports  # the papers' bounds are above their pair; WS's estimate is not
@settings(deadline=None, max_examples=3)
@given(sigma=st.floats(0.01, 20), rate=st.floats(1e-4, 1.0), steps=st.integers(1, 1000), users=st.integers(2, 10**5))
def test_pair_never_exceeds_published(accountant_class, sigma, rate, steps, users):
    if rate * users < 1 and accountant_class.mechanism() != "shuffled_checkin":
        return  # no report at all
    history = [(sigma, rate, steps)]
    published = spent(accountant_class, history, bound="published", num_users=users)
    pair = spent(accountant_class, history, bound="pair", num_users=users)
    assert pair <= published * (1 + 1e-9)


@pytest.mark.zoo  # at one setting each, tests/accountants/test_report.py's ladders say it too
@every_accountant
@settings(deadline=None, max_examples=3)
@given(sigma=st.floats(0.3, 20), rate=st.floats(0.01, 1.0), steps=st.integers(1, 10**4), users=st.integers(100, 10**5))
def test_what_holds_for_every_data_set_is_never_below_one_pair(accountant_class, sigma, rate, steps, users):
    pair, certified = (
        spent(accountant_class, [(sigma, rate, steps)], bound=bound, num_users=users) for bound in ("pair", "certified")
    )
    assert pair <= certified


@every_shuffler_of_reports  # what is proved of shuffled weights is DP-SGD's own
def test_shuffling_helps_in_every_bound(accountant_class):
    for bound in ("pair", "certified"):
        crowd = spent(accountant_class, [(4.0, 0.5, 20)], bound=bound, num_users=100_000)
        assert crowd < spent(accountant_class, [(4.0, 0.5, 20)], bound=bound, num_users=100) / 3


@pytest.mark.zoo
@every_bound
def test_histories_that_change_compose(accountant_class, bound):
    whole = spent(accountant_class, [(2.0, 0.1, 70)], bound=bound)
    assert spent(accountant_class, [(2.0, 0.1, 30), (2.0, 0.1, 40)], bound=bound) == pytest.approx(whole, rel=1e-12)
    mixed = spent(accountant_class, [(2.0, 0.1, 30), (3.0, 0.2, 40)], bound=bound)
    assert spent(accountant_class, [(3.0, 0.2, 40), (2.0, 0.1, 30)], bound=bound) == pytest.approx(mixed, rel=1e-12)
    assert spent(accountant_class, [(3.0, 0.1, 70)], bound=bound) < spent(
        accountant_class, [(2.0, 0.1, 30), (3.0, 0.1, 40)], bound=bound
    )
    assert spent(accountant_class, [(2.0, 0.1, 30), (3.0, 0.1, 40)], bound=bound) < whole


@every_accountant
def test_step_writes_opacus_triples_and_merges_neighbours(accountant_class):
    accountant = accountant_of(accountant_class)
    for sigma in (2.0, 2.0, 3.0, 2.0):
        accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    assert accountant.history == [(2.0, 0.1, 2), (3.0, 0.1, 1), (2.0, 0.1, 1)]
    assert len(accountant) == 4


@every_shuffler_of_reports  # shuffled weights have no reports with noise of their own
def test_the_noise_of_the_sum_is_root_b_times_the_local_one(accountant_class):
    local = spent(accountant_class, [(2.0, 0.1, 5)], local_noise=True)
    assert spent(accountant_class, [(2.0 * math.sqrt(100), 0.1, 5)], local_noise=False) == pytest.approx(local, rel=1e-9)


@every_accountant
def test_state_survives_and_shares_nothing(accountant_class):
    accountant = accountant_of(accountant_class, [(2.0, 0.1, 5)], batch_size=100)
    state = accountant.state_dict()
    restored = accountant_class()
    restored.load_state_dict(state)
    assert restored.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
    assert restored.state_dict() == state
    assert (restored.num_users, restored.batch_size, restored.emulated) == (1000, 100, False)
    restored.step(noise_multiplier=2.0, sample_rate=0.1)
    assert state["rounds"] == [(dataclasses.asdict(accountant.rounds[0][0]), 5)]
    assert accountant.history == [(2.0, 0.1, 5)]
    copied = copy.deepcopy(accountant)
    copied.step(noise_multiplier=9.0, sample_rate=0.1)
    assert accountant.history == [(2.0, 0.1, 5)]


@every_accountant
@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: {},
        lambda state: None,
        lambda state: {**state, "mechanism": "rdp"},
        lambda state: {**state, "unread": [((2.0,), 1)]},
        lambda state: {**state, "unread": [(1, 2)]},
        lambda state: {**state, "rounds": [({**state["rounds"][0][0], "noise_multiplier": math.nan}, 5)]},
        lambda state: {**state, "rounds": [({**state["rounds"][0][0], "sigma": 1.0}, 5)]},
        lambda state: {**state, "rounds": [({"noise_multiplier": 2.0}, 5)]},
        lambda state: {**state, "rounds": [(state["rounds"][0][0], 0)]},
        lambda state: {**state, "rounds": [3]},
        lambda state: {**state, "planned": {"noise_multiplier": 2.0}},
        lambda state: {**state, "fields": {"sigma": 1.0}},
        lambda state: {**state, "fields": {3: 1.0}},
        lambda state: {**state, "num_users": 999},
        lambda state: {**state, "num_users": "x"},
        lambda state: {**state, "batch_size": -1},
        lambda state: {**state, "emulated": not state["emulated"]},
        lambda state: {**state, "emulated": "no"},
        lambda state: {name: value for name, value in state.items() if name != "rounds"},
        lambda state: {**state, "more": 1},
    ],
)
def test_a_spoilt_state_is_refused_and_changes_nothing(accountant_class, spoil):
    accountant = accountant_of(accountant_class, [(2.0, 0.1, 5)])
    assert accountant.rounds[0][1] == 5
    before = copy.deepcopy(accountant.__dict__)
    with pytest.raises(ValueError):  # noqa: PT011 - Opacus words half of these
        accountant.load_state_dict(spoil(accountant.state_dict()))
    assert accountant.__dict__ == before


@every_accountant
@pytest.mark.parametrize("change", [{"num_users": 10**9}, {"sample_rate": 0.01}])
def test_a_saved_round_of_another_run_than_its_own_plan_or_population_is_refused(accountant_class, change):
    if "sample_rate" in change and accountant_class.mechanism_class.sampling is None:
        change = {"num_users": 10**6}
    accountant = accountant_of(accountant_class, [(2.0, 0.1, 5)])
    for planned in (None, accountant.rounds[0][0]):
        if planned is not None:
            accountant.plan(planned)
        elif accountant_class.mechanism_class.sampling is None or "sample_rate" in change:
            continue  # nothing says what these were: a batch's size, or a rate, of a stock engine's run
        state = accountant.state_dict()
        state["rounds"] = [({**state["rounds"][0][0], **change}, 5)]
        with pytest.raises(ValueError, match="state_dict speaks of"):
            accountant_class().load_state_dict(state)


@every_accountant
def test_a_saved_run_keeps_what_its_accountant_was_told_or_is_refused(accountant_class):
    told = {"dimension": 50} if "dimension" in accountant_class.mechanism_class.field_names() else {}
    accountant = accountant_class(batch_size=60, **told)
    for spoilt in [{"batch_size": 1}, *({**told, name: 2} for name in told)]:
        other = accountant_class(**{"batch_size": 60, **told, **spoilt}).state_dict()
        with pytest.raises(ValueError, match="state_dict speaks of"):
            accountant.load_state_dict(other)
    accountant.load_state_dict(accountant_class().state_dict())
    assert (accountant.batch_size, accountant.state_dict()["fields"]) == (60, told)


@every_accountant
def test_the_first_epsilon_that_is_not_proved_warns_once_and_names_the_proved_one(accountant_class):
    accountant = accountant_of(accountant_class, [(2.0, 0.1, 5)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certified = accountant.get_epsilon(DELTA, bound="certified")
    covered = "one pair of data sets" if accountant_class in FAMILY else "no data set for certain"
    with pytest.warns(PrivacyAssumptionWarning, match=f"{covered}.*epsilon={round_up(certified)}"):
        accountant.get_epsilon(DELTA, bound="published")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accountant.get_epsilon(DELTA, bound="pair")


@every_accountant
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"delta": 0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"bound": "loose"}, "bound"),
        ({"adjacency": "add_remove"}, "adjacency"),
        ({"adjacency": "replace", "bound": "published"}, "certified"),
        ({"epsilon": 3}, "epsilon=3"),
        ({"orders": [0.5]}, "orders"),
        ({"num_users": 0}, "num_users"),
        ({"num_users": 10**9}, "known to be 1000"),
        ({"delta": "1e-5"}, "delta"),
        ({"delta": 10**400}, "delta"),
    ],
)
def test_bad_arguments_are_named(accountant_class, options, named):
    accountant = accountant_of(accountant_class, [(2.0, 0.1, 5)])
    with pytest.raises(ValueError, match=named):
        accountant.get_epsilon(**{"delta": DELTA, **options})


@every_accountant
@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 1e-170, 1e200, "2", True, None, np.bool_(True)])
def test_noise_must_be_positive_and_finite(accountant_class, sigma):
    accountant = accountant_of(accountant_class)
    with pytest.raises(ValueError, match="noise_multiplier"):
        accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    with pytest.raises(ValueError, match="noise_multiplier"):
        accountant.history = [(sigma, 0.1, 5)]  # as Opacus writes it
    assert accountant.history == []


@every_shuffler_of_reports  # shuffled weights hide in the same way among any number of records
def test_an_unknown_population_is_refused_with_the_remedy(accountant_class):
    accountant = accountant_class()
    accountant.history = [(20.0, 0.1, 5)]
    with pytest.raises(ValueError, match=r"accountant\.num_users = "):
        accountant.get_epsilon(DELTA)
    with pytest.raises(ValueError, match="make_private_with_epsilon"):
        get_noise_multiplier(
            target_epsilon=1.0, target_delta=DELTA, sample_rate=0.1, steps=5, accountant=accountant_class.mechanism()
        )
    assert accountant.get_epsilon(DELTA, num_users=1000) > 0


@pytest.mark.zoo
@every_bound
def test_opacus_own_calibration_works(accountant_class, bound):
    sigma = get_noise_multiplier(
        target_epsilon=20.0,  # Theorems 2 and 3 keep terms that no noise removes: smaller targets are out of their reach
        target_delta=DELTA,
        sample_rate=0.1,
        steps=20,
        accountant=accountant_class.mechanism(),
        num_users=2000,
        bound=bound,
        **weights_of(accountant_class),
    )
    assert spent(accountant_class, [(sigma, 0.1, 20)], bound=bound, num_users=2000, local_noise=False) <= 20.0


@every_bound_named("certified")
def test_the_certified_value_never_exceeds_the_unshuffled_gaussian_and_is_it_for_one_user(accountant_class, bound):
    from opacus.accountants.analysis.gdp import eps_from_mu

    for adjacency, distance in zip(Adjacency, (1, 2), strict=True):
        exact = eps_from_mu(mu=distance * math.sqrt(50 / 16 + 20 / 25), delta=DELTA)
        history = [(4.0, 0.1, 50), (5.0, 0.2, 20)]
        assert spent(accountant_class, history, bound=bound, adjacency=adjacency) < exact
        alone = [(4.0, 1.0, 50), (5.0, 1.0, 20)]
        found = spent(accountant_class, alone, bound=bound, adjacency=adjacency, num_users=1)
        assert found == pytest.approx(exact, rel=1e-7)  # Opacus's root finder stops at about 1e-9 absolute


# --- particulars ---------------------------------------------------------------------------------------------------


def test_more_reports_than_planned_share_the_noise_of_the_sum():
    for kind in (opacus_shuffle.ShuffledCheckIn, opacus_shuffle.ShuffleGauss):
        rate = {} if kind.sampling is None else {"sample_rate": 0.1}
        found = opacus_shuffle.accountants.ACCOUNTANTS[kind.name](num_users=1000)
        found.plan(kind(noise_multiplier=1.0, num_users=1000 if rate else 100, **rate))
        found.step(noise_multiplier=20.0, sample_rate=0.2)
        assert found.rounds[0][0].noise_multiplier == pytest.approx(20 / math.sqrt(200), rel=1e-12)


def test_a_batch_size_that_is_told_late_counts_as_if_it_was_known():
    known, late = (ShuffleGaussAccountant(num_users=1000, batch_size=batch) for batch in (400, None))
    for each in (known, late):
        each.step(noise_multiplier=10.0, sample_rate=0.1)
    assert late.get_epsilon(DELTA, batch_size=400) == known.get_epsilon(DELTA) > late.get_epsilon(DELTA)
    restored = ShuffleGaussAccountant()
    restored.load_state_dict(late.state_dict())
    with pytest.raises(ValueError, match="leave out num_users and batch_size"):
        restored.get_epsilon(DELTA, batch_size=400)


def test_shuffle_gauss_takes_a_batch_for_a_round():
    epsilon = spent(ShuffleGaussAccountant, [(3.0, 0.1, 7)], num_users=1000)
    assert epsilon == opacus_shuffle.compute_epsilon("shuffle_gauss", noise_multiplier=3.0, num_users=100, steps=7, delta=DELTA)


def test_orders_may_come_from_a_generator():
    orders = [2, 3, 5, 8]
    once = spent(ShuffleGaussAccountant, [(3.0, 0.1, 7)], bound="published", orders=(order for order in orders))
    assert once == spent(ShuffleGaussAccountant, [(3.0, 0.1, 7)], bound="published", orders=orders)


def test_published_is_the_exact_rdp_of_theorem_1_for_shuffle_gauss():
    orders = np.arange(2, 400)
    rdp = mean_ratio.compute_rdp(noise_multiplier=3.0, num_users=100, orders=orders)
    direct, _ = composition.epsilon_from_rdp(lambda at: 7 * np.interp(at, orders, rdp), delta=DELTA, orders=orders)
    assert spent(ShuffleGaussAccountant, [(3.0, 0.1, 7)], bound="published") == pytest.approx(direct, rel=1e-9)


def test_the_answer_of_pair_carries_a_lower_value_within_a_percent():
    accountant = ShuffleGaussAccountant(num_users=60_000, local_noise=True)
    accountant.history = [(9.48, 1.0, 7)]
    answer = accountant.bound(1 / 60_000, bound="pair")
    assert 0.99 * answer.epsilon < answer.lower < answer.epsilon
    assert accountant.bound(1 / 60_000).lower is None


def test_a_rise_in_the_number_of_users_is_worth_reporting_in_full():
    accountant = ShuffleGaussAccountant(num_users=60_000, local_noise=True)
    accountant.step(noise_multiplier=9.48, sample_rate=1.0)
    report = accountant.report(1 / 60_000)
    printed = str(report)
    for word in ("published", "pair", "certified", "PAIR", "PROVED", "zero_out", "every data set", "0.001407", "0.3469"):
        assert word in printed
    rungs = ["local", "certified", "published", "pair", "secure_aggregation", "central"]
    assert [row["bound"] for row in report.to_dict()["bounds"]] == rungs


# --- registration --------------------------------------------------------------------------------------------------


# In another process: here a second table of accountants would stand beside the one that tests have imported.
IMPORTED_AND_RELOADED = """
import importlib, sys
for name in ('matplotlib', 'mlxtend', 'tqdm', 'flwr', 'transformers', 'triton'):
    sys.modules[name] = None
import opacus_shuffle, opacus_shuffle.accountants, opacus_shuffle.commands.main
print('without extras', flush=True)
from opacus.accountants import create_accountant
importlib.reload(opacus_shuffle.accountants)
create_accountant('shuffled_checkin')
print('accountants reloaded', flush=True)
importlib.reload(opacus_shuffle)
for name in [each for each in sys.modules if each.startswith('opacus_shuffle')]:
    del sys.modules[name]
import opacus_shuffle
create_accountant('shuffle_gauss')
print('all imported anew', flush=True)
"""


@pytest.fixture(scope="module")
def fresh_interpreter():
    """What a fresh interpreter printed that imported everything, reloaded the accountants, and then all."""
    return subprocess.run([sys.executable, "-c", IMPORTED_AND_RELOADED], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("done", ["without extras", "accountants reloaded", "all imported anew"])
def test_importing_needs_none_of_the_extras_and_registration_survives_reloads(fresh_interpreter, done):
    assert done in fresh_interpreter.stdout.splitlines(), fresh_interpreter.stderr


def test_a_stranger_of_the_same_name_is_not_overwritten():
    from opacus.accountants import RDPAccountant
    from opacus.accountants.registry import _ACCOUNTANTS

    ours = _ACCOUNTANTS["shuffle_gauss"]
    register_accountant("shuffle_gauss", RDPAccountant, force=True)
    try:
        with pytest.raises(ValueError, match="already registered"):
            opacus_shuffle.accountants.register_accountants()
    finally:
        register_accountant("shuffle_gauss", ours, force=True)


# --- calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.zoo
@every_bound
def test_the_calibrated_noise_meets_the_budget_and_a_little_less_does_not(accountant_class, bound):
    name = accountant_class.mechanism()
    target = 12.0 if bound == "published" else 1.0  # Theorems 2 and 3 keep terms that no noise removes
    run = {"num_users": 3000, "steps": 20, "sample_rate": 1.0 if name == "shuffle_gauss" else 0.2, "bound": bound}
    run |= weights_of(accountant_class)
    sigma = opacus_shuffle.compute_noise_multiplier(name, target_epsilon=target, target_delta=DELTA, **run)
    assert opacus_shuffle.compute_epsilon(name, noise_multiplier=sigma, delta=DELTA, **run) <= target
    # Grids and groups of pool sizes move ε by some tenths of a percent; σ moves it at least as much as itself.
    assert opacus_shuffle.compute_epsilon(name, noise_multiplier=0.98 * sigma, delta=DELTA, **run) > target


@pytest.mark.zoo
def test_replacement_takes_more_noise_than_zero_out():
    run = {"target_epsilon": 1.0, "target_delta": DELTA, "num_users": 300, "steps": 5}
    zero_out, replace = (
        opacus_shuffle.compute_noise_multiplier("shuffle_gauss", adjacency=adjacency, **run) for adjacency in Adjacency
    )
    assert replace > zero_out
    spent_then = opacus_shuffle.compute_epsilon(
        "shuffle_gauss",
        noise_multiplier=replace,
        num_users=300,
        steps=5,
        delta=DELTA,
        adjacency="replace",
    )
    assert spent_then <= 1.0
