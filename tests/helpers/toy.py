"""Small private runs that many tests start from."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

DEVICE = torch.device("cpu")
"""Where small private runs take place, networks and data: pytest's option ``--device``."""

ONE_NOISE = ("shuffle_gauss", "subsampled_shuffle", "shuffled_checkin", "shuffled_fw")
"""The accountants whose rounds a noise multiplier describes."""


def here(thing: Any) -> Any:
    """A network, or all tensors of a batch, where small private runs take place."""
    if isinstance(thing, nn.Module):
        return thing.to(DEVICE)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), thing)


def generator_here(seed: int = 0) -> torch.Generator:
    """A seeded generator for the noise of small private runs."""
    return torch.Generator(DEVICE).manual_seed(seed)


def make_toy(*, records: int = 24, batch_size: int = 6, **loader: Any) -> dict[str, Any]:
    module = here(nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)))
    data = torch.randn(records, 5), torch.randint(0, 3, (records,))
    if not loader.keys() & {"num_workers", "pin_memory"}:  # which serve data on the CPU alone
        data = here(data)
    return {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.05),
        "data_loader": DataLoader(TensorDataset(*data), batch_size=batch_size, **loader),
        "max_grad_norm": 1.0,
    }


def run_epoch(model: nn.Module, optimizer: Any, loader: DataLoader, criterion: Any = None) -> None:
    """One ordinary training epoch."""
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    for x, y in map(here, loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
