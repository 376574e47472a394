"""A pytest plugin: Opacus's own test files with another engine, and without torchvision.

``python -m pytest -p helpers.opacus_suite --engine=ours [--accountant=shuffled_checkin] ...``. The
little of torchvision that those files use is made here: ``FakeData``, ``Compose``, ``ToTensor``,
``Normalize``, and two networks with batch norm.
"""

import functools
import importlib.util
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset


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


def _pictures(
    size: int,
    image_size: tuple[int, ...],
    num_classes: int,
    transform: Callable[[torch.Tensor], torch.Tensor],
) -> TensorDataset:
    """Random pictures of bytes, as numbers in [0, 1], with labels: in the place of FakeData."""
    draws = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (size, *image_size), generator=draws) / 255
    return TensorDataset(transform(pictures), torch.randint(num_classes, (size,), generator=draws))


def _normalize(mean: tuple[float, ...], std: tuple[float, ...]) -> Callable[..., torch.Tensor]:
    """Takes off the mean and divides by the standard deviation."""
    center, scale = (torch.tensor(numbers)[:, None, None] for numbers in (mean, std))
    return lambda pictures: (pictures - center) / scale


def _compose(steps: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """One after another."""
    return lambda pictures: functools.reduce(lambda result, step: step(result), steps, pictures)


def _network(weights: None = None) -> nn.Module:
    """A network that Opacus refuses for its batch norm, and trains once that is replaced."""
    layers = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(OrderedDict(features=features, classifier=nn.Linear(8, 1000)))


def _install_stub() -> None:
    parts = {
        "datasets": {"FakeData": _pictures},
        "transforms": {
            "Compose": _compose,
            "ToTensor": lambda: lambda picture: picture,
            "Normalize": _normalize,
        },
        "models": {"resnet18": _network, "densenet121": _network},
    }
    package = types.ModuleType("torchvision")
    package.__path__ = []
    sys.modules["torchvision"] = package
    for name, members in parts.items():
        part = types.ModuleType(f"torchvision.{name}")
        vars(part).update(members)
        sys.modules[part.__name__] = part
        setattr(package, name, part)
