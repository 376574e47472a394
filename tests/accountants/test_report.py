"""Reports: the ladder of bounds, statements and the picture; runs of Opacus's own accountants."""

import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import scipy.stats
from helpers.accountants import (
    accountant_of,
    compute_baseline,
    every_accountant,
    every_shuffler_of_reports,
)
from helpers.hockey_sticks import gaussian_delta
from helpers.pictures import check_layout
from helpers.toy import make_toy, run_epoch
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant

from opacus_shuffle import Guarantee, PrivacyEngine, PrivacyReport
from opacus_shuffle.accountants.bounds.registry import entries_of
from opacus_shuffle.accountants.mechanisms import (
    MECHANISMS,
    RandomAllocation,
    ShuffledCheckIn,
    ShuffledSums,
    ShuffledWeights,
    ShuffleGauss,
)
from opacus_shuffle.accountants.opacus_report import report_of_opacus
from opacus_shuffle.accountants.report import contradiction, promise
from opacus_shuffle.core.guarantees import InconsistentBound, PrivacyBound
from opacus_shuffle.core.picture_styles import BOUND_STYLES
from opacus_shuffle.core.rounding import round_up

LADDER = ("local", "certified", "published", "pair", "secure_aggregation", "central")
CHECK_IN = [(ShuffledCheckIn(noise_multiplier=3.0, num_users=5000, sample_rate=0.1), 200)]
FEW = [(ShuffledCheckIn(noise_multiplier=3.0, num_users=100, sample_rate=0.3), 5)]
SUMS = [(ShuffledSums.build(noise_multiplier=1.0, num_users=100, dimension=4), 3)]
ALLOCATION = [(RandomAllocation(noise_multiplier=1.0, num_batches=10), 20)]
DRAWN = ("shuffled_checkin", "shuffled_fw", "random_allocation")
WEIGHTS = [(ShuffledWeights(noise_multiplier=1.0, sample_rate=0.5, dimension=10), 1)]
LARGE = ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1)


@functools.cache
def report_of(kind, **changes):
    numbers = {"noise_multiplier": 3.0, "num_users": 1000}
    if kind.sampling is not None:
        numbers["sample_rate"] = 0.1
    if kind is ShuffledWeights:
        numbers |= {"dimension": 1000, "batch_clip": 500.0}
    options = {name: changes.pop(name) for name in ("adjacency",) if name in changes}
    return PrivacyReport([(kind(**{**numbers, **changes}), 20)], delta=1e-5, **options)


def epsilons_of(report):
    return {bound.bound: bound.epsilon for bound in report.bounds}


def words_of(text):
    return " ".join(str(text).split())


@every_shuffler_of_reports
def test_the_ladder_falls_from_no_trust_to_full_trust(kind):
    report = report_of(kind)
    spent = epsilons_of(report)
    assert tuple(spent) == LADDER
    assert spent["local"] >= spent["certified"] >= spent["pair"]
    assert spent["published"] >= spent["pair"]
    assert spent["secure_aggregation"] >= spent["central"] > 0
    trusted = ("nobody", *["the shuffler"] * 3, "the aggregation", "the server")
    assert tuple(bound.trusted for bound in report.bounds) == trusted
    assert report.best.bound == "certified"
    assert f"the proof that gives it: {report.best.proof}" in words_of(report)
    assert f"To quote: epsilon = {round_up(report.best.epsilon)}" in str(report)


@every_accountant
def test_every_name_has_a_meaning_in_words_and_in_json(kind):
    report = report_of(kind)
    worth = {bound.bound: bound.guarantee for bound in report.bounds}
    assert (worth["certified"], worth["pair"]) == (Guarantee.PROVED, Guarantee.PAIR)
    assert worth["published"] is not Guarantee.PROVED
    assert worth.keys() == {entry.name for entry in entries_of(kind)}
    for bound in report.bounds:
        assert math.isfinite(bound.epsilon)
        assert bound.meaning in words_of(report)
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    ((mechanism, rounds),) = report.rounds
    assert plain["settings"] == [{**dataclasses.asdict(mechanism), "rounds": rounds}]
    assert plain["quote"] == report.best.bound
    assert {row["bound"]: row["epsilon"] for row in plain["bounds"]} == epsilons_of(report)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ShuffledCheckIn, ["local", "certified", "secure_aggregation"]),
        (ShuffleGauss, ["local", "certified", "secure_aggregation", "central"]),
        (ShuffledWeights, ["certified"]),
    ],
)
def test_replacement_costs_more_and_leaves_out_what_it_has_no_value_for(kind, names):
    report = report_of(kind, adjacency="replace")
    zero_out = epsilons_of(report_of(kind))
    assert list(epsilons_of(report)) == names
    assert "when one record is any other record" in words_of(report) or report.best.epsilon > 10
    for left_out in zero_out.keys() - {*names}:
        assert left_out in words_of(report)
    assert all(bound.epsilon > zero_out[bound.bound] for bound in report.bounds)


@pytest.mark.parametrize(
    ("rewound", "said"),
    [(0, None), (1, "1 accounted round was"), (5, "5 accounted rounds were")],
)
def test_whatever_is_quoted_of_a_rewound_account_says_so(rewound, said):
    accountant = accountant_of(ShuffledCheckIn, num_users=100)
    another = accountant_of(ShuffledCheckIn, num_users=100)
    another.record(FEW[0][0])
    state = another.state_dict()
    if not rewound:
        accountant = another
    else:
        accountant.record(FEW[0][0], rewound)
        accountant.load_state_dict(state, allow_rewind=True)
    report = accountant.report(1e-5)
    assert (report.bounds[0].rounds, report.to_dict()["rewound"]) == (1, rewound)
    for quoted in (report.statement(), words_of(report)):
        assert ("replaced in this account" in quoted) == (said is not None)
        assert (said or "") in quoted


# --- rows that contradict each other


@pytest.mark.parametrize(
    ("rounds", "spoilt", "share", "adjacency", "named"),
    [
        (FEW, "certified", 0.1, "zero_out", "'certified' says .*'pair' at least"),
        (FEW, "certified", 100, "zero_out", "'certified' says .*'local'"),
        (FEW, "certified", 100, "replace", r"'certified' says .*'local'.*\(replace\)"),
        (FEW, "certified", 0.01, "replace", "'certified' says .*'pair' at least .* for zero_out"),
        (FEW, "local", 1e-3, "replace", "'certified' says .*'local'"),
        (WEIGHTS, "certified", 0.1, "zero_out", "'certified' says .*'pair' at least"),
        (SUMS, "certified", 0.5, "zero_out", "'certified' says .*lower"),
    ],
)
def test_a_false_bound_is_refused_where_another_row_contradicts_it(
    rounds, spoilt, share, adjacency, named
):
    def false(*arguments, **options):
        answer = true.function(*arguments, **options)
        return dataclasses.replace(answer, epsilon=share * answer.epsilon)

    entries = entries_of(type(rounds[0][0]))
    (true,) = (entry for entry in entries if entry.name == spoilt)
    PrivacyReport(rounds, delta=1e-5, adjacency=adjacency)
    entries[entries.index(true)] = dataclasses.replace(true, function=false)
    with pytest.raises(InconsistentBound, match=f"bound {named}"):
        PrivacyReport(rounds, delta=1e-5, adjacency=adjacency, entries=entries)


def bound_of(**fields):
    standard = {"mechanism": "m", "bound": "b", "epsilon": 1.0, "delta": 1e-5, "rounds": 3}
    known = {"adjacency": "zero_out", "guarantee": Guarantee.ESTIMATE, "covers": ""}
    return PrivacyBound(**{**standard, **known, **fields})


def test_an_estimate_is_contradicted_by_a_pair_of_the_same_adversary_alone():
    pair = bound_of(bound="pair", epsilon=3.0, lower=2.0, guarantee=Guarantee.PAIR)
    assert "is no upper bound here" in contradiction(bound_of(), pair)
    for other in (
        *({"adversary": "sees sums"}, {"trusted": "nobody"}, {"adjacency": "replace"}),
        *({"delta": 1e-6}, {"rounds": 4}, {"mechanism": "n"}),
        *({"epsilon": 2.0}, {"guarantee": Guarantee.PROVED}),
    ):
        assert not contradiction(bound_of(**other), pair), other
    with pytest.raises(ValueError, match="bound must be proved for every data set"):
        promise(pair)


# --- the picture


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DRAWN else pytest.mark.zoo) for name in MECHANISMS],
)
def test_the_picture_has_a_line_per_bound_in_its_colour_that_ends_at_its_epsilon(name, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.setattr("opacus_shuffle.accountants.report.POINTS", 3)
    given = {"shuffled_sums": SUMS, "random_allocation": ALLOCATION}
    report = PrivacyReport(given.get(name) or report_of(MECHANISMS[name]).rounds, delta=1e-5)
    ax = report.plot()
    names = [line.get_label().split(":")[0] for line in ax.lines]
    assert names == list(epsilons_of(report))
    for name, line in zip(names, ax.lines, strict=True):
        assert line.get_color() == BOUND_STYLES[name]["color"]
        epsilons = [0, *line.get_ydata()]
        assert epsilons == sorted(epsilons)
        assert epsilons[-1] == epsilons_of(report)[name]
    assert "noise multiplier" in ax.get_title()
    check_layout(ax.figure)
    matplotlib.pyplot.close("all")


def test_no_two_bounds_are_told_apart_by_colour_alone():
    grey = [str({**style, "color": "", "zorder": 0}) for style in BOUND_STYLES.values()]
    assert len(set(grey)) == len(grey)


def test_a_report_says_how_noisy_the_gradient_is_by_which_training_steps():
    louder = dataclasses.replace(CHECK_IN[0][0], noise_multiplier=4.0)
    for rounds, which, sigma in ((CHECK_IN, "a", 3), ([*CHECK_IN, (louder, 1)], "the noisiest", 4)):
        report = PrivacyReport(rounds, delta=1e-5)  # 500 reports in a round
        on_sum = sigma * math.sqrt(500)
        assert f"of {which} round's sum: {on_sum:.3g} clipping norms" in words_of(report)
        assert f"mean of 500 reports: {on_sum / 500:.3g}" in words_of(report)
        plain = report.to_dict()
        assert (plain["noise_of_sum"], plain["noise_of_mean"]) == (on_sum, on_sum / 500)


# --- sums of reports, of rounds by coins


def exact_delta(run, rounds, epsilon):
    """δ at ε where each round's sum and participants are seen.

    A mixture of Gaussian mechanisms over how many take part.
    """
    others = np.arange(run.num_users)
    chances = run.sample_rate * scipy.stats.binom(run.num_users - 1, run.sample_rate).pmf(others)
    squares = np.append(0.0, 1 / ((others + 1) * run.noise_multiplier**2))  # μ² of one round
    total, weight = np.zeros(1), np.ones(1)
    for _ in range(rounds):
        total = np.add.outer(total, squares).ravel()
        weight = np.outer(weight, np.append(1 - run.sample_rate, chances)).ravel()
    seen = total > 0
    return float(weight[seen] @ gaussian_delta(np.sqrt(total[seen]), epsilon))


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
@pytest.mark.parametrize(
    ("users", "rate", "sigma"), [(20, 0.1, 0.5), (40, 0.5, 1.0), (30, 0.02, 2.0)]
)
def test_the_sum_of_a_round_by_coins_has_the_noise_of_the_reports_that_it_has(
    rounds, delta, users, rate, sigma
):
    run = ShuffledCheckIn(noise_multiplier=sigma, num_users=users, sample_rate=rate)
    sums, local = (
        compute_baseline([(run, rounds)], delta=delta, baseline=baseline)
        for baseline in ("secure_aggregation", "local")
    )
    assert sums.guarantee is Guarantee.PROVED
    assert exact_delta(run, rounds, sums.epsilon) <= delta * (1 + 1e-9)
    assert sums.epsilon <= local.epsilon


# --- statements, which people paste into papers: they leave out nothing that the report says, and
# promise no more


def test_a_statement_names_the_model_and_all_numbers_that_the_accounting_was_made_with():
    report = PrivacyReport([(LARGE, 5540)], delta=1e-5, max_grad_norms=[0.5])
    said = report.statement("Our digit classifier")
    assert said.startswith("Our digit classifier was trained by 5,540 rounds of shuffled_checkin (")
    for part in (
        "noise multiplier 5, users 60,000, sampling rate 0.1, ",
        "clipped to norm 0.5",
        f"({round_up(report.best.epsilon)}, 1e-05)-differentially private for every data set in "
        "zero-out adjacency, trusting the shuffler alone",
        "sees every shuffled report of every round",
        "compared with a run in which one record's report is noise alone",
        "(certified; ",
        "docs/proofs, pages 1",
    ):
        assert part in said, part
    assert "almost no protection" not in said
    with pytest.raises(ValueError, match="model must be a str"):
        report.statement(3)


def test_what_changed_is_told_as_its_range_and_replacement_as_such():
    small = dataclasses.replace(LARGE, num_users=100)
    rounds = [(dataclasses.replace(small, noise_multiplier=6.0), 3), (small, 3)]
    norms = {"max_grad_norms": [0.5, 0.7, 1.0], "num_users": 70_000}
    said = PrivacyReport(rounds, delta=1e-5, adjacency="replace", **norms).statement()
    assert said.startswith("The model was trained by 6 rounds")
    for part in (
        *("noise multiplier 5 to 6", "clipped to norm 0.5 to 1", "a data set of 70,000 records"),
        *("replacement adjacency", "one record is any other record"),
    ):
        assert part in said


@pytest.mark.parametrize("delta", [1e-5, 1 / 24, 0.3])
def test_what_the_report_warns_of_the_statement_warns_of(delta):
    rounds = [(ShuffleGauss(noise_multiplier=0.3, num_users=6), 4)]
    report = PrivacyReport(rounds, delta=delta, num_users=24, emulated=True, unchecked=["a file"])
    above = f"delta = {delta:.3g} is above 1/n = 0.0417"
    for text in (words_of(report), report.statement()):
        assert "almost no protection" in text
        assert "the noise was added once to the sum" in text
        assert "This account rests on a file" in text
        assert (above in text) is (delta > 1 / 24)


def test_a_run_that_others_can_draw_again_is_promised_nothing():
    report = PrivacyReport(FEW, delta=1e-5, predictable=("seed=0",))
    said = report.statement()
    assert "This run is not private: whoever knows seed=0" in said
    assert said.index("not private") < said.index("With secret randomness, this training would be")
    assert "This training is" not in said
    assert "seed=0" in words_of(repr(report))


pytestmark = pytest.mark.filterwarnings("ignore")


def private(name, *, secure_mode=False, seed=None, **keywords):
    """An engine and what it makes private."""
    engine = PrivacyEngine(accountant=name, secure_mode=secure_mode, seed=seed)
    return engine, *engine.make_private(**make_toy(), noise_multiplier=2.0, **keywords)


def trained(name, **options):
    engine, *made = private(name, **options)
    run_epoch(*made)
    return engine, *made


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
