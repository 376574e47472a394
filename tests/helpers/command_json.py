"""Checks of the JSON that a command prints: documented names, and every ε with its meaning."""

import json
import pathlib
import re

import pytest


def checked_answer(printed: str) -> dict:
    """Parses the output of a command, and checks that all names are documented."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "how_to" / "command_line.rst"
    documented = set(re.findall(r"``(\w+)``", page.read_text(encoding="utf-8")))
    # An ε has these names beside it.
    meaning = {"delta", "adjacency", "bound", "guarantee", "covers", "trusted"}

    def checked(values: dict) -> dict:
        """Checks one object; the settings of a job and the findings of an audit have no meaning."""
        names = values.keys()
        explained = meaning <= names <= documented or {"data", "confidence"} & names
        assert explained or "epsilon" not in names
        return values

    answer = json.loads(printed, parse_constant=pytest.fail, object_hook=checked)
    assert answer.keys() <= documented
    return answer
