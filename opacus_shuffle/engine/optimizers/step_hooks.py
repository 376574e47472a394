"""Step hooks that add up. Opacus has one slot, so a second ``attach_step_hook`` would silently end the accounting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus_shuffle.engine.optimizers.not_copied import NotCopied


class StepHooks(NotCopied):
    """Mixin for any Opacus optimizer: every attached hook runs, the accountant's first."""

    def attach_step_hook(self, fn: Callable[[Any], None] | None) -> None:
        """Add a hook that runs after noise and scaling, before the update, once per logical batch; None takes off all."""
        previous = self.step_hook

        def both(optimizer: Any) -> None:
            previous(optimizer)
            fn(optimizer)  # type: ignore[misc]

        super().attach_step_hook(fn if fn is None or previous is None else both)
