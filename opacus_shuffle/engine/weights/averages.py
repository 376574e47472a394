"""Averages of weights over steps: copies of a network that go on reading its parameters, and so must follow their order."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.networks.running import unwrap


def becomes_average(memo: dict[Any, Any]) -> bool:
    """Returns whether a deep copy, whose memo this is, is being made by ``AveragedModel``."""
    if AveragedModel not in memo:
        making: Any = AveragedModel.__init__
        memo[AveragedModel] = any(frame.f_code is making.__code__ for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return bool(memo[AveragedModel])


def average_that_reads() -> AveragedModel | None:
    """Returns the average whose update has called the caller; None if it was called by anything else."""
    caller, update = sys._getframe(2), AveragedModel.update_parameters
    return caller.f_locals["self"] if caller.f_code is update.__code__ else None


def refuse_begun(average: AveragedModel) -> None:
    """Refuses an average that has averaged other weights before.

    Raises:
        ValueError: If it has.
    """
    if average.n_averaged:
        raise ValueError(
            f"{type(average).__name__} has averaged weights whose units are in another order than the network's: make it of "
            "what make_private returned, and load its state afterwards"
        )


def bring_up_to_date(average: nn.Module, network: nn.Module) -> nn.Module:
    """Gives a copy of a network the weights of the network, and returns it without its wrappers.

    Raises:
        ValueError: If it is no copy.
    """
    copied = unwrap(instance_of("average", average, (nn.Module,)))
    own, others = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in (network, copied))
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (own, others)]
    if copied is network or shapes[0] != shapes[1]:
        raise ValueError(f"average must be a copy of the network, got {type(average).__name__}: pass copy.deepcopy(model)")
    with torch.no_grad():
        for name, tensor in own.items():
            others[name].copy_(tensor)
    return copied
