"""Stops a network that reads values without end, as a loop does that waits for what made-up records never bring.

>>> x = torch.ones(3)
>>> with LimitedReads():
...     while not (x * float("nan") < 1).any():
...         x = x / 2
Traceback (most recent call last):
    ...
opacus_shuffle.engine.limited_reads.TooManyReadsError: ...
"""

from __future__ import annotations

from typing import Any

import torch

from opacus_shuffle.permutation.finding.cheap_products import ASKING
from opacus_shuffle.permutation.higher_order import InsightMode

MOST = 10_000
"""Values that one run may read."""


class TooManyReadsError(Exception):
    """Raised inside a network that reads on and on."""


class LimitedReads(InsightMode):
    """A dispatch mode that lets a run read so many values of tensors, and no more.

    Attributes:
        read: How many were read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read = 0

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Performs an operation.

        Raises:
            TooManyReadsError: If it reads a value, and the run has read enough.
        """
        result = self.go_on(func, args, kwargs)
        if ASKING & set(func.tags) and not isinstance(result, torch.Tensor):
            if self.read >= MOST:
                raise TooManyReadsError(f"{MOST:,} values of tensors have been read in one run")
            result = self.told(result)
            self.read += 1
        return result

    def told(self, value: Any) -> Any:
        """Returns what Python is told of a value."""
        return value
