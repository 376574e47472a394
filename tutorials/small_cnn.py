"""The small CNN of Opacus's MNIST example, and its accuracy.

>>> sum(parameter.numel() for parameter in SmallCNN(channels=1, size=28).parameters())
26010
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PHYSICAL_BATCH = 300
"""The batch size with the smallest time per record on two CPU cores."""


class SmallCNN(nn.Module):
    """Two convolutions and two dense layers: 26,010 parameters on 28 × 28 images of one channel."""

    def __init__(self, *, channels: int, size: int, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 8, 2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
        )
        with torch.no_grad():
            width = self.features(torch.zeros(1, channels, size, size)).shape[1]
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits ``(batch, classes)`` of images ``(batch, channels, size, size)``."""
        return self.head(self.features(images))


@torch.no_grad()
def accuracy(network: nn.Module, data: TensorDataset, device: torch.device | str = "cpu") -> float:
    """Returns the fraction of records that the network classifies correctly."""
    network.eval()
    hits = sum(
        int((network(x.to(device)).argmax(1) == y.to(device)).sum())
        for x, y in DataLoader(data, batch_size=1000)
    )
    network.train()
    return hits / len(data)
