"""Compares the noise of a mean of single reports by participation and form, at one budget.

Run ``python benchmarks/secret_checkin.py``, about seven minutes. Every value is certified for every
data set. It is the noise on the sum, divided by the clipping norm and by the signal.

>>> round(noise_of("shuffle_gauss", 1.0, users=4000, steps=10, delta=1e-5))
96
"""

from __future__ import annotations

import time
from typing import Any

import opacus_shuffle
from opacus_shuffle.accountants import best_sample_rate
from opacus_shuffle.analysis import gaussian

SETTINGS = ((4000, 10, 1e-5), (4000, 40, 1e-5), (60_000, 200, 1e-5), (1_000_000, 1000, 1e-7))
BUDGETS = (0.5, 1.0, 2.0, 4.0)


def noise_of(mechanism: str, epsilon: float, *, users: int, steps: int, **fields: Any) -> float:
    """Returns the noise of the sum, divided by the signal, within a budget."""
    delta = fields.pop("delta")
    sigma = opacus_shuffle.compute_noise_multiplier(
        mechanism,
        target_epsilon=epsilon,
        target_delta=delta,
        num_users=users,
        steps=steps,
        **fields,
    )
    return float(users**0.5 * sigma / fields.get("sample_rate", 1.0))


def main() -> None:
    """Prints one row for each setting and budget."""
    print("users, rounds, delta, epsilon: everyone, Gaussian (q), linear (q), step (q), server; s")
    for users, steps, delta in SETTINGS:
        for epsilon in BUDGETS:
            start = time.perf_counter()
            run = {"users": users, "steps": steps, "delta": delta}
            noises = [f"{noise_of('shuffle_gauss', epsilon, **run):.1f}"]
            for report in ("gaussian", "linear", "step"):
                rate = best_sample_rate(
                    num_users=users,
                    steps=steps,
                    target_epsilon=epsilon,
                    target_delta=delta,
                    report=report,
                )
                noise = noise_of("secret_checkin", epsilon, report=report, sample_rate=rate, **run)
                noises.append(f"{noise:.1f} ({rate:g})")
            server = gaussian.largest_mu(epsilon=epsilon, delta=delta)
            noises.append(f"{steps**0.5 / server:.1f}")
            taken = time.perf_counter() - start
            print(f"{users}, {steps}, {delta:g}, {epsilon}: {', '.join(noises)}; {taken:.0f}")


if __name__ == "__main__":
    main()
