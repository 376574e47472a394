"""The Flower app of the tutorials runs by its own commands, in one process and in many, and leaves nothing running."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra federated")
pytest.importorskip("mlxtend", reason="needs the extra tutorials")
APP = Path(__file__).parent.parent.parent / "tutorials" / "federated"


def run(*command: str) -> str:
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.zoo
def test_virtual_clients_train_in_one_process_and_their_server_goes_on(tmp_path):
    command = [
        str(APP / "simulate.py"),
        "--clients",
        "12",
        "--rounds",
        "2",
        "--book",
        str(tmp_path / "book"),
    ]
    assert re.search(
        r"12 clients, 2 rounds, accuracy [\d.]+%\nshuffled_sums, 2 rounds", run(*command)
    )


@pytest.mark.zoo
def test_virtual_clients_train_in_processes_of_flower_s_own_simulation():
    pytest.importorskip("ray", reason="needs flwr[simulation]")
    said = run(str(APP / "simulate.py"), "--ray", "--clients", "20", "--rounds", "2")
    assert re.search(r"20 clients, 2 rounds, accuracy [\d.]+%\nshuffled_sums, 2 rounds", said)


@pytest.mark.zoo
def test_secure_aggregation_takes_the_shuffler_s_place():
    said = run(
        str(APP / "secure_aggregation.py"), "--clients", "6", "--missing", "1", "--rounds", "1"
    )
    assert re.search(
        r"6 clients, 1 rounds, accuracy [\d.]+%, modulus \d+\nshuffled_sums, 1 round", said
    )


def processes() -> set[int]:
    """The numbers of those that a deployment starts."""
    found = set()
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            command = each.read_bytes()
            if b"flower-super" in command or b"federated.serve" in command:
                found.add(int(each.parent.name))
    return found


@pytest.mark.zoo
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_shuffler_superlink_and_supernodes_train_and_end():
    before = processes()
    said = run(str(APP / "deploy.py"))
    assert re.search(r"3 rounds, accuracy [\d.]+%\nshuffled_sums, 3 rounds", said), said
    assert "'reports': 4" in said
    assert "plays the records' owners" not in said
    assert processes() <= before
