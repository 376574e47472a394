"""The example of distributed training runs by the command that it names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

EXAMPLE = Path(__file__).parent.parent / "tutorials" / "distributed" / "train.py"
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@pytest.mark.zoo
def test_two_processes_train_and_one_of_them_says_what_it_cost():
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    done = subprocess.run(
        [*torchrun, str(EXAMPLE), "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^2 processes, accuracy [\d.]+%\nshuffled_sums, 20 rounds", done.stdout, re.MULTILINE
    )
    assert done.stdout.count("certified") >= 2
