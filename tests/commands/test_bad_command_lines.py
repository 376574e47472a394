"""No command line ends in a traceback: it answers, or exits with status 2 and a line of why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from opacus_shuffle.commands import compare
from opacus_shuffle.commands.main import main

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = "--mechanism subsampled_shuffle --num-users 400 --steps 10 --sample-rate 0.1"
VIT = "--mechanism shuffled_fw --num-users 50000 --steps 500 --sample-rate 0.02"
EPSILON = f"epsilon {RUN} --noise-multiplier 1 --delta 1e-5"
WRONG = [
    (f"epsilon {RUN} --noise-multiplier -1 --delta 1e-5", "noise_multiplier"),
    (f"epsilon {RUN} --noise-multiplier nan --delta 1e-5", "noise_multiplier"),
    (f"epsilon {RUN} --noise-multiplier 1e-170 --delta 1e-5", "noise_multiplier"),
    (f"epsilon {RUN} --noise-multiplier 1 --delta 2", "delta"),
    (f"{EPSILON} --bound pair --adjacency replace", "certified"),
    (f"{EPSILON} --bound published_optimised", "bound"),
    (f"{EPSILON} --steps 0", "steps"),
    (f"{EPSILON} --num-users {'9' * 400}", "num_users"),
    (f"{EPSILON} --dimension 10", "subsampled_shuffle has no --dimension"),
    (f"{EPSILON} --orders 30:2 --bound published", "orders must be"),
    (f"{EPSILON} --orders 1:30 --bound published", "orders must be"),
    (f"{EPSILON} --orders 2,4", "orders=(2, 4): leave them out"),
    (f"epsilon {RUN} --delta 1e-5", "subsampled_shuffle needs --noise-multiplier"),
    (f"report {RUN[:-18]} --delta 1e-5", "needs --noise-multiplier, --sample-rate"),
    (f"noise {RUN} --target-epsilon 0 --target-delta 1e-5", "target_epsilon"),
    (f"noise {RUN} --batch-clip 1 --target-epsilon 1 --target-delta 1e-5", "--batch-clip"),
    (f"epsilon {VIT} --noise-multiplier 1 --delta 1e-5", "dimension"),
    (f"epsilon {VIT} --dimension 2.5 --noise-multiplier 1 --delta 1e-5", "dimension"),
    (f"epsilon {VIT} --dimension 10,0 --noise-multiplier 1 --delta 1e-5", "dimension"),
    (f"epsilon {VIT} --dimension 9 --clip 0 --noise-multiplier 1 --delta 1e-5", "clip"),
    (f"plot {RUN} --noise-multiplier 1 --delta 1e-5 -o ladder.xyz", "--output must name a file"),
    (f"{EPSILON} --espilon", "--espilon; see opacus-shuffle epsilon --help"),
    ("train --data mnist", "data-root"),
    ("train --data cifar10 --data-root /nowhere", "cifar10"),
    ("train --data-root /tmp", "mnist-5k"),
    ("train --epochs 0", "epochs"),
    ("train --bound pair", "target_epsilon"),
    ("train --noise-multiplier 1 --target-epsilon 1", "not both"),
    ("train --batch-size 5000", "batch_size"),
    ("train --seed -1", "seed"),
    ("train --noise-multiplier 0", "noise_multiplier"),
    ("train --delta 0", "delta"),
    ("train --batch-clip 1", "batch_clip"),
    ("compare --epsilon 0", "epsilon"),
    ("compare --target-epsilon 0.05", "epsilon must be at least 0.1"),
    ("compare --delta 1", "delta"),
    ("compare --seed -1", "seed"),
    ("compare --runs 0", "runs"),
    ("compare --data mnist", "data-root"),
    ("compare --statement found.txt", "--statement"),
    ("compare --statement /nowhere/found.md", "--statement"),
    ("compare --output picture", "--output"),
    ("audit --trials 10", "trials must be a whole number of at least 1000"),
    ("audit --training-steps 7", "training_steps must be a whole number of at least 100"),
    ("audit --target-epsilon nan", "target_epsilon must be a finite number"),
    ("audit --seed -1", "seed must be a whole number of at least 0"),
    ("plan --num-users 0 --steps 1 --target-epsilon 1 --target-delta 1e-5", "num_users"),
    ("", "which command? opacus-shuffle compare is the one to begin with"),
]


@pytest.mark.parametrize(("line", "named"), WRONG)
def test_a_wrong_argument_is_one_line_and_exit_status_2_before_any_work(
    capsys, monkeypatch, line, named
):
    monkeypatch.setattr(compare, "train_kind", lambda *_, **__: pytest.fail("it trains"))
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("epsilon --sigma 1", "--mechanism"),
        ("compar", "invalid choice: 'compar'"),
        (
            f"epsilon {VIT} --dimension many --noise-multiplier 1 --delta 1e-5",
            "'many' is no number",
        ),
        (f"epsilon {VIT} --dimension 10,128 --delta 1e-5", "write 10128, or '10, 128'"),
        *((f"{EPSILON} --orders {text}", "--orders") for text in ("2:1000000000", "2:", "a")),
    ],
)
def test_words_that_no_flag_has_and_what_could_be_one_number_or_two_are_refused(
    capsys, line, named
):
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err


PLOT = f"plot {RUN} --noise-multiplier 2 --delta 1e-5"


@pytest.mark.slow
@pytest.mark.parametrize("job", [EPSILON, "--help", f"{EPSILON} --delta=2"])
@pytest.mark.parametrize(
    "stream", ["> /dev/full", "2> /dev/full", ">&-", "2>&-", ">&- 2>&-", "| true", "| head -c 1"]
)
def test_output_that_has_nowhere_to_go_is_no_traceback(job, stream):
    command = f"{sys.executable} -W error::RuntimeWarning -m opacus_shuffle {job} {stream}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "Exception ignored" not in done.stdout + done.stderr
    assert done.returncode in (0, 2)
    # Without a stdout argparse writes its help to stderr.
    assert job == "--help" or len(done.stderr.splitlines()) <= 1


@pytest.mark.parametrize(
    "root", ["", "/nowhere", "/dev/null", "/etc/passwd", "/dev/full", "\x00", "a" * 5000]
)
@pytest.mark.parametrize("data", ["mnist", "fashion-mnist", "cifar10"])
def test_a_folder_that_is_none_is_one_line_that_names_the_option(data, root, capsys):
    assert main(["train", f"--data={data}", f"--data-root={root}"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    assert "root" in printed.err


@pytest.mark.parametrize(
    "output", ["", ".", "/nowhere/x.png", "/etc/passwd/x.png", "x", "x.xyz", "a" * 300 + ".png"]
)
def test_a_picture_that_has_no_place_is_one_line_that_names_the_option(
    output, capsys, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main([*PLOT.split(), f"--output={output}"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    assert "output" in printed.err
