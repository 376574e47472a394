"""``compare``: one model in four trust models, each within the same proved budget."""

import dataclasses
import json
import math

import pytest
import torch
from helpers.command_json import checked_answer
from helpers.pictures import check_layout
from torch.utils.data import TensorDataset

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.commands import compare
from opacus_shuffle.commands.compare import TRUST_MODELS, Progress, runtime_note, train_model
from opacus_shuffle.commands.images import load_images
from opacus_shuffle.commands.main import main
from opacus_shuffle.core.guarantees import Guarantee

pytestmark = pytest.mark.filterwarnings("ignore:This run is not private")
RECORDS, ROUNDS, RUNS = 60, 4, 2
NOBODY = dataclasses.replace(TRUST_MODELS[3], rounds=ROUNDS)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A comparison on quarters of a few images with few rounds, and its JSON.

    At an epsilon of 1 Opacus finds its noise multiplier, 2.5, ten times as soon as at 2.
    """
    pytest.importorskip("matplotlib")
    folder, small = tmp_path_factory.mktemp("compare"), []
    for images, labels in (data.tensors for data in load_images("mnist-5k")):
        quarters = torch.nn.functional.pad(images[:RECORDS, ..., ::2, ::2], (1, 1, 1, 1))
        small.append(TensorDataset(quarters, labels[:RECORDS]))
    fewer = tuple(dataclasses.replace(each, rounds=ROUNDS) for each in TRUST_MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "load_images", lambda *_: small)
        patch.setattr(compare, "TRUST_MODELS", fewer)
        patch.setattr(compare, "SAMPLED_BATCH", RECORDS // ROUNDS)
        written = {"output": str(folder / "found.png"), "statement": str(folder / "found.json")}
        options = {**written, "runs": RUNS, "seed": 0, "quiet": True}
        values, found, write = compare.run_comparison(options)
    assert not any(folder.iterdir())
    write()
    assert checked_answer((folder / "found.json").read_text()) == json.loads(json.dumps(values))
    assert (folder / "found.png").read_bytes().startswith(b"\x89PNG")
    return found, json.loads(json.dumps(values))


@pytest.mark.parametrize(("flag", "name"), [("--statement", "full.md"), ("--output", "full.png")])
def test_a_file_that_cannot_be_written_does_not_lose_the_result(
    ran, flag, name, tmp_path, capsys, monkeypatch
):
    """A full device is only detected when it is written to."""
    (tmp_path / name).symlink_to("/dev/full")
    monkeypatch.setattr(compare, "compare", lambda settings, **_: ran[0])
    assert main(["compare", flag, str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == f"{ran[0]}\n"
    assert "No space left" in printed.err
    assert len(printed.err.splitlines()) == 1


def test_every_trust_model_stays_within_the_same_proved_budget(ran):
    found, _ = ran
    trained = [outcome.trust_model.how for outcome in found.outcomes]
    assert trained == [trust_model.how for trust_model in TRUST_MODELS]
    for outcome in found.outcomes:
        bound = outcome.bound
        assert bound.guarantee is Guarantee.PROVED
        assert (bound.delta, bound.adjacency, bound.rounds) == (1e-5, "zero_out", ROUNDS)
        assert 0.95 < bound.epsilon <= 1.0
    assert [outcome.bound.trusted for outcome in found.outcomes] == [
        "the server",
        "the shuffler",
        "the shuffler",
        "nobody",
    ]


def test_less_trust_needs_more_noise(ran):
    server, bits, shuffled, local = (outcome.noise_multiplier for outcome in ran[0].outcomes)
    assert server == pytest.approx(bits, rel=0.05)
    assert server < shuffled * RECORDS**0.5 <= local * RECORDS**0.5


def test_users_of_gaussian_reports_send_four_bytes_for_every_weight_and_round(ran):
    weights = 17 * 16 * 10
    assert [outcome.bytes_per_user for outcome in ran[0].outcomes[2:]] == [4 * weights * ROUNDS] * 2
    assert ran[0].outcomes[0].bytes_per_user is None
    assert ran[0].outcomes[1].bytes_per_user > weights * ROUNDS / 8


def test_the_text_fits_a_terminal_and_agrees_with_the_json(ran):
    found, exported = ran
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    for text in (" ".join(lines), found.markdown()):
        assert exported["quote"] in text
        assert exported["caveat"] in text
        assert (
            "zero_out: compared with a run in which one record reports zero." in text
        )  # no epsilon without what it compares
        assert (
            f"mean ± sample standard deviation of {RUNS} runs; epsilon is that of one run, and so "
            "is the size of what a user sends" in text
        )
    assert found.markdown().count("\n| ") == 6
    for row, shown in zip(exported["rows"], found.rows(), strict=True):
        assert float(shown[2]) >= row["privacy"]["epsilon"]
        assert len(row["test_accuracies"]) == RUNS
        assert row["test_accuracy"] == pytest.approx(sum(row["test_accuracies"]) / RUNS)


def test_the_sentence_to_quote_is_about_the_sums_and_has_a_standard_error(ran):
    secret = dataclasses.replace(ran[0], settings=dataclasses.replace(ran[0].settings, seed=None))
    sentence = secret.quote()
    assert (
        "differentially private for every data set in zero-out adjacency, trusting the shuffler "
        "alone" in sentence
    )
    assert "(sums of bits)" in sentence  # whichever row happens to be best on the held-out images
    # Epsilon is one run's, so no mean of several is quoted beside it.
    server, ours, _, nobody = (outcome.accuracies[0] for outcome in secret.outcomes)
    assert f"has {ours:.1%} accuracy on {RECORDS} held-out images of mnist-5k" in sentence
    assert f"{server:.1%} when trusting a server and {nobody:.1%} when trusting nobody" in sentence
    assert "±" not in sentence
    largest = max((share * (1 - share) / RECORDS) ** 0.5 for share in (server, ours, nobody))
    assert f"standard error is at most {largest:.1%}" in sentence
    assert "To quote:" in str(secret)
    assert secret.to_dict()["private"] is True


def with_accuracies(comparison, *accuracies):
    """Returns the comparison with other accuracies."""
    return dataclasses.replace(
        comparison,
        settings=dataclasses.replace(comparison.settings, runs=len(accuracies)),
        outcomes=tuple(
            dataclasses.replace(outcome, accuracies=accuracies) for outcome in comparison.outcomes
        ),
    )


def test_the_spread_is_the_sample_standard_deviation_of_the_runs(ran):
    found = with_accuracies(ran[0], 0.90, 0.92, 0.97)
    spread = math.sqrt((0.03**2 + 0.01**2 + 0.04**2) / 2)  # about 0.036
    assert {cells[3] for cells in found.rows()} == {f"93.0% ± {100 * spread:.1f}"}
    assert [outcome.spread for outcome in found.outcomes] == pytest.approx([spread] * 4)


def words_and_boxes(figure):
    """Returns the labels of the bars, and the boxes of labels and error bars in pixels."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [text.get_window_extent() for text in axes.texts]
    segments = [part for lines in axes.collections for part in lines.get_segments()]
    spreads = [Bbox(axes.transData.transform(segment)) for segment in segments]
    return [text.get_text() for text in axes.texts], labels, spreads


@pytest.mark.parametrize("accuracies", [(0.99, 1.0), (0.0, 0.3), (0.06, 0.076)])
def test_no_label_overlaps_a_bar_or_leaves_the_canvas(ran, accuracies):
    import matplotlib

    with matplotlib.rc_context({"axes.grid": True}):  # as a user's style may have it
        figure = compare.draw(with_accuracies(ran[0], *accuracies))
    check_layout(figure)
    _, labels, spreads = words_and_boxes(figure)
    assert len(labels) == len(spreads) == len(TRUST_MODELS)
    assert not any(label.overlaps(box) for label in labels for box in spreads)


def test_a_single_run_has_no_spread(ran):
    alone = with_accuracies(ran[0], 0.93)
    assert "±" not in f"{alone}{alone.markdown()}"
    assert "accuracy: one run each" in " ".join(str(alone).split())
    figure = compare.draw(alone)
    labels, _, spreads = words_and_boxes(figure)
    assert labels == ["93.0%"] * len(TRUST_MODELS)
    assert spreads == []
    assert "±" not in figure.axes[0].get_xlabel()


def test_a_run_with_a_seed_has_no_sentence_to_quote(ran):
    found, exported = ran
    assert "not private" in exported["quote"]
    assert "differentially private" not in exported["quote"]
    assert exported["private"] is False
    assert "To quote" not in str(found)


def features(seed, records=60):
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(records, 5, generator=generator),
        torch.randint(10, (records,), generator=generator),
    )
    return TensorDataset(torch.nn.functional.normalize(x, dim=1), y)


def test_a_seed_repeats_all_runs_which_differ_and_each_has_the_budget_of_gaussian_noise():
    nobody = dataclasses.replace(NOBODY, rounds=9)
    thrice, again, once = (
        train_model(nobody, features(0), features(1), epsilon=3.0, delta=1e-6, runs=runs, seed=7)
        for runs in (3, 3, 1)
    )
    assert thrice == again
    assert len(set(thrice.accuracies)) == 3
    # What a row says besides its accuracies is one run's, however many there are.
    assert dataclasses.replace(thrice, accuracies=thrice.accuracies[:1]) == once
    closed = gaussian.compute_epsilon(mu=9**0.5 / thrice.noise_multiplier, delta=1e-6)
    assert thrice.bound.epsilon == pytest.approx(closed, rel=1e-9)
    assert 2.999 < thrice.bound.epsilon <= 3.0


@pytest.mark.filterwarnings("ignore:noise_multiplier")  # that so little protects next to nothing
def test_every_run_starts_again():
    """Without noise all runs agree, so none continues with the weights or momentum of another."""
    # At a learning rate of 10 more rounds, or a first step in momentum, would change accuracy.
    nobody, seen = dataclasses.replace(NOBODY, learning_rate=10.0), features(0)
    found = train_model(nobody, seen, seen, epsilon=1e8, delta=1e-6, runs=3, seed=0)
    assert set(found.accuracies) == {found.accuracies[0]}


@pytest.mark.parametrize("trust_model", TRUST_MODELS, ids=lambda each: each.how)
@pytest.mark.parametrize("records", [10, 4000, 60_000])
def test_the_passes_over_the_data_follow_their_number(trust_model, records):
    batch_size = trust_model.batch_size(records, epsilon=1.0, delta=1e-5)
    rounds = trust_model.epochs(records, batch_size) * math.ceil(records / batch_size)
    assert rounds == pytest.approx(trust_model.rounds, rel=0.1)
    assert batch_size <= records


@pytest.mark.parametrize(("quiet", "written"), [(False, "0\n10\n21\n"), (True, "")])
def test_progress_writes_a_line_at_once_and_then_one_every_ten_seconds(quiet, written, capsys):
    """The clock is simulated."""
    seconds = [0, 1, 9.9, 10, 19, 21, 30]
    progress = Progress(quiet=quiet, clock=iter(seconds).__next__)
    for second in seconds:
        progress(str(second))
    assert capsys.readouterr() == ("", written)


@pytest.mark.parametrize(
    ("runs", "records", "text"),
    [(1, 4000, "4 rows × 1 run on 4,000 images; about 1 min"), (3, 60_000, "3 runs on 60,000")],
)
def test_the_expected_duration_names_the_work(runs, records, text):
    assert text in runtime_note(runs, records)
