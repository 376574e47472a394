"""What a step with shuffled sums takes, as a ratio of stock Opacus's on the same gradients.

Run ``python benchmarks/sums.py [--records 1 8 32]``. One layer of a million parameters, secret
check-in of 4000 users, one thread: Opacus's optimizer and ours take their ``pre_step`` (clip, sum,
noise) by turns, in one process, ours with entries rounded by NumPy and by Numba (without the extra
``fast``: twice by NumPy). Ratios are those of the medians of processor times.

>>> run(records=2, parameters=1000, users=40, repeats=1)[-1] > 0
True
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from unittest import mock

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

from opacus_shuffle.core import compiled
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.shuffled_sum import ShuffledSum
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


def stepper(kind: str, samples: torch.Tensor, users: int) -> Callable[[], float]:
    """Gives a function that clips, sums and noises these gradients once, and tells its seconds."""
    records, parameters = samples.shape
    model = GradSampleModule(torch.nn.Linear(parameters, 1, bias=False))
    weights = next(model.parameters())
    keywords = {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "expected_batch_size": records}
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    if kind == "opacus":
        optimizer = DPOptimizer(sgd, **keywords)
    else:
        protocol = ShuffleVectorSum.with_noise_multiplier(
            users, parameters, 1.0, 1.1, delta=1e-5, zero_on_grid=True, rate=records / users
        )
        sigma = protocol.noise_multiplier
        sums = ShuffledSum(protocol, noise_multiplier=sigma, everyone_reports=True)
        optimizer = PrivateOptimizer(
            sgd,
            clipping=sums,
            noise=sums,
            generator=SecretGenerator(),
            **{**keywords, "noise_multiplier": sigma},
        )

    compiled_from = 0 if kind == "compiled" else samples.numel() + 1
    inputs = torch.zeros(records, parameters, requires_grad=True)

    def step() -> float:
        optimizer.zero_grad()
        (0 * model(inputs)).sum().backward()  # what a step expects to have happened
        weights.grad_sample = samples.view(records, 1, parameters)
        with mock.patch.object(compiled, "WORTH_COMPILING", compiled_from):
            start = time.process_time()
            optimizer.pre_step()
            return time.process_time() - start

    return step


def run(
    *, records: int, parameters: int = 10**6, users: int = 4000, repeats: int = 9
) -> tuple[float, ...]:
    """Times all of them by turns.

    Returns:
        Milliseconds of Opacus's step, of one with sums by NumPy and of one by Numba, the last two
        over the first, and the last over the second.
    """
    samples = torch.randn(records, parameters, generator=torch.Generator().manual_seed(0)) * (
        2 / parameters**0.5
    )
    steppers = [stepper(kind, samples, users) for kind in ("opacus", "sums", "compiled")]
    for step in steppers:
        step()
    times = zip(*([step() for step in steppers] for _ in range(repeats)), strict=True)
    stock, ours, compiled = (1e3 * median(kind) for kind in times)
    return stock, ours, compiled, ours / stock, compiled / stock, compiled / ours


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'records':>7} {'Opacus':>10} {'NumPy':>10} {'compiled':>10} {'ratio':>7} "
        f"{'compiled':>9} {'/ NumPy':>8}"
    )
    for records in options.records:
        stock, ours, compiled, *ratios = run(records=records)
        print(
            f"{records:>7} {stock:>7.0f} ms {ours:>7.0f} ms {compiled:>7.0f} ms {ratios[0]:>6.1f}x "
            f"{ratios[1]:>8.1f}x {ratios[2]:>8.2f}"
        )


if __name__ == "__main__":
    main()
