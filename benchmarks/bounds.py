"""Compares ε, time and memory of every bound with Opacus's PRV accountant at the papers' settings.

Run ``python benchmarks/bounds.py``. Each value comes from a fresh process with cold caches; time
and memory are those of one call, without the imports. The baselines are Opacus's ``PRVAccountant``
for the same noise at a trusted server, in the same run: once with its default absolute error, 0.01,
and once with an error of 1 % of the pair's ε, which is that of our bounds. Times are divided by the
latter.
"""

from __future__ import annotations

import math
import multiprocessing
import platform
import resource
import time
import warnings

import opacus

from opacus_shuffle import compute_epsilon
from opacus_shuffle.accountants.bounds.registry import entries_of, evaluate_bound
from opacus_shuffle.accountants.mechanisms import MECHANISMS

SETTINGS = {
    "SG Table 1, 1 round": (
        "shuffle_gauss",
        dict(noise_multiplier=9.48, num_users=60_000, steps=1, delta=1 / 60_000),
    ),
    "SG Table 1, 7 rounds": (
        "shuffle_gauss",
        dict(noise_multiplier=9.48, num_users=60_000, steps=7, delta=1 / 60_000),
    ),
    "SG Figure 1a (60 of 60,000)": (
        "subsampled_shuffle",
        dict(noise_multiplier=0.86, num_users=60_000, steps=50_000, delta=1e-5, sample_rate=0.001),
    ),
    "SG Figure 1b (check-in)": (
        "shuffled_checkin",
        dict(noise_multiplier=5.0, num_users=60_000, steps=5540, delta=1 / 60_000, sample_rate=0.1),
    ),
    "a million users": (
        "shuffle_gauss",
        dict(noise_multiplier=3.0, num_users=10**6, steps=1000, delta=1e-7),
    ),
    "a hundred thousand rounds": (
        "shuffle_gauss",
        dict(noise_multiplier=9.48, num_users=60_000, steps=10**5, delta=1e-6),
    ),
}
BOUNDS = ("pair", "certified", "published", "local", "secure_aggregation", "central")


def opacus_prv(run: dict[str, float], eps_error: float) -> float:
    """Returns the ε of Opacus's PRV accountant for DP-SGD with noise √(γn)·σ."""
    rate = run.get("sample_rate", 1.0)
    noise = math.sqrt(rate * run["num_users"]) * run["noise_multiplier"]
    accountant = opacus.accountants.PRVAccountant()
    accountant.history = [
        (noise, min(rate, 1 - 1e-12), run["steps"])
    ]  # its formulas divide by zero at rate 1
    return accountant.get_epsilon(run["delta"], eps_error=eps_error)


def measure(
    bound: str, mechanism: str, run: dict[str, float], eps_error: float
) -> tuple[float, float, float]:
    """Returns ε, seconds, and MiB of memory in addition to the imports."""
    warnings.simplefilter("ignore")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if bound.startswith("Opacus"):
        epsilon = opacus_prv(run, eps_error)
    elif bound in ("local", "secure_aggregation", "central"):
        numbers = {
            name: run[name]
            for name in ("noise_multiplier", "num_users", "sample_rate")
            if name in run
        }
        rounds = [(MECHANISMS[mechanism](**numbers), run["steps"])]
        (entry,) = (entry for entry in entries_of(MECHANISMS[mechanism]) if entry.name == bound)
        epsilon = evaluate_bound(entry, rounds, delta=run["delta"]).epsilon
    else:
        epsilon = compute_epsilon(mechanism, bound=bound, **run)
    seconds = time.perf_counter() - start
    return epsilon, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Prints the tables."""
    print(f"{platform.machine()}, Python {platform.python_version()}")
    context = multiprocessing.get_context("spawn")
    for title, (mechanism, run) in SETTINGS.items():
        print(
            f"\n{title}: {mechanism}, "
            + ", ".join(f"{name} = {value:.4g}" for name, value in run.items())
        )
        print(f"{'bound':<22}{'epsilon':>12}{'time':>10}{'memory':>12}{'time / PRV':>13}")
        with context.Pool(1) as pool:
            one_percent = 0.01 * pool.apply(measure, ("pair", mechanism, run, math.nan))[0]
        yardstick = math.nan
        for bound, error in (
            ("Opacus PRV, 1 %", one_percent),
            ("Opacus PRV, 0.01", 0.01),
            *((name, 0.0) for name in BOUNDS),
        ):
            with context.Pool(1) as pool:
                epsilon, seconds, memory = pool.apply(measure, (bound, mechanism, run, error))
            yardstick = seconds if math.isnan(yardstick) else yardstick
            print(
                f"{bound:<22}{epsilon:>12.5g}{seconds:>8.2f} s{memory:>8.0f} "
                f"MiB{seconds / yardstick:>13.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
