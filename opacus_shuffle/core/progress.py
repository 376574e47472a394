"""Saying what a long task is doing: a line on a terminal, and in the end one for the log.

Tasks of two seconds say nothing. ``logging.getLogger("opacus_shuffle").setLevel(logging.INFO)``
shows how long each phase of the others took, where the log goes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar

LOGGER = logging.getLogger("opacus_shuffle")
QUIET = 2.0
"""Seconds for which a task says nothing."""
BAR = 20
"""Characters of a progress bar."""


class _Task:
    def __init__(self, name: str) -> None:
        self._name, self._phase = name, ""
        self._begun = self._last = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._width = 0
        self._bar = ""

    def enter(self, phase: str, share: float | None) -> None:
        total = self._count()
        self._phase = phase
        if share is not None:
            self._bar = f"{'#' * round(BAR * share):.<{BAR}} {share:4.0%}, "
        if total > QUIET:
            self._show(f"{self._name}: {self._bar}{phase}, {total:.0f} s")

    def leave(self) -> None:
        total = self._count()
        if total > QUIET:
            phases = ", ".join(
                f"{phase} {seconds:.1f} s" for phase, seconds in self._seconds.items() if phase
            )
            LOGGER.info("%s took %.1f s: %s", self._name, total, phases)
        if self._width:
            self._show("")

    def _count(self) -> float:
        """Returns how long the task has lasted, and counts what is new of it for the phase that it is in."""
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._last
        self._last = now
        return now - self._begun

    def _show(self, line: str) -> None:
        """Writes over the line that was there, on a terminal."""
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write("\r" + line.ljust(self._width) + ("\r" if not line else ""))
            sys.stderr.flush()
            self._width = len(line)


_TASK: ContextVar[_Task | None] = ContextVar("_TASK", default=None)


@contextlib.contextmanager
def progress(name: str) -> Iterator[None]:
    """Says what the task inside is doing; a task within another one is a part of it."""
    if _TASK.get() is not None:
        yield
        return
    task = _Task(name)
    token = _TASK.set(task)
    try:
        yield
    finally:
        _TASK.reset(token)
        task.leave()


def enter_phase(phase: str, *, share: float | None = None) -> None:
    """Says that the task which is under way, if there is one, enters a phase, or is still in it.

    Args:
        phase: What is being done.
        share: How much of the whole task is done, 0 to 1, for a bar, which stays until the next
            share.
    """
    if (task := _TASK.get()) is not None:
        task.enter(phase, share)
