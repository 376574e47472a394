"""Measures the overhead of weight shuffling in a private step and the time to draw permutations.

Run ``python benchmarks/weight_shuffling.py [--device cuda] [--batch 64] [--steps 8]``. For a small
ViT and a BERT, the benchmark takes steps of ``make_private`` training (AdamW, hooks) in both modes
and prints the median time of the shuffler in each step, divided by the rest of that step. (A
comparison of whole steps with and without shuffling would be lost in the noise of a shared
machine.) It then prints the time to find the permutations, the time to draw one, the time of the
host in a shuffle apart from moving, and the time to move everything once compared with a copy of
the same bytes.

>>> round(median([3.0, 1.0, 2.0]), 1)
2.0
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import opacus_shuffle
from opacus_shuffle.permutation import find_permutations
from opacus_shuffle.permutation.moving import gather


class Records(Dataset):
    """Random records with a network's keyword arguments and a label."""

    def __init__(
        self, make: Callable[[torch.Generator], dict[str, torch.Tensor]], count: int
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.records = [{**make(generator), "labels": torch.tensor(i % 2)} for i in range(count)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.records[index]


def networks() -> dict[
    str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], dict[str, torch.Tensor]]]
]:
    """Returns functions that build the networks and their records."""
    import transformers

    shape = {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    vit = transformers.ViTConfig(image_size=64, patch_size=8, num_labels=2, **shape)
    bert = transformers.BertConfig(
        vocab_size=8000, max_position_embeddings=128, num_labels=2, **shape
    )
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
    """Trains one network privately, one step at a time."""

    def __init__(
        self, network: nn.Module, data: Records, batch: int, device: str, **shuffling: Any
    ) -> None:
        network.to(device)
        self.device = device
        self.engine = opacus_shuffle.PrivacyEngine(accountant="rdp")
        self.network, self.optimizer, loader = self.engine.make_private(
            module=network,
            optimizer=torch.optim.AdamW(network.parameters(), lr=1e-4),
            data_loader=DataLoader(data, batch_size=batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **shuffling,
        )
        self.batches = itertools.chain.from_iterable(
            itertools.repeat(loader)
        )  # every step takes a new one
        self.inside = 0.0  # seconds in the shuffler's hooks
        shuffler = self.engine.shuffler
        assert shuffler is not None
        inner = shuffler._optimizer
        for hooks in (inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks):
            for key, hook in hooks.items():
                hooks[key] = self._timed(hook)

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Wraps a hook and adds up its time."""

        def run(*arguments: Any) -> None:
            self.wait()
            start = time.perf_counter()
            hook(*arguments)
            self.wait()
            self.inside += time.perf_counter() - start

        return run

    def step(self) -> tuple[float, float]:
        """Returns the seconds of one step inside and outside the shuffler."""
        batch = {name: value.to(self.device) for name, value in next(self.batches).items()}
        self.wait()
        start, self.inside = time.perf_counter(), 0.0
        self.network(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wait()
        return self.inside, time.perf_counter() - start - self.inside

    def wait(self) -> None:
        """Waits for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()


def seconds(
    run: Callable[[], Any], repeat: int = 5, wait: Callable[[], None] = lambda: None
) -> float:
    """Returns the median time of a call, including the wait for the device to finish."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        torch.cuda.get_device_name()
        if options.device != "cpu"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    for name, (build, make) in networks().items():
        measure(name, build, Records(make, 4 * options.batch), options)


def measure(
    name: str, build: Callable[[], nn.Module], data: Records, options: argparse.Namespace
) -> None:
    """Prints one network's figures."""
    run = Run(build(), data, options.batch, options.device, shuffle_weights=True)
    run.step()
    steps = [run.step() for _ in range(options.steps)]
    share = median(inside / outside for inside, outside in steps)
    print(
        f"{name}, batch {options.batch}: a step takes "
        f"{median(outside for _, outside in steps):.3f} s"
    )
    print(f"  shuffling: {100 * share:.2f} % more")
    shuffler = run.engine.shuffler
    assert shuffler is not None
    tensors = [p.detach() for p in run.network.parameters()]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    sample = {
        key: value.to(options.device)
        for key, value in next(iter(DataLoader(data, batch_size=2))).items()
    }
    network = build().to(options.device)
    find = seconds(lambda: find_permutations(network, sample), 1)
    wait = run.wait
    # On a GPU the call returns after all launches; on a CPU it moves nothing here.
    with (
        mock.patch.object(gather, "execute_with_torch")
        if options.device == "cpu"
        else contextlib.nullcontext()
    ):
        host = 1e3 * seconds(shuffler.shuffle_, 25)
    draw, move = (
        1e3 * seconds(shuffler.spec.sample, 25),
        1e3 * seconds(shuffler.shuffle_, wait=wait),
    )
    copy = 3e3 * seconds(
        lambda: [a.copy_(b) for a, b in zip(copies, tensors, strict=True)], wait=wait
    )
    print(
        f"  find {find:.2f} s, draw {draw:.2f} ms, all that the host does besides moving "
        f"{host:.2f} ms"
    )
    print(f"  draw and move weights and two moments {move:.1f} ms (copy {copy:.1f})")


if __name__ == "__main__":
    main()
