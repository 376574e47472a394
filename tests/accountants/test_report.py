"""The ladder of bounds: what it holds, how it reads, and its picture."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import pkgutil

import numpy as np
import pytest
import scipy.stats
from helpers.toy import ONE_NOISE
from hypothesis import given, settings
from hypothesis import strategies as st

import opacus_shuffle
from opacus_shuffle import Guarantee, PrivacyReport
from opacus_shuffle.accountants import baselines_of, bounds_of, compute_baseline, compute_bound
from opacus_shuffle.accountants.bounds.shuffle_gaussian import fewest_reports
from opacus_shuffle.accountants.mechanisms import (
    MECHANISMS,
    ShuffledCheckIn,
    ShuffledSums,
    ShuffledWeights,
    ShuffleGauss,
    SubsampledShuffle,
)
from opacus_shuffle.accountants.report import contradiction
from opacus_shuffle.core.guarantees import Adjacency, InconsistentBound, PrivacyBound
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import WIDTH

# shuffled_sums is described by its protocol (tests/accountants/test_shuffled_sums_accountant.py),
# the others by plain numbers.
PLAIN = ONE_NOISE
every_mechanism = pytest.mark.parametrize("mechanism", PLAIN)
# Reports are shuffled here, by a shuffler that is trusted; shuffled_fw shuffles weights at a server
# that is.
every_shuffler_of_reports = pytest.mark.parametrize(
    "mechanism", [name for name in PLAIN if name != "shuffled_fw"]
)
LADDER = ("local", "certified", "published", "pair", "secure_aggregation", "central")
RUNGS_OF_WEIGHTS = ("composition", "certified", "published", "published_optimised", "pair")
CHECK_IN = [(ShuffledCheckIn(noise_multiplier=3.0, num_users=5000, sample_rate=0.1), 200)]


def report_of(mechanism, **changes):
    numbers = {"noise_multiplier": 3.0, "num_users": 5000, "steps": 200, "delta": 1e-5}
    if mechanism != "shuffle_gauss":
        numbers["sample_rate"] = 0.1
    if mechanism == "shuffled_fw":
        numbers |= {"dimension": 1000, "batch_clip": 500.0}
    return opacus_shuffle.privacy_report(mechanism, **{**numbers, **changes})


@every_shuffler_of_reports
def test_the_ladder_falls_from_no_trust_to_full_trust(mechanism):
    spent = {bound.bound: bound.epsilon for bound in report_of(mechanism).bounds}
    assert tuple(spent) == LADDER
    assert spent["local"] >= spent["certified"]
    assert spent["certified"] >= spent["pair"]
    assert spent["published"] >= spent["pair"]
    assert spent["secure_aggregation"] >= spent["central"] > 0
    report = report_of(mechanism)
    assert {bound.trusted for bound in report.bounds} == {
        "nobody",
        "the shuffler",
        "the aggregation",
        "the server",
    }
    assert report.best.bound == "certified"
    assert f"To quote: epsilon = {round_up(report.best.epsilon)}" in str(report)


def test_the_ladder_of_shuffled_weights_falls_from_what_is_proved_to_what_is_not():
    report = report_of("shuffled_fw")
    spent = {bound.bound: bound.epsilon for bound in report.bounds}
    assert tuple(spent) == RUNGS_OF_WEIGHTS
    assert spent["composition"] >= spent["certified"] >= spent["pair"] > 0
    assert spent["composition"] >= spent["published"] >= spent["published_optimised"] > 0
    assert {bound.trusted for bound in report.bounds} == {"the server"}
    everything, one = {report.bounds[0].adversary}, {report.bounds[2].adversary}
    assert {bound.adversary for bound in report.bounds[:2]} == everything
    assert {bound.adversary for bound in report.bounds[2:]} == one != everything
    assert "for the same adversary as published" in " ".join(str(report).split())


@every_mechanism
def test_every_name_has_a_meaning_in_words(mechanism):
    report = report_of(mechanism)
    printed = " ".join(str(report).split())
    kind = MECHANISMS[mechanism]
    worth = {bound.bound: bound.guarantee for bound in report.bounds}
    assert worth["certified"] is Guarantee.PROVED
    assert worth["pair"] is Guarantee.PAIR
    assert worth["published"] is not Guarantee.PROVED
    assert all(bound.rounds == 200 and math.isfinite(bound.epsilon) for bound in report.bounds)
    assert {bound.bound for bound in report.bounds} == {*bounds_of(kind), *baselines_of(kind)}
    assert all(bound.meaning and bound.meaning in printed for bound in report.bounds)


def test_the_report_names_the_proof_that_won():
    many, few = (report_of("shuffle_gauss", noise_multiplier=sigma) for sigma in (3.0, 0.1))
    assert many.best.proof in ("mended clones", "truncated clones")
    assert f"the proof that gives it: {many.best.proof}" in " ".join(str(many).split())
    assert few.best.proof == "no gain from shuffling"


def test_replacement_leaves_out_what_it_has_no_value_for():
    report = report_of("shuffled_checkin", adjacency="replace")
    assert [bound.bound for bound in report.bounds] == ["local", "certified", "secure_aggregation"]
    assert "is replaced by any other" in " ".join(str(report).split())
    zero_out = {bound.bound: bound.epsilon for bound in report_of("shuffled_checkin").bounds}
    assert all(bound.epsilon > zero_out[bound.bound] for bound in report.bounds)
    assert [bound.bound for bound in report_of("shuffled_fw", adjacency="replace").bounds] == [
        "certified"
    ]
    names = [bound.bound for bound in report_of("shuffle_gauss", adjacency="replace").bounds]
    assert names == ["local", "certified", "secure_aggregation", "central"]


def test_the_dictionary_is_json_and_complete():
    report = report_of("subsampled_shuffle")
    found = json.loads(json.dumps(report.to_dict()))
    assert found["settings"] == [
        {"noise_multiplier": 3.0, "num_users": 5000, "sample_rate": 0.1, "rounds": 200}
    ]
    assert found["quote"] == report.best.bound
    assert [row["epsilon"] for row in found["bounds"]] == [bound.epsilon for bound in report.bounds]
    tight = next(row for row in found["bounds"] if row["bound"] == "pair")
    assert 0.99 * tight["epsilon"] <= tight["lower"] <= tight["epsilon"]


def test_notebooks_get_the_same_text_escaped():
    report = report_of("shuffle_gauss", noise_multiplier=0.3, num_users=10)
    assert "protects next to nothing" in " ".join(str(report).split())
    assert max(map(len, str(report).splitlines())) <= WIDTH
    assert html.unescape(report._repr_html_()) == f"<pre>{report}</pre>"


@pytest.mark.parametrize(
    ("rewound", "said"), [(0, None), (1, "1 round that ran is"), (5, "5 rounds that ran are")]
)
def test_whatever_is_quoted_of_a_rewound_account_says_so(rewound, said):
    accountant = opacus_shuffle.accountants.ShuffleAccountant(
        ShuffledCheckIn, num_users=100, local_noise=True
    )
    accountant.record(FEW[0][0])
    state = accountant.state_dict()
    if rewound:
        accountant.record(FEW[0][0], rewound)
        accountant.load_state_dict(state, allow_rewind=True)
    report = accountant.report(1e-5)
    assert report.bounds[0].rounds == 1
    for quoted in (report.statement(), " ".join(str(report).split())):
        assert ("left out of this account" in quoted) == (said is not None)
        assert (said or "") in quoted


# --- rows that contradict each other
# -------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(
    kind=st.sampled_from([ShuffleGauss, ShuffledCheckIn, ShuffledWeights]),
    noise=st.floats(0.3, 30),
    users=st.integers(1, 50),
    rate=st.floats(0.02, 1),
    steps=st.sampled_from([1, 7, 100]),
    delta=st.sampled_from([1e-9, 1e-5, 1e-3, 0.02, 0.0905, 0.4, 0.99]),
)
def test_certified_lies_between_the_pair_s_lower_value_and_what_is_seen_without_a_shuffler(
    kind, noise, users, rate, steps, delta
):
    fields = {} if kind is ShuffleGauss else {"sample_rate": rate}
    sizes = {"dimension": users} if kind is ShuffledWeights else {"num_users": users}
    rounds = [(kind(noise_multiplier=noise, **fields, **sizes), steps)]
    certified, pair = (
        compute_bound(rounds, delta=delta, bound=bound) for bound in ("certified", "pair")
    )
    assert pair.lower <= certified.epsilon
    if kind is not ShuffledWeights:
        for adjacency in Adjacency:
            local = compute_baseline(rounds, delta=delta, baseline="local", adjacency=adjacency)
            assert compute_bound(rounds, delta=delta, adjacency=adjacency).epsilon <= local.epsilon


FEW = [(ShuffledCheckIn(noise_multiplier=3.0, num_users=100, sample_rate=0.3), 5)]
SUMS = ShuffledSums.build(noise_multiplier=1.0, num_users=100, dimension=4)
WEIGHTS = [(ShuffledWeights(noise_multiplier=1.0, sample_rate=0.5, dimension=10), 1)]
BOUNDS = "opacus_shuffle.accountants.bounds"


@pytest.mark.parametrize(
    ("spoilt", "share", "rounds", "adjacency", "named"),
    [
        (
            "shuffle_gaussian.monotone_epsilon.monotone_epsilon",
            0.1,
            FEW,
            "zero_out",
            "'certified' says .*'pair' at least",
        ),
        (
            "shuffle_gaussian.monotone_epsilon.monotone_epsilon",
            100,
            FEW,
            "zero_out",
            "'certified' says .*'local'",
        ),
        (
            "shuffle_gaussian.monotone_epsilon.monotone_epsilon",
            100,
            FEW,
            "replace",
            r"'certified' says .*'local'.*\(replace\)",
        ),
        ("shuffle_gaussian.unshuffled_epsilon", 1e-3, FEW, "replace", "'certified' says .*'local'"),
        (
            "shuffled_weights.sampled_gaussian_epsilon",
            0.1,
            WEIGHTS,
            "zero_out",
            "'certified' says .*'pair' at least",
        ),
        (
            "shuffled_sums.unshuffled_epsilon",
            0.5,
            [(SUMS, 3)],
            "zero_out",
            "'certified' says .*lower",
        ),
        (
            "shuffled_sums.advanced_composition.compose",
            0.1,
            [(SUMS, 3)],
            "replace",
            "'published' says .*'certified' at least",
        ),
    ],
)
def test_a_false_bound_is_refused_where_another_row_contradicts_it(
    monkeypatch, spoilt, share, rounds, adjacency, named
):
    place = f"{BOUNDS}.{spoilt}"
    true = pkgutil.resolve_name(place)
    PrivacyReport(rounds, delta=1e-5, adjacency=adjacency)
    monkeypatch.setattr(place, lambda *args, **options: share * true(*args, **options))
    with pytest.raises(InconsistentBound, match=f"bound {named}"):
        PrivacyReport(rounds, delta=1e-5, adjacency=adjacency)


# --- the picture
# ---------------------------------------------------------------------------------------------------


def test_the_curves_end_at_the_report_s_own_values_and_rise(monkeypatch):
    monkeypatch.setattr("opacus_shuffle.accountants.report.POINTS", 3)
    report = PrivacyReport(CHECK_IN, delta=1e-5)
    curves = report.curves()
    for bound in report.bounds:
        counts, epsilons = zip(*curves[bound.bound], strict=True)
        assert counts[0] == 1
        assert (counts[-1], epsilons[-1]) == (200, bound.epsilon)
        assert list(epsilons) == sorted(epsilons)


def test_the_picture_has_log_axes_a_line_per_bound_and_the_shaded_region(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.setattr("opacus_shuffle.accountants.report.POINTS", 3)
    ax = PrivacyReport(CHECK_IN, delta=1e-5).plot()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert len(ax.lines) == len(LADDER)
    assert len(ax.collections) == 1
    styles = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines}
    assert len(styles) == len(LADDER)  # told apart
    brightness = {name: matplotlib.colors.rgb_to_hsv(matplotlib.colors.to_rgb(line.get_color()))[2] for name, line in
                  zip(LADDER, ax.lines, strict=True)}  # fmt: skip
    assert abs(brightness["pair"] - brightness["certified"]) > 0.1  # also in grey
    again = ax.figure.add_subplot()
    assert PrivacyReport(CHECK_IN, delta=1e-5).plot(again) is again
    matplotlib.pyplot.close("all")


def test_a_report_says_how_noisy_the_gradient_is_by_which_training_steps():
    report = report_of("shuffled_checkin")  # 500 reports of 3.0 each
    louder = PrivacyReport(
        [*CHECK_IN, (ShuffledCheckIn(noise_multiplier=4.0, num_users=5000, sample_rate=0.1), 1)],
        delta=1e-5,
    )
    assert f"the noisiest round's sum: {4 * math.sqrt(500):.3g}" in " ".join(str(louder).split())
    on_sum = 3.0 * math.sqrt(500)
    assert f"round's sum: {on_sum:.3g} clipping norms" in " ".join(str(report).split())
    assert f"mean of 500 reports: {on_sum / 500:.3g}" in " ".join(str(report).split())
    found = report.to_dict()
    assert (found["noise_of_sum"], found["noise_of_mean"]) == pytest.approx((on_sum, on_sum / 500))


# --- what is compared, and what is seen ---

FEW_USERS = {"noise_multiplier": 0.3, "num_users": 50, "sample_rate": 0.1}


def bound_of(**fields):
    standard = {
        "mechanism": "m",
        "bound": "b",
        "epsilon": 1.0,
        "delta": 1e-5,
        "adjacency": "zero_out",
        "rounds": 3,
    }
    return PrivacyBound(**{**standard, "guarantee": Guarantee.ESTIMATE, "covers": "", **fields})


@pytest.mark.parametrize("kind", [ShuffledCheckIn, SubsampledShuffle])
def test_a_sum_and_a_server_are_not_contradicted_by_a_pair_whose_every_report_is_seen(kind):
    report = PrivacyReport([(kind(**FEW_USERS), 50)], delta=1e-3)
    spent = {bound.bound: bound for bound in report.bounds}
    assert spent["central"].epsilon < spent["pair"].lower
    assert "no upper bound" not in str(report)


def test_an_estimate_is_contradicted_by_a_pair_of_the_same_adversary_alone():
    pair = bound_of(bound="pair", epsilon=3.0, lower=2.0, guarantee=Guarantee.PAIR)
    assert "is no upper bound here" in contradiction(bound_of(), pair)
    others = {
        "adversary": "sees sums",
        "trusted": "nobody",
        "adjacency": "replace",
        "delta": 1e-6,
        "rounds": 4,
        "mechanism": "n",
    }
    for name, value in others.items():
        assert not contradiction(bound_of(**{name: value}), pair), name
    assert not contradiction(bound_of(epsilon=2.0), pair)
    assert not contradiction(dataclasses.replace(bound_of(), guarantee=Guarantee.PROVED), pair)


def exact_delta(run, rounds, epsilon):
    """δ at ε where each round's sum and participants are seen: a mixture of Gaussian mechanisms over how many take part."""
    others = np.arange(run.num_users)
    squares = np.concatenate(
        [[0.0], 1 / ((others + 1) * run.noise_multiplier**2)]
    )  # μ² of one round
    chances = np.concatenate(
        [
            [1 - run.sample_rate],
            run.sample_rate * scipy.stats.binom(run.num_users - 1, run.sample_rate).pmf(others),
        ]
    )
    total, weight = np.zeros(1), np.ones(1)
    for _ in range(rounds):
        total, weight = np.add.outer(total, squares).ravel(), np.outer(weight, chances).ravel()
    mu, weight = np.sqrt(total[total > 0]), weight[total > 0]
    normal = scipy.stats.norm
    return float(
        weight
        @ (normal.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu))
    )


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    ("users", "rate", "sigma"), [(20, 0.1, 0.5), (40, 0.5, 1.0), (30, 0.02, 2.0)]
)
def test_the_sum_of_a_round_by_coins_has_the_noise_of_the_reports_that_it_has(
    rounds, users, rate, sigma
):
    run = ShuffledCheckIn(noise_multiplier=sigma, num_users=users, sample_rate=rate)
    for delta in (1e-3, 1e-6):
        sums = compute_baseline([(run, rounds)], delta=delta, baseline="secure_aggregation")
        assert sums.guarantee is Guarantee.PROVED
        assert exact_delta(run, rounds, sums.epsilon) <= delta * (1 + 1e-9)
        assert (
            sums.epsilon <= compute_baseline([(run, rounds)], delta=delta, baseline="local").epsilon
        )


@pytest.mark.parametrize(
    ("users", "rate", "sigma", "delta"), [(50, 0.7, 0.5, 0.01), (200, 0.5, 1.0, 1e-3)]
)
def test_the_sum_of_a_round_by_coins_costs_what_is_left_of_delta_for_as_few_reports_as_there_may_be(
    users, rate, sigma, delta
):
    """A hundredth of δ is for rounds of fewer than k reports; 99 of them are for k, of which a grid takes 0.3 at most."""
    run = [(ShuffledCheckIn(noise_multiplier=sigma, num_users=users, sample_rate=rate), 1)]
    others = scipy.stats.binom(users - 1, rate)
    fewest = max(k for k in range(1, users + 1) if rate * others.cdf(k - 2) <= 0.01 * delta)
    epsilon = compute_baseline(run, delta=delta, baseline="secure_aggregation").epsilon
    mu, normal = 1 / (sigma * math.sqrt(fewest)), scipy.stats.norm
    spent = rate * (
        normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)
    )
    assert 0.987 * delta < spent <= 0.99 * delta


@settings(max_examples=50)
@given(users=st.integers(1, 300), rate=st.floats(1e-3, 0.999), exponent=st.floats(-12, -0.1))
def test_a_record_is_rarely_in_a_round_of_fewer_reports(users, rate, exponent):
    probability = 10**exponent
    fewest = fewest_reports(users, rate, probability)
    chances = scipy.stats.binom(users - 1, rate).pmf(np.arange(users))  # of the others' reports
    assert 1 <= fewest <= users
    assert rate * chances[: fewest - 1].sum() <= probability
    if fewest < users and probability < rate / 2.1:
        assert rate * chances[:fewest].sum() >= probability * (
            1 - 1e-5
        )  # not one report fewer than that takes


def test_a_row_says_that_who_takes_part_is_seen_where_not_everyone_does():
    run = ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1)
    report = PrivacyReport([(run, 500)], delta=1e-5)
    rows = [line for line in str(report).splitlines() if "sample seen" in line]
    assert [row.split("  ")[0] for row in rows] == ["aggregation"]
    everyone = PrivacyReport([(dataclasses.replace(run, sample_rate=1.0), 500)], delta=1e-5)
    assert "sample seen" not in str(everyone)


# --- statements, which people paste into papers: they leave out nothing that the report says, and
# promise no more ---
LARGE = ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1)


def test_a_statement_names_the_model_and_all_numbers_that_the_accounting_was_made_with():
    report = PrivacyReport([(LARGE, 5540)], delta=1e-5, max_grad_norms=[0.5])
    said = report.statement("Our digit classifier")
    assert said.startswith("Our digit classifier was trained by 5,540 rounds of shuffled_checkin (")
    for part in (
        "noise multiplier 5",
        "users 60,000",
        "sampling rate 0.1",
        "clipped to norm 0.5",
        f"({round_up(report.best.epsilon)}, 1e-05)-differentially private for every data set in "
        "zero-out adjacency",
        "trusting the shuffler alone",
        "sees every shuffled report of every round",
        "compared with a run in which one record's report is noise alone",
        "(certified; ",
        "docs/proofs, pages 1",
    ):
        assert part in said, part
    assert "protects next to nothing" not in said


def test_changed_noise_is_told_as_its_range_and_replacement_as_such():
    louder = ShuffledCheckIn(noise_multiplier=6.0, num_users=60_000, sample_rate=0.1)
    said = PrivacyReport([(louder, 3), (LARGE, 3)], delta=1e-5, adjacency="replace").statement()
    assert said.startswith("The model was trained by 6 rounds")
    assert "noise multiplier 5 to 6" in said
    assert "replacement adjacency" in said
    assert "one record is any other record" in said


@pytest.mark.parametrize("delta", [1e-5, 0.3])
def test_what_the_report_warns_of_the_statement_warns_of(delta):
    report = PrivacyReport(
        [(ShuffleGauss(noise_multiplier=0.3, num_users=6), 4)],
        delta=delta,
        num_users=24,
        emulated=True,
    )
    text, said = (" ".join(each.split()) for each in (str(report), report.statement()))
    for sentence in ("protects next to nothing", "the noise was added once to the sum"):
        assert sentence in text
        assert sentence in said
    above = f"delta = {delta:.3g} is above 1/n = 0.0417"
    assert (above in text) is (above in said) is (delta > 1 / 24)


def test_a_delta_of_one_over_n_is_not_above_it():
    assert "above 1/n" not in PrivacyReport([(LARGE, 1)], delta=1 / 60_000).statement()


def test_a_run_that_others_can_draw_again_is_promised_nothing():
    said = PrivacyReport([(LARGE, 1)], delta=1e-5, predictable=("seed=0",)).statement()
    assert "This run is not private: whoever knows seed=0" in said
    assert said.index("not private") < said.index(
        "With secret randomness, this training would be ("
    )
    assert "This training is" not in said


def test_a_statement_of_sums_cites_their_proofs():
    run = ShuffledSums.build(noise_multiplier=1.5, num_users=4000, sample_rate=0.1, dimension=100)
    said = PrivacyReport([(run, 10)], delta=1e-5).statement()
    assert "secret coins, docs/proofs, pages 2, 3 and 8" in said


@pytest.mark.parametrize("model", [None, 3, b"x"])
def test_a_model_that_is_no_name_is_refused(model):
    with pytest.raises(ValueError, match="model must be a str"):
        PrivacyReport([(LARGE, 1)], delta=1e-5).statement(model)
