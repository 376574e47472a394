"""Long tasks say what they do on a terminal; short ones, and tests, say nothing."""

from __future__ import annotations

import io
import sys
import time

import pytest

from opacus_shuffle.core.progress import enter_phase, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def do():
    with progress("finding"):
        enter_phase("tracing")
        enter_phase("tracing")
        with progress("a part of it"):
            enter_phase("checking", share=0.25)


@pytest.mark.parametrize(
    ("stream", "seconds", "told"),
    [
        # What is written over the line before ends with nothing: the line is gone.
        (Terminal(), 1.0, "\r\x1b[Kfinding: 25%, checking, 3 s\r\x1b[K"),
        (Terminal(), 0.1, "\r\x1b[K"),
        (io.StringIO(), 1.0, ""),
        (None, 1.0, None),
    ],
)
def test_a_long_task_shows_one_line_on_a_terminal_and_takes_it_away(
    stream, seconds, told, monkeypatch
):
    ticks = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: seconds * next(ticks))
    monkeypatch.setattr(sys, "stderr", stream)
    do()
    enter_phase("outside of a task")
    assert (stream and stream.getvalue()) == told
