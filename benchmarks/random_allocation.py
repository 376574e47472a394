"""ε of random allocation beside the best published accountant of it, and beside Poisson batches.

Run ``python benchmarks/random_allocation.py``, some minutes with ``PLD_accounting`` (``pip install
PLD-accounting``; without it, or with ``--alone``, its columns are left out). Its interval and ours
both contain the truth, so they overlap; the width is upper over lower, less one, and the last
column its seconds over ours.

>>> bound, _ = ours(1000, 1.0, 1, 1e-5)
>>> bound.epsilon / bound.lower < 1.005
True
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any

import opacus_shuffle
from opacus_shuffle import PrivacyBound

SETTINGS = (  # t, σ, epochs, δ
    (1000, 1.0, 1, 1e-5),
    (1000, 1.0, 5, 1e-8),
    (1000, 0.6, 10, 1e-5),
    (100, 0.7, 10, 1e-5),
    (250, 1.1, 20, 1e-5),
    (10, 0.4, 500, 1e-10),
    (10, 5.0, 1, 1e-5),
    (1_000_000, 0.4, 1, 1e-10),
    (1_000_000, 5.0, 500, 1e-10),
)


def timed(function: Any, *arguments: Any, **keywords: Any) -> tuple[Any, float]:
    """Returns a function's result, and how many seconds it took."""
    start = time.perf_counter()
    result = function(*arguments, **keywords)
    return result, time.perf_counter() - start


def ours(batches: int, sigma: float, epochs: int, delta: float) -> tuple[PrivacyBound, float]:
    """Returns the certified bound, and how many seconds it took."""
    return timed(
        opacus_shuffle.privacy_bound,
        "random_allocation",
        noise_multiplier=sigma,
        num_batches=batches,
        steps=epochs * batches,
        delta=delta,
    )


def poisson(batches: int, sigma: float, epochs: int, delta: float) -> float:
    """Returns ε of Poisson batches at the same noise."""
    report = opacus_shuffle.privacy_report(
        "random_allocation",
        noise_multiplier=sigma,
        num_batches=batches,
        steps=epochs * batches,
        delta=delta,
    )
    return next(bound.epsilon for bound in report.bounds if bound.bound == "poisson")


def peer() -> Any:
    """Returns PLD_accounting's function, or None where it is not installed."""
    try:
        api = importlib.import_module("PLD_accounting.random_allocation_api")
    except ImportError:
        return None
    return api.gaussian_allocation_epsilon_range


def main() -> None:
    """Prints one row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="leave PLD_accounting out")
    theirs = None if parser.parse_args().alone else peer()
    ours(7, 1.0, 1, 1e-5)  # loads what is loaded at its first use
    print("      t  sigma  epochs  delta |     lower     upper  width", end=" | ")
    print("peer: lower      upper   width |   Poisson  time")
    for batches, sigma, epochs, delta in SETTINGS:
        bound, seconds = ours(batches, sigma, epochs, delta)
        low, high = bound.lower or 0.0, bound.epsilon
        row = f"{batches:7} {sigma:6} {epochs:7}  {delta:5.0e} | {low:9.5f} {high:9.5f} "
        row += f"{high / low - 1:6.2%} | "
        ratio = ""
        if theirs is not None:
            settings = {"delta": delta, "sigma": sigma, "num_steps": batches, "num_epochs": epochs}
            (upper, lower), took = timed(theirs, **settings)
            row += f"{lower:11.5f} {upper:10.5f} {upper / lower - 1:7.2%}"
            ratio = f"{took / seconds:5.0f}"
            assert lower <= high, "their lower value is above our upper one"
            assert low <= upper, "our lower value is above their upper one"
        else:
            row += " " * 30
        print(f"{row} | {poisson(batches, sigma, epochs, delta):9.5f} {ratio}", flush=True)


if __name__ == "__main__":
    main()
