"""Compares the time for all Rényi orders at once with the sum over partitions in one run."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable

import numpy as np
from partition_sum import shuffle_gauss_rdp

from opacus_shuffle.accountants.compute import privacy_bound
from opacus_shuffle.analysis import mean_ratio

SETTING = {"noise_multiplier": 9.48, "num_users": 60_000}  # SG Table 1


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Returns the median time of several runs, each without caches."""
    times = []
    for _ in range(repeats):
        mean_ratio.log_moments.cache_clear()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def log_number_of_partitions(total: int) -> float:
    """Returns the log of Hardy and Ramanujan's formula; 9 % too high at 30, 1 % at 2000."""
    return math.pi * math.sqrt(2 * total / 3) - math.log(4 * total * math.sqrt(3))


def main() -> None:
    """Prints the table."""
    print(
        f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}; SG "
        f"Table 1's setting: {SETTING}"
    )
    partition_30 = seconds(
        lambda: [shuffle_gauss_rdp(order=k, **SETTING) for k in range(2, 31)],
        repeats=3,
    )
    print(f"{'orders':<12}{'recurrence':>14}{'partition sum':>18}{'ratio':>12}")
    for top in (30, 2000):
        ours = seconds(
            lambda top=top: mean_ratio.compute_rdp(orders=range(2, top + 1), **SETTING), repeats=7
        )
        if top == 30:
            theirs, note = math.log10(partition_30), "measured"
        else:
            # Each further partition costs at least as much, so the number of partitions of the top
            # order underestimates the time.
            theirs = math.log10(partition_30) + (
                log_number_of_partitions(top) - log_number_of_partitions(30)
            ) / math.log(10)
            note = "extrapolated by the number of partitions"
        baseline = f"{10**theirs:.3f} s" if theirs < 6 else f"1e{theirs:.0f} s"
        ratio = theirs - math.log10(ours)
        shown = f"{10**ratio:.0f}" if ratio < 6 else f"1e{ratio:.0f}"
        print(f"2 ... {top:<6}{ours * 1e3:>11.2f} ms{baseline:>18}{shown:>12}  ({note})")
    whole = seconds(
        lambda: privacy_bound(
            "shuffle_gauss", steps=1, delta=1 / 60_000, bound="published", **SETTING
        ),
        repeats=3,
    )
    print(f"epsilon with the orders it needs: {whole * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
