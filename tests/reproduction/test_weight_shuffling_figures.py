"""The figures' numbers: what they must be whatever the paper's open settings are.

What is written can be read.
"""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import weight_shuffling_figures as figures

from opacus_shuffle.analysis.fenton_wilkinson import compute_delta

NORMS = [figures.NORMS[0], *(pytest.param(n, marks=pytest.mark.zoo) for n in figures.NORMS[1:])]


def test_the_vits_run_is_five_hundred_steps_of_the_known_budget():
    run = figures.RUNS["ViT"]
    assert run.steps == 500
    epsilon, delta = run.budget(0.5)
    assert round(epsilon, 4) == 0.1976
    assert delta == pytest.approx(2.5e-7, rel=1e-12)


# WS Figure 3: σ over ε.
@pytest.mark.parametrize("name", figures.RUNS)
def test_every_configuration_spends_its_step_and_no_less(name):
    run = figures.RUNS[name]
    for norm in (0.1, 10.0):
        sigma = figures.noise(run, epsilon=1.0, norm=norm)
        epsilon, delta = run.budget(1.0)
        spent = compute_delta(
            epsilon=epsilon, noise_std=sigma, dimension=run.dimension, batch_clip=norm
        )
        assert spent == pytest.approx(delta, rel=1e-4)


# WS Figure 4.
@pytest.mark.parametrize("norm", NORMS)
def test_noise_falls_with_epsilon_and_with_dimension(norm):
    rows = figures.figure_4(norm=norm)
    sigmas = np.array([[row[name] for name in list(row)[1:]] for row in rows])
    assert sigmas.shape == (6, len(figures.DIMENSIONS))
    assert np.all(np.diff(sigmas, axis=0) < 0)
    assert np.all(np.diff(sigmas[:, 1:], axis=1) < 0)
    assert np.all(sigmas[:, 1:] < sigmas[:, :1])


@pytest.mark.parametrize(("epsilon", "target"), [(0.197617, 2.5e-7), (2.0, 1e-3)])
def test_the_last_crossing_counts_though_the_curve_is_not_monotone(epsilon, target):
    def delta(sigma):
        return compute_delta(epsilon=epsilon, noise_std=sigma, dimension=85_800_000)

    noise = np.geomspace(0.05, 50, 2000)
    values = np.array([delta(sigma) for sigma in noise])
    assert np.any(np.diff(values[values.argmin() :]) > 0)
    sigma = figures.noise_std(epsilon, target, 85_800_000)
    assert delta(sigma) <= target < delta(sigma * (1 - 1e-6))
    assert sigma >= noise[values > target].max()
    assert epsilon > 1 or f"{sigma:.5f}" == "0.27372"


@pytest.mark.parametrize("norm", NORMS)
def test_the_order_is_one_over_the_root_of_log_d(norm):
    assert figures.exponent(figures.RUNS["ViT"], norm=norm) == pytest.approx(-0.5, abs=0.02)


# WS Figure 2, WS Figure 4.
def test_figures_can_be_written_and_read_back(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures, "DIMENSIONS", (1, 100, 10**6))
    figures.main(["--figure", "2", "--repetitions", "200", "--output", str(tmp_path / "new")])
    figures.main(["--figure", "4", "--output", str(tmp_path / "new")])
    assert "F-W" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        f"figure_{n}.{k}" for n in (2, 4) for k in ("json", "csv", "png")
    }
    rows = json.loads((tmp_path / "new" / "figure_4.json").read_text())
    with (tmp_path / "new" / "figure_4.csv").open(newline="") as file:
        read = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert read == rows
    assert len(rows) == 6
    for reading in json.loads((tmp_path / "new" / "figure_2.json").read_text()).values():
        for method, values in reading["cdf"].items():
            assert len(values) == len(reading["x"]), method
            assert np.all(np.diff(values) >= 0), method
            assert 0 <= values[0] <= values[-1] <= 1, method
