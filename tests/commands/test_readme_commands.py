"""The commands that the README shows, and the numbers that it says they find."""

from __future__ import annotations

import pathlib

import pytest

from opacus_shuffle.commands.main import main

README = (pathlib.Path(__file__).parents[2] / "README.rst").read_text(encoding="utf-8")
NUMBERS = [
    line.split()[1:]
    for line in README.splitlines()
    if line.startswith("    opacus-shuffle ") and "--delta" in line
]
NOISES = [
    line.split()[1:] for line in README.splitlines() if line.startswith("    opacus-shuffle noise ")
]


@pytest.mark.parametrize("command", [*NUMBERS, *NOISES], ids=" ".join)
def test_a_command_of_the_readme_finds_the_number_that_stands_there(capsys, command):
    assert main(command) == 0
    assert f" {capsys.readouterr().out.splitlines()[0]}, " in README.replace("\n", " ")


def test_the_readme_shows_a_command_for_epsilon_and_one_for_noise():
    assert [command[0] for command in [*NUMBERS, *NOISES]] == ["epsilon", "noise"]
