"""Compares the time of a step of this package's engine with stock Opacus.

Run ``python benchmarks/step_time.py [--steps 600]``. The engines run SGD on one thread and step
alternately in one process. A ratio is that of the medians of their CPU times per record:

* two layers of width 512, batches of 256, accountant ``rdp``, with hooks and with ghost clipping;
* the small CNN of Opacus's MNIST example (26,010 parameters), 4,000 images, with hooks: stock
  Opacus, and our engine with accountant ``rdp`` and with sums of bits.

>>> run("ghost", steps=1)[-1] > 0
True
>>> all(ratio > 0 for ratio in run_cnn(batch=4, users=40, steps=1))
True
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_shuffle

sys.path.append(str(Path(__file__).parents[1] / "tutorials"))
from small_cnn import SmallCNN


def two_layers() -> nn.Module:
    """Returns the network of 267,786 parameters on 512 numbers."""
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def small_cnn() -> nn.Module:
    """Returns the network of 26,010 parameters on images of 28 x 28."""
    return SmallCNN(channels=1, size=28)


def stepper(
    engine: Any,
    make: Callable[[], nn.Module],
    *shape: int,
    batch: int,
    records: int,
    mode: str = "hooks",
) -> Callable[[], float]:
    """Returns a function that takes one step of private training and returns seconds per record.

    Args:
        engine: Opacus's or ours.
        make: Makes the network.
        shape: Of one input.
        batch: Expected number of records in a step.
        records: In the data set.
        mode: Opacus's ``grad_sample_mode``.
    """
    torch.manual_seed(0)
    network, criterion = make(), nn.CrossEntropyLoss()
    data = TensorDataset(torch.randn(records, *shape), torch.randint(10, (records,)))
    model, optimizer, *ghost, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=batch),
        criterion=criterion,
        noise_multiplier=1.1,
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
        return (time.process_time() - start) / max(len(x), 1)

    return step


def medians(steppers: Sequence[Callable[[], float]], steps: int) -> list[float]:
    """Runs the steppers alternately and returns the median seconds per record of each."""
    for step in steppers:
        step()
    times = ([step() for step in steppers] for _ in range(steps))
    return [median(kind) for kind in zip(*times, strict=True)]


def run(mode: str, steps: int) -> tuple[float, float, float]:
    """Times stock Opacus and this package's engine alternately.

    Returns:
        Milliseconds of a stock step on 256 records, those of ours, and the ratio.
    """
    stock, ours = medians(
        [
            stepper(
                Engine(accountant="rdp"), two_layers, 512, batch=256, records=60 * 256, mode=mode
            )
            for Engine in (opacus.PrivacyEngine, opacus_shuffle.PrivacyEngine)
        ],
        steps,
    )
    return 256e3 * stock, 256e3 * ours, ours / stock


def run_cnn(*, batch: int, steps: int, users: int = 4000) -> tuple[float, ...]:
    """Times the small CNN with stock Opacus and two variants of our engine alternately.

    Returns:
        Milliseconds of a stock step, and the ratios of the steps with ``rdp`` and with sums.
    """
    kinds: list[tuple[Any, str]] = [
        (opacus.PrivacyEngine, "rdp"),
        (opacus_shuffle.PrivacyEngine, "rdp"),
        (opacus_shuffle.PrivacyEngine, "shuffled_sums"),
    ]
    stock, *ours = medians(
        [
            stepper(
                Engine(accountant=accountant),
                small_cnn,
                *(1, 28, 28),
                batch=batch,
                records=users,
            )
            for Engine, accountant in kinds
        ],
        steps,
    )
    return 1e3 * batch * stock, *(seconds / stock for seconds in ours)


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
    print("small CNN, over stock Opacus: rdp, sums")
    for batch in (32, 64, 256):
        stock, *ratios = run_cnn(batch=batch, steps=max(1, options.steps // 10))
        print(f"{batch:8} stock {stock:8.2f} ms" + "".join(f"{ratio:8.3f}" for ratio in ratios))


if __name__ == "__main__":
    main()
