"""What is reported of runs that Opacus's own accountants account for."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from helpers.changed_files import ACCOUNT, signed
from helpers.toy import make_toy, run_epoch
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant

from opacus_shuffle import Guarantee, PrivacyEngine
from opacus_shuffle.accountants.opacus_report import OpacusReport
from opacus_shuffle.core.tables import WIDTH

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("rdp", "prv", "gdp")


def trained(name, *, noise_multiplier=2.0, seed=None, **keywords):
    engine = PrivacyEngine(accountant=name, seed=seed)
    model, optimizer, loader = engine.make_private(
        **make_toy(), noise_multiplier=noise_multiplier, **keywords
    )
    run_epoch(model, optimizer, loader)
    return engine


@pytest.mark.parametrize("name", NAMES)
def test_the_report_holds_the_accountant_s_own_epsilon_with_what_it_is_worth(name):
    engine = trained(name)
    report = engine.privacy_report(1e-5)
    (bound,) = report.bounds
    assert (bound.epsilon, bound.rounds, bound.trusted) == (
        engine.get_epsilon(1e-5),
        4,
        "the server",
    )
    assert bound.guarantee is (Guarantee.ESTIMATE if name == "gdp" else Guarantee.PROVED)
    assert max(map(len, str(report).splitlines())) <= WIDTH
    assert ("To quote" in str(report)) is (name != "gdp")
    assert ("to quote" in repr(report)) is (name != "gdp")
    assert f"\n{bound.guarantee.name} " in str(report)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["settings"] == [{"noise_multiplier": 2.0, "sample_rate": 0.25, "rounds": 4}]
    assert (found["noise_of_sum"], found["noise_of_mean"]) == (2.0, None)
    assert name in report._repr_html_()


def test_a_statement_of_an_estimate_promises_nothing():
    proved, estimate = (trained(name).privacy_report(1e-5).statement() for name in ("rdp", "gdp"))
    assert (
        "differentially private for every data set in zero-out adjacency, trusting the server alone"
        in proved
    )
    assert "opacus 1." in proved  # whose proof it is
    assert "differentially private" not in estimate
    assert (
        "is an approximation, no guarantee: it is about the limit of many steps, trusting the "
        "server." in estimate
    )


@pytest.mark.parametrize(("secure", "said"), [(False, True), (True, False)])
def test_the_report_says_in_one_line_that_the_noise_is_pytorch_s_own(secure, said):
    engine = PrivacyEngine(accountant="rdp", secure_mode=secure)
    run_epoch(*engine.make_private(**make_toy(), noise_multiplier=2.0))
    report = engine.privacy_report(1e-5)
    for text in (str(report), report.statement(), report._repr_html_()):
        assert (
            "the noise is PyTorch's own, as in Opacus"
            in " ".join(text.replace("&#x27;", "'").split())
        ) is said
    assert report.to_dict()["pytorch_noise"] is said


@pytest.mark.parametrize("way", [{"poisson_sampling": False}, {"seed": 3}], ids=str)
def test_what_makes_an_epsilon_no_guarantee_is_not_forgotten_in_a_checkpoint(way, tmp_path):
    def engine_of(seed=None, **keywords):
        engine = PrivacyEngine(accountant="rdp", seed=seed)
        return engine, *engine.make_private(**make_toy(), noise_multiplier=2.0, **keywords)

    saved, *made = engine_of(**way)
    run_epoch(*made)
    saved.save_checkpoint(path=tmp_path / "run.pt", module=made[0], optimizer=made[1])
    loaded, model, optimizer, _ = engine_of()
    loaded.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    first, second = (each.privacy_report(1e-5) for each in (saved, loaded))
    assert first.best == second.best
    assert first.predictable == second.predictable
    assert first.best.guarantee is Guarantee.ESTIMATE or first.predictable == ("seed=3",)

    changed = torch.load(tmp_path / "run.pt", weights_only=True)
    changed[ACCOUNT]["poisson"] = "yes"
    torch.save(signed(changed), tmp_path / "changed.pt")
    with pytest.raises(ValueError, match="poisson in the checkpoint"):
        loaded.load_checkpoint(path=tmp_path / "changed.pt", module=model, optimizer=optimizer)


def test_a_seed_is_told_and_so_are_rounds_that_were_left_out():
    report = trained("rdp", seed=0).privacy_report(1e-5)
    assert report.to_dict()["predictable"] == ["seed=0"]
    assert "not private" in str(report)
    assert "not private" in repr(report)
    left_out = OpacusReport(trained("rdp").accountant, delta=1e-5, rewound=3)
    assert "3 rounds that ran are left out" in " ".join(str(left_out).split())
    assert "3 rounds that ran are left out" in left_out.statement()


@pytest.mark.parametrize("name", ["rdp", "prv"])
def test_the_curve_ends_at_the_epsilon_of_the_table_and_never_falls(name):
    report = trained(name).privacy_report(1e-5)
    (points,) = report.curves().values()
    assert points[-1] == (4, report.best.epsilon)
    assert [epsilon for _, epsilon in points] == sorted(epsilon for _, epsilon in points)
    axes = report.plot()
    assert [name in text.get_text() for text in axes.get_legend().get_texts()] == [True]


def test_what_has_no_epsilon_is_refused_by_name():
    engine = trained("rdp")
    with pytest.raises(ValueError, match="zero_out alone, got adjacency='replace'"):
        engine.privacy_report(1e-5, adjacency="replace")
    for wrong in ("x", None):
        with pytest.raises(ValueError, match="adjacency must be one of"):
            engine.privacy_report(1e-5, adjacency=wrong)
    with pytest.raises(ValueError, match="nothing to report"):
        PrivacyEngine(accountant="prv").privacy_report(1e-5)


def test_a_report_changes_nothing_of_the_accountant_and_warns_of_nothing_itself():
    accountant = PRVAccountant()
    accountant.history = [(1.0, 0.1, 3), (2.0, 0.1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = OpacusReport(accountant, delta=1e-5)
    assert accountant.history == [(1.0, 0.1, 3), (2.0, 0.1, 2)]
    assert (report.best.rounds, report.noisiest.noise_multiplier) == (5, 2.0)
    assert math.isclose(report.best.epsilon, accountant.get_epsilon(1e-5), rel_tol=0)


class Mine(RDPAccountant):
    """Nobody knows what its ε is worth."""


@pytest.mark.parametrize(
    ("accountant", "history", "remedy"),
    [
        *((kind, [], "train first") for kind in (RDPAccountant, PRVAccountant, GaussianAccountant)),
        (RDPAccountant, [(1.0, 0.01, 0)], "train first"),
        *(
            (kind, [(0.0, 0.01, 10)], "add noise")
            for kind in (RDPAccountant, PRVAccountant, GaussianAccountant)
        ),
        (
            GaussianAccountant,
            [(1.0, 0.01, 100), (2.0, 0.02, 10)],
            "use 'prv' or 'rdp'",
        ),  # it counts the last only
        (Mine, [(1.0, 0.1, 1)], r"use get_epsilon\(delta\)"),
    ],
)
def test_what_has_no_epsilon_is_refused_in_words_with_the_remedy(accountant, history, remedy):
    ran = accountant()
    ran.history = history
    with pytest.raises(ValueError, match=rf"{ran.mechanism()}.*{remedy}$"):
        OpacusReport(ran, delta=1e-5)
