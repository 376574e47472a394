"""What ``--help`` shows."""

from __future__ import annotations

import argparse

import pytest

from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.commands.main import COMMANDS, parser


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_as_wide_as_a_terminal_and_names_every_choice(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    (commands,) = (
        each for each in parser(command)._actions if isinstance(each, argparse._SubParsersAction)
    )
    help_text = commands.choices[command].format_help()
    assert max(map(len, help_text.splitlines())) <= 80
    assert command not in ("epsilon", "noise", "report", "plot", "train") or all(
        name in help_text for name in MECHANISMS
    )
