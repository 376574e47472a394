"""Compares the time of a step with shuffled sums with stock Opacus on the same gradients.

Run ``python benchmarks/sums.py [--records 8 32 256] [--parameters 1000000]``. The benchmark has one
layer, secret check-in of 4000 users and one thread. Opacus's optimizer and ours run their
``pre_step`` (clip, sum, noise) alternately in one process. Ratios are those of the medians of CPU
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

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.step.shuffled_sum import SumsNoise
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
        optimizer = PrivateOptimizer(
            sgd,
            noise=SumsNoise(protocol, everyone_reports=True),
            generator=SecretGenerator(),
            **{**keywords, "noise_multiplier": sigma},
        )

    inputs = torch.zeros(records, parameters, requires_grad=True)

    def step() -> float:
        optimizer.zero_grad()
        (0 * model(inputs)).sum().backward()  # what a step requires
        weights.grad_sample = samples.view(records, 1, parameters)
        start = time.process_time()
        optimizer.pre_step()
        return time.process_time() - start

    return step


def run(
    *, records: int, parameters: int = 10**6, users: int = 4000, repeats: int = 9
) -> tuple[float, ...]:
    """Times all variants alternately.

    Returns:
        Milliseconds of Opacus's step and of one with sums, and their ratio.
    """
    samples = torch.randn(records, parameters, generator=torch.Generator().manual_seed(0)) * (
        2 / parameters**0.5
    )
    steppers = [stepper(kind, samples, users) for kind in ("opacus", "sums")]
    for step in steppers:
        step()
    times = zip(*([step() for step in steppers] for _ in range(repeats)), strict=True)
    stock, ours = (1e3 * median(kind) for kind in times)
    return stock, ours, ours / stock


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
    parser.add_argument("--records", type=int, nargs="+", default=[8, 32, 256])
    parser.add_argument("--parameters", type=int, default=10**6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for records in options.records:
        stock, ours, ratio = run(records=records, parameters=options.parameters)
        print(f"{records:>4} records: {stock:.0f} ms and {ours:.0f} ms, {ratio:.2f} times as much")
    stock, ours = noise_alone(parameters=options.parameters)
    print(f"noise alone: {stock:.1f} ms and {ours:.1f} ms, {ours / stock:.2f} times as much")


if __name__ == "__main__":
    main()
