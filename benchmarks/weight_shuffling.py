"""What weight shuffling adds to a step of private training, and to finding and drawing permutations.

Run ``python benchmarks/weight_shuffling.py [--device cuda] [--batch 32] [--steps 8]``. For a small ViT and a small BERT it
takes steps of ``make_private`` training (AdamW, hooks) with and without shuffling in turn, in one process, and prints the
median of the paired ratios for both modes; then the time to find the permutations, to draw one, and to move everything once
against a copy of the same bytes.

>>> round(median([3.0, 1.0, 2.0]), 1)
2.0
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import opacus_shuffle
from opacus_shuffle.permutation import find_permutations


class Records(Dataset):
    """Random records of a network's keyword arguments, with a label."""

    def __init__(self, make: Callable[[torch.Generator], dict[str, torch.Tensor]], count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.records = [{**make(generator), "labels": torch.tensor(i % 2)} for i in range(count)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.records[index]


def networks() -> dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], dict[str, torch.Tensor]]]]:
    """Builders of networks and of their records."""
    import transformers

    shape = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
    vit = transformers.ViTConfig(image_size=64, patch_size=8, num_labels=2, **shape)
    bert = transformers.BertConfig(vocab_size=8000, max_position_embeddings=128, num_labels=2, **shape)
    return {
        "ViT, 5 M parameters": (
            lambda: transformers.ViTForImageClassification(vit),
            lambda generator: {"pixel_values": torch.randn(3, 64, 64, generator=generator)},
        ),
        "BERT, 7 M parameters": (
            lambda: opacus_shuffle.prepare_model(transformers.BertForSequenceClassification(bert)),
            lambda generator: {"input_ids": torch.randint(5, 8000, (64,), generator=generator)},
        ),
    }


class Run:
    """Private training of one network, one step at a time."""

    def __init__(self, network: nn.Module, data: Records, batch: int, device: str, **shuffling: Any) -> None:
        network.to(device)
        self.device = device
        self.engine = opacus_shuffle.PrivacyEngine(accountant="rdp")
        self.network, self.optimizer, _ = self.engine.make_private(
            module=network,
            optimizer=torch.optim.AdamW(network.parameters(), lr=1e-4),
            data_loader=DataLoader(data, batch_size=batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **shuffling,
        )
        self.batch = {name: value.to(device) for name, value in next(iter(DataLoader(data, batch_size=batch))).items()}

    def step(self) -> float:
        """Seconds of one step."""
        self._wait()
        start = time.perf_counter()
        self.network(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def seconds(run: Callable[[], Any], repeat: int = 5) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(torch.cuda.get_device_name() if options.device != "cpu" else f"CPU, {torch.get_num_threads()} threads")
    for name, (build, make) in networks().items():
        measure(name, build, Records(make, 4 * options.batch), options)


def measure(name: str, build: Callable[[], nn.Module], data: Records, options: argparse.Namespace) -> None:
    """Prints one network's figures."""
    plain = Run(build(), data, options.batch, options.device)
    modes = {
        mode: Run(build(), data, options.batch, options.device, shuffle_weights=True, shuffle_mode=mode)
        for mode in ("every_step", "on_release")
    }
    for run in (plain, *modes.values()):
        run.step()
    ratios: dict[str, list[float]] = {mode: [] for mode in modes}
    base = []
    for _ in range(options.steps):
        for mode, run in modes.items():
            base.append(plain.step())
            ratios[mode].append(run.step() / base[-1])
    print(f"{name}: a step takes {median(base):.3f} s")
    for mode, each in ratios.items():
        low, middle, high = (100 * (sorted(each)[round(share * (len(each) - 1))] - 1) for share in (0.25, 0.5, 0.75))
        print(f"  shuffled {mode}: {middle:+.1f} % (quartiles {low:+.1f} to {high:+.1f})")
    shuffler = modes["every_step"].engine.shuffler
    assert shuffler is not None
    tensors = [p.detach() for p in plain.network.parameters()]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    sample = {key: value[:2] for key, value in plain.batch.items()}
    network = build().to(options.device)
    find = seconds(lambda: find_permutations(network, sample), 1)
    draw, move = (1e3 * seconds(each) for each in (shuffler.spec.sample, shuffler.shuffle_))
    copy = 3e3 * seconds(lambda: [a.copy_(b) for a, b in zip(copies, tensors, strict=True)])
    print(f"  find {find:.2f} s, draw {draw:.2f} ms, draw and move weights and two moments {move:.1f} ms (copy {copy:.1f})")


if __name__ == "__main__":
    main()
