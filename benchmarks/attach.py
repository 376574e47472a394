"""Measures the cost of ``make_private`` and its network check relative to a plain training step.

``python benchmarks/attach.py [--batch 8] [--networks "ViT 6 x 192" ...]`` measures BERT-base on
texts of 128 tokens, ViT-B/16, and a ViT of 6 layers of width 192 on images of 32 x 32 (17 tokens),
on one thread. Each value comes from a fresh process. The baseline is one step (forward, backward,
SGD with momentum) on the same batch without privacy. Memory is the peak of the whole process,
including PyTorch and transformers.

The last rows are quantiles over 54 small transformers, on texts of 16 tokens: nine architectures
of Hugging Face, each with 2 and 4 layers of width 32, 64 and 128. The step is the median of 9, and
the finder runs for the first time.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import platform
import resource
import statistics
import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

TASKS = (
    "a step of plain training",
    "finding permutations",
    "make_private",
    "make_private, shuffle_weights=True",
)
NETWORKS = ("BERT-base", "ViT-B/16", "ViT 6 x 192", "54 transformers")
ARCHITECTURES = (
    "albert",
    "bert",
    "distilbert",
    "electra",
    "gpt2",
    "gpt_neox",
    "llama",
    "qwen3",
    "roberta",
)


def build(name: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """Returns a network and its records; every other text is padded."""
    import transformers

    import opacus_shuffle

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    labels = [torch.tensor(i % 2) for i in range(64)]
    if name.startswith("ViT"):
        small = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3}
        small |= {"intermediate_size": 768, "image_size": 32, "patch_size": 8}
        options = small if name == "ViT 6 x 192" else {}
        config = transformers.ViTConfig(num_labels=2, **options)
        shape = (3, config.image_size, config.image_size)
        return transformers.ViTForImageClassification(config), [
            {"pixel_values": torch.randn(shape), "labels": label} for label in labels
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
    from opacus_shuffle.engine.step.weight_shuffler import WeightShuffling, find_spec

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    network, records = build(name)
    if name == "ViT 6 x 192":  # small enough for the first step to differ from the others
        train(network, torch.optim.SGD(network.parameters(), lr=0.0), default_collate(records[:2]))
    loader: DataLoader[Any] = DataLoader(records, batch_size=batch)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    start = time.process_time()
    if task == TASKS[0]:
        train(network, optimizer, next(iter(loader)))
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


def train(
    network: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> None:
    """Takes a step of training without privacy."""
    optimizer.zero_grad()
    network.train()(**batch).loss.backward()
    optimizer.step()


def small_transformers(batch: int) -> list[float]:
    """Returns the time to find permutations relative to a step, for 54 small transformers."""
    import transformers

    from opacus_shuffle.permutation import find_permutations

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    texts = {"input_ids": torch.randint(5, 100, (batch, 16))}
    texts["attention_mask"] = torch.ones_like(texts["input_ids"])
    labels = torch.arange(batch) % 2
    ratios = []
    for architecture, layers, width in itertools.product(ARCHITECTURES, (2, 4), (32, 64, 128)):
        config = transformers.AutoConfig.for_model(
            architecture,
            vocab_size=100,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=width // 4,
            pad_token_id=0,
            num_labels=2,
        )
        if hasattr(config, "intermediate_size"):
            config.intermediate_size = 4 * width
        network = transformers.AutoModelForSequenceClassification.from_config(config)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
        steps = []
        for _ in range(9):
            start = time.process_time()
            train(network, optimizer, {**texts, "labels": labels})
            steps.append(time.process_time() - start)
        start = time.process_time()
        find_permutations(network, {name: tensor[:2] for name, tensor in texts.items()})
        ratios.append((time.process_time() - start) / statistics.median(steps))
    return ratios


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    options = parser.parse_args()
    print(f"{platform.machine()}, one thread, batches of {options.batch}")
    context = multiprocessing.get_context("spawn")
    for name in options.networks:
        if name == "54 transformers":
            with context.Pool(1) as pool:
                ratios = pool.apply(small_transformers, (options.batch,))
            cuts = (min(ratios), *statistics.quantiles(ratios, n=4), max(ratios))
            print(f"{name}: finding permutations takes", end=" ")
            print(*(f"{cut:.1f}" for cut in cuts), "steps (minimum, quartiles, maximum)")
            continue
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
