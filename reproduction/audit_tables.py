"""Tables of audit results over many seeds.

Run ``python reproduction/audit_tables.py [--section NAME] [--seeds N]``.

Every number is a lower bound on ε at 95 % confidence, next to the claims. WS is Yang, Ji and
Xiang's weight shuffling. The sections are:

* ``published``: WS's own settings, with two pairs of gradients that meet every condition of its
  Theorem 6.
* ``training``: a small network trained by WS Algorithm 1, with and without matching the released
  weights.
* ``gaussian``: the audit against an exact ε.
* ``users``: the shuffle Gaussian of Liew and Takahashi.
* ``utility``: accuracy with and without shuffling at the same noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
import warnings

import torch
from permuted_audits import audit_published_setting
from released_weights import audit_small_training
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyAssumptionWarning, PrivacyEngine, WeightShuffling
from opacus_shuffle.audit import AuditResult, audit_gaussian, audit_shuffle_gauss
from opacus_shuffle.commands.images import load_images
from opacus_shuffle.core.rounding import round_down, round_up

# Table I's training (10 epochs of 50,000 in batches of 1000) and Table VI's audit (200 epochs).
PUBLISHED = {
    "Table I, 500 steps": (500, (0.1, 0.5, 1.0)),
    "Table VI, 10,000 steps": (10_000, (0.5, 1.0)),
}


def line(title: str, results: list[AuditResult]) -> str:
    """Returns one row: claims, the range of the findings, and how many exceed each claim."""
    claims = {claim.bound: claim.epsilon for claim in results[0].claims}
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
    """Prints a title and the columns."""
    print(f"\n{title}\n{'':<44}{'least':>8}{'median':>8}{'most':>8}", flush=True)


def published(seeds: int) -> None:
    """Audits WS's settings for the ViT, with noise by its own formula."""
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
                    results.append(
                        audit_published_setting(
                            target_epsilon=target, steps=steps, seed=seed, pair=pair, **runs
                        )
                    )
                print(line(f"{name}, {target:g}, {pair}", results), flush=True)


def training(seeds: int) -> None:
    """Audits one step of a training run against each adversary."""
    for others in ("zero", "real"):
        title = (
            "one step of WS Algorithm 1 on 25,450 parameters, 2000 steps, the others' gradients "
        )
        heading(title + ("zero, c' = c" if others == "zero" else "those of real digits, c' = 80 c"))
        results = [audit_small_training(others=others, seed=seed) for seed in range(seeds)]
        for place, finding in enumerate(results[0].findings):
            only = [
                dataclasses.replace(result, findings=(result.findings[place],))
                for result in results
            ]
            title = finding.name
            if title == "re-aligned":
                share = min(result.findings[place].recovered for result in results)
                title += f" ({100 * share:.4g} % of rows found)"
            print(line(title, only), flush=True)
        for note in results[0].notes:
            print(f"    seed 0: {note}")


def gaussian(seeds: int) -> None:
    """Audits a mechanism whose exact ε is available."""
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
    """Audits the shuffle Gaussian, with the other users at 0 and at −1."""
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
    """Compares the accuracy of a small network with and without shuffled weights."""
    train_set, test_set = load_images("mnist-5k")
    images, labels = test_set.tensors
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
                correct = network(images).argmax(1) == labels
                found.setdefault(moves, []).append(float(correct.double().mean()))
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
    """Prints the requested sections."""
    parser = argparse.ArgumentParser(description="Tables of audit results over many seeds.")
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
