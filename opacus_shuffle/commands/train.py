"""``opacus-shuffle train``: the CNN of Opacus's MNIST example, trained in the shuffle model."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.accountants.mechanisms import MECHANISMS, ShuffledWeights
from opacus_shuffle.accountants.report import WEAK, PrivacyReport
from opacus_shuffle.commands.flags import (
    DEFAULT_EPOCHS,
    DEFAULT_NOISE_MULTIPLIER,
    DEFAULT_RECORDS,
    TrainingSettings,
)
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.commands.progress import SILENT, Progress
from opacus_shuffle.commands.small_cnn import PHYSICAL_BATCH, SmallCNN, accuracy
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import paragraph
from opacus_shuffle.core.validation import integer, open_unit_interval
from opacus_shuffle.engine.privacy_engine import PrivacyEngine
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling

LEARNING_RATE = 0.12
"""It falls linearly to 0."""
CLIPPING_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The accuracy on held-out images, what was spent, and the trained network."""

    accuracy: float
    test_records: int
    noise_multiplier: float
    report: PrivacyReport
    model: SmallCNN
    permutations: int


def train(settings: TrainingSettings, *, progress: Progress = SILENT) -> TrainingResult:
    """Trains the network, and says how far it is.

    The training loss is never shown: it is a function of the private data that no ε accounts for.

    Args:
        settings: What to train on, and how.
        progress: What says so.

    Raises:
        ValueError: If a setting is out of range, the data are not there, or an extra is not
            installed.
    """
    batch_size = integer("batch_size", settings.batch_size)
    open_unit_interval("delta", settings.delta)
    if settings.target_epsilon is None and settings.bound is not None:
        raise ValueError(
            f"bound={settings.bound!r} says which epsilon target_epsilon is about: give "
            "target_epsilon too"
        )
    if settings.noise_multiplier is not None and settings.target_epsilon is not None:
        raise ValueError("give either noise_multiplier or target_epsilon, not both")
    train_set, test_set = load_image_dataset(settings.data, settings.data_root)
    images = train_set.tensors[0]
    if batch_size > len(images):
        raise ValueError(
            f"batch_size must not exceed the {len(images)} training images, got {batch_size}"
        )
    usual_epochs = max(1, round(DEFAULT_EPOCHS * min(1.0, DEFAULT_RECORDS / len(images))))
    epochs = integer("epochs", usual_epochs if settings.epochs is None else settings.epochs)
    with torch.random.fork_rng(devices=[]):
        # The first weights are public: the same ones every time make runs comparable.
        torch.manual_seed(0)
        network = SmallCNN(channels=images.shape[1], size=images.shape[2])
    sgd = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    engine = PrivacyEngine(accountant=settings.accountant, seed=settings.seed)
    mechanism = MECHANISMS[settings.accountant]
    run: dict[str, Any] = {
        "module": network,
        "optimizer": sgd,
        "data_loader": DataLoader(train_set, batch_size=batch_size, shuffle=True),
        "max_grad_norm": CLIPPING_NORM,
        "local_noise": mechanism.noise_is_local,
        "shuffle_weights": WeightShuffling(
            groups=mechanism is ShuffledWeights, batch_clip=settings.batch_clip
        ),
    }
    if settings.target_epsilon is None:
        usual = DEFAULT_NOISE_MULTIPLIER * (1 if mechanism.noise_is_local else batch_size**0.5)
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
    warn_if_weak(engine.accountant.planned, steps, settings.delta)
    falling = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.0, total_iters=steps)
    sgd.register_step_post_hook(lambda *_: falling.step())
    for epoch in range(epochs):
        progress(f"epoch {epoch + 1} of {epochs}")
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=PHYSICAL_BATCH, optimizer=optimizer
        ) as physical_loader:
            for x, y in physical_loader:
                functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    return TrainingResult(
        accuracy=accuracy(network, test_set),
        test_records=len(test_set),
        noise_multiplier=optimizer.noise_multiplier,
        report=engine.privacy_report(settings.delta),
        model=model.to_standard_module(),
        permutations=0 if engine.shuffler is None else engine.shuffler.shuffles,
    )


def warn_if_weak(planned: Mechanism, steps: int, delta: float) -> None:
    """Warns before a run if its ε will protect next to nothing."""
    spent = compute_bound([(planned, steps)], delta=delta).epsilon
    if spent > WEAK and sys.stderr is not None:
        said = (
            f"This run will end at a proved epsilon of {round_up(spent)}, which protects next to "
            f"nothing (above {WEAK:g}): give --target-epsilon, or begin with opacus-shuffle "
            "compare, which trains at epsilon = 1."
        )
        print(*paragraph(said), sep="\n", file=sys.stderr)


def run_training(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Trains, and returns the accuracy, the noise and the report."""
    progress = Progress(quiet=options.pop("quiet"))
    settings = TrainingSettings(**options)
    result = train(settings, progress=progress)
    shown = (
        round_up(result.noise_multiplier)
        if settings.target_epsilon is not None
        else f"{result.noise_multiplier:g}"
    )
    whose = "each record's own" if MECHANISMS[settings.accountant].noise_is_local else "the sum's"
    said = [
        f"\ntest accuracy: {result.accuracy:.1%} ({result.test_records} held-out images of "
        f"{settings.data})",
        f"noise multiplier: {shown} ({whose}), clipping norm {CLIPPING_NORM:g}\n",
        str(result.report),
    ]
    if result.permutations:
        said.append(
            f"the weights were permuted {result.permutations:,} times; no proved epsilon is "
            "smaller for it"
        )
    if settings.target_epsilon is not None and settings.bound not in (None, "certified"):
        said.append(
            f"the budget, {settings.target_epsilon:g}, is what the bound {settings.bound!r} says; "
            "what is certified for every data set stands in the table"
        )
    values = {
        "job": dataclasses.asdict(settings),
        "test_accuracy": result.accuracy,
        "test_records": result.test_records,
        "noise_multiplier": result.noise_multiplier,
        **result.report.to_dict(),
    }
    return values, "\n".join(said)
