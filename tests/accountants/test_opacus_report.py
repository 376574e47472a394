"""What is reported of runs that Opacus's own accountants account for."""

import json

import pytest
from helpers.toy import make_toy, run_epoch
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant

from opacus_shuffle import Guarantee, PrivacyEngine
from opacus_shuffle.accountants.opacus_report import report_of_opacus

pytestmark = pytest.mark.filterwarnings("ignore")


def private(name, *, secure_mode=False, seed=None, **keywords):
    """An engine and what it makes private."""
    engine = PrivacyEngine(accountant=name, secure_mode=secure_mode, seed=seed)
    return engine, *engine.make_private(**make_toy(), noise_multiplier=2.0, **keywords)


def trained(name, **options):
    engine, *made = private(name, **options)
    run_epoch(*made)
    return engine, *made


def words_of(report):
    return " ".join(str(report).split())


@pytest.mark.parametrize("name", ["rdp", "prv", "gdp"])
def test_the_report_holds_the_accountant_s_own_epsilon_with_what_it_is_worth(name):
    engine, *_ = trained(name)
    report, proved = engine.privacy_report(1e-5), name != "gdp"
    (bound,) = report.bounds
    assert (bound.epsilon, bound.rounds) == (engine.get_epsilon(1e-5), 4)
    assert bound.guarantee is (Guarantee.PROVED if proved else Guarantee.ESTIMATE)
    assert ("To quote" in repr(report)) is proved
    said = report.statement()
    assert ("for every data set in zero-out adjacency, trusting the server alone" in said) is proved
    assert ("differentially private" in said and "opacus 1." in said) is proved
    assert ("no guarantee: it is about the limit of many steps" in said) is not proved
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    settings = {"noise_multiplier": 2.0, "num_users": 1, "sample_rate": 0.25, "rounds": 4}
    assert plain["settings"] == [settings]
    with pytest.raises(ValueError, match="zero_out alone, got adjacency='replace'"):
        engine.privacy_report(1e-5, adjacency="replace")


@pytest.mark.parametrize("secure_mode", [False, True])
def test_the_report_says_in_one_line_that_the_noise_is_pytorch_s_own(secure_mode):
    report = trained("rdp", secure_mode=secure_mode)[0].privacy_report(1e-5)
    for text in (words_of(report), report.statement()):
        assert ("the noise is from PyTorch's generator, as in Opacus" in text) is not secure_mode
    assert report.to_dict()["pytorch_noise"] is not secure_mode


ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 2.0,
    "min_clipbound": 0.5,
    "unclipped_num_std": 4.0,
}


@pytest.mark.parametrize("way", [{"poisson_sampling": False}, {"seed": 3}, ADAPTIVE], ids=str)
def test_what_makes_an_epsilon_no_guarantee_is_not_forgotten_in_a_checkpoint(way, tmp_path):
    saved, model, optimizer, _ = trained("rdp", **way)
    saved.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    loaded, model, optimizer, _ = private("rdp")
    loaded.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    first, second = (engine.privacy_report(1e-5) for engine in (saved, loaded))
    assert first.best == second.best
    assert first.predictable == second.predictable == (("seed=3",) if "seed" in way else ())
    assert ("not private" in words_of(second)) is ("seed" in way)
    assert (second.best.guarantee is Guarantee.ESTIMATE) is ("seed" not in way)


class Mine(RDPAccountant):
    """Nobody knows what its ε is worth."""


EVERY = (RDPAccountant, PRVAccountant, GaussianAccountant)


@pytest.mark.parametrize(
    ("accountant", "history", "remedy"),
    [
        *((kind, [], "has seen no step.*train first") for kind in EVERY),
        (RDPAccountant, [(1.0, 0.01, 0)], "'rdp' has seen no step"),
        *(
            (kind, [(0.0, 0.01, 10)], "noise_multiplier must be positive.*got 0.0")
            for kind in EVERY
        ),
        (PRVAccountant, [(1e-6, 0.01, 10)], "'prv' has no finite epsilon.*add noise"),
        # It counts the last kind of steps only.
        (GaussianAccountant, [(1.0, 0.01, 100), (2.0, 0.02, 10)], "'gdp'.*use 'prv' or 'rdp'"),
        (Mine, [(1.0, 0.1, 1)], r"use get_epsilon\(delta\)"),
    ],
)
def test_what_has_no_epsilon_is_refused_in_words_with_the_remedy(accountant, history, remedy):
    ran = accountant()
    ran.history = history
    with pytest.raises(ValueError, match=remedy):
        report_of_opacus(ran, delta=1e-5)
