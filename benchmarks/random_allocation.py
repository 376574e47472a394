"""Compares ε of random allocation with the best published accountant and with Poisson batches.

Run ``python benchmarks/random_allocation.py``, a few minutes. The peers are ``PLD_accounting``
(``pip install PLD-accounting``), which supports random allocation, and, for Poisson batches with
the same noise, ``dp_accounting`` (the extra ``dp-accounting``) and Opacus's PRV accountant. A peer
has a minute for each setting (``--limit``). A dash means that the peer took longer, failed or is
not installed. The intervals of PLD_accounting and of this package both contain the true value, so
they must overlap.

>>> bound, _ = timed(ours, 1000, 1.0, 1, 1e-5)
>>> bound.epsilon / bound.lower < 1.005
True
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import opacus_shuffle
from opacus_shuffle import PrivacyBound

Setting = tuple[int, float, int, float]
"""t, σ, epochs, δ."""

SETTINGS: tuple[Setting, ...] = (
    (10, 0.4, 500, 1e-10),
    (10, 5.0, 1, 1e-5),
    (100, 0.7, 10, 1e-5),
    (100, 2.0, 500, 1e-8),
    (250, 1.1, 20, 1e-5),
    (1000, 0.6, 10, 1e-5),
    (1000, 1.0, 1, 1e-5),
    (10_000, 0.5, 1, 1e-6),
    (10_000, 0.8, 100, 1e-9),
    (100_000, 2.0, 20, 1e-10),
    (1_000_000, 0.4, 1, 1e-10),
    (1_000_000, 0.7, 20, 1e-5),
    (1_000_000, 5.0, 500, 1e-10),
)

Epsilons = tuple[float | None, float]
"""A lower value of ε, if there is one, and an upper value."""


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Returns a function's result and its duration in seconds."""
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def ours(batches: int, sigma: float, epochs: int, delta: float) -> PrivacyBound:
    """Returns the certified bound."""
    return opacus_shuffle.privacy_bound(
        "random_allocation",
        noise_multiplier=sigma,
        num_batches=batches,
        steps=epochs * batches,
        delta=delta,
    )


def pld_accounting(batches: int, sigma: float, epochs: int, delta: float) -> Epsilons:
    """Returns Feldman and Shenfeld's interval."""
    from PLD_accounting.random_allocation_api import gaussian_allocation_epsilon_range

    upper, lower = gaussian_allocation_epsilon_range(
        delta=delta, sigma=sigma, num_steps=batches, num_epochs=epochs
    )
    return lower, upper


def dp_accounting(batches: int, sigma: float, epochs: int, delta: float) -> Epsilons:
    """Returns the upper value for Poisson batches; the lower value may be a third smaller."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    step = from_gaussian_mechanism(sigma, sampling_prob=1 / batches)
    return None, step.self_compose(batches * epochs).get_epsilon_for_delta(delta)


def opacus_prv(batches: int, sigma: float, epochs: int, delta: float) -> Epsilons:
    """Returns the upper value for Poisson batches, with an absolute error of 0.01 by default."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, 1 / batches, batches * epochs)]
    return None, accountant.get_epsilon(delta)


PEERS = (pld_accounting, dp_accounting, opacus_prv)


def of_peer(
    peer: Callable[..., Epsilons], setting: Setting, limit: float
) -> tuple[Epsilons, float] | None:
    """Returns a peer's ε and its seconds; None if it failed or took longer than the limit."""
    with multiprocessing.get_context("fork").Pool(1) as pool:  # which ends when it is left
        try:
            return pool.apply_async(timed, (peer, *setting)).get(limit)
        except Exception as error:
            reason = str(error).splitlines() or [type(error).__name__]
            print(f"    {peer.__name__}: {reason[0][:80]}")
            return None


def main() -> None:
    """Prints one row for each setting and accountant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="leave the peers out")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a peer for a setting")
    options = parser.parse_args()
    ours(7, 1.0, 1, 1e-5)  # loads what is loaded at its first use
    print("      t  sigma  epochs  delta   accountant            lower      upper   width  seconds")
    for setting in SETTINGS:
        bound, seconds = timed(ours, *setting)
        rows = {"opacus_shuffle": ((bound.lower, bound.epsilon), seconds)}
        for peer in () if options.alone else PEERS:
            rows[peer.__name__] = of_peer(peer, setting, options.limit)
        if rows.get("pld_accounting"):
            (lower, upper), _ = rows["pld_accounting"]
            assert lower <= bound.epsilon, "their lower value is above our upper one"
            assert bound.lower <= upper, "our lower value is above their upper one"
        batches, sigma, epochs, delta = setting
        place = f"{batches:7} {sigma:6} {epochs:7}  {delta:5.0e}"
        for name, row in rows.items():
            if row is None:
                print(f"{place}   {name:14}           -          -       -        -", flush=True)
            else:
                (lower, upper), seconds = row
                low = f"{lower:10.5f}" if lower else " " * 10
                width = f"{upper / lower - 1:7.2%}" if lower else " " * 7
                print(f"{place}   {name:14} {low}  {upper:9.5f} {width} {seconds:8.2f}", flush=True)
            place = " " * len(place)


if __name__ == "__main__":
    main()
