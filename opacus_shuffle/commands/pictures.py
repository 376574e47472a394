"""Where a command's picture goes: checked before any work is done, written at the end."""

from __future__ import annotations

import os
from typing import Any

from opacus_shuffle.core import extras


def check_output(output: str) -> None:
    """Refuses a picture that cannot be drawn, or has nowhere to go."""
    kind = os.path.splitext(output)[1]  # without one matplotlib writes another file than the one named
    if not kind or os.path.isdir(output) or not os.path.isdir(os.path.dirname(output) or "."):
        raise ValueError(f"--output must name a file in a folder that is there, got {output!r}: for instance report.png")
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ValueError(extras.missing("a picture", "matplotlib", "plots")) from error
    matplotlib.use("Agg")
    if kind[1:].lower() not in matplotlib.figure.Figure().canvas.get_supported_filetypes():
        raise ValueError(f"--output must end in .png, .pdf, .svg or what else matplotlib can write, got {output!r}")


def save(figure: Any, output: str) -> None:
    """Writes the picture."""
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {output}: {error}") from error
