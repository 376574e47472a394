"""What audits find of weight shuffling, over many seeds.

Run ``python benchmarks/audit.py [--section NAME] [--seeds N]``.

Every number is a lower bound on ε at 95 % confidence beside what is claimed. Sections:
``published`` (WS's own settings, two pairs of gradients that meet every condition of its Theorem
6), ``training`` (a small network trained by WS Algorithm 1, with or without matching the released
weights), ``gaussian`` (the audit against a known ε), ``users`` (the shuffle Gaussian of Liew and
Takahashi), ``utility`` (accuracy with and without shuffling at the same noise).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import warnings

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyAssumptionWarning, PrivacyEngine, WeightShuffling
from opacus_shuffle.audit import AuditResult, audit_gaussian, audit_shuffle_gauss
from opacus_shuffle.commands.audit import (
    AuditSettings,
    audit_published_setting,
    audit_small_training,
)
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.commands.small_cnn import accuracy
from opacus_shuffle.core.rounding import round_down, round_up

# Table I's training (10 epochs of 50,000 in batches of 1000) and Table VI's audit (200 epochs).
PUBLISHED = {
    "Table I, 500 steps": (500, (0.1, 0.5, 1.0)),
    "Table VI, 10,000 steps": (10_000, (0.5, 1.0)),
}


def line(title: str, results: list[AuditResult]) -> str:
    """One row: claims, the findings' range over seeds, and how often they were above the claims."""
    claims = {claim.name: claim.epsilon for claim in results[0].claims}
    found = sorted(result.largest.lower.epsilon for result in results)
    above = {
        name: sum(value > claims[name] for value in found)
        for name in ("published", "certified")
        if name in claims
    }
    said = ", ".join(f"{name} {round_up(epsilon)}" for name, epsilon in claims.items())
    least, middle, most = (
        round_down(value, digits=3) for value in (found[0], statistics.median(found), found[-1])
    )
    counts = ", ".join(f"{name} {count}/{len(found)}" for name, count in above.items())
    return f"{title:<44}{least:>8}{middle:>8}{most:>8}   above: {counts}   claimed: {said}"


def heading(title: str) -> None:
    """A title and the columns."""
    print(f"\n{title}\n{'':<44}{'least':>8}{'median':>8}{'most':>8}", flush=True)


def published(seeds: int) -> None:
    """WS's settings for the ViT, noise by its own formula."""
    heading("WS's settings (ViT: d = 85.8e6, q = 0.02, delta = 5e-6, c' = c), sigma by Theorem 6")
    for name, (steps, targets) in PUBLISHED.items():
        for target in targets:
            for pair in ("one_coordinate", "oblique", "all_but_one"):
                results = []
                for seed in range(seeds):
                    runs = (
                        {"trials": max(2000, 10_000_000 // steps)}
                        if pair != "one_coordinate"
                        else {}
                    )  # enough, and quick
                    settings = AuditSettings(target_epsilon=target, steps=steps, seed=seed, **runs)
                    results.append(audit_published_setting(settings, pair=pair))
                print(line(f"{name}, {target:g}, {pair}", results), flush=True)


def training(seeds: int) -> None:
    """One step of a run: what each adversary finds."""
    for others in ("zero", "real"):
        title = (
            "one step of WS Algorithm 1 on 25,450 parameters, 2000 steps, the others' gradients "
        )
        heading(title + ("zero, c' = c" if others == "zero" else "those of real digits, c' = 80 c"))
        results = [
            audit_small_training(AuditSettings(others=others, seed=seed)) for seed in range(seeds)
        ]
        for place, finding in enumerate(results[0].findings):
            only = [
                dataclasses.replace(result, findings=(result.findings[place],))
                for result in results
            ]
            rows = [result.findings[place].recovered for result in results]
            known = [value for value in rows if value is not None]
            print(
                line(
                    finding.name + (f" ({100 * min(known):.4g} % of rows found)" if known else ""),
                    only,
                ),
                flush=True,
            )
        for note in results[0].notes:
            print(f"    seed 0: {note}")


def gaussian(seeds: int) -> None:
    """The audit itself, where ε is known."""
    heading("one Gaussian step, delta = 1e-5: counts, and with the Gaussian curve")
    for sigma in (0.5, 1.0, 2.0, 4.0):
        results = [
            audit_gaussian(
                noise_multiplier=sigma, delta=1e-5, generator=torch.Generator().manual_seed(seed)
            )
            for seed in range(seeds)
        ]
        for place, name in enumerate(("counts", "gdp")):
            only = [
                dataclasses.replace(result, findings=(result.findings[place],))
                for result in results
            ]
            print(line(f"sigma {sigma:g}, {name}", only), flush=True)


def users(seeds: int) -> None:
    """The shuffle Gaussian, others at zero and at the far end."""
    heading("shuffle Gaussian, 1000 users, sigma = 1, delta = 1e-5, one round")
    for others in (0.0, -1.0):
        results = [
            audit_shuffle_gauss(
                noise_multiplier=1.0,
                num_users=1000,
                delta=1e-5,
                others=others,
                generator=torch.Generator().manual_seed(seed),
            )
            for seed in range(seeds)
        ]
        print(line(f"others at {others:g}", results), flush=True)


def utility(seeds: int) -> None:
    """Trains a small network for ten epochs, with moved weights or without: its accuracy."""
    train_set, test_set = load_image_dataset("mnist-5k", None)
    size = train_set.tensors[0][0].numel()
    print(
        "\ntest accuracy after 10 epochs, batches of 80, 784-32-10 network, sigma by Theorem 6 for "
        "epsilon = 0.5"
    )
    print(f"{'':<44}{'moved at every step':>24}{'never moved':>24}")
    for batch_clip in (1.0, 10.0, 80.0):
        found: dict[bool, list[float]] = {}
        for moves in (True, False):
            for seed in range(seeds):
                torch.manual_seed(seed)
                network = nn.Sequential(
                    nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, 10)
                )
                engine = PrivacyEngine(accountant="shuffled_fw")
                model, optimizer, loader = engine.make_private_with_epsilon(
                    module=network,
                    optimizer=torch.optim.SGD(
                        network.parameters(), lr=0.5 if batch_clip > 1 else 4.0
                    ),
                    data_loader=DataLoader(train_set, batch_size=80),
                    target_epsilon=0.5,
                    target_delta=5e-6,
                    epochs=10,
                    max_grad_norm=1.0,
                    shuffle_weights=WeightShuffling(batch_clip=batch_clip),
                    bound="published",
                )
                if not moves and engine.shuffler is not None:
                    engine.shuffler.detach()
                for _ in range(10):
                    for x, y in loader:
                        functional.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                found.setdefault(moves, []).append(accuracy(network, test_set, torch.device("cpu")))
        certified = engine.get_epsilon(5e-6, bound="certified")
        cells = "".join(
            f"{f'{statistics.mean(v):.1%} +- {statistics.stdev(v) / len(v) ** 0.5:.1%}':>24}"
            for v in found.values()
        )
        sigma = optimizer.noise_multiplier
        setting = f"c-prime = {batch_clip:g} c, sigma {sigma:.3g}, certified {certified:.3g}"
        print(f"{setting:<44}{cells}", flush=True)


SECTIONS = {
    "published": published,
    "training": training,
    "gaussian": gaussian,
    "users": users,
    "utility": utility,
}


def main() -> None:
    """Print the sections asked for."""
    parser = argparse.ArgumentParser(
        description="What audits find of weight shuffling, over many seeds."
    )
    parser.add_argument(
        "--section", choices=SECTIONS, action="append", help="by default all of them"
    )
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore", PrivacyAssumptionWarning)
    for name in options.section or SECTIONS:
        start = time.perf_counter()
        SECTIONS[name](options.seeds)
        print(f"[{name}: {time.perf_counter() - start:.0f} s]")


if __name__ == "__main__":
    main()
