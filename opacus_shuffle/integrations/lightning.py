"""Trains privately with Lightning (the extra ``lightning``); ``docs/how_to/lightning.rst``."""

from __future__ import annotations

from typing import Any, NoReturn

from opacus_shuffle.core import imports
from opacus_shuffle.core.rounding import up_to_single
from opacus_shuffle.engine.privacy_engine import PrivacyEngine
from opacus_shuffle.integrations.epoch_budget import EpochBudget, check_settings

try:
    import lightning
except ImportError as error:
    raise ImportError(
        imports.missing_extra("opacus_shuffle.integrations.lightning", "lightning", "lightning")
    ) from error


class PrivacyCallback(lightning.Callback):
    """Logs ``epsilon`` after each epoch, ends training at a budget, and refuses what would void it.

    Args:
        engine: The engine that has made the module's network private.
        delta: δ in (0, 1).
        target_epsilon: ε to stay within: the trainer stops before an epoch with which ε would be
            above it. By default it stops as it would anyway.

    Raises:
        ValueError: If an argument is out of range. Besides, ``fit`` is refused before its first
            step if the trainer accumulates gradients, clips them, writes or resumes checkpoints or
            has several processes, if the engine has not made the module's network private, or if
            not even one epoch is within the target.
    """

    def __init__(
        self, engine: PrivacyEngine, *, delta: float, target_epsilon: float | None = None
    ) -> None:
        self.budget = EpochBudget(engine, delta=delta, target_epsilon=target_epsilon)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks the trainer's settings, and whether an epoch fits."""
        check_settings(
            "Trainer",
            {
                "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1),
                "gradient_clip_val": (trainer.gradient_clip_val, None),
                "enable_checkpointing": (bool(trainer.checkpoint_callbacks), False),
                "devices": (trainer.world_size, 1),
                "ckpt_path": (trainer.ckpt_path, None),
            },
        )
        self.budget.start(pl_module, trainer.train_dataloader)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs ε, and stops where the next epoch does not fit."""
        pl_module.log("epsilon", up_to_single(self.budget.spent), prog_bar=True)
        trainer.should_stop = trainer.should_stop or not self.budget.allows_epoch()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> NoReturn:
        """Refuses to save weights without their account.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a checkpoint of Lightning holds weights and not what they cost: call "
            "engine.save_checkpoint(path=..., module=..., optimizer=...)"
        )
