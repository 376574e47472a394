"""Compares our calibration with the published constants, and times a simulated sum.

Run ``python benchmarks/vector_sum.py``, about a minute. The baseline of speed is the
straightforward method: it draws a uniform double for every entry and one binomial per coordinate
for the noise.

>>> row = gain(num_users=1000, dimension=100, epsilon=1.0, delta=1e-6)
>>> f"{row.variance:.1g}", f"{row.bits:.1g}"
('3e+05', '1e+05')
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

sys.path.append(str(Path(__file__).parent.parent / "reproduction"))
from published_sums import published_vector_sum

SETTINGS = (
    (1_000, 100, 1.0, 1e-6),
    (100_000, 100, 1.0, 1e-6),
    (100_000, 100, 0.1, 1e-6),
    (100_000, 100, 8.0, 1e-6),
    (100_000, 100_000, 1.0, 1e-6),
)


class Gain(NamedTuple):
    """The published variance and bits divided by ours, and bounds on the true ε.

    The bounds on ε are an upper bound for the published protocol and a lower bound for ours.
    """

    variance: float
    bits: float
    published_epsilon: float
    our_lower: float


def gain(*, num_users: int, dimension: int, epsilon: float, delta: float) -> Gain:
    """Compares both calibrations of one protocol."""
    published, ours = (
        protocol(num_users, dimension, 1.0, epsilon, delta)
        for protocol in (published_vector_sum, ShuffleVectorSum)
    )
    return Gain(
        published.variance / ours.variance,
        published.bits_per_user / ours.bits_per_user,
        published.exact_epsilon()[1],
        ours.exact_epsilon()[0],
    )


def obvious(
    protocol: ShuffleVectorSum, vectors: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Rounds with one uniform double per entry, all rows at once."""
    place = (vectors.double() + protocol.max_norm) * (
        protocol.granularity / (2 * protocol.max_norm)
    )
    whole = place.floor()
    counts = (
        whole + (torch.rand(place.shape, generator=generator, dtype=torch.float64) < place - whole)
    ).sum(0)
    return protocol.decode(counts + protocol.draw_noise(len(vectors), generator), len(vectors))


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Returns the best time of several runs."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    """Prints both tables."""
    print(
        f"{'users':>9} {'dimension':>9} {'epsilon':>7}   variance   bits    published epsilon is   "
        "ours is at least"
    )
    for users, dimension, epsilon, delta in SETTINGS:
        row = gain(num_users=users, dimension=dimension, epsilon=epsilon, delta=delta)
        print(
            f"{users:>9,} {dimension:>9,} {epsilon:>7} {row.variance:>9.2g}x {row.bits:>8.2g}x "
            f"{row.published_epsilon:>16.5f} "
            f"{row.our_lower:>20.4f}"
        )
    generator = torch.Generator().manual_seed(0)
    print(f"\n{'users':>9} {'dimension':>9}   million numbers a second   against the obvious way")
    for users, dimension in ((20_000, 100), (2_000, 1_000), (200, 100_000)):
        protocol = ShuffleVectorSum(users, dimension, 1.0, 1.0, 1e-6)
        vectors = torch.nn.functional.normalize(
            torch.randn(users, dimension, generator=generator), dim=1
        )
        ours = seconds(lambda p=protocol, v=vectors: p.simulate(v, generator))
        theirs = seconds(lambda p=protocol, v=vectors: obvious(p, v, generator))
        print(
            f"{users:>9,} {dimension:>9,} {users * dimension / ours / 1e6:>22.0f} "
            f"{theirs / ours:>22.1f}x"
        )


if __name__ == "__main__":
    main()
