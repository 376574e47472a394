"""The main job: one model for four kinds of trust, each within the same proved budget."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from torch.utils.data import TensorDataset

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.commands import compare, linear_training
from opacus_shuffle.commands.flags import check_picture
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.commands.linear_training import KINDS, train_kind
from opacus_shuffle.commands.main import main
from opacus_shuffle.core.guarantees import Guarantee

RECORDS, ROUNDS = 200, 2
NOBODY = dataclasses.replace(KINDS[3], rounds=ROUNDS)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One comparison of a few images in a few rounds: what was printed, and what was exported."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("compare")
    few = [
        TensorDataset(
            *(
                each[:RECORDS, ..., ::2, ::2] if each.ndim > 1 else each[:RECORDS]
                for each in images.tensors
            )
        )
        for images in load_image_dataset("mnist-5k")
    ]
    few = [
        TensorDataset(torch.nn.functional.pad(images.tensors[0], (1, 1, 1, 1)), images.tensors[1])
        for images in few
    ]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(compare, "load_image_dataset", lambda *_: few)
        patch.setattr(
            linear_training,
            "KINDS",
            tuple(dataclasses.replace(kind, rounds=ROUNDS) for kind in KINDS),
        )
        written = {"output": str(folder / "found.png"), "statement": str(folder / "found.json")}
        values, found = compare.run_comparison({**written, "epsilon": 2.0, "seed": 0})
    assert json.loads((folder / "found.json").read_text()) == json.loads(json.dumps(values))
    assert (folder / "found.png").read_bytes().startswith(b"\x89PNG")
    return found, json.loads(json.dumps(values))


def test_every_kind_of_trust_stays_within_the_same_proved_budget(ran):
    found, _ = ran
    assert [(each.kind.trusted, each.kind.how) for each in found.outcomes] == [
        (kind.trusted, kind.how) for kind in KINDS
    ]
    for each in found.outcomes:
        assert each.bound.guarantee is Guarantee.PROVED
        assert (each.bound.delta, each.bound.adjacency, each.bound.rounds) == (
            1e-5,
            "zero_out",
            ROUNDS,
        )
        assert 1.9 < each.bound.epsilon <= 2.0
    assert [each.bound.trusted for each in found.outcomes] == [
        "the server",
        "the shuffler",
        "the shuffler",
        "nobody",
    ]


def test_less_trust_takes_more_noise_in_all(ran):
    server, bits, shuffled, local = (each.noise_multiplier for each in ran[0].outcomes)
    assert server == pytest.approx(bits, rel=0.05)
    assert server < shuffled * RECORDS**0.5 <= local * RECORDS**0.5


def test_users_of_gaussian_reports_send_four_bytes_for_every_weight_and_round(ran):
    weights = 17 * 16 * 10
    assert [each.bytes_per_user for each in ran[0].outcomes[2:]] == [4 * weights * ROUNDS] * 2
    assert ran[0].outcomes[0].bytes_per_user is None
    assert ran[0].outcomes[1].bytes_per_user > weights * ROUNDS / 8


def test_what_is_printed_fits_a_terminal_and_is_what_is_exported(ran):
    found, exported = ran
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    for text in (" ".join(lines), found.markdown()):
        assert exported["quote"] in text
        assert exported["caveat"] in text
        assert (
            "zero_out: compared with a run in which one record reports zero." in text
        )  # no epsilon without what it compares
    assert found.markdown().count("\n| ") == 6
    for row, shown in zip(exported["rows"], found.rows(), strict=True):
        assert float(shown[2]) >= row["privacy"]["epsilon"]


def test_the_sentence_to_quote_is_about_the_sums_and_says_how_sure_its_accuracies_are(ran):
    secret = dataclasses.replace(ran[0], settings=dataclasses.replace(ran[0].settings, seed=None))
    sentence = secret.quote()
    assert (
        "differentially private for every data set in zero-out adjacency, trusting the shuffler "
        "alone" in sentence
    )
    assert "(sums of bits)" in sentence  # whichever row happens to be best on the held-out images
    largest = max(
        (each.accuracy * (1 - each.accuracy) / RECORDS) ** 0.5 for each in secret.outcomes
    )
    assert f"standard error of {largest:.1%} at most" in sentence
    assert "To quote:" in str(secret)
    assert secret.to_dict()["private"] is True


def test_a_run_with_a_seed_has_no_sentence_to_quote(ran):
    found, exported = ran
    assert "not private" in exported["quote"]
    assert "differentially private" not in exported["quote"]
    assert exported["private"] is False
    assert "To quote" not in str(found)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--epsilon", "0"], "epsilon"),
        (["--target-epsilon", "0.05"], "epsilon must be at least 0.1"),
        (["--delta", "1"], "delta"),
        (["--seed", "-1"], "seed"),
        (["--data", "mnist"], "data-root"),
        (["--statement", "found.txt"], "--statement"),
        (["--statement", "/nowhere/found.md"], "--statement"),
        (["--output", "picture"], "--output"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_trained(
    capsys, monkeypatch, arguments, named
):
    monkeypatch.setattr(linear_training, "train_kind", lambda *_, **__: pytest.fail("it trains"))
    assert main(["compare", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
    assert len(printed.err.splitlines()) == 1


def features(seed, records=60):
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(records, 5, generator=generator),
        torch.randint(10, (records,), generator=generator),
    )
    return TensorDataset(torch.nn.functional.normalize(x, dim=1), y)


def test_a_seed_repeats_a_run_and_its_budget_is_that_of_gaussian_noise():
    kind = dataclasses.replace(NOBODY, rounds=9)
    first, again = (
        train_kind(kind, features(0), features(1), epsilon=3.0, delta=1e-6, seed=7)
        for _ in range(2)
    )
    assert first == again
    closed = gaussian.compute_epsilon(mu=9**0.5 / first.noise_multiplier, delta=1e-6)
    assert first.bound.epsilon == pytest.approx(closed, rel=1e-9)
    assert 2.999 < first.bound.epsilon <= 3.0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.trusted}, {kind.how}")
@pytest.mark.parametrize("records", [10, 4000, 60_000])
def test_the_passes_over_the_data_follow_their_number(kind, records):
    rounds = kind.epochs(records) * records / kind.batch_size(records)
    assert rounds == pytest.approx(kind.rounds, rel=0.1)
    assert kind.batch_size(records) <= records


def test_a_picture_of_a_kind_that_nobody_draws_is_refused_before_any_training():
    with pytest.raises(ValueError, match=r"--output must name a file .*\.png.*got 'trust.xyz'"):
        check_picture("trust.xyz")
    check_picture("trust.svg")
