"""Every notebook has a text without outputs beside it; ``pytest tutorials`` runs the notebooks."""

from pathlib import Path

import jupytext
import pytest

TUTORIALS = Path(__file__).parent.parent / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))


def test_every_text_has_its_notebook():
    assert [path.stem for path in sorted((TUTORIALS / "text").glob("*.py"))] == [
        path.stem for path in NOTEBOOKS
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_and_text_have_the_same_cells(path):
    """If this fails, run ``jupytext --sync`` on the notebook, then ``pytest --overwrite`` on it."""
    text = jupytext.read(TUTORIALS / "text" / f"{path.stem}.py")
    notebook = jupytext.read(path)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in text.cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_was_run_from_top_to_bottom_warns_of_nothing_and_is_small(path):
    code = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [
        output
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert path.stat().st_size < 400_000
