"""Lines that say on a terminal what a long command is doing."""

from __future__ import annotations

import sys


def show_progress(line: str) -> None:
    """Writes a line to the error stream if that is a terminal, and nothing anywhere else."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr)
