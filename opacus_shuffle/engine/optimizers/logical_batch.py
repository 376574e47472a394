"""What a logical batch really held: how many records, clipped to what, and nothing left over from a batch that was abandoned.

Opacus sums physical batches until one step ends the logical batch. Three of its habits would make an ε too small, and end
here: leaving the loop inside a logical batch leaves a sum that the next epoch's first batch would join; a norm that changes
between two physical batches leaves reports larger than the noise was made for; ghost clipping steps on any gradient at all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping, DPPerLayerOptimizer

from opacus_shuffle.core.opacus_compat import last_step_was_skipped, rows_waiting
from opacus_shuffle.engine.optimizers.usable_records import UsableRecords


class LogicalBatch(UsableRecords):
    """Mixin for Opacus's flat clipping; the subclasses below are for per-layer and ghost clipping.

    Attributes:
        num_records: Records of the current logical batch that have been clipped and summed so far.
    """

    num_records: int = 0
    _clipped_to: float | None = None

    def rows_waiting(self) -> set[int]:
        """How many records each parameter has gradients of, that the next step will clip."""
        return rows_waiting(self)

    def clip_and_accumulate(self) -> None:
        """Clip and sum one physical batch, and note its size and norm."""
        super().clip_and_accumulate()
        if self.params:
            self._note(max(rows_waiting(self)), self._clipping_norm())

    def check_release(self) -> None:
        """Refuse a sum that the noise is not made for.

        Raises:
            ValueError: If the norm was changed after the reports were clipped.
        """
        if self._clipped_to is not None and not math.isclose(self._clipped_to, self.max_grad_norm, rel_tol=1e-6):
            raise ValueError(
                f"max_grad_norm is {self.max_grad_norm} for the noise but reports of this batch were clipped to "
                f"{self._clipped_to}: change it only between logical batches, and with a scheduler only with clipping='flat' "
                "and grad_sample_mode 'hooks', 'functorch' or 'ew'"
            )

    def add_noise(self) -> None:
        """Add the noise, if it is made for what was summed."""
        self.check_release()
        super().add_noise()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients, and the notes whenever Opacus clears the sum."""
        super().zero_grad(set_to_none)
        if not last_step_was_skipped(self):
            self.forget_sum()

    def forget_sum(self) -> None:
        """Forget the notes on what was summed so far."""
        self.num_records, self._clipped_to = 0, None

    def _note(self, records: int, norm: float) -> None:
        """Add one physical batch to the notes; of two norms the larger counts."""
        self.num_records += records
        self._clipped_to = norm if self._clipped_to is None else max(norm, self._clipped_to)

    def _clipping_norm(self) -> float:
        """The norm that one whole report is clipped to."""
        return self.max_grad_norm


class PerLayerLogicalBatch(LogicalBatch, DPPerLayerOptimizer):
    """Per-layer clipping: the reports' norm is that of the layers' norms, which schedulers do not reach."""

    def _clipping_norm(self) -> float:
        return float(torch.norm(torch.Tensor(self.max_grad_norms), p=2).item())


class GhostLogicalBatch(LogicalBatch, DPOptimizerFastGradientClipping):
    """Ghost clipping: the criterion's backward pass clips, and its clipping factors say how many records there were."""

    _pending: tuple[int, float] | None = None
    _clipped_parameters: frozenset[int] = frozenset()

    def watch(self, module: Any) -> None:
        """Note every batch that ``module`` computes clipping factors for, and which parameters it clips."""
        factors = module.get_clipping_coef

        def noted() -> torch.Tensor:
            found: torch.Tensor = factors()
            self._pending = (len(found), module.max_grad_norm)
            return found

        module.get_clipping_coef = noted
        self._clipped_parameters = frozenset(map(id, module.trainable_parameters))

    def accumulate(self) -> None:
        """Add one physical batch's clipped sum.

        Raises:
            ValueError: If this gradient was not clipped, or holds a parameter that the clipping does not know.
        """
        if self._pending is None:
            raise ValueError(
                "this gradient was not clipped: call the criterion that make_private returned, then loss.backward(), then "
                "optimizer.step(), once each per batch"
            )
        if not self._clipped_parameters.issuperset(map(id, self.params)):
            raise ValueError("a parameter was made trainable after make_private and is not clipped: call make_private after")
        self._note(*self._pending)
        self._pending = None
        super().accumulate()

    def clip_and_accumulate(self) -> None:
        """Nothing: the backward pass has clipped."""

    def rows_waiting(self) -> set[int]:
        """How many records the criterion has clipped."""
        return set() if self._pending is None else {self._pending[0]}

    @property
    def pending(self) -> bool:
        """Whether a clipped gradient waits for its noise."""
        return self._pending is not None

    def forget_clipped(self) -> None:
        """Forgets clipped gradients, and refuses steps until there are new ones."""
        super().forget_clipped()
        self._pending = None

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients, and with them what the criterion has clipped."""
        self._pending = None
        super().zero_grad(set_to_none)
