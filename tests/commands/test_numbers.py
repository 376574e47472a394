"""``epsilon``, ``noise``, ``report`` and ``plot`` as a user calls them: numbers with meaning."""

import argparse
import dataclasses
import json
import pathlib

import pytest
from helpers.command_json import checked_answer

from opacus_shuffle import compute_epsilon, compute_noise_multiplier
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.commands.flags import add_flags, flag
from opacus_shuffle.commands.main import main

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
README = (pathlib.Path(__file__).parents[2] / "README.rst").read_text(encoding="utf-8")
RUN = "--mechanism subsampled_shuffle --num-users 400 --steps 10 --sample-rate 0.1"
SAMPLED = {"mechanism": "subsampled_shuffle", "num_users": 400, "steps": 10, "sample_rate": 0.1}
VIT = "--mechanism shuffled_fw --num-users 50000 --steps 500 --sample-rate 0.02"
WEIGHTS = {"mechanism": "shuffled_fw", "num_users": 50_000, "steps": 500, "sample_rate": 0.02}
EPOCHS = (
    "--mechanism shuffled_sums --sampling random_allocation --sample-rate 0.025 --num-users 90 "
    "--dimension 4 --steps 100"
)
ALLOCATED = {
    "mechanism": "shuffled_sums",
    "sampling": "random_allocation",
    "sample_rate": 0.025,
    "num_users": 90,
    "dimension": 4,
    "steps": 100,
}
LAYERS = {"dimension": (100, 20_000, 300), "clip": 0.1, "batch_clip": 0.4}
NOISE, SMALL = {"noise_multiplier": 5.0, "delta": 1e-5}, {"noise_multiplier": 0.27372}
IDEAL = {**SMALL, "delta": 5e-6, "dimension": 85_800_000}
EVERY = ["PROVED", "every data set", "adversary"]
ESTIMATE = ["ESTIMATE", "no data set for certain", "certified for every data set: epsilon = 108"]


def printed_lines(capsys, line: str) -> list[str]:
    """Returns the lines that a command prints."""
    assert main(line.split()) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("line", "bound", "run", "words"),
    [
        (f"{RUN} --noise-multiplier 5 --delta 1e-5", "certified", {**SAMPLED, **NOISE}, EVERY),
        (
            "--mechanism random_allocation --num-batches 40 --steps 100 --noise-multiplier 5 "
            "--delta 1e-5",
            "certified",
            {"mechanism": "random_allocation", "num_batches": 40, "steps": 100, **NOISE},
            [*EVERY, "nor how many"],
        ),
        (
            f"{EPOCHS} --noise-multiplier 5 --delta 1e-5",
            "certified",
            {**ALLOCATED, **NOISE},
            [*EVERY, "one secret batch of each epoch"],
        ),
        (
            f"{RUN.replace('subsampled_shuffle', 'secret_checkin')} --report gaussian "
            "--noise-multiplier 5 --delta 1e-5",
            "certified",
            {**SAMPLED, **NOISE, "mechanism": "secret_checkin", "report": "gaussian"},
            [*EVERY, "the reports of all users"],
        ),
        (f"{RUN} --noise-multiplier 5 --delta 1e-5", "pair", {**SAMPLED, **NOISE}, ["PAIR"]),
        (f"{RUN} --noise-multiplier 5 --delta 1e-5", "published", {**SAMPLED, **NOISE}, ["PAIR"]),
        (
            f"{VIT} --dimension 85.8e6 --noise-multiplier 0.27372 --delta 5e-6",
            "published",
            {**WEIGHTS, **IDEAL},
            [*ESTIMATE, "published (0.4983) is no upper bound here"],
        ),
        (
            f"{VIT} --dimension 85.8e6 --noise-multiplier 0.27372 --delta 5e-6",
            "pair",
            {**WEIGHTS, **IDEAL},
            ["PAIR", "one pair of data sets", "certified for every data set: epsilon = 108"],
        ),
        (
            f"{VIT} --dimension 100,2e4,300 --clip 0.1 --batch-clip 0.4 --noise-multiplier 1 "
            "--delta 1e-5",
            "published",
            {**WEIGHTS, **LAYERS, "noise_multiplier": 1.0, "delta": 1e-5},
            ["ESTIMATE"],
        ),
    ],
)
def test_epsilon_prints_one_number_rounded_up_and_its_meaning(capsys, line, bound, run, words):
    number, *meaning = printed_lines(capsys, f"epsilon {line} --bound {bound}")
    exact = compute_epsilon(**run, bound=bound)
    assert exact <= float(number) <= exact * 1.001
    text = " ".join(meaning)
    always = [f"{run['steps']} rounds", f"delta = {run['delta']:.4g}", "zero_out: ", f"{bound}: "]
    for word in (*always, *words):
        assert word in text
    values = json.loads(*printed_lines(capsys, f"epsilon {line} --bound {bound} --json"))
    assert values["epsilon"] == exact
    assert values["certified_epsilon"] == compute_epsilon(**run)
    assert values["guarantee"] == words[0] or bound == "certified"


@pytest.mark.parametrize(
    ("line", "bound", "run", "words"),
    [
        (RUN, "pair", SAMPLED, "local noise multiplier (sigma of one report"),
        (f"{VIT} --dimension 85.8e6", "published", WEIGHTS, "noise multiplier of the sum (sigma"),
        pytest.param(
            *(EPOCHS, "certified", ALLOCATED, "noise multiplier of the sum (sigma"),
            marks=pytest.mark.zoo,
        ),
    ],
)
def test_noise_prints_one_number_that_meets_the_budget(capsys, line, bound, run, words):
    dimension = {"dimension": 85_800_000} if run is WEIGHTS else {}
    budget = f"--target-epsilon 0.5 --target-delta 5e-6 --bound {bound}"
    number, *meaning = printed_lines(capsys, f"noise {line} {budget}")
    run = {**run, **dimension, "bound": bound}
    exact = compute_noise_multiplier(**run, target_epsilon=0.5, target_delta=5e-6)
    assert exact <= float(number) <= exact * (1 + 1e-5)
    assert compute_epsilon(**run, noise_multiplier=float(number), delta=5e-6) <= 0.5
    assert words in meaning[0]


COMMAND_LINES = [
    " ".join(line.split()[1:])
    for line in README.replace("\\\n", "").splitlines()
    if line.startswith(("    opacus-shuffle epsilon ", "    opacus-shuffle noise "))
]


def test_the_commands_of_the_readme_print_its_numbers(capsys):
    assert len(COMMAND_LINES) == 2
    for line in COMMAND_LINES:
        assert f" {printed_lines(capsys, line)[0]}, " in README.replace("\n", " ")


def test_report_prints_all_bounds_and_contradicts_an_estimate(capsys):
    numbers = f"report {RUN} --noise-multiplier 5 --delta 1e-5"
    shown = " ".join(printed_lines(capsys, numbers))
    for word in ("To quote", "nobody", "shuffler", "server", "PROVED", "PAIR", "10 rounds"):
        assert word in shown
    values = json.loads(*printed_lines(capsys, f"{numbers} --json"))
    quoted = next(row for row in values["bounds"] if row["bound"] == values["quote"])
    assert quoted["guarantee"] == "PROVED"
    ideal = f"report {VIT} --dimension 85.8e6 --noise-multiplier 0.27372 --delta 5e-6"
    shown = " ".join(" ".join(printed_lines(capsys, ideal)).split())
    assert "the pair of data sets of 'pair' has epsilon of at least 1.8" in shown
    assert "To quote: epsilon = 108" in shown


@pytest.mark.parametrize(
    "suffix", ["png", *(pytest.param(s, marks=pytest.mark.zoo) for s in ("pdf", "svg"))]
)
def test_plot_writes_a_picture(capsys, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"ladder.{suffix}"
    assert printed_lines(capsys, f"plot {RUN} --noise-multiplier 5 --delta 1e-5 -o {target}") == [
        str(target)
    ]
    assert target.stat().st_size > 5000


TABLE = "--mechanism shuffle_gauss --noise-multiplier 9.476 --num-users 60000 --steps 1 --delta"
TABLE += f" {1 / 60_000}"


def test_orders_up_to_30_give_the_number_of_the_paper(capsys):
    number, *meaning = printed_lines(capsys, f"epsilon {TABLE} --orders 2:30 --bound published")
    assert float(number) == pytest.approx(0.228, abs=5e-4)  # SG Table 1, one round
    assert any("certified for every data set" in line for line in meaning)
    shown = " ".join(" ".join(printed_lines(capsys, f"report {TABLE} --orders 2:30")).split())
    assert f"published {number}" in shown
    assert "over the 29 Rényi orders from 2 to 30 that were asked for" in shown


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_field_of_every_mechanism_is_a_flag(name):
    job = argparse.ArgumentParser()
    add_flags(job, "epsilon")
    fields = {flag(field.name) for field in dataclasses.fields(MECHANISMS[name])}
    assert fields <= set(job._option_string_actions)


def test_a_table_of_rounds_is_reported(capsys, tmp_path):
    table = tmp_path / "rounds.csv"
    table.write_text(
        "mechanism,steps,noise_multiplier,num_users,sample_rate,count_noise\n"
        "server_noise,50,1,100,0.1,\nserver_noise,20,3e0,100,0.2,5\n"
    )
    assert main(f"report --rounds {table} --delta 1e-5 --json".split()) == 0
    answer = checked_answer(capsys.readouterr().out)
    mu = (50 + 20 * (3**-2 + 5**-2)) ** 0.5
    assert answer["bounds"][0]["epsilon"] == gaussian.compute_epsilon(mu=mu, delta=1e-5)
    assert (answer["quote"], answer["rounds"], len(answer["settings"])) == ("certified", 70, 2)


@pytest.mark.parametrize(
    ("line", "more", "words"),
    [
        ("server_noise,5,abc,10", "", "line 3: noise_multiplier must be a number, got 'abc'"),
        ("server_noise,,1,10", "", "line 3: steps must be a number"),
        ("server_noise,5,1", "", "line 3: 3 cells for the columns mechanism, steps, noise"),
        ("gaussian,5,1,10", "", "line 3: mechanism must be one of"),
        ("client_noise,5,1,10", "", "must be of one mechanism"),
        ("server_noise,5,1,10", "--steps 3", "unknown keyword(s): --steps=3"),
    ],
)
def test_a_wrong_line_of_a_table_is_refused_with_its_column(capsys, tmp_path, line, more, words):
    table = tmp_path / "rounds.csv"
    table.write_text(f"mechanism,steps,noise_multiplier,num_users\nserver_noise,1,1,10\n{line}\n")
    assert main(f"report --rounds {table} --delta 1e-5 {more}".split()) == 2
    assert words in capsys.readouterr().err
