"""Trains privately with Accelerate (the extra ``accelerate``); ``docs/how_to/accelerate.rst``."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils.data import DataLoader

from opacus_shuffle.core import imports
from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
from opacus_shuffle.integrations.epoch_budget import check_loader, check_settings

try:
    import accelerate  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        imports.missing_extra("opacus_shuffle.integrations.accelerate", "accelerate", "accelerate")
    ) from error


def prepare(
    accelerator: accelerate.Accelerator, model: Any, optimizer: Any, data_loader: DataLoader
) -> tuple[Any, Any, DataLoader]:
    """Prepares what ``make_private`` returned for Accelerate; the loader stays as it is.

    ``accelerator.prepare`` would put another sampler into the loader, whose batches are not those
    that are accounted. So batches are not moved for you: send each to ``accelerator.device``.
    ``accelerator.save_state`` and ``load_state`` are refused from now on: states of it hold weights
    without their account.

    Args:
        accelerator: In one process, without gradient accumulation or float16.
        model: Of ``make_private``.
        optimizer: Of the same call.
        data_loader: Of the same call.

    Returns:
        Model and optimizer as Accelerate prepares them, and the loader that was given.

    Raises:
        ValueError: If the accelerator would void ε, or the loader is not the optimizer's.
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
    """Refuses to save or load weights without their account.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "a state of Accelerate holds weights and not what they cost: call "
        "engine.save_checkpoint(path=..., module=..., optimizer=...) and load_checkpoint"
    )
