"""The console script, as a user types it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import unittest.mock

import pytest
import torch
from opacus.accountants import PRVAccountant
from torch.utils.data import TensorDataset

from opacus_shuffle import compute_epsilon, compute_noise_multiplier
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.commands import train as command
from opacus_shuffle.commands.flags import add_run_flags, flag
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.commands.main import main
from opacus_shuffle.commands.train import TrainingSettings, train
from opacus_shuffle.engine.privacy_engine import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
SUBSAMPLED = [
    "--mechanism",
    "subsampled_shuffle",
    "--num-users",
    "400",
    "--steps",
    "10",
    "--sample-rate",
    "0.1",
]
NUMBERS = {"num_users": 400, "steps": 10, "sample_rate": 0.1}
WEIGHTS = [
    "--mechanism",
    "shuffled_fw",
    "--num-users",
    "50000",
    "--steps",
    "500",
    "--sample-rate",
    "0.02",
    "--dimension",
    "85.8e6",
]
REPORTS = [
    "--mechanism",
    "shuffle_gauss",
    "--num-users",
    "500",
    "--steps",
    "3",
    "--noise-multiplier",
    "5",
    "--delta",
    "1e-5",
]
QUICK = {"epochs": 1, "batch_size": 40, "seed": 0}
SHORT = ["--epochs", "1", "--batch-size", "40"]


@pytest.fixture
def few_images(monkeypatch):
    """Training takes a tenth of its images, in ten rounds of 40."""
    few = [TensorDataset(*images[:400]) for images in load_image_dataset("mnist-5k")]
    monkeypatch.setattr(command, "load_image_dataset", lambda *_: few)


@pytest.mark.parametrize("bound", ["published", "pair", "certified"])
def test_epsilon_prints_one_number_and_its_meaning(capsys, bound):
    assert (
        main(
            ["epsilon", *SUBSAMPLED, "--noise-multiplier", "5", "--delta", "1e-5", "--bound", bound]
        )
        == 0
    )
    number, *meaning = capsys.readouterr().out.splitlines()
    exact = compute_epsilon(
        "subsampled_shuffle", noise_multiplier=5.0, delta=1e-5, bound=bound, **NUMBERS
    )
    assert exact <= float(number) <= exact * 1.001  # four digits, rounded up
    told = "\n".join(meaning)
    for word in (
        "1e-05",
        "10 rounds",
        "every data set",
        "adversary",
        f"\n{bound}: ",
        "\nzero_out: ",
    ):
        assert word in told
    assert ("PROVED" if bound == "certified" else "PAIR") in told


@pytest.mark.parametrize(
    "bound",
    [pytest.param("published", marks=pytest.mark.zoo), "published_optimised", "pair", "certified"],
)
def test_epsilon_of_shuffled_weights_says_what_it_is_worth(capsys, bound):
    job = [
        "epsilon",
        *WEIGHTS,
        "--noise-multiplier",
        "0.27372",
        "--delta",
        "5e-6",
        "--bound",
        bound,
    ]
    assert main(job) == 0
    number, *meaning = capsys.readouterr().out.splitlines()
    exact = compute_epsilon(
        "shuffled_fw",
        noise_multiplier=0.27372,
        num_users=50_000,
        steps=500,
        sample_rate=0.02,
        dimension=85_800_000,
        delta=5e-6,
        bound=bound,
    )
    assert exact <= float(number) <= exact * 1.001  # four digits, rounded up
    told = "\n".join(meaning)
    worth, words = {
        "certified": (
            "PROVED",
            ["every data set", "sees all weights and noised gradients of every step"],
        ),
        "pair": (
            "PAIR",
            ["one pair of data sets", "by itself", "certified for every data set: epsilon = 108"],
        ),
    }.get(
        bound,
        (
            "ESTIMATE",
            ["no data set for certain", "by itself", "certified for every data set: epsilon = 108"],
        ),
    )
    for word in (worth, *words):
        assert word in told
    assert ("published (0.4983) is no upper bound here" in told) is (bound == "published")


def test_layers_and_norms_of_shuffled_weights_reach_the_formula(capsys):
    numbers = [
        *WEIGHTS[:-1],
        "100,2e4,300",
        "--clip",
        "0.1",
        "--batch-clip",
        "0.4",
        "--delta",
        "1e-5",
    ]
    assert (
        main(["epsilon", *numbers, "--noise-multiplier", "1", "--bound", "published", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    run = {
        "num_users": 50_000,
        "steps": 500,
        "sample_rate": 0.02,
        "dimension": (100, 20_000, 300),
        "clip": 0.1,
        "batch_clip": 0.4,
    }
    assert found["epsilon"] == compute_epsilon(
        "shuffled_fw", noise_multiplier=1.0, delta=1e-5, bound="published", **run
    )
    assert found["guarantee"] == "ESTIMATE"


def test_the_noise_of_shuffled_weights_is_that_of_the_sum(capsys):
    assert (
        main(
            [
                "noise",
                *WEIGHTS,
                "--target-epsilon",
                "0.5",
                "--target-delta",
                "5e-6",
                "--bound",
                "published",
            ]
        )
        == 0
    )
    number, *meaning = capsys.readouterr().out.splitlines()
    assert float(number) == pytest.approx(0.27372, abs=5e-6)
    assert "noise multiplier of the sum" in meaning[0]
    assert any(line.startswith("ESTIMATE") for line in meaning)


def test_the_report_of_shuffled_weights_contradicts_its_estimate(capsys):
    assert main(["report", *WEIGHTS, "--noise-multiplier", "0.27372", "--delta", "5e-6"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "is no upper bound here: the pair of data sets of 'pair' has epsilon of at least 1.8"
        in shown
    )
    assert "To quote: epsilon = 108" in shown


def test_noise_prints_one_number_that_meets_the_budget(capsys):
    budget = ["--target-epsilon", "1", "--target-delta", "1e-5", "--bound", "pair"]
    assert main(["noise", *SUBSAMPLED, *budget]) == 0
    number = float(capsys.readouterr().out.splitlines()[0])
    exact = compute_noise_multiplier(
        "subsampled_shuffle", target_epsilon=1.0, target_delta=1e-5, bound="pair", **NUMBERS
    )
    assert exact <= number <= exact * (1 + 1e-5)
    assert (
        compute_epsilon(
            "subsampled_shuffle", noise_multiplier=number, delta=1e-5, bound="pair", **NUMBERS
        )
        <= 1.0
    )


def test_report_prints_the_whole_ladder(capsys):
    numbers = [*SUBSAMPLED, "--noise-multiplier", "5", "--delta", "1e-5"]
    assert main(["report", *numbers]) == 0
    shown = capsys.readouterr().out
    for word in (
        "To quote",
        "nobody",
        "shuffler",
        "server",
        "PROVED",
        "PAIR",
        "zero_out",
        "10 rounds",
    ):
        assert word in shown
    assert main(["report", *numbers, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    quoted = next(row for row in found["bounds"] if row["bound"] == found["quote"])
    assert quoted["guarantee"] == "PROVED"


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_plot_writes_a_picture(capsys, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"ladder.{suffix}"
    assert main(["plot", *REPORTS, "-o", str(target)]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert target.stat().st_size > 5000


def test_json_is_for_machines(capsys):
    assert (
        main(
            [
                "epsilon",
                *SUBSAMPLED,
                "--noise-multiplier",
                "5",
                "--delta",
                "1e-5",
                "--bound",
                "published",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["guarantee"] == "PAIR"
    assert (
        0 < found["certified_epsilon"] < found["epsilon"]
    )  # Theorem 3 as printed loses more than the certificate
    assert (
        main(
            [
                "noise",
                *SUBSAMPLED,
                "--target-epsilon",
                "1",
                "--target-delta",
                "1e-5",
                "--bound",
                "pair",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] <= 1.0
    assert found["noise_multiplier"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["epsilon", *SUBSAMPLED, "--noise-multiplier", "-1", "--delta", "1e-5"],
            "noise_multiplier",
        ),
        (
            ["epsilon", *SUBSAMPLED, "--noise-multiplier", "nan", "--delta", "1e-5"],
            "noise_multiplier",
        ),
        (["epsilon", *SUBSAMPLED, "--noise-multiplier", "1", "--delta", "2"], "delta"),
        (
            [
                "epsilon",
                *SUBSAMPLED,
                "--noise-multiplier",
                "1",
                "--delta",
                "1e-5",
                "--bound",
                "pair",
                "--adjacency",
                "replace",
            ],
            "certified",
        ),
        (
            ["epsilon", *SUBSAMPLED, "--noise-multiplier", "1", "--delta", "1e-5", "--steps", "0"],
            "steps",
        ),
        (
            ["noise", *SUBSAMPLED, "--target-epsilon", "0", "--target-delta", "1e-5"],
            "target_epsilon",
        ),
        (["train", "--data", "mnist"], "data-root"),
        (["train", "--data", "cifar10", "--data-root", "/nowhere"], "cifar10"),
        (["train", "--epochs", "0"], "epochs"),
        (["train", "--bound", "pair"], "target_epsilon"),
        (["train", "--batch-size", "5000"], "batch_size"),
        (["train", "--seed", "-1"], "seed"),
        (
            ["epsilon", *SUBSAMPLED[:-2], "--noise-multiplier", "1", "--delta", "1e-5"],
            "--sample-rate",
        ),
        (
            ["epsilon", *SUBSAMPLED, "--noise-multiplier", "1e-170", "--delta", "1e-5"],
            "noise_multiplier",
        ),
        (
            [
                "epsilon",
                *SUBSAMPLED,
                "--noise-multiplier",
                "1",
                "--delta",
                "1e-5",
                "--num-users",
                "9" * 400,
            ],
            "num_users",
        ),
        (["train", "--noise-multiplier", "0"], "noise_multiplier"),
        (["train", "--delta", "0"], "delta"),
        (["train", "--data-root", "/tmp"], "mnist-5k"),
        (["epsilon", *WEIGHTS[:-2], "--noise-multiplier", "1", "--delta", "1e-5"], "dimension"),
        (
            ["epsilon", *SUBSAMPLED, "--delta", "1e-5"],
            "subsampled_shuffle needs --noise-multiplier",
        ),
        (
            ["report", *SUBSAMPLED[:-2], "--delta", "1e-5"],
            "needs --noise-multiplier, --sample-rate",
        ),
        (
            ["epsilon", *WEIGHTS[:-1], "2.5", "--noise-multiplier", "1", "--delta", "1e-5"],
            "dimension",
        ),
        (
            ["epsilon", *WEIGHTS[:-1], "10,0", "--noise-multiplier", "1", "--delta", "1e-5"],
            "dimension",
        ),
        (
            ["epsilon", *WEIGHTS, "--clip", "0", "--noise-multiplier", "1", "--delta", "1e-5"],
            "clip",
        ),
        (
            [
                "epsilon",
                *WEIGHTS,
                "--batch-clip",
                "nan",
                "--noise-multiplier",
                "1",
                "--delta",
                "1e-5",
            ],
            "batch_clip",
        ),
        (
            [
                "epsilon",
                *SUBSAMPLED,
                "--bound",
                "published_optimised",
                "--noise-multiplier",
                "1",
                "--delta",
                "1e-5",
            ],
            "bound",
        ),
        (
            [
                "epsilon",
                *SUBSAMPLED,
                "--dimension",
                "10",
                "--noise-multiplier",
                "1",
                "--delta",
                "1e-5",
            ],
            "subsampled_shuffle has no --dimension",
        ),
        (
            [
                "noise",
                *SUBSAMPLED,
                "--batch-clip",
                "1",
                "--target-epsilon",
                "1",
                "--target-delta",
                "1e-5",
            ],
            "--batch-clip",
        ),
        (["train", "--accountant", "shuffled_fw", "--local-noise"], "local_noise"),
        (
            ["train", "--accountant", "shuffled_fw", "--no-shuffle-weights", "--batch-clip", "1"],
            "shuffle_weights=True",
        ),
        (["train", "--batch-clip", "1"], "batch_clip"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_status_2(capsys, arguments, named):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["epsilon", "--sigma", "1"], "--mechanism"),
        (
            ["epsilon", *WEIGHTS[:-1], "many", "--noise-multiplier", "1", "--delta", "1e-5"],
            "'many' is no number",
        ),
        (
            ["epsilon", *WEIGHTS[:-1], "10,128", "--noise-multiplier", "1", "--delta", "1e-5"],
            "write 10128, or '10, 128'",
        ),
    ],
)
def test_unknown_flags_words_for_numbers_and_what_could_be_one_number_or_two_are_refused(
    capsys, arguments, named
):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err


@pytest.mark.parametrize("accountant", ["shuffle_gauss", "subsampled_shuffle", "shuffled_checkin"])
@pytest.mark.parametrize("local_noise", [True, False])
def test_the_main_job_trains_and_ends_with_accuracy_and_the_table(
    capsys, few_images, accountant, local_noise
):
    flag = "--local-noise" if local_noise else "--no-local-noise"
    job = ["train", "--accountant", accountant, flag, *SHORT, "--noise-multiplier", "1"]
    assert main(job) == 0
    printed = capsys.readouterr().out
    for word in ("test accuracy", "held-out", "certified", "PROVED", accountant, "10 rounds"):
        assert word in printed
    assert ("added once to the sum" in printed) is not local_noise


@pytest.mark.zoo
def test_the_main_job_with_shuffled_sums(capsys):
    assert (
        main(
            [
                "train",
                "--accountant",
                "shuffled_sums",
                "--epochs",
                "1",
                "--target-epsilon",
                "4",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    # A grid has the noise asked for or up to 2.5 % more.
    most, least = PRVAccountant(), PRVAccountant()  # which are right to 0.01
    most.history, least.history = (
        [(found["noise_multiplier"] / more, 0.1, 10)] for more in (1.0, 1.025)
    )
    assert most.get_epsilon(1e-5) <= 4.02
    assert least.get_epsilon(1e-5) >= 3.98
    spent = {row["bound"]: row for row in found["bounds"]}["certified"]
    assert (spent["guarantee"], found["job"]["local_noise"]) == ("PROVED", False)
    assert spent["epsilon"] <= 4.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["permuted 10 times", "ESTIMATE", "(the sum's)"]),
        (["--noise-multiplier", "1", "--batch-clip", "0.5"], ["permuted 10 times"]),
        (["--no-shuffle-weights"], ["composition", "nothing is permuted"]),
    ],
)
def test_the_main_job_with_shuffled_weights(capsys, few_images, options, words):
    assert main(["train", "--accountant", "shuffled_fw", *SHORT, *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for word in ("test accuracy", "certified", "PROVED", "shuffled_fw", "10 rounds", *words):
        assert word in printed
    assert "added once to the sum" not in printed
    assert ("permuted" in printed.replace("nothing is permuted", "")) is (
        "--no-shuffle-weights" not in options
    )


def test_a_budget_for_shuffled_weights_is_met_by_its_estimate_and_said_to_be_no_more(
    capsys, few_images
):
    assert (
        main(
            [
                "train",
                "--accountant",
                "shuffled_fw",
                *SHORT,
                "--target-epsilon",
                "2",
                "--bound",
                "published",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    spent = {row["bound"]: row["epsilon"] for row in found["bounds"]}
    assert 1.99 < spent["published"] <= 2.0 < spent["certified"]
    assert found["quote"] == "certified"


@pytest.mark.parametrize("accountant", ["shuffled_checkin", "shuffled_fw"])
def test_a_seed_repeats_a_run_and_no_seed_does_not(few_images, accountant):
    def weights(seed):
        settings = TrainingSettings(
            **{**QUICK, "accountant": accountant, "batch_size": 100, "seed": seed}
        )
        return next(train(settings).model.parameters())

    assert weights(0).equal(weights(0))
    assert not weights(None).equal(weights(None))


def test_a_budget_is_kept(few_images):
    settings = TrainingSettings(
        accountant="subsampled_shuffle", target_epsilon=3.0, bound="pair", **QUICK
    )
    result = train(settings)
    spent = {answer.bound: answer.epsilon for answer in result.report.bounds}
    assert 2.99 < spent["pair"] <= 3.0
    assert result.noise_multiplier > 0


@pytest.mark.parametrize(("noise", "weak"), [("0.5", True), ("30", False)])
def test_a_run_that_will_protect_next_to_nothing_is_said_to_before_it_trains(
    capsys, few_images, noise, weak
):
    assert main(["train", *SHORT, "--noise-multiplier", noise]) == 0
    printed = capsys.readouterr()
    assert ("protects next to nothing" in printed.err) is weak
    if weak:
        spent = printed.out.split("To quote: epsilon = ")[1].split()[0]
        assert f"a proved epsilon of {spent}" in printed.err
        assert "opacus-shuffle compare" in printed.err


@pytest.mark.parametrize(("records", "epochs"), [(400, 150), (6000, 100)])
def test_more_images_are_passed_over_less_often(monkeypatch, records, epochs):
    images = TensorDataset(torch.zeros(records, 1, 28, 28), torch.zeros(records, dtype=torch.int64))
    stop = unittest.mock.Mock(side_effect=ValueError("enough"))
    monkeypatch.setattr(command, "load_image_dataset", lambda *_: (images, images))
    monkeypatch.setattr(PrivacyEngine, "make_private_with_epsilon", stop)
    with pytest.raises(ValueError, match="enough"):
        train(TrainingSettings(target_epsilon=1.0))
    assert stop.call_args.kwargs["epochs"] == epochs


def test_both_a_noise_and_a_budget_is_one_too_many():
    with pytest.raises(ValueError, match="not both"):
        train(TrainingSettings(noise_multiplier=1.0, target_epsilon=1.0))


@pytest.mark.slow
def test_the_main_job_learns_the_digits():
    result = train(dataclasses.replace(TrainingSettings(), seed=0))
    assert result.accuracy > 0.85
    assert all(math.isfinite(answer.epsilon) for answer in result.report.bounds)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_field_of_every_mechanism_is_a_flag(name):
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    fields = dataclasses.fields(MECHANISMS[name])
    assert {flag(field.name) for field in fields} <= set(parser._option_string_actions)


NUMBER = ["epsilon", *SUBSAMPLED, "--noise-multiplier", "5", "--delta", "1e-5"]
