"""Telling when an optimizer has changed the weights, once per update.

>>> network = torch.nn.Linear(2, 2)
>>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
>>> handles = after_each_update(optimizer, lambda: print("updated"))
>>> optimizer.step()
updated
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def after_each_update(optimizer: torch.optim.Optimizer, then: Callable[[], None]) -> list[RemovableHandle]:
    """Calls ``then`` after each ``step`` of the optimizer, but for steps inside of a step (wrappers such as lookahead).

    Returns:
        The handles of the hooks.
    """
    running: list[FrameType] = []

    def begin(*_: Any) -> None:
        running[:] = [frame for frame in running if frame in _callers()] + [sys._getframe(1)]

    def end(*_: Any) -> None:
        here = sys._getframe(1)
        running[:] = [frame for frame in running if frame is not here and frame in _callers()]
        if not running:
            then()

    return [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]


def _callers() -> list[FrameType]:
    """Returns the frames that are running."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
