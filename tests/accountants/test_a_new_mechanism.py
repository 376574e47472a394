"""A mechanism is added by new files and no edit anywhere else.

``helpers/laplace_reports.py`` has its round and its bounds; docs/adding_a_mechanism.rst, which runs
as a test, also trains with one.
"""

import json
import pickle
import sys

import pytest
from helpers.changed_files import through_json
from opacus.accountants import create_accountant
from opacus.accountants.registry import _ACCOUNTANTS
from opacus.accountants.utils import get_noise_multiplier

import opacus_shuffle
from opacus_shuffle.accountants import ShuffleAccountant, bounds_of, register_accountants
from opacus_shuffle.accountants.bounds import registry
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.commands.main import main
from opacus_shuffle.engine.schemes.base import Scheme

NAME, RUN = "laplace_reports", {"num_users": 100, "noise_multiplier": 20.0}
ROUNDS = {"steps": 4, "delta": 1e-5}


@pytest.fixture(scope="module")
def laplace():
    """The mechanism, registered for the tests of this file only."""
    tables = (MECHANISMS, _ACCOUNTANTS, registry._REGISTERED, Scheme._by_mechanism)
    before = [dict(table) for table in tables]
    from helpers import laplace_reports

    register_accountants()
    yield laplace_reports
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    del sys.modules["helpers.laplace_reports"]


def test_it_answers_for_its_name_and_fields(laplace, capsys):
    one, cost = laplace.LaplaceReports(**RUN), opacus_shuffle.compute_epsilon
    assert cost(one, **ROUNDS) == 0.2
    assert cost(one, adjacency="replace", **ROUNDS) == 0.4
    assert cost(NAME, diameter=3.0, **ROUNDS, **RUN) == pytest.approx(0.6)
    budget = {"target_epsilon": 1, "target_delta": 0.1, "num_users": 9, "steps": 7}
    sigma = opacus_shuffle.compute_noise_multiplier(NAME, **budget)
    assert 7 <= sigma <= 7 * (1 + 1e-4)
    with pytest.raises(ValueError, match="did you mean diameter"):
        cost(NAME, diametre=3.0, **ROUNDS, **RUN)
    with pytest.warns(opacus_shuffle.PrivacyAssumptionWarning):
        cost(one, bound="half", **ROUNDS)
    asked = {"mechanism": NAME, "diameter": 3, **ROUNDS, **RUN}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    assert main(["epsilon", *flags]) == 0
    assert capsys.readouterr().out.startswith("0.6000\n")


def test_it_is_reported_with_its_meanings(laplace):
    report = opacus_shuffle.privacy_report(laplace.LaplaceReports(**RUN), **ROUNDS)
    assert [bound.bound for bound in report.bounds] == ["certified", "half"]
    assert report.best.bound == "certified"
    printed = " ".join(str(report).split())
    for meaning in ("pure differential privacy adds up, whoever sees", "no guarantee at all"):
        assert meaning in printed
    assert json.loads(json.dumps(report.to_dict()))["settings"][0]["diameter"] == 1.0


def test_opacus_knows_its_accountant_which_pickles_and_restores(laplace):
    accountant = create_accountant(NAME)
    accountant.num_users = 1000
    for _ in range(3):
        accountant.step(noise_multiplier=200.0, sample_rate=0.1)
    # 100 reports share the noise of the sum.
    assert accountant.get_epsilon(1e-5) == pytest.approx(3 * 100**0.5 / 200)
    restored = create_accountant(NAME)
    restored.load_state_dict(through_json(accountant.state_dict()))
    assert accountant.rounds == restored.rounds == pickle.loads(pickle.dumps(accountant)).rounds
    budget = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 3}
    assert get_noise_multiplier(**budget, accountant=NAME, num_users=100) >= 3 * 10**0.5


def a_bound(mechanism, name):
    registry.register_bound(
        mechanism, name, meaning="nothing", guarantee=opacus_shuffle.Guarantee.PROVED
    )(lambda rounds, **options: None)


NEWCOMERS = {
    "'shuffled_checkin' belongs to ShuffledCheckIn": lambda kind: type(
        "Mine", (kind,), {"name": "shuffled_checkin"}
    ),
    "bound 'certified' of shuffled_checkin belongs to": lambda kind: a_bound(kind, "certified"),
    "the training of shuffled_checkin belongs to GaussianReports": lambda kind: type(
        "Takeover", (Scheme,), {"mechanisms": (kind,)}
    ),
}


@pytest.mark.parametrize("named", NEWCOMERS)
def test_a_newcomer_takes_nothing_from_others(laplace, named):
    before = dict(MECHANISMS)
    with pytest.raises(ValueError, match=named):
        NEWCOMERS[named](opacus_shuffle.ShuffledCheckIn)
    assert before == MECHANISMS
    assert bounds_of(laplace.LaplaceReports) == ("certified", "half")


def test_a_mechanism_derived_from_another_has_neither_its_bounds_nor_its_accountant(laplace):
    derived = type("Derived", (opacus_shuffle.ShuffledCheckIn,), {"name": "derived"})
    one = derived(noise_multiplier=5.0, num_users=100, sample_rate=0.1)
    for ask in (opacus_shuffle.compute_epsilon, opacus_shuffle.privacy_report):
        with pytest.raises(ValueError, match="Derived has no bounds"):
            ask(one, steps=1, delta=1e-5)
    with pytest.raises(ValueError, match="mechanism must be a ShuffledCheckIn"):
        ShuffleAccountant(opacus_shuffle.ShuffledCheckIn).record(one)
