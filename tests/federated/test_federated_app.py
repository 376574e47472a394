"""The scripts of the tutorials train, in one process and in many, and say what it cost."""

import hashlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from opacus_shuffle.federated.serve import main

pytest.importorskip("flwr", reason="needs the extra federated")
pytest.importorskip("mlxtend", reason="needs the extra tutorials")
yaml = pytest.importorskip("yaml", reason="comes with Flower")
APP = Path(__file__).parent.parent.parent / "tutorials" / "federated"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs flwr[simulation]"
)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("simulate.py --clients 12 --rounds 2 --book {folder}/book", "12 clients, 2 rounds, "),
        (
            "simulate.py --clients 12 --rounds 1 --reports secret_reports",
            r"12 clients, 1 rounds, accuracy [\d.]+%\nsecret_checkin, 1 round, ",
        ),
        pytest.param(
            "simulate.py --ray --clients 20 --rounds 1", "20 clients, 1 rounds, ", marks=needs_ray
        ),
        ("deploy.py", r"(?s)'reports': 4.*2 rounds, "),
    ],
    ids=["in one process", "secret reports", "Ray", "deployed"],
)
def test_a_script_trains_and_says_what_it_cost(command, said, tmp_path):
    done = subprocess.run(
        [sys.executable, *f"{APP}/{command}".format(folder=tmp_path).split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sums = "" if "secret_checkin" in said else r"(accuracy [\d.]+%)?\nshuffled_sums, \d rounds?"
    assert re.search(said + sums, done.stdout)


def test_a_client_runs_no_app_but_the_one_that_it_has_read(monkeypatch):
    command = importlib.import_module("flwr.supernode.cli.flwr_clientapp")
    apps = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    for name in ("install_from_fab", "get_project_dir"):  # which are put back at the end
        monkeypatch.setattr(apps, name, lambda *given, **options: given)
    monkeypatch.setattr(command, "flwr_clientapp", lambda: None)
    read = runpy.run_path(str(APP / "machines" / "flwr-clientapp"))["READ"]
    read.add(digest := hashlib.sha256(b"this").hexdigest())
    assert apps.install_from_fab(b"this") == (b"this",)
    assert apps.get_project_dir("a/b", "1.0.0", digest) == ("a/b", "1.0.0", digest)
    for ask, given in (
        (apps.install_from_fab, (b"that",)),
        (apps.get_project_dir, ("a/b", "1.0.0", "0" * 64)),
        (apps.get_project_dir, ("a/b", "1.0.0/../../x", digest)),
    ):
        with pytest.raises(PermissionError, match="not the one that the client has read"):
            ask(*given)


def test_shufflers_are_started_by_options_that_there_are_and_files_that_they_are_given(capsys):
    compose = yaml.safe_load((APP / "machines" / "compose.yaml").read_text())
    service = compose["services"]["shuffler"]
    unit = (APP / "machines" / "opacus-shuffler.service").read_text().replace("\\\n", "")
    for command, given in (
        (service["command"], service["secrets"]),
        (re.search("federated.serve(.+)", unit)[1].split(), re.findall("Credential=(.+):", unit)),
    ):
        assert set(re.findall(r"/([a-z]+\.[a-z]+)", " ".join(command))) == set(given)
        with pytest.raises(SystemExit):
            main(command)
        assert "No such file or directory" in capsys.readouterr().err  # no option is unknown
