"""One line on a terminal that says what a long task is doing, and is gone when the task ends.

Tasks of two seconds say nothing, and nothing is said where the error stream is no terminal.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar

QUIET = 2.0
"""Seconds for which a task says nothing."""
_TASK: ContextVar[tuple[str, float] | None] = ContextVar("_TASK", default=None)


@contextlib.contextmanager
def progress(name: str) -> Iterator[None]:
    """Says what the task inside is doing; a task within another one is a part of it."""
    outer = _TASK.get()
    token = _TASK.set(outer or (name, time.monotonic()))
    try:
        yield
    finally:
        _TASK.reset(token)
        if outer is None:
            _show("")


def enter_phase(phase: str, *, share: float | None = None) -> None:
    """Says that the task which is under way, if there is one, enters a phase, or is still in it.

    Args:
        phase: What is being done.
        share: How much of the whole task is done, 0 to 1.
    """
    task = _TASK.get()
    seconds = 0.0 if task is None else time.monotonic() - task[1]
    if task is not None and seconds > QUIET:
        done = "" if share is None else f"{share:.0%}, "
        _show(f"{task[0]}: {done}{phase}, {seconds:.0f} s")


def _show(line: str) -> None:
    """Writes over the line that was there, on a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()
