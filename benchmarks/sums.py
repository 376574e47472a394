"""Compares the time of a step with shuffled sums with stock Opacus on the same gradients.

Run ``python benchmarks/sums.py [--records 1 8 32] [--parameters 1000000]``. The benchmark has one
layer, secret check-in of 4000 users and one thread. Opacus's optimizer and ours run their
``pre_step`` (clip, sum, noise) alternately in one process; ours uses NumPy, Numba (NumPy if the
extra ``fast`` is not installed), and Numba in secure mode. Ratios are those of the medians of CPU
times. The last measurement is the noise alone, compared with ``torch.normal``, which Opacus uses.

>>> all(ratio > 0 for ratio in run(records=2, parameters=1000, users=40, repeats=1))
True
>>> min(noise_alone(parameters=1000, users=40, repeats=1)) > 0
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
from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.step.shuffled_sum import ShuffledSumsStrategy
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


def stepper(kind: str, samples: torch.Tensor, users: int) -> Callable[[], float]:
    """Returns a function that clips, sums and noises the gradients once and returns its seconds."""
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
        sums = ShuffledSumsStrategy(protocol, noise_multiplier=sigma, everyone_reports=True)
        optimizer = PrivateOptimizer(
            sgd,
            clipping=sums,
            noise=sums,
            generator=SecretGenerator(secure=kind == "secure"),
            **{**keywords, "noise_multiplier": sigma},
        )

    compiled_from = samples.numel() + 1 if kind == "sums" else 0
    inputs = torch.zeros(records, parameters, requires_grad=True)

    def step() -> float:
        optimizer.zero_grad()
        (0 * model(inputs)).sum().backward()  # what a step requires
        weights.grad_sample = samples.view(records, 1, parameters)
        with mock.patch.object(compiled, "WORTH_COMPILING", compiled_from):
            start = time.process_time()
            optimizer.pre_step()
            return time.process_time() - start

    return step


def run(
    *, records: int, parameters: int = 10**6, users: int = 4000, repeats: int = 9
) -> tuple[float, ...]:
    """Times all variants alternately.

    Returns:
        Milliseconds of Opacus's step, of one with sums by NumPy, of one by Numba and of one by
        Numba in secure mode; the second and the third over the first, and the last over the third.
    """
    samples = torch.randn(records, parameters, generator=torch.Generator().manual_seed(0)) * (
        2 / parameters**0.5
    )
    steppers = [stepper(kind, samples, users) for kind in ("opacus", "sums", "compiled", "secure")]
    for step in steppers:
        step()
    times = zip(*([step() for step in steppers] for _ in range(repeats)), strict=True)
    stock, ours, fast, secure = (1e3 * median(kind) for kind in times)
    return stock, ours, fast, secure, ours / stock, fast / stock, secure / fast


def noise_alone(
    *, parameters: int = 10**6, users: int = 4000, repeats: int = 9
) -> tuple[float, float]:
    """Returns the milliseconds to draw all noise, for Opacus and for a sum, timed alternately."""
    protocol = ShuffleVectorSum.with_noise_multiplier(
        users, parameters, 1.0, 1.1, delta=1e-5, zero_on_grid=True, rate=0.01
    )
    generator = SecretGenerator()

    def seconds(draw: Callable[[], object]) -> float:
        start = time.process_time()
        draw()
        return time.process_time() - start

    times = [
        (
            seconds(lambda: torch.normal(0.0, 1.0, (parameters,))),
            seconds(lambda: protocol.draw_noise(users, generator)),
        )
        for _ in range(repeats + 1)
    ]
    stock, ours = (1e3 * median(kind[1:]) for kind in zip(*times, strict=True))
    return stock, ours


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--parameters", type=int, default=10**6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = ("records", "Opacus", "NumPy", "Numba", "secure", "NumPy", "Numba", "/ Numba")
    print("".join(f"{head:>10}" for head in heads))
    for records in options.records:
        figures = run(records=records, parameters=options.parameters)
        print(
            f"{records:>10}"
            + "".join(f"{value:>7.0f} ms" for value in figures[:4])
            + "".join(f"{ratio:>9.2f}x" for ratio in figures[4:])
        )
    stock, ours = noise_alone(parameters=options.parameters)
    print(f"noise alone: {stock:.1f} ms and {ours:.1f} ms, {ours / stock:.2f} times as much")


if __name__ == "__main__":
    main()
