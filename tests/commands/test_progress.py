"""Long commands say on a terminal what they do, and write nothing into files and pipes."""

from __future__ import annotations

import io
import sys

import pytest

from opacus_shuffle.commands.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "told"), [(Terminal(), "epoch 1 of 2\n"), (io.StringIO(), ""), (None, None)]
)
def test_progress_is_shown_on_a_terminal_alone(stream, told, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    show_progress("epoch 1 of 2")
    assert (stream and stream.getvalue()) == told
