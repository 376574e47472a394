"""What private runs in other libraries have in common: a budget, and settings that would void ε.

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
from opacus_shuffle.engine.privacy_engine import PrivacyEngine
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.engine.raw_gradients import private_optimizers


def check_settings(name: str, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuses a library's settings that would void ε.

    Args:
        name: What is set.
        settings: What each setting is, and what it has to be.

    Raises:
        ValueError: If one is something else. The message names all of these.
    """
    wrong = [
        f"{setting}={needed!r} (got {value!r})"
        for setting, (value, needed) in settings.items()
        if value != needed
    ]
    if wrong:
        raise ValueError(
            f"{name} must have {', '.join(wrong)}: the engine clips, takes each batch as one step, "
            "in one process, and saves and loads weights only with their account "
            "(engine.save_checkpoint and load_checkpoint)"
        )


def check_loader(optimizer: PrivateOptimizer, loader: Any) -> None:
    """Refuses a loader that is not the one which ``make_private`` returned with an optimizer.

    Raises:
        ValueError: If it is another one. With Opacus's accountants and ``poisson_sampling=False``
            any loader is taken.
    """
    tickets = optimizer.tickets
    if tickets is not None and tickets.loader() is not loader:
        raise ValueError(
            "the data loader must be the one that make_private returned with this optimizer, as it "
            f"is: got another {type(loader).__name__}, whose batches nobody accounts for"
        )


class EpochBudget:
    """A privacy budget that is asked before each epoch whether the whole epoch fits.

    Once it has begun, and as long as it is kept, the optimizer refuses every step beyond it,
    whoever asks for the step. What else the engine trains in the same epoch is not foreseen: train
    one network at a time.

    Args:
        engine: It accounts for the run.
        delta: δ in (0, 1).
        target_epsilon: ε to stay within, above 0; by default every epoch fits.

    Attributes:
        optimizer: That of ``make_private``, once the run has begun.
        steps: How many an epoch has.
        fits: Whether the epoch that runs, or is to run next, fits.
        noise: The noise multiplier with which it was found to.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, engine: PrivacyEngine, *, delta: float, target_epsilon: float | None = None
    ) -> None:
        self.engine = instance_of("engine", engine, (PrivacyEngine,))
        self.delta = open_unit_interval("delta", delta)
        self.target = math.inf
        if target_epsilon is not None:
            self.target = positive("target_epsilon", target_epsilon)

    def start(self, module: nn.Module, loader: DataLoader) -> None:
        """Begins a run, of which at least one epoch has to fit.

        Args:
            module: What is trained: the module of ``make_private``, or what holds it.
            loader: Of the same call; an epoch is one pass over it.

        Raises:
            ValueError: If the engine has not made them private, or not even one epoch fits.
        """
        owners = private_optimizers(module)
        if len(owners) != 1 or owners[0].accountant is not self.engine.accountant:
            raise ValueError(
                "the model must hold one network that engine.make_private has made private, got "
                f"{len(owners)} private ones: call make_private before training, with this engine"
            )
        check_loader(owners[0], loader)
        self.optimizer, self.steps = owners[0], len(loader)
        self.allows_epoch()
        self.check_step()
        # A trainer's own hooks see no step that a script takes with the optimizer itself. A kept
        # network keeps no engine, which knows the data.
        self.optimizer.before_release = functools.partial(
            EpochBudget.check_step, weakref.proxy(self)
        )

    @property
    def spent(self) -> float:
        """ε of all that has run."""
        return self.engine.get_epsilon(self.delta)

    @property
    def ahead(self) -> float:
        """What ε would be after one more epoch, with the noise of now."""
        return self.optimizer.epsilon_after(self.steps, self.delta)

    def allows_epoch(self) -> bool:
        """Tells whether ε stays within the target if one more epoch runs, with the noise of now."""
        self.noise = float(self.optimizer.noise_multiplier)
        self.fits = self.target == math.inf or self.ahead <= self.target
        return self.fits

    def check_step(self) -> None:
        """Refuses a step beyond the budget, before anything of it is released.

        Raises:
            ValueError: If the epoch did not fit, or the noise has fallen since it was found to.
        """
        if not self.fits:
            raise ValueError(
                f"target_epsilon={self.target} does not allow this epoch: ε is "
                f"{round_up(self.spent)}, and would be {round_up(self.ahead)} after it; train "
                "fewer epochs (and leave out a least number of them), or take the noise that "
                "make_private_with_epsilon finds"
            )
        if self.target < math.inf and self.optimizer.noise_multiplier < self.noise:
            raise ValueError(
                f"noise_multiplier is {self.optimizer.noise_multiplier}, this epoch was found "
                f"within target_epsilon={self.target} with {self.noise}: let the noise fall "
                "between epochs alone"
            )
