"""A mechanism is added by three new pieces and no edit anywhere else; ``helpers/laplace_reports.py`` has them."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
from helpers.changed_files import through_json
from helpers.toy import make_toy, run_epoch
from opacus.accountants import create_accountant
from opacus.accountants.registry import _ACCOUNTANTS
from opacus.accountants.utils import get_noise_multiplier

import opacus_shuffle
from opacus_shuffle.accountants import ShuffleAccountant, bounds_of, register_accountants
from opacus_shuffle.accountants.bounds import registry
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.engine.schemes.base import Scheme

RUN = {"num_users": 100, "noise_multiplier": 20.0}


@pytest.fixture(scope="module")
def laplace():
    """The three pieces, found; and taken away again, for the sake of other tests."""
    tables = (MECHANISMS, _ACCOUNTANTS, registry._TABLE, Scheme._by_mechanism)
    before = [dict(table) for table in tables]
    from helpers import laplace_reports

    register_accountants()
    yield laplace_reports
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    del sys.modules["helpers.laplace_reports"]


def test_it_answers_for_its_name_and_fields(laplace):
    one = laplace.LaplaceReports(**RUN)
    assert opacus_shuffle.compute_epsilon(one, steps=4, delta=1e-5) == 0.2
    assert opacus_shuffle.compute_epsilon(
        "laplace_reports", steps=4, delta=1e-5, diameter=3.0, **RUN
    ) == pytest.approx(0.6)
    assert opacus_shuffle.compute_epsilon(one, steps=4, delta=1e-5, adjacency="replace") == 0.4
    sigma = opacus_shuffle.compute_noise_multiplier(
        "laplace_reports", target_epsilon=1, target_delta=0.1, num_users=9, steps=7
    )
    assert sigma == pytest.approx(7, rel=1e-6)
    with pytest.raises(ValueError, match="did you mean diameter"):
        opacus_shuffle.compute_epsilon("laplace_reports", steps=4, delta=1e-5, diametre=3.0, **RUN)
    with pytest.warns(opacus_shuffle.PrivacyAssumptionWarning):
        opacus_shuffle.compute_epsilon(one, steps=4, delta=1e-5, bound="half")


def test_it_is_reported_with_its_meanings_and_drawn(laplace):
    report = opacus_shuffle.privacy_report(laplace.LaplaceReports(**RUN), steps=4, delta=1e-5)
    assert [bound.bound for bound in report.bounds] == ["certified", "half"]
    assert report.best.bound == "certified"
    printed = " ".join(str(report).split())
    assert "pure differential privacy adds up, whoever sees the reports" in printed
    assert "no guarantee at all" in printed
    assert json.loads(json.dumps(report.to_dict()))["settings"][0]["diameter"] == 1.0
    pytest.importorskip("matplotlib").use("Agg")
    assert [line.get_label() for line in report.plot().lines] == [
        "certified: every data set",
        "half: nothing",
    ]


def test_opacus_knows_its_accountant_which_pickles_and_restores(laplace):
    accountant = create_accountant("laplace_reports")
    assert isinstance(accountant, ShuffleAccountant)
    accountant.num_users = 1000
    for _ in range(3):
        accountant.step(noise_multiplier=200.0, sample_rate=0.1)
    assert accountant.get_epsilon(1e-5) == pytest.approx(
        3 * 100**0.5 / 200
    )  # 100 reports share the noise of the sum
    assert pickle.loads(pickle.dumps(accountant)).rounds == accountant.rounds
    restored = create_accountant("laplace_reports")
    restored.load_state_dict(through_json(accountant.state_dict()))
    assert restored.rounds == accountant.rounds
    sigma = get_noise_multiplier(
        target_epsilon=1.0,
        target_delta=1e-5,
        sample_rate=0.1,
        steps=3,
        accountant="laplace_reports",
        num_users=100,
    )
    assert sigma >= 3 * 10**0.5


def test_networks_train_with_it(laplace):
    engine = opacus_shuffle.PrivacyEngine(accountant="laplace_reports")
    toy = make_toy(records=60, batch_size=10)
    model, optimizer, loader = engine.make_private(**toy, noise_multiplier=30.0, local_noise=True)
    run_epoch(model, optimizer, loader)
    assert engine.accountant.rounds == [
        (laplace.LaplaceReports(noise_multiplier=30.0, num_users=10), 6)
    ]
    assert engine.get_epsilon(1e-5) == pytest.approx(6 / 30)
    budget = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 1, "local_noise": True}
    engine = opacus_shuffle.PrivacyEngine(accountant="laplace_reports")
    _, optimizer, _ = engine.make_private_with_epsilon(
        **make_toy(records=60, batch_size=10), **budget
    )
    assert optimizer.noise_multiplier == pytest.approx(3.0, rel=1e-6)


def test_it_is_on_the_command_line(laplace, capsys):
    from opacus_shuffle.commands.main import main

    assert "laplace_reports" in MECHANISMS
    assert bounds_of(laplace.LaplaceReports) == ("certified", "half")
    flags = [
        "--num-users",
        "100",
        "--noise-multiplier",
        "20",
        "--diameter",
        "3",
        "--steps",
        "4",
        "--delta",
        "1e-5",
    ]
    assert main(["epsilon", "--mechanism", "laplace_reports", *flags]) == 0
    assert capsys.readouterr().out.startswith("0.6000\n")


def test_a_newcomer_takes_nothing_from_others(laplace):
    before = opacus_shuffle.compute_epsilon(
        "shuffled_checkin", noise_multiplier=5.0, num_users=100, steps=1, delta=1e-5
    )
    with pytest.raises(ValueError, match="'shuffled_checkin' belongs to ShuffledCheckIn"):
        type("Mine", (opacus_shuffle.ShuffledCheckIn,), {"name": "shuffled_checkin"})
    with pytest.raises(ValueError, match="bound 'certified' of shuffled_checkin belongs to"):
        registry.register_bound(
            opacus_shuffle.ShuffledCheckIn, "certified", meaning="nothing", guarantee=laplace.PROVED
        )(lambda rounds, **options: None)
    with pytest.raises(
        ValueError, match="the training of shuffled_checkin belongs to GaussianReports"
    ):
        type("Takeover", (Scheme,), {"mechanisms": (opacus_shuffle.ShuffledCheckIn,)})
    after = opacus_shuffle.compute_epsilon(
        "shuffled_checkin", noise_multiplier=5.0, num_users=100, steps=1, delta=1e-5
    )
    assert after == before


def test_a_mechanism_without_bounds_and_one_derived_from_another_are_refused_by_name(laplace):
    derived = type("Derived", (opacus_shuffle.ShuffledCheckIn,), {"name": "derived"})
    one = derived(noise_multiplier=5.0, num_users=100, sample_rate=0.1)
    with pytest.raises(ValueError, match="Derived has no bounds"):
        opacus_shuffle.compute_epsilon(one, steps=1, delta=1e-5)
    with pytest.raises(ValueError, match="Derived has no bounds"):
        opacus_shuffle.privacy_report(one, steps=1, delta=1e-5)
    with pytest.raises(ValueError, match="mechanism must be a ShuffledCheckIn"):
        ShuffleAccountant(opacus_shuffle.ShuffledCheckIn).record(one)
