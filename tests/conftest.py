"""What the tests share: small private runs, and the reference values."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

collect_ignore = [
    "helpers/laplace_reports.py"
]  # looking there for doctests would register its mechanism for all tests

# The same examples every time, so that a test fails for a change alone. New ones are looked for by
# ``pytest --hypothesis-profile=explore``.
settings.register_profile("explore", deadline=None, max_examples=200)
settings.register_profile("again", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("again")

if "PYTEST_XDIST_WORKER" in os.environ:  # one core each, and for the processes that it starts
    os.environ["OMP_NUM_THREADS"] = "1"  # before the first import of PyTorch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Lets the small private runs take place on a GPU: ``pytest --device cuda``."""
    parser.addoption("--device", default="cpu", help="of small private runs (default: cpu)")


def pytest_configure(config: pytest.Config) -> None:
    """Tells the helpers that make small private runs where to make them."""
    if (device := config.getoption("device")) != "cpu":  # the main process needs no PyTorch
        import torch
        from helpers import toy

        toy.DEVICE = torch.device(device)


def pytest_collection_finish() -> None:
    """Spares collections of garbage what all modules hold: then they take no half second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """20-digit values by term-by-term sums over integer partitions with 60 digits."""
    return json.loads((Path(__file__).parent / "reference_values.json").read_text())


@pytest.fixture
def toy() -> dict[str, Any]:
    """A tiny network, its optimizer and a loader of 24 records, as keywords of make_private."""
    from helpers.toy import make_toy

    return make_toy()
