"""What a step of this package's engine takes, as a ratio of stock Opacus's.

Run ``python benchmarks/step_time.py [--steps 600]``. Two layers of width 512, batches of 256,
accountant ``rdp``, SGD on one thread: both engines take steps by turns, in one process; the ratio
is that of the medians of their processor times per record.

>>> run("ghost", steps=1)[-1] > 0
True
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_shuffle


def stepper(engine: Any, mode: str) -> Callable[[], float]:
    """Sets up private training; the function returned takes a step and gives seconds per record."""
    torch.manual_seed(0)
    network, criterion = (
        nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        nn.CrossEntropyLoss(),
    )
    data = TensorDataset(torch.randn(60 * 256, 512), torch.randint(10, (60 * 256,)))
    model, optimizer, *ghost, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=256),
        criterion=criterion,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    loss, batches = [*ghost, criterion][0], itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> float:
        x, y = next(batches)
        start = time.process_time()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        return (time.process_time() - start) / len(x)

    return step


def run(mode: str, steps: int) -> tuple[float, float, float]:
    """Times stock Opacus and ours by turns.

    Returns:
        Milliseconds of a stock step on 256 records, those of ours, and the ratio.
    """
    steppers = [
        stepper(Engine(accountant="rdp"), mode)
        for Engine in (opacus.PrivacyEngine, opacus_shuffle.PrivacyEngine)
    ]
    for step in steppers:
        step()
    stock, ours = (
        median(times)
        for times in zip(*([step() for step in steppers] for _ in range(steps)), strict=True)
    )
    return 256e3 * stock, 256e3 * ours, ours / stock


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for mode, steps in (("hooks", max(1, options.steps // 10)), ("ghost", options.steps)):
        stock, ours, ratio = run(mode, steps)
        print(f"{mode:8} stock {stock:8.2f} ms, ours {ours:8.2f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
