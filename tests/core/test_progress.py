"""Long tasks say what they do on a terminal and in the log; short ones, and tests, say nothing."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from opacus_shuffle.core import progress as module
from opacus_shuffle.core.progress import enter_phase, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A step passes between any two looks at the clock: a second."""
    time = {"now": 0.0, "step": 1.0}

    def monotonic():
        time["now"] += time["step"]
        return time["now"]

    monkeypatch.setattr(module.time, "monotonic", monotonic)
    return time


def do():
    with progress("finding"):
        enter_phase("tracing")
        enter_phase("tracing")
        with progress("a part of it"):
            enter_phase("checking")


def test_a_long_task_shows_one_line_on_a_terminal_and_takes_it_away(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    do()
    shown = "finding: checking, 3 s"
    assert terminal.getvalue() == f"\r{shown}\r{' ' * len(shown)}\r"


def test_a_bar_says_how_much_is_done_and_stays_through_phases_that_do_not(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress("training"):
        for done in range(5):
            enter_phase("rounds", share=done / 4)
            enter_phase("looking")
    shown = [line.strip() for line in terminal.getvalue().split("\r") if line.strip()]
    assert "training: ##########..........  50%, rounds, 5 s" in shown
    assert "training: ##########..........  50%, looking, 6 s" in shown
    assert shown[-1] == "training: #################### 100%, looking, 10 s"


def test_a_long_task_tells_the_log_how_long_each_phase_took(clock, caplog):
    with caplog.at_level(logging.INFO, logger="opacus_shuffle"):
        do()
    assert caplog.messages == ["finding took 4.0 s: tracing 2.0 s, checking 1.0 s"]


def test_a_short_task_says_nothing(clock, caplog, monkeypatch):
    clock["step"] = 0.1
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with caplog.at_level(logging.INFO, logger="opacus_shuffle"):
        do()
    assert not caplog.messages
    assert not terminal.getvalue()


def test_nothing_is_shown_where_there_is_no_terminal(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    do()
    assert not file.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    do()
