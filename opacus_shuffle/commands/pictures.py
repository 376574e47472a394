"""Where a command's picture goes: checked before any work is done, written at the end."""

from __future__ import annotations

import os
from typing import Any


def check_output(output: str) -> None:
    """Refuses a picture that cannot be drawn, or has nowhere to go."""
    if not output or os.path.isdir(output):
        raise ValueError(f"--output must name a file, got {output!r}: for instance report.png")
    folder = os.path.dirname(output) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"--output {output}: there is no folder {folder}")
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("a picture needs matplotlib: pip install 'opacus_shuffle[plots]'") from error
    matplotlib.use("Agg")


def save(figure: Any, output: str) -> None:
    """Writes the picture."""
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {output}: {error}") from error
