"""What a page registers is forgotten after it: no test meets the mechanism of an example."""

from __future__ import annotations

import importlib.util

import pytest

PAGES = {
    "how_to/lightning.rst": "lightning",
    "how_to/hugging_face_trainer.rst": "accelerate",
    "how_to/accelerate.rst": "accelerate",
    "how_to/log_epsilon.rst": "tensorboard",
    "how_to/lora.rst": "peft",
    "federated.rst": "flwr",
}
collect_ignore = [
    page for page, package in PAGES.items() if importlib.util.find_spec(package) is None
]


@pytest.fixture(autouse=True)
def registries_are_left_as_they_were():
    """Restores the tables of mechanisms, bounds and schemes."""
    # Imported here, as the process that distributes the tests needs neither PyTorch nor Opacus.
    import opacus.accountants.registry as opacus_registry

    from opacus_shuffle.accountants.bounds import registry
    from opacus_shuffle.accountants.mechanisms import MECHANISMS
    from opacus_shuffle.engine.schemes.base import Scheme

    ours = (MECHANISMS, registry._REGISTERED, Scheme._by_mechanism)
    tables = (*ours, opacus_registry._ACCOUNTANTS)
    saved = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, saved, strict=True):
        table.clear()
        table.update(before)
