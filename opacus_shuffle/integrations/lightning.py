"""Private training with Lightning (``pip install '.[lightning]'``).

``docs/how_to/lightning.rst`` has an example.
"""

from __future__ import annotations

from typing import Any, NoReturn

import lightning
import numpy as np

from opacus_shuffle.integrations.epoch_budget import EpochBudget, check_settings


class PrivacyCallback(lightning.Callback, EpochBudget):
    """Logs ``epsilon`` after each epoch, and stops the trainer before ε exceeds a target.

    Args:
        engine: The engine that made the network of the module private.
        delta: δ in (0, 1).
        target_epsilon: The maximum ε. The trainer stops before an epoch that would exceed it. By
            default there is no maximum.

    Raises:
        ValueError: If an argument is out of range. ``fit`` also raises it before the first step, if
            the trainer accumulates or clips gradients, writes or resumes checkpoints or has several
            processes, if the engine did not make the network private, or if not even one epoch is
            within the target.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks the settings of the trainer, and whether one epoch is within the target."""
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
        self.start(pl_module, trainer.train_dataloader)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs ε, and stops the trainer if the next epoch would exceed the target."""
        # Lightning stores the value in single precision. The next number of this precision is above
        # it, whichever way the value was rounded.
        logged = float(np.nextafter(np.float32(self.spent), np.float32(np.inf)))
        pl_module.log("epsilon", logged, prog_bar=True)
        trainer.should_stop = trainer.should_stop or not self.allows_epoch()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> NoReturn:
        """Refuses to save weights without their privacy account.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a checkpoint of Lightning contains the weights without their privacy account: call "
            "engine.save_checkpoint(path=..., module=..., optimizer=...)"
        )
