"""Reproduces the weight-shuffling paper's Figures 2, 3 and 4 as numbers and plots.

It also tests which batch clip agrees with the paper's text.

Run ``python reproduction/weight_shuffling_figures.py [--figure 2|3|4|all] [--output DIR]``, half a
minute; ``--output`` writes every figure as JSON, CSV and, if matplotlib is installed, PNG. Every σ
of shuffled training here is that of WS Theorem 6, an estimate that is false for known pairs of data
sets (:mod:`opacus_shuffle.analysis.fenton_wilkinson`): the figures show what the paper computes,
not privacy.

The paper does not print two settings: the batch size of training (1000 here, as in its audit) and
the batch clip c′ of its Algorithm 1. The script computes σ for c′/c from 0.1 to 10 and compares it
with the text's descriptions of the figures.

>>> vit = RUNS["ViT"]
>>> vit.steps, round(noise(vit, epsilon=0.5), 4), round(noise(vit, epsilon=0.5, dimension=1), 2)
(500, 0.2737, 20.72)
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import lognormal_sums
import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri
from step_budgets import step_budget

from opacus_shuffle.analysis import fenton_wilkinson
from opacus_shuffle.core import imports
from opacus_shuffle.core.solve import safe_root

BATCH = 1000
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0)
NORMS = (0.1, 0.3, 1.0, 3.0, 10.0)
DIMENSIONS = (1, 10**2, 10**4, 10**6, 10**7, 10**8, 10**9)
SIGMA, DIMENSION = 0.25, 10**8  # Figure 2

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One row of WS Table I: parameters, training records, epochs, δ."""

    dimension: int
    records: int
    epochs: int
    delta: float

    @property
    def steps(self) -> int:
        """Returns the number of updates, each on ``BATCH`` records."""
        return round(self.epochs * self.records / BATCH)

    def budget(self, epsilon: float) -> tuple[float, float]:
        """Returns (ε_s, δ_s) of one step by WS Theorems 1 and 2, with half of δ for Σ δ_j."""
        return step_budget(
            epsilon=epsilon, delta=self.delta, steps=self.steps, sample_rate=BATCH / self.records
        )


RUNS = {
    "ViT": Run(85_800_000, 50_000, 10, 5e-6),
    "BERT": Run(110_000_000, 67_349, 3, 1 / (2 * 67_349)),
    "RoBERTa": Run(125_000_000, 67_349, 3, 1 / (2 * 67_349)),
    "GPT-2": Run(124_000_000, 42_043, 10, 8e-6),
    "GPT2-L E": Run(838_000_000, 42_043, 10, 8e-6),
    "GPT2-L D": Run(838_000_000, 60_591, 15, 1e-5),
}


def noise(run: Run, *, epsilon: float, norm: float = 1.0, dimension: int | None = None) -> float:
    """Returns WS Algorithm 1's σ for ε of the run; ``dimension`` 1 is its σ₀, without shuffling.

    Args:
        run: The configuration.
        epsilon: Of all its steps.
        norm: c′/c.
        dimension: d, the run's own if ``None``.
    """
    step_epsilon, step_delta = run.budget(epsilon)
    return noise_std(step_epsilon, step_delta, dimension or run.dimension, norm)


def noise_std(epsilon: float, delta: float, dimension: int, norm: float = 1.0) -> float:
    """Returns the smallest σ, at c = 1, above which δ by WS Theorem 6 is at most ``delta``.

    δ is not monotone in σ.

    Args:
        epsilon: ε of one step.
        delta: δ of one step.
        dimension: d; 1 is the unshuffled Gaussian mechanism.
        norm: c′/c.
    """

    def excess(sigma: float) -> float:
        spent = fenton_wilkinson.compute_delta(
            epsilon=epsilon, noise_std=sigma, dimension=dimension, batch_clip=norm
        )
        return spent - delta

    # As ζ₁ ≤ 0 and s₁ ≤ 1/σ, Φ(1/2σ − εσ) ≤ δ is enough, a quadratic equation.
    z = float(ndtri(delta))
    sigma = 1 / (z + math.sqrt(z * z + 2 * epsilon))
    while excess(sigma * 2 ** (-1 / 64)) <= 0:
        sigma *= 2 ** (-1 / 64)
    return safe_root(
        excess, unsafe=sigma * 2 ** (-1 / 64), safe=sigma, tolerance=1e-14 * sigma, step=1e-13
    )


# ---- Figure 2
# ----------------------------------------------------------------------


def readings() -> dict[str, tuple[list[float], float, list[int]]]:
    """Returns readings of "σ = 0.25 and d = 10⁸": means, std and counts of the summands."""
    inverse = 1 / SIGMA**2
    return {
        "equal terms, std c/sigma = 4": ([0.0], 1 / SIGMA, [DIMENSION]),
        "Theorem 6's own terms, c' = c, std 4": (
            [inverse, -inverse / (DIMENSION - 1)],
            1 / SIGMA,
            [1, DIMENSION - 1],
        ),
        "equal terms, std 0.25": ([0.0], SIGMA, [DIMENSION]),
    }


def figure_2(*, repetitions: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Computes each method's CDF of log S.

    It also computes the distance to the CDF of far more samples than the paper's 1000, in each
    reading.

    Args:
        repetitions: Number of samples that serve as the reference.
        seed: Of the samples.
    """
    found: dict[str, Any] = {}
    for name, (means, std, counts) in readings().items():
        generator = np.random.default_rng(seed)

        def draw(
            number: int, terms: Any = (means, std, counts), generator: Any = generator
        ) -> lognormal_sums.Vector:
            return lognormal_sums.monte_carlo(
                *terms, repetitions=number, generator=generator, largest=3000
            )

        truth, few = np.sort(draw(repetitions)), draw(1000)
        distributions = {
            "Monte Carlo, 1000": lognormal_sums.SampledDistribution(few),
            "F-W": lognormal_sums.fenton_wilkinson(means, std, counts),
            "S-Y": lognormal_sums.schwartz_yeh(means, std, counts),
            "S-Y by doubling": lognormal_sums.schwartz_yeh(means, std, counts, combine="doubling"),
            "LSQ of 1000": lognormal_sums.least_squares(few),
            "KDE of 1000": lognormal_sums.kernel_density(few),
        }
        x = np.linspace(*np.quantile(truth, [0.001, 0.99]), 101)
        found[name] = {
            "x": x.tolist(),
            "cdf": {"truth": lognormal_sums.SampledDistribution(truth).cdf(x).tolist()}
            | {
                method: distribution.cdf(x).tolist()
                for method, distribution in distributions.items()
            },
            "distance": {
                method: distance(distribution, truth)
                for method, distribution in distributions.items()
            },
            "error": 1.63 / math.sqrt(repetitions)
            + lognormal_sums.largest_error(std, max(counts), 3000),
            "below": below(means, std, distributions["F-W"], truth),
        }
    return found


def distance(
    distribution: lognormal_sums.NormalDistribution | lognormal_sums.SampledDistribution,
    samples: lognormal_sums.Vector,
) -> float:
    """Returns the largest distance between a distribution's CDF and that of sorted samples.

    It evaluates the distance at up to 1000 samples.
    """
    ranks = np.linspace(0, len(samples) - 1, min(len(samples), 1000)).astype(int)
    return float(np.abs(distribution.cdf(samples[ranks]) - (ranks + 0.5) / len(samples)).max())


def below(
    means: list[float], std: float, distribution: Any, samples: lognormal_sums.Vector
) -> dict[str, float] | None:
    """Returns P(S ≤ C(ε_s)) of WS Eq. 38 for the ViT's step at ε = 0.5 with Theorem 6's terms.

    One value is by F-W, the other from the samples.
    """
    if len(means) == 1:
        return None
    threshold = -RUNS["ViT"].budget(0.5)[0] + 1.5 * std**2  # c = c′: ‖g‖² + 2⟨f, g⟩ = 3c²
    return {
        "log C": threshold,
        "F-W": float(distribution.cdf(threshold)),
        "samples": float(np.mean(samples <= threshold)),
        "smallest sample": float(samples[0]),
    }


# ---- Figures 3 and 4
# ----------------------------------------------------------------------


def figure_3() -> Rows:
    """Computes σ over ε for each configuration.

    The values are without shuffling by the same composition, by Opacus's RDP accountant, and with
    shuffling for each c′/c.
    """
    return [
        {
            "model": name,
            "epsilon": epsilon,
            "unshuffled": noise(run, epsilon=epsilon, dimension=1),
            "RDP": rdp(run, epsilon),
        }
        | {f"c'/c = {norm:g}": noise(run, epsilon=epsilon, norm=norm) for norm in NORMS}
        for name, run in RUNS.items()
        for epsilon in EPSILONS
    ]


def rdp(run: Run, epsilon: float) -> float:
    """Returns the proved σ by Opacus's RDP, the baselines' accountant, to a thousandth of ε."""
    return _rdp(epsilon, run.delta, BATCH / run.records, run.steps)


@functools.cache
def _rdp(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Caches :func:`rdp`, because configurations share runs."""
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the optimal order
        return get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=sample_rate,
            steps=steps,
            accountant="rdp",
            epsilon_tolerance=1e-3 * epsilon,
        )


def figure_4(*, norm: float = 1.0) -> Rows:
    """Computes σ over ε and d for the ViT's run; d = 1 is the unshuffled mechanism."""
    return [
        {"epsilon": epsilon}
        | {
            f"d = {d:.0e}" if d > 1 else "d = 1": noise(
                RUNS["ViT"], epsilon=epsilon, norm=norm, dimension=d
            )
            for d in DIMENSIONS
        }
        for epsilon in (0.1, *EPSILONS)
    ]


# ---- what the text says, and which c' fits it
# ----------------------------------------------------------------------


def statements() -> tuple[Rows, dict[str, float]]:
    """Returns a row for each c′/c with the quantities that the text describes, and its values.

    The condition from Table III does not depend on how accuracy falls with noise. At ε = 0.1
    shuffled training (67.31 %) is worse than Ghost at ε = 0.5 (72.99 %), so it has more noise per
    signal; at ε = 1 it (75.61 %) is no worse than Ghost (75.53 %). σ(0.1)/σ(1) is therefore at
    least Ghost's σ(0.5)/σ(1), if c′ stays the same. The last column is c′·σ_RDP/σ: the norm,
    divided by c, of the batch's summed gradient at which shuffled training, clipped to c′, has the
    same noise per signal as Ghost at ε = 1.
    """
    vit = RUNS["ViT"]
    plain = {epsilon: rdp(vit, epsilon) for epsilon in (0.5, 1.0)}
    rows = []
    for norm in NORMS:
        one = {epsilon: noise(vit, epsilon=epsilon, norm=norm) for epsilon in (0.1, 0.25, 1.0, 4.0)}
        rows.append(
            {
                "c'/c": norm,
                "flat: sigma(0.25)/sigma(4)": one[0.25] / one[4.0],
                "exponent of log d": exponent(vit, norm=norm),
                "sigma at d = 1e8": noise(vit, epsilon=0.5, norm=norm, dimension=DIMENSION),
                "Table III: sigma(0.1)/sigma(1)": one[0.1] / one[1.0],
                "batch/c for RDP's at 1": norm * plain[1.0] / one[1.0],
            }
        )
    asked = {
        "unshuffled: sigma(0.25)/sigma(4)": noise(vit, epsilon=0.25, dimension=1)
        / noise(vit, epsilon=4.0, dimension=1),
        "RDP: sigma(0.25)/sigma(4)": rdp(vit, 0.25) / rdp(vit, 4.0),
        "exponent of log d": -0.5,
        "sigma at d = 1e8": SIGMA,
        "c'/c with that sigma": brentq(
            lambda x: noise(vit, epsilon=0.5, norm=x, dimension=DIMENSION) - SIGMA, 0.1, 10.0
        ),
        "Table III: sigma(0.1)/sigma(1) at least": plain[0.5] / plain[1.0],
    }
    return rows, asked


def exponent(run: Run, *, norm: float, epsilon: float = 0.5) -> float:
    """Returns the slope of log σ over log log d for d from 10⁴ to 10⁹; −1/2 for σ ~ 1/√log d."""
    dimensions = np.geomspace(1e4, 1e9, 11)
    sigmas = [noise(run, epsilon=epsilon, norm=norm, dimension=round(d)) for d in dimensions]
    return float(np.polyfit(np.log(np.log(dimensions)), np.log(sigmas), 1)[0])


# ---- output
# ----------------------------------------------------------------------


def table(rows: Rows) -> str:
    """Formats rows as aligned text."""
    cells = [
        [*rows[0]],
        *(
            [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()]
            for row in rows
        ),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "    " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def write(output: Path, name: str, data: Any, rows: Rows) -> None:
    """Writes ``name``.json and ``name``.csv to the folder, which is created if necessary."""
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    with (output / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw_2(data: dict[str, Any]) -> Any:
    """Draws Figure 2, one panel for each reading."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(data), figsize=(9.6, 4.0), sharey=True, layout="constrained")
    for ax, (name, reading) in zip(axes, data.items(), strict=True):
        # The last panel's values differ only in their fifth digit, so its axis starts at the
        # smallest.
        least = min(reading["x"])
        for method, values in reading["cdf"].items():
            # A wide band remains visible on both sides of the curves that overlap it.
            style = {"color": "#BBBBBB", "linewidth": 6, "linestyle": "-"}
            ax.plot(
                [x - least for x in reading["x"]],
                values,
                label=method,
                **(style if method == "truth" else {"linewidth": 1.6}),
            )
        ax.set_title(name, fontsize=10)
        ax.set_xlabel(f"log S − {least:.6g}")
        ax.locator_params(axis="x", nbins=3)
    axes[0].set_ylabel("CDF")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def draw_3(rows: Rows) -> Any:
    """Draws Figure 3, one panel for each configuration."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(9.6, 6.4), sharey=True, layout="constrained")
    for ax, model in zip(axes.flat, RUNS, strict=True):
        mine = [row for row in rows if row["model"] == model]
        for name, marker in zip(list(mine[0])[2:], "s^ovDPX", strict=True):
            style = {"unshuffled": "k-", "RDP": "k:"}.get(name, "--")
            ax.plot(
                [row["epsilon"] for row in mine],
                [row[name] for row in mine],
                style,
                marker=marker,
                markersize=4,
                label=name,
            )
        ax.set(
            title=f"{model}, d = {RUNS[model].dimension:.3g}",
            xlabel="ε",
            xscale="log",
            yscale="log",
        )
        ax.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        ax.minorticks_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("σ")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def draw_4(rows: Rows) -> Any:
    """Draws Figure 4."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    names = list(rows[0])[1:]
    values = np.array([[row[name] for name in names] for row in rows])
    figure, ax = plt.subplots(figsize=(8, 4.4), layout="constrained")
    image = ax.imshow(values, norm=LogNorm(), cmap="viridis", aspect="auto")
    ax.grid(visible=False)
    for (i, j), value in np.ndenumerate(values):
        ax.text(
            j,
            i,
            f"{value:.3g}",
            ha="center",
            va="center",
            color="white" if value < 3 else "black",
            fontsize=9,
        )
    exponents = [round(math.log10(dimension)) for dimension in DIMENSIONS]
    ax.set_xticks(range(len(names)), [f"$10^{{{exponent}}}$" for exponent in exponents])
    ax.set_yticks(range(len(rows)), [f"{row['epsilon']:g}" for row in rows])
    ax.set(xlabel="d", ylabel="ε", title="σ (WS Theorem 6, an estimate), c' = c")
    figure.colorbar(image, label="σ")
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Prints and, with ``--output``, writes the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--figure", choices=["2", "3", "4", "all"], default="all")
    parser.add_argument("--output", type=Path, help="folder for JSON, CSV and PNG")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=10_000,
        help="Figure 2's samples that stand for the truth",
    )
    options = parser.parse_args(arguments)
    chosen = ["2", "3", "4"] if options.figure == "all" else [options.figure]
    for figure in chosen:
        data, rows, picture = {"2": _second, "3": _third, "4": _fourth}[figure](options)
        if options.output:
            write(options.output, f"figure_{figure}", data, rows)
            try:
                import matplotlib
            except ImportError:
                print(imports.missing_extra("--output", "matplotlib", "plots"))
                continue
            matplotlib.use("Agg")
            picture(data).savefig(options.output / f"figure_{figure}.png", dpi=150)


def _second(options: argparse.Namespace) -> tuple[Any, Rows, Any]:
    """Prints Figure 2."""
    data = figure_2(repetitions=options.repetitions)
    print("\nWS Figure 2: largest distance of each CDF of log S to the true one")
    for name, reading in data.items():
        print(f"\n{name} (the truth is known to {reading['error']:.3f})")
        print(
            table(
                [
                    {"method": method, "distance": value}
                    for method, value in reading["distance"].items()
                ]
            )
        )
        if reading["below"]:
            print(
                "    P(S <= C(eps)) of Eq. 38: F-W {F-W:.3g}, samples {samples:.3g}".format(
                    **reading["below"]
                ),
                end="",
            )
            print(
                " (log C = {log C:.2f}, smallest sample {smallest sample:.2f})".format(
                    **reading["below"]
                )
            )
    rows = [
        {"reading": name, "method": method, "log S": x, "cdf": value}
        for name, reading in data.items()
        for method, values in reading["cdf"].items()
        for x, value in zip(reading["x"], values, strict=True)
    ]
    return data, rows, draw_2


def _third(options: argparse.Namespace) -> tuple[Any, Rows, Any]:
    """Prints Figure 3 with the text's descriptions of it."""
    rows = figure_3()
    print(f"\nWS Figure 3: sigma over epsilon, batches of {BATCH}; shuffled values are estimates")
    print(table(rows))
    checks, asked = statements()
    print("\nThe text against c'/c (ViT)")
    print(table(checks))
    print("asked for: " + ", ".join(f"{name} {value:.3g}" for name, value in asked.items()))
    return rows, rows, draw_3


def _fourth(options: argparse.Namespace) -> tuple[Any, Rows, Any]:
    """Prints Figure 4."""
    rows = figure_4()
    print("\nWS Figure 4: sigma over epsilon and d, the ViT's run, c' = c; estimates but for d = 1")
    print(table(rows))
    return rows, rows, draw_4


if __name__ == "__main__":
    main()
