"""Opacus's own tests, from its source distribution, pass with this package's engine in the place of Opacus's."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import opacus
import pytest

pytestmark = pytest.mark.slow
FILES = (
    "privacy_engine_validation_test.py",
    "batch_memory_manager_test.py",
    "gradient_accumulation_test.py",
    "randomness_test.py",
    "poisson_test.py",
    "dpdataloader_test.py",
    "schedulers",
    "privacy_engine_test.py",
)
TESTS = Path(__file__).parent.parent
TIME_FIRST = "it trains [time, batch] data without batch_first=False, so that Opacus clips time steps as records"
EXPECTED = {
    f"privacy_engine_test.py::{name}::test_make_private_with_epsilon": TIME_FIRST
    for name in (
        "PrivacyEngineTextTest",
        "PrivacyEngineTextTestFunctorch",
        "PrivacyEngineTextHooksTest",
    )
}
"""Tests that the stock engine passes and ours must not, with the reason."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with Opacus's tests as a package of their own."""
    place = tmp_path_factory.mktemp("opacus")
    version = metadata.version("opacus")
    command = [
        "download",
        "--no-binary",
        "opacus",
        "--no-deps",
        "--no-build-isolation",
        "-d",
        str(place),
        f"opacus=={version}",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False
    )
    archives = list(place.glob("opacus-*.tar.gz"))
    installed = Path(opacus.__file__).parent / "tests"  # wheels have had them
    if archives:
        with tarfile.open(archives[0]) as archive:
            archive.extractall(place, filter="data")
        found = next(place.glob("opacus-*/opacus/tests"))
    elif (installed / "privacy_engine_test.py").exists():
        found = installed
    else:
        reason = (run.stderr or run.stdout).strip().splitlines()[-1:]
        pytest.skip(
            f"the source distribution of Opacus {version} cannot be fetched: {' '.join(reason)}"
        )
    missing = [
        name for name in ("hypothesis", "opt_einsum") if importlib.util.find_spec(name) is None
    ]
    if missing:
        pytest.skip(f"Opacus's tests need {' and '.join(missing)}")
    shutil.copytree(found, place / "opacus_tests")
    return place


def failures(folder, engine, *options, tests=FILES):
    """What fails, by name, and how many pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "helpers.opacus_suite", f"--engine={engine}", *options,
               "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "-c", os.devnull, f"--rootdir={folder}"]  # fmt: skip
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*command, *(f"opacus_tests/{each}" for each in tests)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "passed" in run.stdout.splitlines()[-1] or "failed" in run.stdout.splitlines()[-1], (
        run.stdout + run.stderr
    )
    passed = re.search(r"(\d+) passed", run.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) opacus_tests/(\S+)", run.stdout, flags=re.MULTILINE)
    return failed, int(passed[1]) if passed else 0


def test_opacus_s_own_tests_pass_with_our_engine(folder):
    failed, passed = failures(folder, "ours")
    failed = [each for each in failed if each not in EXPECTED]
    if failed:  # by no fault of ours where the stock engine fails as well
        failed = sorted({*failed} - {*failures(folder, "stock", tests=failed)[0]})
    assert not failed
    assert passed > 250
