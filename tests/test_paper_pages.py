"""Pages about papers name functions and files that there are, and every numbered statement."""

import functools
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "papers").glob("*.rst"))
NUMBERED = {
    "shuffle_gaussian": {
        *(f"Definition {number}" for number in (1, 2, 3, 4)),
        *("Lemma 1", "Lemma 2", "Corollary 1", "Algorithm 1", "Conjecture 1"),
        *(
            "Theorem 1",
            "Theorem 2",
            "Theorem 3",
            "Table 1",
            "Equation 11 (ICLR), Equation 17 (arXiv)",
            "Figure 1a (arXiv)",
            "Figure 1a (ICLR)",
            "Figure 1b",
        ),
    },
    "weights_shuffling": {
        *(f"Definition {number}" for number in range(1, 7)),
        *(f"Lemma {number}" for number in range(1, 4)),
        *(f"Theorem {number}" for number in range(1, 7)),
        *(f"Figure {number}" for number in range(1, 5)),
        *(f"Table {number}," for number in ("I", "II", "III", "IV", "V", "VI", "VII", "VIII")),
        *("Algorithm 1", "Section VI-B"),
    },
    "private_convex_optimisation": {
        *(
            f"Definition {number}"
            for number in ("2.1", "2.2", *(f"2.{last}" for last in range(5, 13)), "4.5")
        ),
        *(f"Definition {number}" for number in ("A.4", "A.7", "B.1", "C.1", "C.2")),
        *(
            "Fact 2.3",
            "Fact 2.4",
            "Claim A.8",
            "Table 1",
            *(f"Algorithm {number}" for number in range(1, 7)),
        ),
        *(
            f"Lemma {number}"
            for number in (
                "3.1",
                "3.3",
                "4.2",
                "4.4",
                "4.6",
                "A.1",
                "A.2",
                "A.3",
                "A.5",
                "C.4",
                "C.5",
            )
        ),
        *(f"Lemma B.{number}" for number in range(2, 8)),
        *(
            f"Theorem {number}"
            for number in ("3.2", "4.1", "4.3", "4.7", "4.8", "4.9", "A.6", "C.3")
        ),
        *(f"Corollary {number}," for number in ("A.9", "B.8", "B.9", "B.10", "B.11")),
    },
}


def resolve(name: str) -> object:
    """What a dotted name means: a module, or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], module)
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_on_a_page_is_there(page):
    text = page.read_text()
    names = re.findall(r":(?:func|class|mod|meth):`~?([\w.]+)`", text)
    files = re.findall(r"``((?:tests|benchmarks|reproduction)/[\w/]+\.py)``", text)
    assert names
    assert files
    for name in names:
        assert resolve(name)
    assert not [file for file in files if not (ROOT / file).exists()]


def rows(page):
    """The statements of a page's table, each with the cell that says which tests it has."""
    cells = r"^   \* - (.+?)\n     - .+?\n     - (.+?)\n     - "
    return re.findall(cells, page.read_text(), flags=re.MULTILINE | re.DOTALL)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_numbered_statement_has_its_row(page):
    names = [name for name, _ in rows(page)]
    assert not [
        number for number in NUMBERED[page.stem] if not any(n.startswith(number) for n in names)
    ]


def passages(file):
    """The tests of a file, each with the comment above it."""
    return [block for block in (ROOT / file).read_text().split("\n\n\n") if "def test_" in block]


KINDS = "Definition|Lemma|Theorem|Fact|Claim|Corollary|Algorithm|Conjecture|Table|Figure|Equation"
LABEL = rf"(?:{KINDS}|Section|Appendix) [\w.-]*\w(?: \((?:arXiv|ICLR)\))?"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_cited_test_names_its_paper_and_a_number_of_the_row(page):
    paper = page.read_text().partition(":")[0]
    for name, tests in rows(page):
        numbers = "|".join(map(re.escape, re.findall(LABEL, name)))
        named = re.compile(rf"\b{paper}\b.*\b(?:{numbers})(?!\.?\w)")
        files = re.findall(r"``(tests/[\w/]+\.py)``", tests)
        assert files or tests.startswith("none: "), name
        for file in files if numbers else ():
            assert any(map(named.search, passages(file))), (name, file)
