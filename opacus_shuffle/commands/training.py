"""The small CNN of Opacus's MNIST example, trained on real data in the shuffle model.

>>> sum(parameter.numel() for parameter in SmallCNN(channels=1, size=28).parameters())
26010
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.accountants.report import WEAK, PrivacyReport
from opacus_shuffle.commands.flags import generator_of
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.commands.training_settings import (
    DEFAULT_EPOCHS,
    DEFAULT_NOISE_MULTIPLIER,
    DEFAULT_RECORDS,
    TrainingSettings,
)
from opacus_shuffle.core import extras
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import paragraph
from opacus_shuffle.core.validation import integer, open_unit_interval, positive
from opacus_shuffle.engine.privacy_engine import PrivacyEngine
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling

PHYSICAL_BATCH = 300  # at which two CPU cores take the least time per record


class SmallCNN(nn.Module):
    """Two convolutions and two dense layers: 26,010 parameters on 28 × 28 images of one channel."""

    def __init__(self, *, channels: int, size: int, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 8, 2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
        )
        with torch.no_grad():
            width = self.features(torch.zeros(1, channels, size, size)).shape[1]
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, size, size)``."""
        return self.head(self.features(images))


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Accuracy on the held-out images, what was spent, and the trained network (without Opacus's wrapping)."""

    accuracy: float
    test_records: int
    noise_multiplier: float
    report: PrivacyReport
    model: SmallCNN
    permutations: int = 0


def train(settings: TrainingSettings, *, progress: bool = True) -> TrainingResult:
    """Trains, with a progress bar on standard error that shows nothing but the held-out accuracy.

    The training loss is never shown: it is a function of the private data that no ε accounts for.

    Raises:
        ValueError: If a setting is out of range, the data are not there, or an extra is not installed.
    """
    epochs = None if settings.epochs is None else integer("epochs", settings.epochs)
    batch_size = integer("batch_size", settings.batch_size)
    if positive("learning_rate", settings.learning_rate) > 1e30:
        raise ValueError(f"learning_rate must not exceed 1e30, got {settings.learning_rate!r}: single precision ends there")
    open_unit_interval("delta", settings.delta)
    if settings.target_epsilon is None and settings.bound is not None:
        raise ValueError(f"bound={settings.bound!r} says which epsilon target_epsilon is about: give target_epsilon too")
    if settings.noise_multiplier is not None and settings.target_epsilon is not None:
        raise ValueError("give either noise_multiplier or target_epsilon, not both")
    try:
        device = torch.device(settings.device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={settings.device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    try:
        from tqdm import tqdm
    except ImportError:
        raise ValueError(extras.missing("train", "tqdm", "tutorials")) from None

    train_set, test_set = load_image_dataset(settings.data, settings.data_root)
    images = train_set.tensors[0]
    if batch_size > len(images):
        raise ValueError(f"batch_size must not exceed the {len(images)} training images, got {batch_size}")
    if epochs is None:
        epochs = max(1, round(DEFAULT_EPOCHS * min(1.0, DEFAULT_RECORDS / len(images))))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the first weights are public: the same ones every time make runs comparable
        network = SmallCNN(channels=images.shape[1], size=images.shape[2]).to(device)
    per_record = seconds_per_gradient(network, min(batch_size, PHYSICAL_BATCH), images.shape[1:]) if progress else 0.0
    sgd = torch.optim.SGD(network.parameters(), lr=settings.learning_rate)
    data_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, generator=generator_of(settings.seed, 2))

    shuffling = WeightShuffling(
        groups=bool(settings.shuffle_weights),
        generator=generator_of(settings.seed, 3) if settings.shuffle_weights else None,
        batch_clip=settings.batch_clip,
    )
    engine = PrivacyEngine(accountant=settings.accountant)
    run: dict[str, Any] = {
        "module": network,
        "optimizer": sgd,
        "data_loader": data_loader,
        "max_grad_norm": settings.max_grad_norm,
        "noise_generator": generator_of(settings.seed, 1, device),
        "local_noise": settings.local_noise,
        "shuffle_weights": shuffling,
        "rounding_share": settings.rounding_share,
    }
    if settings.target_epsilon is None:
        usual = DEFAULT_NOISE_MULTIPLIER * (1 if settings.local_noise else batch_size**0.5)
        noise = usual if settings.noise_multiplier is None else settings.noise_multiplier
        model, optimizer, loader = engine.make_private(**run, noise_multiplier=noise)
    else:
        model, optimizer, loader = engine.make_private_with_epsilon(
            **run,
            target_epsilon=settings.target_epsilon,
            target_delta=settings.delta,
            epochs=epochs,
            bound=settings.bound or "certified",
        )
    steps = epochs * len(loader)
    if progress and sys.stderr is not None:
        print(f"{epochs * len(images):,} gradients, {duration(per_record * epochs * len(images))}", file=sys.stderr)
        print(weak_sentence(engine.accountant.planned, steps, settings.delta), end="", file=sys.stderr)
    falling = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.0, total_iters=steps)
    sgd.register_step_post_hook(lambda *_: falling.step())
    with tqdm(
        total=steps, desc="training", unit="step", disable=not progress or sys.stderr is None, file=sys.stderr, mininterval=1.0
    ) as bar:
        for epoch in range(epochs):
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=PHYSICAL_BATCH, optimizer=optimizer
            ) as physical_loader:
                for x, y in physical_loader:
                    functional.cross_entropy(model(x.to(device)), y.to(device)).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                    bar.update(len(engine.accountant) - bar.n)
            if epoch % 10 == 9:
                bar.set_postfix(test_accuracy=f"{accuracy(network, test_set, device):.1%}")
    return TrainingResult(
        accuracy=accuracy(network, test_set, device),
        test_records=len(test_set),
        noise_multiplier=optimizer.noise_multiplier,
        report=engine.privacy_report(settings.delta),
        model=model.to_standard_module(),
        permutations=0 if engine.shuffler is None else engine.shuffler.shuffles,
    )


def seconds_per_gradient(network: nn.Module, records: int, shape: Sequence[int]) -> float:
    """Returns how long one record's gradient takes here, measured on blank images: no data are read, nothing is drawn.

    Args:
        network: Is copied.
        records: In a pass.
        shape: Of one image.
    """
    probe, device = GradSampleModule(copy.deepcopy(network)), next(network.parameters()).device
    x, y = torch.zeros(records, *shape, device=device), torch.zeros(records, dtype=torch.long, device=device)
    taken = []
    for _ in range(3):  # the first one warms up
        begun = time.perf_counter()
        functional.cross_entropy(probe(x), y).backward()  # type: ignore[no-untyped-call]
        probe.zero_grad()
        next(probe.parameters()).sum().item()  # waits for a GPU
        taken.append(time.perf_counter() - begun)
    return min(taken) / records


def duration(seconds: float) -> str:
    """Returns about how long training takes.

    >>> duration(4), duration(150), duration(9_000)
    ('less than a minute here', 'about 3 minutes here, and the noise besides', 'about 150 minutes here, and the noise besides')
    """
    minutes = math.ceil(seconds / 60)
    return "less than a minute here" if minutes < 2 else f"about {minutes:,} minutes here, and the noise besides"


def weak_sentence(planned: Mechanism, steps: int, delta: float) -> str:
    """Returns the lines to say before a run whose ε will protect next to nothing; empty for any other."""
    spent = compute_bound([(planned, steps)], delta=delta).epsilon
    if spent <= WEAK:
        return ""
    said = (
        f"This run will end at a proved epsilon of {round_up(spent)}, which protects next to nothing (above {WEAK:g}): "
        "give --target-epsilon, or begin with opacus-shuffle compare, which trains at epsilon = 1."
    )
    return "\n".join(paragraph(said)) + "\n"


@torch.no_grad()
def accuracy(network: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Returns the share of records that the network classifies rightly."""
    network.eval()
    hits = sum(int((network(x.to(device)).argmax(1) == y.to(device)).sum()) for x, y in DataLoader(data, batch_size=1000))
    network.train()
    return hits / len(data)
