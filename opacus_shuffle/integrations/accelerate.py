"""Private training with Accelerate (``pip install '.[accelerate]'``).

``docs/how_to/accelerate.rst`` has an example.
"""

from __future__ import annotations

from typing import Any, NoReturn

import accelerate  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
from opacus_shuffle.integrations.epoch_budget import check_loader, check_settings


def prepare(
    accelerator: accelerate.Accelerator, model: Any, optimizer: Any, data_loader: DataLoader
) -> tuple[Any, Any, DataLoader]:
    """Prepares what ``make_private`` returned for Accelerate, and leaves the loader unchanged.

    ``accelerator.prepare`` would replace the sampler of the loader, and the engine would not
    account for its batches. The batches of the unchanged loader are not moved automatically: move
    each one to ``accelerator.device``. ``accelerator.save_state`` and ``load_state`` are refused
    afterwards, because their states contain the weights without the privacy account.

    Args:
        accelerator: An accelerator of one process, without gradient accumulation or float16.
        model: The model that ``make_private`` returned.
        optimizer: The optimizer of the same call.
        data_loader: The loader of the same call.

    Returns:
        The model and the optimizer as Accelerate prepares them, and the unchanged loader.

    Raises:
        ValueError: If a setting of the accelerator would void ε, or the loader does not belong to
            the optimizer.
    """
    instance_of("accelerator", accelerator, (accelerate.Accelerator,))
    check_settings(
        "Accelerator",
        {
            "gradient_accumulation_steps": (accelerator.gradient_accumulation_steps, 1),
            "num_processes": (accelerator.num_processes, 1),
            "scaler": (accelerator.scaler, None),
        },
    )
    check_loader(instance_of("optimizer", optimizer, (PrivateOptimizer,)), data_loader)
    accelerator.register_save_state_pre_hook(_refuse_state)
    accelerator.register_load_state_pre_hook(_refuse_state)
    return *accelerator.prepare(model, optimizer), data_loader


def _refuse_state(*_: Any) -> NoReturn:
    """Refuses to save or load weights without their privacy account.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "a state of Accelerate contains the weights without their privacy account: call "
        "engine.save_checkpoint(path=..., module=..., optimizer=...) and load_checkpoint"
    )
