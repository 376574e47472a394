"""What every test of the engine begins with."""

from __future__ import annotations

import pytest
import torch

# These networks are so small that more threads only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Weights and data of the small runs repeat; noise is secret all the same."""
    torch.manual_seed(0)
