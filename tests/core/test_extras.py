"""Hints at optional packages name extras that there are."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

from opacus_shuffle.core import extras

ROOT = Path(__file__).parent.parent.parent


def test_every_hint_names_an_extra_that_brings_the_package():
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    calls = [
        [argument.value for argument in node.args]
        for path in (ROOT / "opacus_shuffle").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "extras.missing"
    ]
    assert calls
    for _, package, extra in calls:
        assert package in re.split(r"[[<>=!~][^\n]*|\s+", options["options.extras_require"][extra])


def test_a_hint_can_be_typed_as_it_stands():
    assert extras.missing("plot", "matplotlib", "plots") == (
        "plot needs the package matplotlib: run pip install '.[plots]' in your clone of "
        "opacus_shuffle"
    )
