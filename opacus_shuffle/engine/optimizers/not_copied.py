"""Private optimizers are one of a kind: a copy would release steps that nobody accounts.

PyTorch's own way of copying an optimizer knows nothing of Opacus's: it gives the copy three attributes of the many, and leaves
the class itself broken, so that no later optimizer of that class can step.
"""

from __future__ import annotations

from typing import Any, NoReturn

from opacus.optimizers import DPOptimizer


class NotCopied(DPOptimizer):
    """Mixin for any Opacus optimizer: ``copy``, ``deepcopy``, ``pickle`` and ``torch.save`` refuse it, and change nothing."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__}, the optimizer that make_private returned, cannot be copied or pickled: it holds gradients "
            "of records and the secret of the noise, and steps of a copy would not be accounted; keep optimizer.state_dict() "
            "or engine.save_checkpoint(...), and for another run call make_private on a new model, optimizer and engine"
        )
