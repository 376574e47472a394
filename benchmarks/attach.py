"""Measures the cost of ``make_private`` and its network check relative to a plain training step.

``python benchmarks/attach.py [--batch 8]`` measures BERT-base on texts of 128 tokens and ViT-B/16
on one thread. Each value comes from a fresh process. The baseline is one step (forward, backward,
SGD with momentum) on the same batch without privacy. Memory is the peak of the whole process,
including PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import resource
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

TASKS = (
    "a step of plain training",
    "finding permutations",
    "make_private",
    "make_private, shuffle_weights=True",
)


def build(name: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """Returns a network and its records; every other text is padded."""
    import transformers

    import opacus_shuffle

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    labels = [torch.tensor(i % 2) for i in range(64)]
    if name == "ViT-B/16":
        vit = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=2))
        return vit, [
            {"pixel_values": torch.randn(3, 224, 224), "labels": label} for label in labels
        ]
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=2))
    masks = [(torch.arange(128) < (128 if i % 2 else 64 + i)).long() for i in range(64)]
    texts = [
        {"input_ids": torch.randint(5, 30_000, (128,)) * mask, "attention_mask": mask}
        for mask in masks
    ]
    return opacus_shuffle.prepare_model(bert), [
        {**text, "labels": label} for text, label in zip(texts, labels, strict=True)
    ]


def measure(name: str, task: str, batch: int) -> tuple[float, float]:
    """Returns CPU seconds and the peak memory in MiB."""
    import opacus_shuffle
    from opacus_shuffle.engine.step.weight_shuffling import WeightShuffling, find_spec

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    network, records = build(name)
    loader: DataLoader[Any] = DataLoader(records, batch_size=batch)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    start = time.process_time()
    if task == TASKS[0]:
        network.train()(**next(iter(loader))).loss.backward()
        optimizer.step()
    elif task == TASKS[1]:
        find_spec(WeightShuffling(), network, optimizer, loader)
    else:
        opacus_shuffle.PrivacyEngine(accountant="rdp").make_private(
            module=network,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            shuffle_weights=task == TASKS[3],
        )
    return time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    print(f"{platform.machine()}, one thread, batches of {options.batch}")
    context = multiprocessing.get_context("spawn")
    for name in ("BERT-base", "ViT-B/16"):
        print(f"{name:<38}{'time':>8}{'memory':>12}{'time / step':>15}{'memory / step':>15}")
        for task in TASKS:
            with context.Pool(1) as pool:
                seconds, memory = pool.apply(measure, (name, task, options.batch))
            if task == TASKS[0]:
                yardstick = seconds, memory
            ratios = f"{seconds / yardstick[0]:>15.2f}{memory / yardstick[1]:>15.2f}"
            print(f"    {task:<34}{seconds:>6.1f} s{memory:>8.0f} MiB{ratios}", flush=True)


if __name__ == "__main__":
    main()
