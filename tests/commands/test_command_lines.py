"""A command succeeds, or exits with status 2 and one line; its help and its JSON are valid."""

import json
import math
import subprocess
import sys

import pytest
from helpers.command_json import checked_answer

from opacus_shuffle.commands import compare, epsilon
from opacus_shuffle.commands.main import main
from opacus_shuffle.commands.parser import COMMANDS, PURPOSES, parsers

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = "--mechanism subsampled_shuffle --num-users 400 --steps 10 --sample-rate 0.1"
VIT = "--mechanism shuffled_fw --num-users 50000 --steps 500 --sample-rate 0.02"
EPSILON = f"epsilon {RUN} --noise-multiplier 1 --delta 1e-5"
WRONG = [
    (f"epsilon {RUN} --noise-multiplier -1 --delta 1e-5", "--noise-multiplier must be"),
    (f"epsilon {RUN} --noise-multiplier nan --delta 1e-5", "--noise-multiplier must be"),
    (f"epsilon {RUN} --noise-multiplier 1e-170 --delta 1e-5", "--noise-multiplier must"),
    (f"epsilon {RUN} --noise-multiplier 1 --delta 2", ": --delta must lie"),
    (f"{EPSILON} --bound pair --adjacency replace", "certified"),
    (f"{EPSILON} --bound optimised", "bound"),
    (f"{EPSILON} --steps 0", "--steps must be"),
    (f"{EPSILON} --num-users {'9' * 400}", "--num-users must be"),
    (f"{EPSILON} --dimension 10", "subsampled_shuffle has no --dimension"),
    (f"{EPSILON} --orders 30:2 --bound published", "orders must be"),
    (f"{EPSILON} --orders 1:30 --bound published", "orders must be"),
    (f"{EPSILON} --orders 2,4", "--orders=(2, 4): leave them out"),
    (f"epsilon {RUN} --delta 1e-5", "subsampled_shuffle needs --noise-multiplier"),
    (f"report {RUN[:-18]} --delta 1e-5", "needs --noise-multiplier, --sample-rate"),
    (f"noise {RUN} --target-epsilon 0 --delta 1e-5", "--target-epsilon must"),
    (f"noise {RUN} --batch-clip 1 --target-epsilon 1 --target-delta 1e-5", "--batch-clip"),
    (f"epsilon {VIT} --noise-multiplier 1 --delta 1e-5", "dimension"),
    (f"epsilon {VIT} --dimension 2.5 --noise-multiplier 1 --delta 1e-5", "dimension"),
    (f"epsilon {VIT} --dimension 10,0 --noise-multiplier 1 --delta 1e-5", "dimension"),
    (f"epsilon {VIT} --dimension 9 --clip 0 --noise-multiplier 1 --delta 1e-5", "clip"),
    (f"plot {RUN} --noise-multiplier 1 --delta 1e-5 -o ladder.xyz", "--output must name a file"),
    (f"{EPSILON} --target", "arguments: --target; see opacus-shuffle epsilon --help"),
    ("compare --epsilon 0", ": --epsilon must be positive"),
    ("compare --target-epsilon 0.05", "--target-epsilon must be at least 0.1"),
    ("compare --delta 1", "delta"),
    ("compare --seed -1", "seed"),
    ("compare --runs 0", "runs"),
    ("compare --data mnist", "--data must be 'mnist-5k' or a file that ends in .npz, got 'mnist'"),
    ("compare --data /nowhere/images.npz", "--data='/nowhere/images.npz' cannot be read"),
    ("compare --statement found.txt", "--statement"),
    ("compare --statement /nowhere/found.md", "--statement"),
    ("compare --output picture", "--output"),
    ("audit --steps 7", "--steps must be a whole number of at least 100"),
    ("audit --training-steps 7", "--training-steps must be a whole number of at least 100"),
    ("audit --noise-multiplier 0", "--noise-multiplier must be"),
    ("audit --delta 0", "--delta must lie"),
    ("audit --seed -1", "seed must be a whole number of at least 0"),
    ("plan --num-users 0 --steps 1 --target-epsilon 1 --target-delta 1e-5", "--num-users must"),
    ("", "no command given: start with opacus-shuffle compare"),
    (f"epsilon {VIT} --dimension many --noise-multiplier 1 --delta 1e-5", "'many' is not a number"),
    (f"epsilon {VIT} --dimension 10,128 --delta 1e-5", "write 10128 for one number, or '10, 128'"),
    *((f"{EPSILON} --orders {text}", "--orders") for text in ("2:1000000000", "2:", "a")),
    ("epsilon --steps 1", "arguments are required: --mechanism"),
    ("compar", "invalid choice: 'compar' (choose from 'compare'"),
]
MEANT = [  # what a newcomer types, and what was meant
    ("compar", "compare"),
    ("Audit", "audit"),
    ("epsilon --mechansim shuffle_gauss", "--mechanism"),
    ("epsilon -mechanism shuffle_gauss", "--mechanism"),
    ("epsilon --mechanism shuffle-gauss", "shuffle_gauss"),
    ("epsilon --num_users 10", "--num-users"),
    ("epsilon --users=10", "--num-users"),
    ("epsilon --sigma 3", "--noise-multiplier"),
    (f"{EPSILON} --bound certifed", "certified"),
    ("epsilon --mechanism shuffled_sums --sampling posson", "poisson"),
    ("audit --stesp 100", "--steps"),
]


PLOT = f"plot {RUN} --noise-multiplier 2 --delta 1e-5"
PICTURES = ["", ".", "/nowhere/x.png", "/etc/passwd/x.png", "x", "x.xyz", "a" * 300 + ".png"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        *WRONG,
        *((line, f"(did you mean {meant}?); see opacus-shuffle ") for line, meant in MEANT),
        *((f"{PLOT} --output={path}", "output") for path in PICTURES),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_status_2_before_any_work(
    capsys, monkeypatch, tmp_path, line, named
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "train_model", lambda *_, **__: pytest.fail("it trains"))
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("job", [EPSILON, "--help", f"{EPSILON} --delta=2"])
@pytest.mark.parametrize(
    "stream", ["> /dev/full", "2> /dev/full", ">&-", "2>&-", ">&- 2>&-", "| true", "| head -c 1"]
)
def test_output_that_cannot_be_written_causes_no_traceback(job, stream):
    command = f"{sys.executable} -W error::RuntimeWarning -m opacus_shuffle {job} {stream}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "Exception ignored" not in done.stdout + done.stderr
    assert done.returncode in (0, 2)
    # Without a stdout argparse writes its help to stderr.
    assert job == "--help" or len(done.stderr.splitlines()) <= 1


# --- help and JSON


def test_every_command_has_a_purpose():
    assert sorted(name for names in PURPOSES.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_help_has_two_valid_examples(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*name.split(), "--help"])
    shown = capsys.readouterr().out.split("examples:")[1].replace("\\\n", " ")
    examples = [line.split() for line in shown.strip().splitlines()]
    assert [words[0] for words in examples] == ["opacus-shuffle"] * 2
    for _, command, *words in examples:
        assert parsers(command)[0].parse_args([command, *words])


@pytest.mark.parametrize(
    "name",
    ["epsilon", "report", *(pytest.param(n, marks=pytest.mark.zoo) for n in ("noise", "plot"))],
)
def test_fast_examples_print_documented_json_with_the_meaning_of_every_epsilon(
    name, capsys, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for example in COMMANDS[name].examples:
        assert main([*example.split(), "--json"]) == 0
        assert checked_answer(capsys.readouterr().out)


def test_a_number_that_is_infinite_or_none_is_null(capsys, monkeypatch):
    values = {"lower": -math.inf, "rows": [{"noise": math.inf}, {"noise": math.nan}]}
    monkeypatch.setattr(epsilon, "print_epsilon", lambda options: (values, ""))
    assert main([*COMMANDS["epsilon"].examples[0].split(), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"lower": None, "rows": [{"noise": None}, {"noise": None}]}
