"""Measures SCO's Table 1 on real data: excess loss over the number of users, and its slopes.

Run ``python benchmarks/convex_optimisation.py [--rows NAME ...] [--seeds 6] [--output DIR]``, about
half an hour on one core. ``--output`` writes the table as JSON and CSV and, if matplotlib is
installed, the plot. The benchmark needs scikit-learn.

The population is a real data set (breast cancer: 569 × 30, logistic loss; diabetes: 442 × 10,
absolute loss; rows scaled to norm 1, so L = 1). Users are independent draws from it, so the
population loss and its minimum are known exactly. The settings are ε = 0.1, δ = 1e-6 and the tight
calibration. ε is small so that the cost of privacy dominates the 1/√n of learning.

The exponent of a theorem is that of an upper bound for the worst loss. Each row therefore has three
slopes: that of the theorem, that of the *proved bound* (``excess_loss_bound``) over the same n, and
the measured slope with its standard error. The measured excess loss must stay below the proved
bound; it may decrease faster. While the loss is still near its initial value, all slopes are
smaller than in the limit, so the numbers of users are as large as time allows.

>>> name, exponent, _ = ROWS["smooth, accelerated (Thm 4.3)"][:3]
>>> name, round(exponent, 2)
('cancer', -0.8)
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog, minimize

from opacus_shuffle.sco import (
    Estimate,
    L2Ball,
    MoreauEnvelope,
    Objective,
    PrivacyBudget,
    Problem,
    absolute_loss,
    logistic_loss,
    shuffle_accelerated_sgd,
    shuffle_gradient_descent,
    shuffle_sgd,
    shuffle_strongly_convex,
)

sys.path.append(str(Path(__file__).parent.parent / "reproduction"))
from pan_private import pan_private_accelerated_sgd

EPSILON, DELTA = 0.1, 1e-6
RIDGE = 0.1
PLAIN = (16_000, 64_000, 256_000, 1_024_000)
SEQUENTIAL = (64_000, 256_000, 1_024_000, 4_096_000)
FULL = (4_000, 8_000, 16_000)
FULL_PHASES = (8_000, 16_000, 32_000)

Loss = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Population:
    """A data set that serves as the whole population."""

    records: tuple[torch.Tensor, torch.Tensor]
    loss: Loss
    radius: float
    smoothness: float | None
    minimum: float

    @property
    def dimension(self) -> int:
        """Returns the number of parameters."""
        return self.records[0].shape[1]

    def excess(self, theta: torch.Tensor) -> float:
        """Returns the population loss minus its minimum."""
        return float(self.loss(theta, self.records).mean()) - self.minimum

    def users(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws users independently."""
        drawn = torch.randint(0, len(self.records[1]), (count,), generator=generator)
        # Single precision halves the memory of four million users.
        return self.records[0].float()[drawn], self.records[1].float()[drawn]


def ridged(loss: Loss) -> Loss:
    """Returns the loss plus RIDGE/2·‖θ‖², which is strongly convex."""

    def regularised(theta: torch.Tensor, batch: Any) -> torch.Tensor:
        return loss(theta, batch) + RIDGE / 2 * (theta**2).sum()

    return regularised


@functools.cache
def population(name: str) -> Population:
    """``"cancer"`` or ``"diabetes"``, with `` + ridge`` for the strongly convex loss."""
    from sklearn.datasets import load_breast_cancer, load_diabetes

    plain, _, ridge = name.partition(" + ")
    features, targets = (load_breast_cancer if plain == "cancer" else load_diabetes)(
        return_X_y=True
    )
    features = (features - features.mean(0)) / features.std(0)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    targets = 2.0 * targets - 1 if plain == "cancer" else (targets - targets.mean()) / targets.std()
    records = (torch.from_numpy(features), torch.from_numpy(targets))
    loss, radius, smoothness = (
        (logistic_loss, 4.0, 0.25) if plain == "cancer" else (absolute_loss, 2.0, None)
    )
    if ridge:
        loss, smoothness = ridged(loss), None if smoothness is None else smoothness + RIDGE
    if plain == "cancer":
        minimum = _smooth_minimum(loss, records, radius)
    else:
        minimum = (_ridged_absolute if ridge else _least_absolute)(features, targets, radius)
    return Population(records, loss, radius, smoothness, minimum)


def _least_absolute(features: np.ndarray, targets: np.ndarray, radius: float) -> float:
    """Returns the smallest mean absolute error by a linear program with a solution in the ball."""
    users, dimension = features.shape
    cost = np.concatenate([np.zeros(dimension), np.full(users, 1 / users)])
    sides = np.block([[features, -np.eye(users)], [-features, -np.eye(users)]])
    found = linprog(
        cost,
        A_ub=sides,
        b_ub=np.concatenate([targets, -targets]),
        bounds=[(None, None)] * len(cost),
    )
    if np.linalg.norm(found.x[:dimension]) > radius:
        raise RuntimeError("the minimum lies outside the ball")
    return float(found.fun)


def _ridged_absolute(features: np.ndarray, targets: np.ndarray, radius: float) -> float:
    """Returns the same with RIDGE/2·‖θ‖² added, by its smooth dual problem over a box."""

    def dual(weights: np.ndarray) -> tuple[float, np.ndarray]:
        theta = features.T @ weights / RIDGE
        return float(RIDGE / 2 * theta @ theta - weights @ targets), features @ theta - targets

    start = np.zeros(len(targets))
    box = [(-1 / len(targets), 1 / len(targets))] * len(targets)
    options = {"maxiter": 100_000, "maxfun": 1_000_000, "ftol": 1e-16, "gtol": 1e-13}
    found = minimize(dual, start, jac=True, method="L-BFGS-B", bounds=box, options=options)
    if np.linalg.norm(features.T @ found.x / RIDGE) > radius:
        raise RuntimeError("the minimum lies outside the ball")
    return -float(found.fun)


def _smooth_minimum(loss: Loss, records: tuple[torch.Tensor, torch.Tensor], radius: float) -> float:
    """Returns the minimum of a smooth loss over the ball."""

    def value(point: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.tensor(point, requires_grad=True)
        mean = loss(theta, records).mean()
        mean.backward()
        return float(mean.detach()), theta.grad.numpy()

    inside = {"type": "ineq", "fun": lambda p: radius**2 - p @ p, "jac": lambda p: -2 * p}
    start = np.zeros(records[0].shape[1])
    options = {"maxiter": 3000, "ftol": 1e-15}
    return float(
        minimize(value, start, jac=True, method="SLSQP", constraints=[inside], options=options).fun
    )


class RidgedEnvelope(MoreauEnvelope):
    """The envelope of the absolute loss plus RIDGE/2·‖θ‖², exact.

    Its proximal point is one of the absolute loss alone, nearer to 0 and with more weight.
    """

    def __init__(self, smoothness: float, dimension: int) -> None:
        loss = Objective.from_loss(ridged(absolute_loss), dimension=dimension)
        super().__init__(loss, smoothness)
        self.weight = smoothness + RIDGE
        plain = Objective.from_loss(absolute_loss, dimension=dimension)
        self.inner = MoreauEnvelope(plain, self.weight)

    def proximal_points(self, theta: torch.Tensor, batch: Any) -> torch.Tensor:
        """Returns the proximal point in closed form."""
        point = theta * (self.smoothness / self.weight)
        return point - self.inner.gradients(point, batch) / self.weight


def _problem(people: Population, seed: int, count: int) -> Problem:
    """Returns the problem with the given number of users."""
    generator = torch.Generator().manual_seed(seed)
    strong = (
        RIDGE * people.radius
        if people.smoothness != 0.25 and people.loss is not absolute_loss
        else 0.0
    )
    lipschitz = 1.0 + strong
    envelope = None
    if strong and people.smoothness is None:
        envelope = functools.partial(RidgedEnvelope, dimension=people.dimension)
    return Problem(
        people.loss,
        people.users(count, generator),
        constraint=L2Ball(people.radius),
        lipschitz=lipschitz,
        smoothness=people.smoothness,
        envelope=envelope,
        dimension=people.dimension,
        generator=generator,
    )


def _run(method: str, people: Population, count: int, seed: int) -> Estimate:
    """Computes one estimate."""
    problem, budget = _problem(people, seed, count), PrivacyBudget(EPSILON, DELTA)
    if method == "sgd":
        return shuffle_sgd(problem, budget)
    if method == "accelerated":
        return shuffle_accelerated_sgd(problem, budget)
    if method == "full":
        # About as many rounds as in the theorem's proof; the default is at most 256 rounds.
        rounds = math.ceil((EPSILON * count) ** 2 / (people.dimension * math.log(1 / DELTA)))
        return shuffle_gradient_descent(problem, budget, rounds=min(rounds, count))
    if method == "pan":
        return pan_private_accelerated_sgd(problem, budget)
    how = "accelerated" if method == "phases" else "gradient_descent"
    phases = math.ceil(math.log2(math.log2(count)))  # as in the theorems, whose slopes are measured
    return shuffle_strongly_convex(
        problem, budget, strong_convexity=RIDGE, method=how, phases=phases
    )


ROWS: dict[str, tuple[str, float, str, tuple[int, ...]]] = {
    "convex, SGD (Thm 4.1)": ("diabetes", -1 / 2, "sgd", PLAIN),
    "convex, smoothed (Thm 4.7)": ("diabetes", -2 / 3, "accelerated", SEQUENTIAL),
    "convex, full (Thm 4.9)": ("diabetes", -1.0, "full", FULL),
    "smooth, SGD (Thm 4.1)": ("cancer", -1 / 2, "sgd", PLAIN),
    "smooth, accelerated (Thm 4.3)": ("cancer", -4 / 5, "accelerated", SEQUENTIAL),
    "smooth, full (Lemma B.6)": ("cancer", -1.0, "full", FULL),
    "smooth, pan-private (Thm C.3)": ("cancer", -4 / 5, "pan", SEQUENTIAL),
    "strongly convex (Thm 4.8)": ("diabetes + ridge", -4 / 3, "phases", SEQUENTIAL),
    "strongly convex, smooth (Thm 4.8)": ("cancer + ridge", -2.0, "phases", SEQUENTIAL),
    "strongly convex, full (Thm 4.9)": ("cancer + ridge", -2.0, "full phases", FULL_PHASES),
}
"""Population, the theorem's exponent of n in the cost of privacy, method, numbers of users."""


def slope(counts: tuple[int, ...], values: np.ndarray) -> tuple[float, float]:
    """Fits log mean excess over log n by least squares, with a standard error by jackknife."""
    x = np.log(counts)

    def fit(rows: np.ndarray) -> float:
        return float(np.polyfit(x, np.log(np.maximum(rows.mean(0), 1e-12)), 1)[0])

    whole = fit(values)
    if len(values) < 2:
        return whole, math.nan
    left_out = np.array([fit(np.delete(values, i, axis=0)) for i in range(len(values))])
    return whole, float(math.sqrt((len(values) - 1) * np.var(left_out)))


def measure(name: str, seeds: int, counts: tuple[int, ...] = ()) -> dict[str, Any]:
    """Measures one row of the table at its own or the given numbers of users."""
    where, exponent, method, usual = ROWS[name]
    counts = counts or usual
    people = population(where)
    excess, bounds = np.zeros((seeds, len(counts))), []
    for j, count in enumerate(counts):
        estimates = [_run(method, people, count, 1000 * j + seed) for seed in range(seeds)]
        excess[:, j] = [people.excess(estimate.theta) for estimate in estimates]
        bounds.append(estimates[0].excess_loss_bound)
    found, error = slope(counts, excess)
    proved = float(np.polyfit(np.log(counts), np.log(bounds), 1)[0])
    return {
        "row": name,
        "population": where,
        "users": list(counts),
        "excess": excess.mean(0).tolist(),
        "standard_error": (excess.std(0, ddof=1) / math.sqrt(seeds)).tolist()
        if seeds > 1
        else None,
        "bound": bounds,
        "theorem_slope": exponent,
        "bound_slope": proved,
        "slope": found,
        "slope_error": error,
        "below_bound": bool(np.all(excess.mean(0) <= bounds)),
    }


def _print(row: dict[str, Any]) -> None:
    error = f" ± {row['slope_error']:.2f}" if math.isfinite(row["slope_error"]) else " (one seed)"
    print(
        f"{row['row']:36} theorem {row['theorem_slope']:+.2f}  proved number "
        f"{row['bound_slope']:+.2f}  measured "
        f"{row['slope']:+.2f}{error}  {'below' if row['below_bound'] else 'ABOVE'} the proved "
        "number",
        flush=True,
    )
    for users, excess, bound in zip(row["users"], row["excess"], row["bound"], strict=True):
        print(f"    n = {users:>9,}   excess {excess:.5f}   proved at most {bound:.4f}", flush=True)


def _write(rows: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "convex_optimisation.json").write_text(json.dumps(rows, indent=1))
    with (folder / "convex_optimisation.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "users", "excess", "bound"])
        for row in rows:
            writer.writerows(
                [row["row"], *values]
                for values in zip(row["users"], row["excess"], row["bound"], strict=True)
            )
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, panels = plt.subplots(1, 3, figsize=(10, 5.6), sharey=True, layout="constrained")
    kinds = ("convex,", "smooth,", "strongly")
    for panel, kind in zip(panels, kinds, strict=True):
        for row in rows:
            if row["row"].startswith(kind):
                (line,) = panel.loglog(
                    row["users"], row["excess"], "o-", label=f"{row['row']}: {row['slope']:+.2f}"
                )
                users = np.array(row["users"], dtype=float)
                guide = row["excess"][-1] * (users / users[-1]) ** row["theorem_slope"]
                panel.loglog(
                    users, guide, ":", color=line.get_color(), label=f"n^{row['theorem_slope']:.2f}"
                )
        panel.set_xlabel("users n")
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    panels[0].set_ylabel(f"excess population loss, ε = {EPSILON}, δ = {DELTA:g}")
    figure.savefig(folder / "convex_optimisation.png", dpi=150)


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows",
        nargs="*",
        default=list(ROWS),
        choices=list(ROWS),
        metavar="NAME",
        help=" | ".join(ROWS),
    )
    parser.add_argument("--seeds", type=int, default=6, help="runs per row and number of users (6)")
    parser.add_argument("--output", type=Path, help="a folder for JSON, CSV and PNG")
    options = parser.parse_args()
    rows = []
    for name in options.rows:
        rows.append(measure(name, options.seeds))
        _print(rows[-1])
    if options.output:
        _write(rows, options.output)


if __name__ == "__main__":
    main()
