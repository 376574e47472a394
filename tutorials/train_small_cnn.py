"""Trains the CNN of Opacus's MNIST example in the shuffle model, and prints accuracy and ε.

Examples, from a clone with the extra ``demo``::

    python tutorials/train_small_cnn.py --accountant shuffled_sums --target-epsilon 2
    python tutorials/train_small_cnn.py --accountant secret_checkin --target-epsilon 8 --epochs 20
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch
from image_datasets import MEAN_AND_STD, load_image_dataset
from opacus.utils.batch_memory_manager import BatchMemoryManager
from small_cnn import PHYSICAL_BATCH, SmallCNN, accuracy
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine, WeightShuffling
from opacus_shuffle.accountants.mechanisms import MECHANISMS

LEARNING_RATE = 0.12
"""The initial learning rate, which decreases linearly to 0."""
CLIPPING_NORM = 1.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the settings of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--accountant",
        default="shuffled_checkin",
        choices=MECHANISMS,
        help="mechanism of a round (default: shuffled_checkin)",
    )
    noise = parser.add_mutually_exclusive_group()
    noise.add_argument(
        "--noise-multiplier",
        type=float,
        help="noise over the clipping norm (default: 0.5 for each report, which offers almost no "
        "protection)",
    )
    noise.add_argument("--target-epsilon", type=float, help="find the noise for this budget")
    parser.add_argument("--bound", default="certified", help="bound that --target-epsilon is about")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--data", default="mnist-5k", choices=("mnist-5k", *MEAN_AND_STD))
    parser.add_argument("--data-root", help="folder of the standard files of the data")
    parser.add_argument("--epochs", type=int, default=150, help="expected passes over the data")
    parser.add_argument("--batch-size", type=int, default=400, help="expected reports per round")
    parser.add_argument(
        "--batch-clip", type=float, help="norm to which shuffled_fw clips the sum of a batch"
    )
    parser.add_argument("--seed", type=int, help="for repeatable runs, which are not private")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Trains the network, and prints its accuracy and the report on ε.

    The training loss is never printed. It is a function of the private data that no ε accounts for.
    """
    options = parse(arguments)
    warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook is firing")
    train_set, test_set = load_image_dataset(options.data, options.data_root)
    images = train_set.tensors[0]
    with torch.random.fork_rng(devices=[]):
        # The initial weights are public. The same ones every time make runs comparable.
        torch.manual_seed(0)
        network = SmallCNN(channels=images.shape[1], size=images.shape[2])
    sgd = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    engine = PrivacyEngine(accountant=options.accountant, seed=options.seed)
    local = MECHANISMS[options.accountant].noise_is_local
    run: dict[str, Any] = {
        "module": network,
        "optimizer": sgd,
        "data_loader": DataLoader(train_set, batch_size=options.batch_size, shuffle=True),
        "max_grad_norm": CLIPPING_NORM,
        "local_noise": local,
        "shuffle_weights": WeightShuffling(
            groups=options.accountant == "shuffled_fw", batch_clip=options.batch_clip
        ),
    }
    if options.target_epsilon is None:
        sigma = options.noise_multiplier or 0.5 * (1 if local else options.batch_size**0.5)
        model, optimizer, loader = engine.make_private(**run, noise_multiplier=sigma)
    else:
        model, optimizer, loader = engine.make_private_with_epsilon(
            **run,
            target_epsilon=options.target_epsilon,
            target_delta=options.delta,
            epochs=options.epochs,
            bound=options.bound,
        )
    decay = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.0, options.epochs * len(loader))
    sgd.register_step_post_hook(lambda *_: decay.step())
    for epoch in range(options.epochs):
        print(f"epoch {epoch + 1} of {options.epochs}", file=sys.stderr)
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=PHYSICAL_BATCH, optimizer=optimizer
        ) as pieces:
            for x, y in pieces:
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    print(f"test accuracy: {accuracy(network, test_set):.1%} ({len(test_set)} images)")
    print(f"noise multiplier: {optimizer.noise_multiplier:g}, clipping norm {CLIPPING_NORM:g}\n")
    print(engine.privacy_report(options.delta))


if __name__ == "__main__":
    main()
