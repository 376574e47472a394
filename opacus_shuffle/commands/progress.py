"""Lines on the error stream that say what a long command is doing."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

SECONDS = 10.0
"""Between two lines, on a terminal as in a log file."""


class Progress:
    """Writes a line to the error stream, if the last one is ten seconds old.

    Args:
        quiet: Whether to write nothing.
        clock: Tells the seconds, from any beginning.
    """

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet, self.clock, self.due = quiet, clock, -math.inf

    def __call__(self, line: str) -> None:
        """Writes the line if it is time for one."""
        now = self.clock()
        if not self.quiet and sys.stderr is not None and now >= self.due:
            self.due = now + SECONDS
            print(line, file=sys.stderr, flush=True)


SILENT = Progress(quiet=True)
"""For functions that are called from Python."""
