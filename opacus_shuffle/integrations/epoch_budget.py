"""A privacy budget that is checked before each epoch, and checks of other libraries' settings.

>>> check_settings("Trainer", {"precision": (32, 32), "gradient_clip_val": (0.5, None)})
Traceback (most recent call last):
    ...
ValueError: Trainer must have gradient_clip_val=None (got 0.5): the engine clips, ...
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.validation import instance_of, open_unit_interval, positive
from opacus_shuffle.engine.guards.raw_gradients import private_optimizers
from opacus_shuffle.engine.privacy_engine import PrivacyEngine
from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer


def check_settings(name: str, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuses settings of another library that would void ε.

    Args:
        name: The object that has the settings.
        settings: The current and the required value of each setting.

    Raises:
        ValueError: If a value differs from the required one. The message lists all of these.
    """
    wrong = [
        f"{setting}={required!r} (got {value!r})"
        for setting, (value, required) in settings.items()
        if value != required
    ]
    if wrong:
        raise ValueError(
            f"{name} must have {', '.join(wrong)}: the engine clips, takes each batch as one step, "
            "in one process, and saves and loads weights only with their privacy account "
            "(engine.save_checkpoint and load_checkpoint)"
        )


def check_loader(optimizer: PrivateOptimizer, loader: Any) -> None:
    """Refuses a loader that ``make_private`` did not return together with the optimizer.

    With Opacus's accountants and ``poisson_sampling=False`` any loader is accepted.

    Raises:
        ValueError: If it is another loader.
    """
    tickets = optimizer.tickets
    if tickets is not None and tickets.loader() is not loader:
        raise ValueError(
            "the data loader must be the one that make_private returned with this optimizer: got "
            f"another {type(loader).__name__}, whose batches are not accounted for"
        )


class EpochBudget:
    """A privacy budget that allows or refuses whole epochs.

    Call :meth:`start` once, and :meth:`allows_epoch` before each epoch. From then on, and as long
    as this object exists, the optimizer refuses every step beyond the budget. The budget does not
    foresee what the engine trains elsewhere in the same epoch: train one network at a time.

    Args:
        engine: The engine that accounts for the run.
        delta: δ in (0, 1).
        target_epsilon: The maximum ε, above 0. By default there is no maximum.

    Attributes:
        optimizer: The private optimizer, after ``start``.
        steps: The number of steps in an epoch, after ``start``.
        fits: Whether the current or the next epoch is within the budget.
        noise: The noise multiplier that this decision is based on.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, engine: PrivacyEngine, *, delta: float, target_epsilon: float | None = None
    ) -> None:
        self.engine = instance_of("engine", engine, (PrivacyEngine,))
        self.delta = open_unit_interval("delta", delta)
        self.target = (
            math.inf if target_epsilon is None else positive("target_epsilon", target_epsilon)
        )

    def start(self, module: nn.Module, loader: DataLoader) -> None:
        """Starts a run, of which at least one epoch must be within the budget.

        Args:
            module: The module of ``make_private``, or a module that contains it.
            loader: The loader of the same call. One epoch is one pass over it.

        Raises:
            ValueError: If the engine did not make module and loader private, or not even one epoch
                is within the budget.
        """
        optimizers = private_optimizers(module)
        if len(optimizers) != 1 or optimizers[0].accountant is not self.engine.accountant:
            raise ValueError(
                "the model must contain one network that engine.make_private has made private, got "
                f"{len(optimizers)}: call make_private before training, with this engine"
            )
        check_loader(optimizers[0], loader)
        self.optimizer, self.steps = optimizers[0], len(loader)
        self.allows_epoch()
        self.check_step()
        # The hooks of a trainer do not see steps that a script takes with the optimizer itself. The
        # reference is weak, because a stored network must not keep the engine, which has the data.
        self.optimizer.before_release = functools.partial(
            EpochBudget.check_step, weakref.proxy(self)
        )

    @property
    def spent(self) -> float:
        """The current ε."""
        return self.engine.get_epsilon(self.delta)

    @property
    def ahead(self) -> float:
        """The ε after one more epoch with the current noise."""
        return self.optimizer.epsilon_after(self.steps, self.delta)

    def allows_epoch(self) -> bool:
        """Returns whether one more epoch with the current noise is within the budget."""
        self.noise = float(self.optimizer.noise_multiplier)
        self.fits = self.target == math.inf or self.ahead <= self.target
        return self.fits

    def check_step(self) -> None:
        """Refuses a step beyond the budget, before it releases anything.

        Raises:
            ValueError: If the epoch is not within the budget, or the noise multiplier has decreased
                since ``allows_epoch``.
        """
        if not self.fits:
            raise ValueError(
                f"target_epsilon={self.target} does not allow this epoch: ε is "
                f"{round_up(self.spent)} and would be {round_up(self.ahead)} after it; train fewer "
                "epochs (without a minimum number of epochs), or let make_private_with_epsilon "
                "find the noise"
            )
        if self.target < math.inf and self.optimizer.noise_multiplier < self.noise:
            raise ValueError(
                f"noise_multiplier is {self.optimizer.noise_multiplier}, but this epoch was "
                f"allowed within target_epsilon={self.target} with {self.noise}: decrease the "
                "noise only between epochs"
            )
