"""Small private runs that many tests start from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = torch.device("cpu")
"""Where small private runs take place, networks and data: pytest's option ``--device``."""

ONE_NOISE = ("shuffle_gauss", "subsampled_shuffle", "shuffled_checkin", "shuffled_fw")
"""The accountants whose rounds a noise multiplier describes."""


def make_toy(*, records: int = 24, batch_size: int = 6, **loader: Any) -> dict[str, Any]:
    module = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)).to(DEVICE)
    x, y = torch.randn(records, 5), torch.randint(0, 3, (records,))
    data = TensorDataset(x.to(DEVICE), y.to(DEVICE))
    return {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.05),
        "data_loader": DataLoader(data, batch_size=batch_size, **loader),
        "max_grad_norm": 1.0,
    }


def run_epoch(model: nn.Module, optimizer: Any, loader: DataLoader, criterion: Any = None) -> None:
    """One ordinary training epoch."""
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
