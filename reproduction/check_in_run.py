"""Reproduces SG's Figure 1b in one long run.

The run is shuffled check-in of 60,000 users over 5,540 rounds, with the accuracy after every
hundred rounds.

Run ``python reproduction/check_in_run.py --data fashion-mnist --output
tutorials/recorded/check_in.json``. It takes about three hours of CPU time on the 60,000 images of
Fashion-MNIST. You may stop it at any time and resume it with the same command: finished rounds are
stored in the output's folder, and every hundred rounds begin from their own seed. The curve is
therefore the same as without an interruption. Anyone who knows the seed can subtract the noise: the
run reproduces a figure and offers no privacy protection.

The paper (Liew and Takahashi's shuffle Gaussian mechanism, SG, section 5.2) prints γ = 0.1, C =
0.01, σ = 5 for each report and 5,540 rounds, but no learning rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.core.atomic_file import atomic_write

sys.path.append(str(Path(__file__).parents[1] / "tutorials"))
from image_datasets import load_image_dataset
from small_cnn import PHYSICAL_BATCH, SmallCNN, accuracy

SAMPLE_RATE, CLIPPING_NORM, NOISE_MULTIPLIER, ROUNDS = 0.1, 0.01, 5.0, 5540
PIECE = 100
"""Number of rounds that share one seed."""


def train(model: nn.Module, data: Any, *, rounds: int, learning_rate: float, seed: int) -> None:
    """Trains the network in place on Gaussian reports of users who check in independently."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="This run is not private|Secure RNG|Full backward hook|one step"
        )
        batch = round(SAMPLE_RATE * len(data))
        engine = PrivacyEngine(accountant="shuffled_checkin", seed=seed)
        private, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=learning_rate),
            data_loader=DataLoader(data, batch_size=batch),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=CLIPPING_NORM,
            local_noise=True,
        )
        while len(engine.accountant) < rounds:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=PHYSICAL_BATCH, optimizer=optimizer
            ) as pieces:
                for images, labels in pieces:
                    nn.functional.cross_entropy(private(images), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if len(engine.accountant) == rounds:
                        break
        private.remove_hooks()


def main(arguments: list[str] | None = None) -> None:
    """Continues the run and writes the curve after every hundred rounds."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", default="mnist-5k", help="mnist-5k, fashion-mnist or mnist")
    parser.add_argument("--data-root", help="folder of the data's files")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--learning-rate", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the curve, as JSON; the weights are kept beside it",
    )
    options = parser.parse_args(arguments)
    train_set, test_set = load_image_dataset(options.data, options.data_root)
    torch.manual_seed(options.seed)
    model = SmallCNN(channels=1, size=28)
    setting = {name: getattr(options, name) for name in ("data", "learning_rate", "seed")}
    outcome: dict[str, Any] = {
        **setting,
        "users": len(train_set),
        "cpu_seconds": 0.0,
        "rounds": [],
        "accuracy": [],
    }
    kept = options.output.with_suffix(".pt")
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        if {name: state["found"][name] for name in setting} != setting:
            raise SystemExit(
                f"{kept} belongs to another run, {state['found']}: remove it, or give its settings"
            )
        outcome = state["found"]
        model.load_state_dict(state["weights"])
    for number in itertools.count(len(outcome["rounds"])):
        begun, start = number * PIECE, time.process_time()
        if begun >= options.rounds:
            break
        rounds = min(PIECE, options.rounds - begun)
        train(
            model,
            train_set,
            rounds=rounds,
            learning_rate=options.learning_rate,
            seed=1_000_000 * options.seed + number,
        )
        outcome["rounds"].append(begun + rounds)
        outcome["accuracy"].append(round(accuracy(model, test_set, torch.device("cpu")), 4))
        outcome["cpu_seconds"] = round(outcome["cpu_seconds"] + time.process_time() - start)
        with atomic_write(kept) as file:
            torch.save({"found": outcome, "weights": model.state_dict()}, file)
        options.output.write_text(json.dumps(outcome) + "\n")
        print(
            f"{begun + rounds} rounds: {outcome['accuracy'][-1]:.1%}, "
            f"{outcome['cpu_seconds']} s of CPU",
            flush=True,
        )


if __name__ == "__main__":
    main()
