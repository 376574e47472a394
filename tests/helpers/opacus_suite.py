"""A pytest plugin: Opacus's own test files with another engine, and without torchvision.

``python -m pytest -p helpers.opacus_suite --engine=ours [--accountant=shuffled_checkin] ...``. The
little of torchvision that those files use is made here: ``FakeData``, ``Compose``, ``ToTensor``,
``Normalize``, and two networks with batch norm.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=("stock", "ours"), default="stock")
    parser.addoption("--accountant", default="prv", help="of an engine of ours that is given none")


def pytest_configure(config: pytest.Config) -> None:
    """Before Opacus's files are imported."""
    if importlib.util.find_spec("torchvision") is None:
        _install_stub()
    if config.getoption("--engine") == "ours":
        from opacus_shuffle import PrivacyEngine

        class Engine(PrivacyEngine):
            def __init__(
                self, *, accountant: str = config.getoption("--accountant"), **keywords: Any
            ) -> None:
                super().__init__(accountant=accountant, **keywords)

        opacus.PrivacyEngine = opacus.privacy_engine.PrivacyEngine = Engine


class densenet121(nn.Module):
    """A network with batch norm whose last layer may be replaced."""

    def __init__(self, weights: None = None) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.classifier: nn.Module = nn.Linear(8, 1000)


class FakeData(Dataset):
    """Random pictures with labels, the same at every look."""

    def __init__(
        self,
        size: int,
        image_size: tuple[int, ...],
        num_classes: int,
        transform: Callable[[Any], Any],
    ) -> None:
        self.size, self.image_size, self.num_classes, self.transform = (
            size,
            image_size,
            num_classes,
            transform,
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        draws = torch.Generator().manual_seed(index)
        # What a picture keeps of normal numbers: bytes, read as numbers in [0, 1].
        picture = (torch.randn(self.image_size, generator=draws) * 255).to(
            torch.uint8
        ).float() / 255
        return self.transform(picture), int(torch.randint(self.num_classes, (), generator=draws))


class ToTensor:
    """It is one already."""

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return picture


class Normalize:
    """Takes off the mean and divides by the standard deviation."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = (torch.tensor(numbers)[:, None, None] for numbers in (mean, std))

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        return (picture - self.mean) / self.std


class Compose:
    """One after another."""

    def __init__(self, steps: list[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, picture: Any) -> Any:
        for step in self.steps:
            picture = step(picture)
        return picture


def resnet18() -> nn.Module:
    """A network that Opacus refuses for its batch norm, and trains once that is replaced."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 1000),
    )


def _install_stub() -> None:
    parts = {
        "datasets": {"FakeData": FakeData},
        "transforms": {"Compose": Compose, "ToTensor": ToTensor, "Normalize": Normalize},
        "models": {"resnet18": resnet18, "densenet121": densenet121},
    }
    package = types.ModuleType("torchvision")
    package.__path__ = []
    sys.modules["torchvision"] = package
    for name, members in parts.items():
        part = types.ModuleType(f"torchvision.{name}")
        vars(part).update(members)
        sys.modules[part.__name__] = part
        setattr(package, name, part)
