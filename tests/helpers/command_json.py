"""What holds of every JSON that a command prints: an object, and no ε without its meaning."""

from __future__ import annotations

import json
import pathlib
import re

import pytest


def checked_answer(printed: str) -> dict:
    """Reads what a command printed as standard JSON, whose names are all on the page."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "how_to" / "command_line.rst"
    documented = set(re.findall(r"``(\w+)``", page.read_text(encoding="utf-8")))
    # No ε without these.
    meaning = {"delta", "adjacency", "bound", "guarantee", "covers", "trusted"}

    def checked(held: dict) -> dict:
        """Of every object, the innermost first: a job is as asked, a finding has a confidence."""
        known = meaning <= held.keys() <= documented or {"data", "confidence"} & held.keys()
        assert known or "epsilon" not in held
        return held

    answer = json.loads(printed, parse_constant=pytest.fail, object_hook=checked)
    assert answer.keys() <= documented
    return answer
