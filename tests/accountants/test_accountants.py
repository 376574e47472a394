"""The conformance suite that every accountant passes: questions, refusals and saved states."""

import copy
import dataclasses
import math
import warnings

import numpy as np
import pytest
from helpers.accountants import (
    DELTA,
    FAMILY,
    accountant_of,
    every_accountant,
    every_bound,
    every_shuffler_of_reports,
    spent,
    weights_of,
)
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants.utils import get_noise_multiplier

from opacus_shuffle import PrivacyAssumptionWarning, ShuffledCheckIn, ShuffleGauss
from opacus_shuffle.accountants import ShuffleAccountant
from opacus_shuffle.analysis import composition, mean_ratio
from opacus_shuffle.core.rounding import round_up

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
RUN = [(2.0, 0.1, 50)]


@every_bound
def test_nothing_costs_nothing_and_more_noise_fewer_rounds_and_a_larger_delta_cost_less(
    kind, bound
):
    """Certified, a smaller rate costs less, too; of the printed formulas it is not so."""
    assert spent(kind, [], bound=bound) == ShuffleAccountant(kind).get_epsilon(0.1) == 0.0
    base = spent(kind, RUN, bound=bound)
    assert spent(kind, [(2.2, 0.1, 50)], bound=bound) < base
    assert spent(kind, [(2.0, 0.1, 49)], bound=bound) < base
    assert spent(kind, RUN, bound=bound, delta=1e-4) < base
    if bound == "certified" and kind.sampling is not None:
        assert spent(kind, [(2.0, 0.09, 50)]) < base


@pytest.mark.zoo
@every_bound
def test_histories_that_change_compose(kind, bound):
    def cost(*history):
        return spent(kind, list(history), bound=bound)

    whole = cost((2.0, 0.1, 70))
    assert cost((2.0, 0.1, 30), (2.0, 0.1, 40)) == pytest.approx(whole, rel=1e-12)
    mixed = cost((2.0, 0.1, 30), (3.0, 0.2, 40))
    assert cost((3.0, 0.2, 40), (2.0, 0.1, 30)) == pytest.approx(mixed, rel=1e-12)
    assert cost((3.0, 0.1, 70)) < cost((2.0, 0.1, 30), (3.0, 0.1, 40)) < whole


@every_accountant
def test_step_writes_opacus_triples_and_merges_neighbours(kind):
    accountant = accountant_of(kind)
    for sigma in (2.0, 2.0, 3.0, 2.0):
        accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    assert accountant.history == [(2.0, 0.1, 2), (3.0, 0.1, 1), (2.0, 0.1, 1)]
    assert [steps for _, steps in accountant.rounds] == [2, 1, 1]
    assert len(accountant) == 4


@every_shuffler_of_reports  # shuffled weights have no reports with noise of their own
def test_the_noise_of_the_sum_is_root_b_times_the_local_one(kind):
    local = spent(kind, [(2.0, 0.1, 5)], local_noise=True)
    summed = spent(kind, [(2.0 * math.sqrt(100), 0.1, 5)], local_noise=False)
    assert summed == pytest.approx(local, rel=1e-9)


@pytest.mark.parametrize("kind", [ShuffledCheckIn, ShuffleGauss])
def test_more_reports_than_planned_share_the_noise_of_the_sum(kind):
    rate = {} if kind.sampling is None else {"sample_rate": 0.1}
    accountant = ShuffleAccountant(kind, num_users=1000)
    accountant.plan(kind(noise_multiplier=1.0, num_users=1000 if rate else 100, **rate))
    accountant.step(noise_multiplier=20.0, sample_rate=0.2)
    ((mechanism, _),) = accountant.rounds
    assert mechanism.noise_multiplier == pytest.approx(20 / math.sqrt(200), rel=1e-12)
    with pytest.raises(ValueError, match="use a new PrivacyEngine for another run"):
        accountant.plan(kind(noise_multiplier=1.0, num_users=999, **rate))


@every_accountant
def test_the_first_epsilon_that_is_not_proved_warns_once_and_names_the_proved_one(kind):
    accountant = accountant_of(kind, [(2.0, 0.1, 5)])
    covered = "one pair of data sets" if kind in FAMILY else "no data set for certain"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certified = accountant.get_epsilon(DELTA, bound="certified")
        with pytest.warns(
            PrivacyAssumptionWarning, match=f"{covered}.*epsilon={round_up(certified)}"
        ):
            accountant.get_epsilon(DELTA, bound="published")
        accountant.get_epsilon(DELTA, bound="pair")


REFUSALS = [
    *({"delta": value} for value in (0, 1.0, math.nan, "1e-5", 10**400)),
    {"bound": "loose"},
    {"adjacency": "add_remove"},
    {"epsilon": 3},
    {"orders": [0.5]},
    {"num_users": 0},
    {"num_users": 10**9},  # the accountant knows that there are 1000
    {"adjacency": "replace", "bound": "published"},  # which has no value for it
]


@every_accountant
@pytest.mark.parametrize("options", REFUSALS, ids=str)
def test_bad_questions_are_refused_by_name(kind, options):
    accountant = accountant_of(kind, [(2.0, 0.1, 5)])
    with pytest.raises(ValueError, match=next(iter(options))):
        accountant.get_epsilon(**{"delta": DELTA, **options})


@every_accountant
@pytest.mark.parametrize(
    "sigma", [0.0, -1.0, math.nan, math.inf, 1e-170, 1e200, "2", True, None, np.bool_(True)]
)
def test_noise_must_be_positive_and_finite(kind, sigma):
    accountant = accountant_of(kind)
    with pytest.raises(ValueError, match="noise_multiplier"):
        accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    with pytest.raises(ValueError, match="noise_multiplier"):
        accountant.history = [(sigma, 0.1, 5)]  # as Opacus writes it
    assert accountant.history == []


@every_shuffler_of_reports  # shuffled weights hide in the same way among any number of records
def test_an_unknown_population_is_refused_with_remedies_that_work(kind):
    accountant = ShuffleAccountant(kind)
    with pytest.raises(ValueError, match=r"set engine.accountant.num_users = len\(dataset\)"):
        accountant.step(noise_multiplier=20.0, sample_rate=0.1)
    accountant.history = [(20.0, 0.1, 5)]  # as calibration does
    with pytest.raises(ValueError, match=r"accountant\.num_users = "):
        accountant.get_epsilon(DELTA)
    with pytest.raises(ValueError, match="make_private_with_epsilon"):
        get_noise_multiplier(
            target_epsilon=1.0, target_delta=DELTA, sample_rate=0.1, steps=5, accountant=kind.name
        )
    told = accountant.get_epsilon(DELTA, num_users=1000)
    # B takes the place of n·γ where it is more.
    assert accountant.get_epsilon(DELTA, num_users=1000, batch_size=400) > told
    accountant.num_users = 1000
    assert accountant.get_epsilon(DELTA) == told > 0
    accountant.step(noise_multiplier=20.0, sample_rate=0.1)
    assert accountant.history == [(20.0, 0.1, 6)]


def test_published_is_the_exact_rdp_of_theorem_1_for_shuffle_gauss():
    orders = np.arange(2, 400)
    rdp = mean_ratio.compute_rdp(noise_multiplier=3.0, num_users=100, orders=orders)
    direct, _ = composition.epsilon_from_rdp(
        lambda at: 7 * np.interp(at, orders, rdp), delta=DELTA, orders=orders
    )
    epsilon = spent(ShuffleGauss, [(3.0, 0.1, 7)], bound="published")
    assert epsilon == pytest.approx(direct, rel=1e-9)


# --- the noise that is found for a budget ---


@pytest.mark.zoo
@every_accountant
def test_opacus_own_calibration_works(kind):
    sigma = get_noise_multiplier(
        target_epsilon=20.0,
        target_delta=DELTA,
        sample_rate=0.1,
        steps=20,
        accountant=kind.name,
        num_users=2000,
        **weights_of(kind),
    )
    assert spent(kind, [(sigma, 0.1, 20)], num_users=2000, local_noise=False) <= 20.0


@every_accountant
def test_state_survives_and_shares_nothing(kind):
    accountant = accountant_of(kind, [(2.0, 0.1, 5)], batch_size=100)
    accountant.predictable, accountant.unchecked = ("seed=0",), ("a file",)
    state = accountant.state_dict()
    restored = ShuffleAccountant(kind)
    restored.load_state_dict(state)
    assert restored.get_epsilon(DELTA) == accountant.get_epsilon(DELTA)
    assert restored.state_dict() == state
    assert (restored.num_users, restored.batch_size, restored.emulated) == (1000, 100, False)
    report = restored.report(DELTA).to_dict()
    assert (report["predictable"], report["unchecked"]) == (["seed=0"], ["a file"])
    restored.step(noise_multiplier=2.0, sample_rate=0.1)
    copied = copy.deepcopy(accountant)
    copied.step(noise_multiplier=9.0, sample_rate=0.1)
    assert state["rounds"] == [(dataclasses.asdict(accountant.rounds[0][0]), 5)]
    assert accountant.history == [(2.0, 0.1, 5)]


def with_round(**changes):
    """Spoils the only round."""
    return lambda state: {**state, "rounds": [({**state["rounds"][0][0], **changes}, 5)]}


SPOILT = {
    "noise below 0": with_round(noise_multiplier=-1.0),
    "a field of another mechanism": with_round(sigma=1.0),
    "half a round": lambda state: {**state, "rounds": [(state["rounds"][0][0], 0.5)]},
    "something else for rounds": lambda state: {**state, "rounds": 3},
    "no users": lambda state: {**state, "num_users": 0},
    "a plan without its fields": lambda state: {**state, "planned": {"noise_multiplier": 2.0}},
    "noise that is somewhere": lambda state: {**state, "emulated": None},
    "one name for a list": lambda state: {**state, "predictable": "seed=0"},
    "fewer than no rounds replaced": lambda state: {**state, "rewound": -1},
    "less": lambda state: {name: value for name, value in state.items() if name != "rounds"},
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_malformed_state_is_refused_and_changes_nothing(spoil):
    state = accountant_of(ShuffledCheckIn, [(2.0, 0.1, 5)]).state_dict()
    accountant = ShuffleAccountant(ShuffledCheckIn)
    before = copy.deepcopy(accountant.__dict__)
    with pytest.raises(ValueError, match="state_dict of shuffled_checkin is malformed"):
        accountant.load_state_dict(spoil(state))
    assert accountant.__dict__ == before


@every_accountant
def test_the_state_of_another_run_is_refused_and_changes_nothing(kind):
    accountant = ShuffleAccountant(
        kind, num_users=1000, batch_size=100, local_noise=kind.noise_is_local
    )
    accountant.plan(accountant_of(kind, [(2.0, 0.1, 5)]).rounds[0][0])
    before = copy.deepcopy(accountant.__dict__)
    differences = [
        {"num_users": 999},
        {"batch_size": 99},
        *([{"local_noise": False}] if kind.noise_is_local else []),
        *([{"dimension": 50}] if "dimension" in kind.field_names() else []),
    ]
    others = [accountant_of(kind, [(2.0, 0.1, 5)], **changed) for changed in differences]
    if kind.sampling is not None:  # of a smaller rate than the plan's
        others.append(accountant_of(kind, [(2.0, 0.05, 5)]))
    for other in others:
        with pytest.raises(ValueError, match=r"state_dict is of a run .*this accountant of one"):
            accountant.load_state_dict(other.state_dict(), allow_rewind=True)
    for one in (None, {}, {**others[0].state_dict(), "mechanism": "rdp"}):
        with pytest.raises(ValueError, match="mechanism in state_dict must be"):
            accountant.load_state_dict(one)
    assert accountant.__dict__ == before


ROUND = ShuffledCheckIn(noise_multiplier=2.0, num_users=100, sample_rate=0.1)
moves = st.tuples(st.sampled_from(["run", "load", "rewind"]), st.booleans())


@given(st.lists(moves, max_size=20))
def test_no_load_removes_a_round_that_ran_here_silently(moves):
    """Every round has a number of its own, as equal noise does not make equal rounds."""
    accountants = [ShuffleAccountant(ShuffledCheckIn) for _ in range(2)]
    accounted, ran = [[], []], [set(), set()]
    for number, (move, one) in enumerate(moves):
        accountant, state = accountants[one], accountants[not one].state_dict()
        if move == "run":
            accountant.record(ROUND)
            accounted[one].append(number)
        elif accounted[one] and move == "load":
            with pytest.raises(ValueError, match=r"already accounted here.*allow_rewind=True"):
                accountant.load_state_dict(state)
        else:
            accountant.load_state_dict(state, allow_rewind=move == "rewind")
            accounted[one] = list(accounted[not one])
            ran[one] |= ran[not one]
        ran[one] |= set(accounted[one])
        assert len(accountant) == len(accounted[one])
        assert accountant.rewound >= len(ran[one] - set(accounted[one]))
