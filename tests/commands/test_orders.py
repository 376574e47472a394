"""Rényi orders on the command line: what papers chose, said beside the ε that they give."""

from __future__ import annotations

import pytest

from opacus_shuffle import ShuffleGauss
from opacus_shuffle.accountants import report
from opacus_shuffle.commands.main import main

SG_TABLE = [
    "--mechanism",
    "shuffle_gauss",
    "--noise-multiplier",
    "9.476",
    "--num-users",
    "60000",
    "--delta",
    str(1 / 60_000),
]
SUMS = [
    "--mechanism",
    "shuffled_sums",
    "--noise-multiplier",
    "2",
    "--num-users",
    "100",
    "--dimension",
    "4",
]
SUMS += ["--sample-rate", "1", "--delta", "1e-5"]


def test_orders_up_to_30_give_what_the_paper_prints(capsys):
    asked = [*SG_TABLE, "--steps", "1", "--orders", "2:30"]
    assert main(["epsilon", *asked, "--bound", "published"]) == 0
    number, *meaning = capsys.readouterr().out.splitlines()
    assert float(number) == pytest.approx(0.228, abs=5e-4)  # SG Table 1, one round
    assert any("certified for every data set" in line for line in meaning)
    assert main(["report", *asked]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"published {number}" in shown
    assert "over the 29 Rényi orders from 2 to 30 that were asked for" in shown


@pytest.mark.parametrize("text", ["2:1000000000", "2:", "a", "", "2:3:4"])
def test_orders_that_are_none_are_refused_in_one_line(capsys, text):
    with pytest.raises(SystemExit) as ended:
        main(["epsilon", *SG_TABLE, "--steps", "1", "--bound", "published", "--orders", text])
    assert ended.value.code == 2
    assert "--orders" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["30:2", "1:30"])
def test_orders_that_no_formula_has_are_refused(capsys, text):
    assert (
        main(["epsilon", *SG_TABLE, "--steps", "1", "--bound", "published", "--orders", text]) == 2
    )
    assert "orders must be" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [["epsilon", *SG_TABLE], ["report", *SUMS]])
def test_orders_that_no_bound_uses_are_refused(capsys, asked):
    assert main([*asked, "--steps", "1", "--orders", "2,4"]) == 2
    assert "orders=(2, 4): leave them out" in capsys.readouterr().err


def test_a_picture_has_the_orders_of_its_report(monkeypatch):
    drawn = []
    ladder = report.ladder
    monkeypatch.setattr(
        report,
        "ladder",
        lambda *args, **options: drawn.append(options["orders"]) or ladder(*args, **options),
    )
    ax = pytest.importorskip("matplotlib.figure").Figure().subplots()
    run = ShuffleGauss(noise_multiplier=9.476, num_users=60_000)
    report.PrivacyReport([(run, 1)], delta=1e-5, orders=iter([2, 30])).plot(ax)
    assert drawn == [(2, 30)] * 2  # of the table, and of the curve of one round
