"""The ladder of bounds: what it holds, how it reads, and its picture."""

from __future__ import annotations

import html
import json
import math
import pkgutil

import pytest
from helpers.toy import ONE_NOISE, make_toy, run_epoch
from hypothesis import given, settings
from hypothesis import strategies as st

import opacus_shuffle
from opacus_shuffle import Guarantee, PrivacyReport
from opacus_shuffle.accountants import baselines_of, bounds_of, compute_baseline, compute_bound
from opacus_shuffle.accountants.lineage import first_rounds
from opacus_shuffle.accountants.mechanisms import MECHANISMS, ShuffledCheckIn, ShuffledSums, ShuffledWeights, ShuffleGauss
from opacus_shuffle.core.guarantees import Adjacency, InconsistentBound
from opacus_shuffle.core.tables import WIDTH

# shuffled_sums is described by its protocol (tests/accountants/test_shuffled_sums_accountant.py), the others by plain numbers.
PLAIN = ONE_NOISE
every_mechanism = pytest.mark.parametrize("mechanism", PLAIN)
# Reports are shuffled here, by a shuffler that is trusted; shuffled_fw shuffles weights at a server that is.
every_shuffler_of_reports = pytest.mark.parametrize("mechanism", [name for name in PLAIN if name != "shuffled_fw"])
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


def test_the_ladder_of_shuffled_weights_falls_from_what_is_proved_to_what_is_not():
    report = report_of("shuffled_fw")
    spent = {bound.bound: bound.epsilon for bound in report.bounds}
    assert tuple(spent) == RUNGS_OF_WEIGHTS
    assert spent["composition"] >= spent["certified"] >= spent["pair"] > 0
    assert spent["composition"] >= spent["published"] >= spent["published_optimised"] > 0
    assert report.best.bound == "certified"
    worth = [bound.guarantee for bound in report.bounds]
    proved, estimate, pair = Guarantee.PROVED, Guarantee.ESTIMATE, Guarantee.PAIR
    assert worth == [proved, proved, estimate, estimate, pair]
    assert {bound.trusted for bound in report.bounds} == {"the server"}
    everything, one = {report.bounds[0].adversary}, {report.bounds[2].adversary}
    assert {bound.adversary for bound in report.bounds[:2]} == everything
    assert {bound.adversary for bound in report.bounds[2:]} == one != everything
    printed = " ".join(str(report).split())
    assert "for an adversary who sees each step's permuted gradient by itself" in printed
    assert "for the same adversary as published" in printed
    assert all(bound.meaning in printed for bound in report.bounds)
    assert "simulated" not in printed


@every_mechanism
def test_every_row_says_whom_it_trusts_and_what_it_is_worth(mechanism):
    report = report_of(mechanism)
    for bound in report.bounds:
        assert bound.trusted
        assert bound.adversary.startswith("sees")
        assert bound.covers
        assert bound.rounds == 200
        assert math.isfinite(bound.epsilon)
    worth = {bound.bound: bound.guarantee for bound in report.bounds}
    assert {worth[name] for name in worth if name in ("certified", "local")} == {Guarantee.PROVED}
    assert worth["pair"] is Guarantee.PAIR
    assert worth["published"] is not Guarantee.PROVED


@every_shuffler_of_reports
def test_the_rungs_trust_more_and_more(mechanism):
    report = report_of(mechanism)
    assert {bound.trusted for bound in report.bounds} == {"nobody", "the shuffler", "the aggregation", "the server"}


@every_mechanism
def test_every_name_has_a_meaning_in_words(mechanism):
    report = report_of(mechanism)
    printed = " ".join(str(report).split())
    kind = MECHANISMS[mechanism]
    assert {bound.bound for bound in report.bounds} == {*bounds_of(kind), *baselines_of(kind)}
    assert all(bound.meaning and bound.meaning in printed for bound in report.bounds)


def test_the_report_names_the_proof_that_won():
    many, few = (report_of("shuffle_gauss", noise_multiplier=sigma) for sigma in (3.0, 0.1))
    assert many.best.proof in ("mended clones", "truncated clones")
    assert f"the proof that gives it: {many.best.proof}" in " ".join(str(many).split())
    assert few.best.proof == "no gain from shuffling"


def test_the_number_to_quote_is_the_smallest_that_is_proved_with_the_shuffler_alone():
    report = report_of("shuffled_checkin")
    assert report.best.bound == "certified"
    assert report.best.guarantee is Guarantee.PROVED
    assert f"To quote: epsilon = {opacus_shuffle.core.rounding.round_up(report.best.epsilon)}" in str(report)


def test_the_table_is_aligned_and_its_lines_are_short():
    lines = str(report_of("shuffled_checkin")).splitlines()
    head, rule, *rows = lines[2 : 4 + len(LADDER)]
    edges = [len(part) for part in rule.split("  ")]
    assert len(edges) == 5
    assert len(head) <= len(rule)
    ends = edges[0] + 2 + edges[1] + 2 + edges[2]
    assert all(row[ends - 1].isdigit() and row[ends] == " " for row in rows)  # ε, aligned on the right
    assert max(map(len, lines)) <= WIDTH


def test_a_weak_epsilon_is_called_weak():
    weak = report_of("shuffle_gauss", noise_multiplier=0.3, num_users=10)
    assert "protects next to nothing" in " ".join(str(weak).split())
    assert "next to" not in str(report_of("shuffle_gauss", noise_multiplier=20.0, steps=1))


def test_replacement_leaves_out_what_it_has_no_value_for():
    report = report_of("shuffled_checkin", adjacency="replace")
    assert [bound.bound for bound in report.bounds] == ["local", "certified", "secure_aggregation"]
    assert "is replaced by any other" in " ".join(str(report).split())
    zero_out = {bound.bound: bound.epsilon for bound in report_of("shuffled_checkin").bounds}
    assert all(bound.epsilon > zero_out[bound.bound] for bound in report.bounds)
    assert [bound.bound for bound in report_of("shuffled_fw", adjacency="replace").bounds] == ["certified"]
    names = [bound.bound for bound in report_of("shuffle_gauss", adjacency="replace").bounds]
    assert names == ["local", "certified", "secure_aggregation", "central"]


def test_everyone_takes_part_so_the_server_and_the_aggregation_agree():
    spent = {bound.bound: bound.epsilon for bound in report_of("shuffle_gauss").bounds}
    assert spent["central"] == pytest.approx(spent["secure_aggregation"], rel=1e-12)


def test_the_dictionary_is_json_and_complete():
    report = report_of("subsampled_shuffle")
    found = json.loads(json.dumps(report.to_dict()))
    assert found["settings"] == [{"noise_multiplier": 3.0, "num_users": 5000, "sample_rate": 0.1, "rounds": 200}]
    assert found["quote"] == report.best.bound
    assert [row["epsilon"] for row in found["bounds"]] == [bound.epsilon for bound in report.bounds]
    tight = next(row for row in found["bounds"] if row["bound"] == "pair")
    assert 0.99 * tight["epsilon"] <= tight["lower"] <= tight["epsilon"]


def test_notebooks_get_the_same_text_escaped():
    report = report_of("shuffle_gauss")
    assert html.unescape(report._repr_html_()) == f"<pre>{report}</pre>"


def test_emulated_noise_is_said():
    assert "added once to the sum" in str(PrivacyReport(CHECK_IN, delta=1e-5, emulated=True))
    assert "added once to the sum" not in str(PrivacyReport(CHECK_IN, delta=1e-5))


@pytest.mark.parametrize(("rewound", "said"), [(0, None), (1, "1 round that ran is"), (5, "5 rounds that ran are")])
def test_whatever_is_quoted_of_a_rewound_account_says_so(rewound, said):
    accountant = opacus_shuffle.accountants.ShuffleAccountant(ShuffledCheckIn, num_users=100, local_noise=True)
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


def test_nothing_to_report_and_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="nothing to report"):
        PrivacyReport([], delta=1e-5)
    for changes, named in (
        ({"delta": 0}, "delta"),
        ({"steps": 0}, "steps"),
        ({"adjacency": "x"}, "adjacency"),
        ({"n": 1}, "n=1"),
    ):
        with pytest.raises(ValueError, match=named):
            report_of("shuffled_checkin", **changes)
    with pytest.raises(ValueError, match="mechanism"):
        opacus_shuffle.privacy_report("dpsgd", noise_multiplier=1, num_users=1, steps=1, delta=0.1)


# --- rows that contradict each other -------------------------------------------------------------------------------


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
    certified, pair = (compute_bound(rounds, delta=delta, bound=bound) for bound in ("certified", "pair"))
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
        ("shuffle_gaussian.monotone_epsilon.monotone_epsilon", 0.1, FEW, "zero_out", "'certified' says .*'pair' at least"),
        ("shuffle_gaussian.monotone_epsilon.monotone_epsilon", 100, FEW, "zero_out", "'certified' says .*'local'"),
        ("shuffle_gaussian.monotone_epsilon.monotone_epsilon", 100, FEW, "replace", r"'certified' says .*'local'.*\(replace\)"),
        ("shuffle_gaussian.unshuffled_epsilon", 1e-3, FEW, "replace", "'certified' says .*'local'"),
        ("shuffled_weights.sampled_gaussian_epsilon", 0.1, WEIGHTS, "zero_out", "'certified' says .*'pair' at least"),
        ("shuffled_sums.unshuffled_epsilon", 0.5, [(SUMS, 3)], "zero_out", "'certified' says .*lower"),
        ("shuffled_sums.advanced_composition.compose", 0.1, [(SUMS, 3)], "replace", "'published' says .*'certified' at least"),
    ],
)
def test_a_false_bound_is_refused_where_another_row_contradicts_it(monkeypatch, spoilt, share, rounds, adjacency, named):
    place = f"{BOUNDS}.{spoilt}"
    true = pkgutil.resolve_name(place)
    PrivacyReport(rounds, delta=1e-5, adjacency=adjacency)
    monkeypatch.setattr(place, lambda *args, **options: share * true(*args, **options))
    with pytest.raises(InconsistentBound, match=f"bound {named}"):
        PrivacyReport(rounds, delta=1e-5, adjacency=adjacency)


# --- the picture ---------------------------------------------------------------------------------------------------


def test_the_first_rounds_of_a_history_are_its_first():
    small, large = (ShuffleGauss(noise_multiplier=sigma, num_users=10) for sigma in (1.0, 2.0))
    assert first_rounds([(small, 3), (large, 4)], 2) == [(small, 2)]
    assert first_rounds([(small, 3), (large, 4)], 5) == [(small, 3), (large, 2)]


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


def test_shuffled_weights_are_drawn_too(monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setattr("opacus_shuffle.accountants.report.POINTS", 3)
    ax = report_of("shuffled_fw").plot()
    assert [line.get_label().partition(":")[0] for line in ax.lines] == list(RUNGS_OF_WEIGHTS)
    styles = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines}
    assert len(styles) == len(RUNGS_OF_WEIGHTS)


def test_one_round_can_be_drawn():
    pytest.importorskip("matplotlib").use("Agg")
    ax = PrivacyReport([(CHECK_IN[0][0], 1)], delta=1e-5).plot()
    assert ax.get_xlabel() == "rounds"


def test_a_report_says_how_noisy_the_gradient_is_by_which_training_steps():
    report = report_of("shuffled_checkin")  # 500 reports of 3.0 each
    on_sum = 3.0 * math.sqrt(500)
    assert f"round's sum: {on_sum:.3g} clipping norms" in " ".join(str(report).split())
    assert f"mean of 500 reports: {on_sum / 500:.3g}" in " ".join(str(report).split())
    found = report.to_dict()
    assert (found["noise_of_sum"], found["noise_of_mean"]) == pytest.approx((on_sum, on_sum / 500))


def test_of_rounds_with_different_noise_a_report_says_the_noisiest():
    quiet, loud = (ShuffledCheckIn(noise_multiplier=sigma, num_users=5000, sample_rate=0.1) for sigma in (3.0, 4.0))
    report = PrivacyReport([(quiet, 2), (loud, 1)], delta=1e-5)
    assert report.noisiest == loud
    assert f"the noisiest round's sum: {4 * math.sqrt(500):.3g}" in " ".join(str(report).split())


def test_noise_that_was_added_once_to_the_sum_is_reported_as_it_was_passed():
    engine = opacus_shuffle.PrivacyEngine(accountant="shuffled_checkin")
    model, optimizer, loader = engine.make_private(**make_toy(), noise_multiplier=8.0)
    run_epoch(model, optimizer, loader)
    report = engine.privacy_report(1e-5)
    assert report.noisiest.noise_of_sum == pytest.approx(8.0)
