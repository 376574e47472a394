"""Hints at optional packages name extras that there are."""

import ast
import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_hint_names_an_extra_that_brings_the_package():
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    calls = [
        [argument.value for argument in node.args]
        for path in (ROOT / "opacus_shuffle").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "imports.missing_extra"
    ]
    assert calls
    for _, package, extra in calls:
        assert package in re.split(r"[[<>=!~][^\n]*|\s+", options["options.extras_require"][extra])
