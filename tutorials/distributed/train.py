"""Trains one network on several processes, where every record's report carries noise of its own.

Two processes on this machine, after ``pip install -e ".[dev]"``:

    torchrun --standalone --nproc_per_node 2 tutorials/distributed/train.py

On a machine with several GPUs take as many processes as GPUs: each uses its own.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine


def main() -> None:
    """Train, and let the first process say what came out and what it cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--accountant", default="shuffled_sums", help="whom to trust: see docs/guarantees.rst"
    )
    parser.add_argument(
        "--noise-multiplier",
        type=float,
        default=2.0,
        help="of each report; of the sum with shuffled_sums",
    )
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank = torch.distributed.get_rank()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)

    # Every process holds all records, and draws its own share of each batch.
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(
        TensorDataset(images[:1500], labels[:1500]), batch_size=150
    )  # of all processes together

    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    model = DifferentiallyPrivateDistributedDataParallel(network)
    engine = PrivacyEngine(accountant=options.accountant)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=loader,
        noise_multiplier=options.noise_multiplier,
        max_grad_norm=1.0,
        local_noise=options.accountant
        in ("shuffle_gauss", "subsampled_shuffle", "shuffled_checkin"),
        shuffle_weights=True,
    )
    for _ in range(options.epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        accuracy = (
            (network(images[1500:].to(device)).argmax(1).cpu() == labels[1500:]).float().mean()
        )
    if rank == 0:
        print(f"{torch.distributed.get_world_size()} processes, accuracy {accuracy:.1%}")
        print(engine.privacy_report(delta=1e-5))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
