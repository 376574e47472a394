"""No command line ends in a traceback: it answers, or exits with status 2 and one line that names the option."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers.bad_calls import SECONDS, Hang, limited
from torch.utils.data import TensorDataset

from opacus_shuffle.commands import audit, train
from opacus_shuffle.commands.main import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NO_NUMBER = ["", " ", "nan", "abc", "True", "None", "1 2", "0x10", "[]", "1;2", "½", "\x00"]
NUMBERS = [
    "inf",
    "-inf",
    "-1",
    "0",
    "-0.0",
    "0.5",
    "1",
    "1e-320",
    "1e-12",
    "1e15",
    "1e308",
    "1e400",
    "9" * 400,
    "1_0",
    "١",
]
RUNS = {
    "shuffle_gauss": {"--noise-multiplier": "4", "--num-users": "1000"},
    "subsampled_shuffle": {
        "--noise-multiplier": "2",
        "--num-users": "1000",
        "--sample-rate": "0.1",
    },
    "shuffled_checkin": {"--noise-multiplier": "2", "--num-users": "1000", "--sample-rate": "0.1"},
    "shuffled_fw": {
        **{
            "--noise-multiplier": "1",
            "--num-users": "1000",
            "--sample-rate": "0.1",
            "--dimension": "100",
        },
        **{
            "--clip": "1",
            "--batch-clip": "1",
            "--unshuffled-noise-multiplier": "2",
            "--orbit": "50",
        },
    },
    "shuffled_sums": {
        "--noise-multiplier": "2",
        "--num-users": "1000",
        "--sample-rate": "0.1",
        "--dimension": "4",
    },
}
SMALL = {
    "--epochs": "1",
    "--batch-size": "50",
    "--noise-multiplier": "1",
    "--delta": "1e-5",
    "--learning-rate": "0.1",
}


def lines():
    """Every command with options that it takes; those that only choose words are separate."""
    for name, run in RUNS.items():
        run = {"--mechanism": name, **run, "--steps": "3", "--adjacency": "zero_out"}
        budget = {key: value for key, value in run.items() if "noise-multiplier" not in key}
        yield f"epsilon {name}", "epsilon", {**run, "--delta": "1e-5", "--bound": "certified"}
        if name == "shuffled_checkin":
            yield (
                "noise",
                "noise",
                {**budget, "--target-epsilon": "1", "--target-delta": "1e-5", "--bound": "pair"},
            )
    run = {
        "--mechanism": "shuffled_checkin",
        **RUNS["shuffled_checkin"],
        "--steps": "3",
        "--delta": "1e-5",
    }
    yield "report", "report", run
    yield "plot", "plot", {**run, "--output": "ladder.png"}
    yield (
        "train",
        "train",
        {**SMALL, "--max-grad-norm": "1", "--accountant": "shuffled_checkin", "--seed": "0"},
    )
    yield "train fw", "train", {**SMALL, "--accountant": "shuffled_fw", "--batch-clip": "1"}
    budget = {key: value for key, value in SMALL.items() if key != "--noise-multiplier"}
    yield (
        "train budget",
        "train",
        {**budget, "--target-epsilon": "4", "--bound": "certified", "--data": "mnist-5k"},
    )
    few = {"--target-epsilon": "1", "--steps": "2", "--trials": "1000", "--seed": "0"}
    yield "audit published", "audit", {"--kind": "published", **few}
    yield (
        "audit training",
        "audit",
        {"--kind": "training", "--training-steps": "100", "--others": "zero", "--seed": "0"},
    )


LINES = {name: (command, options) for name, command, options in lines()}
PICTURES = ("--delta", "--steps")
"""Of what is drawn: the other options are those of a report."""
LONG = {"--epochs": ("1e15",)}
"""Right, and days of work."""


def run(capsys, arguments):
    """The exit status and what was printed."""
    try:
        with limited(SECONDS):
            code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    except Hang:
        code = "hangs"
    except Exception as error:
        code = f"{type(error).__name__}: {error}"
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def wrong(capsys, command, options, name, value):
    """What is wrong with what a command says to one bad value; None if nothing is."""
    joined = [f"{key}={word}" for key, word in {**options, name: value}.items()]
    code, out, err = run(capsys, [command, *joined])
    if code == 0:
        return (
            "is accepted" if value in NO_NUMBER else "answers NaN" if "nan" in out.lower() else None
        )
    told = err.splitlines()[-1:]
    if code != 2:
        return f"ends with {code}"
    named = any(
        word in err for word in (name, name[2:].replace("-", "_"), name[2:].removeprefix("target-"))
    )
    return None if named and len(err.splitlines()) == 1 and not out else f"says {told} {out[:40]!r}"


def few_images(name, root=None):
    """Data in the place of mnist-5k, that every run need not take seconds."""
    images, labels = torch.zeros(100, 1, 28, 28), torch.arange(100) % 10
    return TensorDataset(images, labels), TensorDataset(images[:10], labels[:10])


@pytest.mark.parametrize("line", LINES)
def test_every_bad_value_is_one_line_that_names_the_option(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (train, audit):
        monkeypatch.setattr(module, "load_image_dataset", few_images)
    command, options = LINES[line]
    assert run(capsys, [command, *[f"{key}={word}" for key, word in options.items()]])[0] == 0
    found = [
        f"{name}={value!r:.20} {what}"[:250]
        for name in (PICTURES if command == "plot" else options)
        for value in (*NO_NUMBER, *NUMBERS)
        if value not in LONG.get(name, ())
        and (what := wrong(capsys, command, options, name, value)) is not None
    ]
    assert not found, "\n".join(found)


EPSILON = [
    "epsilon",
    "--mechanism",
    "shuffle_gauss",
    "--noise-multiplier",
    "4",
    "--num-users",
    "1000",
    "--steps",
    "3",
]
JOBS = {
    "epsilon": [*EPSILON, "--delta", "1e-5"],
    "help": ["--help"],
    "wrong": [*EPSILON, "--delta", "2"],
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    "stream",
    ["> /dev/full", "2> /dev/full", ">&-", "2>&-", ">&- 2>&-", "| true", "< /dev/null | head -c 1"],
)
def test_output_that_has_nowhere_to_go_is_no_traceback(job, stream):
    command = subprocess.list2cmdline(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "opacus_shuffle.commands.main"]
    )
    words = subprocess.list2cmdline(JOBS[job])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {words} {stream}"],
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert done.returncode in (0, 2)
    assert (
        job == "help" or len(done.stderr.splitlines()) <= 1
    )  # without a stdout argparse writes its help to stderr


TRAIN = ["train", "--epochs=1", "--batch-size=4000", "--data=mnist"]


def files_of(folder, content):
    """The four files of MNIST with this content each; None: directories in their place."""
    for split in ("train", "t10k"):
        for name in (f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz"):
            (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\x1f\x8b",
        b"\x1f\x8b\x08\x00" + b"\x00" * 6 + b"\xff" * 40,
        b"no gzip file",
        b"\x00" * 100,
    ],
)
def test_damaged_data_are_one_line_that_names_the_file(content, capsys, tmp_path):
    code, out, err = run(capsys, [*TRAIN, f"--data-root={files_of(tmp_path, content)}"])
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "train-images-idx3-ubyte" in err


@pytest.mark.parametrize(
    "root", ["", "/nowhere", "/dev/null", "/etc/passwd", "/dev/full", "\x00", "a" * 5000]
)
def test_a_folder_that_is_none_is_one_line_that_names_the_option(root, capsys):
    for data in ("mnist", "fashion-mnist", "cifar10"):
        code, out, err = run(
            capsys, ["train", "--epochs=1", f"--data={data}", f"--data-root={root}"]
        )
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert "root" in err


@pytest.mark.parametrize(
    "output",
    [
        "",
        ".",
        "/nowhere/x.png",
        "/dev/null/x.png",
        "/etc/passwd/x.png",
        "x",
        "x.xyz",
        "a" * 300 + ".png",
    ],
)
def test_a_picture_that_has_no_place_is_one_line_that_names_the_option(
    output, capsys, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, ["plot", *JOBS["epsilon"][1:], f"--output={output}"])
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "output" in err


def test_a_picture_on_a_full_device_is_one_line(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "full.png").symlink_to("/dev/full")
    code, _, err = run(capsys, ["plot", *JOBS["epsilon"][1:], f"--output={tmp_path / 'full.png'}"])
    assert (code, len(err.splitlines())) == (2, 1)
    assert "No space left" in err
