"""The page that makes a FedAvg app private, run as its reader runs it: file by file."""

import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra federated")
pytest.importorskip("sklearn", reason="needs the extra scikit-learn")
PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "private_fedavg.rst"
BLOCK = re.compile(r"\.\. code-block:: python\n   :caption: (\S+\.py)(.*)\n\n((?:   .*\n|\n)+)")


@pytest.mark.zoo
@pytest.mark.parametrize("private", [False, True])
def test_the_page_s_app_trains_and_is_private_with_ten_lines(
    private, tmp_path, monkeypatch, capsys
):
    """Of 297 digits guessing gets 30: neither run is near that, by chance less than once in 10⁹."""
    files = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    for name, where, content in blocks if private else blocks[:4]:
        # A block is a file, or goes to the end of one, or in the place of a line of it.
        old, line = files.get(name, ""), where.partition("in the place of ")[2]
        assert line in old
        code = textwrap.dedent(content)
        files[name] = old.replace(line, code) if line else old * bool(where) + code
    for name, code in files.items():
        (tmp_path / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path(str(tmp_path / "simulate.py"))
    said = capsys.readouterr().out
    assert float(re.search(r"'accuracy': ([\d.]+)", said)[1]) > 0.6
    assert "".join(files.values()).count("# new") == (10 if private else 0)
    assert ("To quote: epsilon = 2.967 at delta = 1e-05" in said) == private
