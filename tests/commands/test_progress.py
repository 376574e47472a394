"""Long commands say what they do: a line at once, and one every ten seconds, unless quiet."""

from __future__ import annotations

import pytest

from opacus_shuffle.commands.compare import cost
from opacus_shuffle.commands.progress import Progress


@pytest.mark.parametrize(("quiet", "told"), [(False, "0\n10\n21\n"), (True, "")])
def test_a_line_at_once_and_then_one_every_ten_seconds(quiet, told, capsys):
    """The clock is not the computer's."""
    seconds = [0, 1, 9.9, 10, 19, 21, 30]
    progress = Progress(quiet=quiet, clock=iter(seconds).__next__)
    for second in seconds:
        progress(str(second))
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize(
    ("runs", "records", "said"),
    [(1, 4000, "4 rows × 1 run on 4,000 images; about 1 min"), (3, 60_000, "3 runs on 60,000")],
)
def test_a_comparison_says_beforehand_what_it_trains(runs, records, said):
    assert said in cost(runs, records)
