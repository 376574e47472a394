"""Step hooks that add up. Opacus has one slot, so a second ``attach_step_hook`` would silently end the accounting.

>>> class Stock:
...     step_hook = None
...     def attach_step_hook(self, fn):
...         self.step_hook = fn
>>> class Ours(StepHooks, Stock): ...
>>> optimizer, calls = Ours(), []
>>> optimizer.attach_step_hook(lambda o: calls.append("account"))
>>> optimizer.attach_step_hook(lambda o: calls.append("mine"))
>>> optimizer.step_hook(optimizer)
>>> len(calls)
2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer as _Base
else:
    _Base = object


class StepHooks(_Base):
    """Mixin for any Opacus optimizer: every attached hook runs, the accountant's first."""

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Add a hook that runs after noise and scaling, before the update, once per logical batch."""
        previous = self.step_hook
        if previous is None:
            super().attach_step_hook(fn)
            return

        def both(optimizer: Any) -> None:
            previous(optimizer)
            fn(optimizer)

        super().attach_step_hook(both)
