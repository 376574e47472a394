"""Notebooks that run side by side have one core each; what they draw is looked at."""

from __future__ import annotations

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# IPython runs this file as a kernel starts.
os.environ["PYTHONSTARTUP"] = str(
    Path(__file__).parent.parent / "tests" / "helpers" / "notebook_startup.py"
)
