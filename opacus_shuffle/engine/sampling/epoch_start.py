"""A call at the start of every epoch: whoever abandoned the last one must not carry a half batch into this one.

>>> class Watcher:
...     def started(self): print("an epoch starts")
>>> watcher = Watcher()
>>> sampler = PoissonSampler(num_samples=4, sample_rate=0.5, steps=1)
>>> call_at_epoch_start(sampler, watcher.started)
>>> _ = list(sampler)
an epoch starts
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from opacus.utils.uniform_sampler import UniformWithReplacementSampler


class EpochStart:
    """Mixin for samplers; holds the listener weakly, so that copies of a loader do not copy an optimizer."""

    _listener: Callable[[], Callable[[], None] | None] | None = None

    def epoch_starts(self) -> None:
        """Tell the listener, if it still lives."""
        listener = self._listener() if self._listener is not None else None
        if listener is not None:
            listener()


class PoissonSampler(EpochStart, UniformWithReplacementSampler):
    """Opacus's Poisson sampler, which says when an epoch starts."""

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch_starts()
        yield from super().__iter__()


def call_at_epoch_start(sampler: EpochStart, method: Callable[[], None]) -> None:
    """Let ``method``, a bound one, be called whenever ``sampler`` starts anew."""
    sampler._listener = weakref.WeakMethod(method)
