"""Compares the time of sums of bits on a GPU with stock Opacus in the same run.

Run ``python benchmarks/sums_on_gpu.py [--records 32]`` on a machine with a GPU. The first
measurement runs the optimizers' ``pre_step`` (clip, sum, noise) alternately on the same gradients:
those of a layer of ten million parameters, and of BERT-base's 200 tensors. The second measures
whole steps of BERT-base on 64 tokens, with the peak GPU memory. A value is the median of the runs
by the device's own clock.

>>> stock, ours, ratio = compare([(40, 3), (3,)], records=4, users=40, device="cpu", repeats=1)
>>> ratio == ours / stock
True
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import opacus
import torch
from gather import MODELS, seconds
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_shuffle
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.step.shuffled_sum import SumsNoise
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

NOISE = 1.1


class Parameters(nn.Module):
    """Returns parameters of the given shapes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


def stepper(
    kind: str, shapes: Sequence[tuple[int, ...]], samples: list[torch.Tensor], users: int
) -> Callable[[], object]:
    """Returns a function that clips, sums and noises the gradients once."""
    records, device = len(samples[0]), samples[0].device
    module = GradSampleModule(Parameters(shapes).to(device), strict=False)
    keywords = {"noise_multiplier": NOISE, "max_grad_norm": 1.0, "expected_batch_size": records}
    sgd = torch.optim.SGD(module.parameters(), lr=0.0)
    if kind == "opacus":
        optimizer = DPOptimizer(sgd, **keywords)
    else:
        entries = sum(sample[0].numel() for sample in samples)
        protocol = ShuffleVectorSum.with_noise_multiplier(
            users, entries, 1.0, NOISE, delta=1e-5, zero_on_grid=True, rate=records / users
        )
        sums = SumsNoise(protocol, everyone_reports=True)
        where = "cpu" if kind == "host" else device
        keywords["noise_multiplier"] = protocol.noise_multiplier
        optimizer = PrivateOptimizer(sgd, noise=sums, generator=SecretGenerator(where), **keywords)

    def step() -> None:
        optimizer.zero_grad()
        for parameter, sample in zip(optimizer.params, samples, strict=True):
            parameter.grad_sample = sample.view(sample.shape)  # a new one, not used before
        optimizer.pre_step()

    return step


def compare(
    shapes: Sequence[tuple[int, ...]],
    *,
    records: int,
    device: str,
    users: int = 4000,
    repeats: int = 7,
    kinds: tuple[str, ...] = ("opacus", "sums"),
) -> list[float]:
    """Times the optimizers alternately; returns milliseconds of each, and ratios to the first."""
    entries = sum(torch.Size(shape).numel() for shape in shapes)
    samples = [
        torch.randn((records, *shape), device=device) * (2 / entries**0.5) for shape in shapes
    ]
    steppers = [stepper(kind, shapes, samples, users) for kind in kinds]
    for step in steppers:
        step()
    times = [[seconds(step, torch.device(device)) for step in steppers] for _ in range(repeats)]
    medians = [1e3 * median(column) for column in zip(*times, strict=True)]
    return medians + [value / medians[0] for value in medians[1:]]


def bert(kind: str, records: int) -> Callable[[], None]:
    """Returns a function that takes one private step of BERT-base."""
    import transformers

    network = opacus_shuffle.prepare_model(
        transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=2))
    ).cuda()
    tokens = torch.randint(5, 30_000, (20 * records, 64), device="cuda")
    data = TensorDataset(tokens, torch.randint(2, (len(tokens),), device="cuda"))
    engine: Any = opacus.PrivacyEngine()
    if kind == "sums":
        engine = opacus_shuffle.PrivacyEngine(accountant="shuffled_sums")
    model, optimizer, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.AdamW(network.parameters(), lr=1e-4),
        data_loader=DataLoader(data, batch_size=records, drop_last=True),
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
        poisson_sampling=False,  # only batches of equal size are comparable
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        tokens, labels = next(batches)
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare_bert(records: int, repeats: int = 12) -> tuple[list[float], list[float]]:
    """Runs both kinds of steps alternately; returns milliseconds and the peak in gigabytes."""
    device, steps, peaks = torch.device("cuda"), [], []
    for kind in ("opacus", "sums"):
        before = torch.cuda.memory_allocated()
        steps.append(bert(kind, records))
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            steps[-1]()
        peaks.append((torch.cuda.max_memory_allocated() - before) / 1e9)
    times = [[seconds(step, device) for step in steps] for _ in range(repeats)]
    return [1e3 * median(column) for column in zip(*times, strict=True)], peaks


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=32)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    bert = [shape for shape, _ in MODELS["bert"]]
    layer = [(10_000, 1000)]
    print(f"{'pre_step':<36}{'Opacus':>10}{'sums':>10}{'ratio':>8}")
    for name, shapes in (("one layer of 10^7", layer), ("BERT-base, 200 tensors", bert)):
        stock, ours, ratio = compare(shapes, records=options.records, device="cuda")
        print(f"{name:<36}{stock:>7.2f} ms{ours:>7.2f} ms{ratio:>8.2f}", flush=True)
    kinds = ("sums", "host")
    ours, host, ratio = compare(layer, records=options.records, device="cuda", kinds=kinds)
    print(f"one layer of 10^7, on the host: {host:.0f} ms, {ratio:.0f} times as much")
    (stock, ours), (stock_peak, our_peak) = compare_bert(options.records)
    print(
        f"whole steps of BERT-base: {stock:.0f} ms and {stock_peak:.1f} GB, with sums "
        f"{ours:.0f} ms and {our_peak:.1f} GB: {ours / stock:.2f} and "
        f"{our_peak / stock_peak:.2f} times as much"
    )


if __name__ == "__main__":
    main()
