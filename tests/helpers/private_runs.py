"""Small private runs: what the tests of the engine train, save, load and attack.

Everything here goes through the public doors: ``make_private``, the model, optimizer and loader
that it returns, checkpoints, and the accountant's history.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from helpers.toy import here, make_toy
from opacus_shuffle import PrivacyEngine

OURS = {
    "shuffle_gauss": {"local_noise": True},
    "subsampled_shuffle": {"local_noise": True},
    "shuffled_checkin": {"local_noise": True},
    "shuffled_fw": {"shuffle_weights": True},
    "shuffled_sums": {},
    "random_allocation": {},
    "secret_checkin": {"local_noise": True},
}
"""The accountants of this package, with the flags that their runs are meant to have."""
OPACUS = ("rdp", "prv", "gdp")
MODES = ("hooks", "functorch", "ew", "ghost", "no wrapper")
"""Opacus's ways to gradients of records; without a wrapper it is hooks on the network itself."""


class Run:
    """A private run of a small network, with its updates counted.

    Args:
        name: The accountant; by default ``"subsampled_shuffle"``, or ``"rdp"`` with expanded
            weights, which only Opacus's own accountants have.
        mode: One of :data:`MODES`.
        sigma: The noise multiplier; None leaves it out.
        engine: By default a new one of this accountant.
        toy: Takes the place of parts of :func:`make_toy`.
        optimizer: Makes the plain optimizer of the network's parameters.
        records: Of the data set.
        batch_size: Of the loader.
        loader: More options of the loader.
        **options: Of ``make_private``.
    """

    def __init__(
        self,
        name: str | None = None,
        mode: str = "hooks",
        *,
        sigma: float | None = 2.0,
        engine: Any = None,
        toy: dict[str, Any] | None = None,
        optimizer: Any = None,
        records: int = 24,
        batch_size: int = 6,
        loader: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.toy = make_toy(records=records, batch_size=batch_size, **(loader or {})) | (toy or {})
        self.network = here(self.toy["module"])
        if optimizer is not None:
            self.toy["optimizer"] = optimizer(self.network.parameters())
        elif "module" in (toy or {}) and "optimizer" not in (toy or {}):
            self.toy["optimizer"] = torch.optim.SGD(self.network.parameters(), lr=0.05)
        name = name or ("rdp" if mode == "ew" else "subsampled_shuffle")
        self.engine = PrivacyEngine(accountant=name) if engine is None else engine
        if sigma is not None:
            options["noise_multiplier"] = sigma
        make = "make_private_with_epsilon" if "target_epsilon" in options else "make_private"
        self.made = made = getattr(self.engine, make)(
            **self.toy,
            grad_sample_mode="hooks" if mode == "no wrapper" else mode,
            wrap_model=mode != "no wrapper",
            **options,
        )
        self.private, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.model = self.network if mode == "no wrapper" else made[0]
        self.criterion = nn.CrossEntropyLoss(reduction=options.get("loss_reduction", "mean"))
        if mode == "ghost":
            self.criterion = made[2]
        self.plain = self.optimizer.original_optimizer
        self._updates: list[int] = []
        # Not a method of the run: the hook would keep it, and with it the data.
        self.plain.register_step_post_hook(_counting(self._updates))
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))

    @property
    def by_epochs(self) -> bool:
        """Whether an epoch is accounted in full at its first step."""
        return self.engine.accountant.mechanism() == "random_allocation"

    @property
    def updates(self) -> int:
        """How often the plain optimizer has moved the weights."""
        return len(self._updates)

    @property
    def accounted(self) -> int:
        """How many rounds the accountant holds."""
        return sum(steps for *_, steps in self.engine.accountant.history)

    def batch(self, at_least: int = 2) -> Any:
        """The next batch of so many records, for Poisson batches may be small."""
        return next(batch for batch in self.batches if len(batch[0]) >= at_least)

    def backward(self, batch: Any = None) -> None:
        """Gradients of a batch, by default of the next one."""
        x, y = here(self.batch() if batch is None else batch)
        self.criterion(self.model(x), y).backward()

    def step(self, batch: Any = None) -> None:
        """An ordinary step on a batch, by default on the next one."""
        self.optimizer.zero_grad()
        self.backward(batch)
        self.optimizer.step()

    def train(self, batches: Iterable[Any] | None = None) -> Run:
        """Steps on these batches, by default on an epoch's."""
        for batch in self.loader if batches is None else batches:
            self.step(batch)
        return self

    def split(self, size: int) -> Any:
        """The loader in physical batches of at most this size."""
        return BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=size, optimizer=self.optimizer
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the network's parameters."""
        return {name: value.detach().clone() for name, value in self.network.named_parameters()}

    @contextlib.contextmanager
    def refused(self, match: str, *, goes_on: bool = True) -> Iterator[None]:
        """What is done inside is refused: nothing moves or is accounted, the next batch trains.

        Args:
            match: What the error says.
            goes_on: Whether to take that next step; not where what was changed stays so.
        """
        weights, updates, accounted = self.weights(), self.updates, self.accounted
        with pytest.raises(ValueError, match=match):
            yield
        assert (self.updates, self.accounted) == (updates, accounted)
        assert same(weights, self.weights())
        if goes_on:
            self.step(self.batch(0))
            assert self.updates == updates + 1
            assert self.by_epochs or self.accounted == accounted + 1
            self.optimizer.zero_grad()

    def saved(self, **options: Any) -> io.BytesIO:
        """A checkpoint of the run."""
        file = io.BytesIO()
        self.engine.save_checkpoint(
            path=file, module=self.model, optimizer=self.optimizer, **options
        )
        file.seek(0)
        return file

    def load(self, file: Any, **options: Any) -> Run:
        """Goes on from a checkpoint: a file, its name, or what is in it."""
        if isinstance(file, dict):
            content, file = file, io.BytesIO()
            torch.save(content, file)
        if hasattr(file, "seek"):
            file.seek(0)
        self.engine.load_checkpoint(
            path=file, module=self.model, optimizer=self.optimizer, **options
        )
        return self


def _counting(updates: list[int]) -> Any:
    return lambda *_: updates.append(1)


def private(name: str = "shuffled_checkin", mode: str = "hooks", **options: Any) -> Run:
    """A run that has the flags which such a run is meant to have."""
    return Run(name, mode, **({} if name in OPACUS else {"local_noise": True}), **options)


def same(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    """Whether tensors of these names are equal, bit for bit; names that one lacks are left out."""
    return all(torch.equal(one, others[name]) for name, one in ones.items() if name in others)


def bound_everywhere(monkeypatch: pytest.MonkeyPatch, original: Any, replacement: Any) -> None:
    """Puts a function in the place of another one in every module of the package."""
    import sys

    name = original.__name__
    for module in [m for key, m in sys.modules.items() if key.startswith("opacus_shuffle")]:
        if getattr(module, name, None) is original:
            monkeypatch.setattr(module, name, replacement)
