"""``GradientCanary``: one more record in the sum of a DP optimizer's batch, or not, as a secret coin says.

The white-box audit of Nasr et al. 2023 ("Tight Auditing of Differentially Private Machine Learning") with their Dirac canary:
the record's gradient is zero but for one entry, of the clipping norm's size. It is put into the sum just before noise is added
(before a batch clipping too), so it works on stock Opacus optimizers as on ours, in every grad-sample mode.

>>> import torch
>>> from opacus import GradSampleModule
>>> from opacus.optimizers import DPOptimizer
>>> model = GradSampleModule(torch.nn.Linear(3, 2, bias=False))
>>> weight = next(model.parameters())
>>> optimizer = DPOptimizer(torch.optim.SGD([weight], lr=1.0), noise_multiplier=0.5, max_grad_norm=1.0, expected_batch_size=4)
>>> with GradientCanary(optimizer, weight, (1, 2), generator=torch.Generator().manual_seed(0)) as canary:
...     for _ in range(300):
...         model(torch.randn(4, 3)).square().sum().backward()
...         optimizer.step()
...         optimizer.zero_grad()
>>> present = [trial.score for trial in canary.trials if trial.present]
>>> round(sum(present) / len(present))
1
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPPerLayerOptimizer,
    FSDPOptimizerFastGradientClipping,
)

from opacus_shuffle.core.randomness import SecretGenerator, check_generator
from opacus_shuffle.core.validation import instance_of, positive
from opacus_shuffle.engine.optimizers import BatchClipping

DISTRIBUTED = (DistributedDPOptimizer, DistributedDPOptimizerFastGradientClipping, FSDPOptimizerFastGradientClipping)


@dataclasses.dataclass(frozen=True)
class CanaryTrial:
    """One step of the optimizer.

    Attributes:
        present: Whether the canary was in the sum.
        background: What the released entry would be without canary and noise: the other records' sum, clipped as a batch
            where the optimizer does that. An adversary who knows all other records can compute it.
        observed: The entry of the noised sum.
    """

    present: bool
    background: float
    observed: float

    @property
    def score(self) -> float:
        """The evidence for the canary: noise, plus the canary's size if it is there (less if the batch was clipped)."""
        return self.observed - self.background


class GradientCanary:
    """Puts a gradient of one entry into the sums of an optimizer's batches, each with probability ½, until removed.

    A training with a canary has seen a record that does not exist; do not use its model.

    Args:
        optimizer: Any of Opacus's or ours on one process, in use: its ``add_noise`` is wrapped.
        parameter: Of the optimizer; the tensor in which the entry is.
        index: Of the entry: along the flattened tensor, or one number per axis.
        size: Of the entry; by default the clipping norm, with per-layer clipping that of the layer: the largest that a record's
            gradient can have there. With a larger one the audit would be of more than one record.
        generator: Of the coins, on the CPU; by default a secret one.

    Attributes:
        trials: One :class:`CanaryTrial` per step so far, empty batches included, physical batches of a virtual step not.

    Raises:
        ValueError: If the optimizer is distributed or holds another canary, or there is no such entry.

    Note:
        With batch clipping to c′ (WS Algorithm 1) the sum f with the canary shrinks by c′/‖f + canary‖ where that is below 1.
        :attr:`CanaryTrial.background` is the entry of f clipped *without* the canary: the score without it is pure noise, and
        with it is smaller than ``size``.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        parameter: torch.Tensor,
        index: int | Sequence[int] = 0,
        *,
        size: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        instance_of("optimizer", optimizer, (DPOptimizer,))
        if isinstance(optimizer, DISTRIBUTED):
            raise ValueError(
                f"optimizer must run on one process, got {type(optimizer).__name__}: each rank has a part of the sum; audit "
                "the same training on one"
            )
        instance_of("parameter", parameter, (torch.Tensor,))
        numbers = [number for number, each in enumerate(optimizer.params) if each is parameter]
        if not numbers:
            raise ValueError("parameter must be one that optimizer trains: take it from model.parameters()")
        if isinstance(getattr(optimizer.__dict__.get("add_noise"), "__self__", None), GradientCanary):
            raise ValueError("optimizer holds a canary already: remove() that one first")
        check_generator("generator", generator)
        self.index = entry(parameter, index)
        self.trials: list[CanaryTrial] = []
        self._optimizer, self._parameter, self._number = optimizer, parameter, numbers[0]
        self._size = None if size is None else positive("size", size)
        self._coins = SecretGenerator() if generator is None else generator
        self._attached = True
        self._shadowed = optimizer.__dict__.get("add_noise")
        self._add_noise = optimizer.add_noise
        optimizer.add_noise = self._add_noise_with_canary

    @property
    def size(self) -> float:
        """How large the canary is in the next step, before a batch clipping."""
        if self._size is not None:
            return self._size
        if isinstance(self._optimizer, DPPerLayerOptimizer):
            return float(self._optimizer.max_grad_norms[self._number])
        return float(self._optimizer.max_grad_norm)

    def remove(self) -> None:
        """Leaves the optimizer as it was; :attr:`trials` stay. Calling it twice is harmless."""
        self._attached = False  # if someone has wrapped us meanwhile, we pass everything on
        if getattr(self._optimizer.__dict__.get("add_noise"), "__self__", None) is self:
            del self._optimizer.add_noise
            if self._shadowed is not None:
                self._optimizer.add_noise = self._shadowed

    def __enter__(self) -> GradientCanary:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    @torch.no_grad()
    def _add_noise_with_canary(self) -> None:
        """What the optimizer calls in place of its own ``add_noise``."""
        if not self._attached:
            self._add_noise()
            return
        total: torch.Tensor = self._parameter.summed_grad  # type: ignore[attr-defined]
        place = total.view(self._parameter.shape)[self.index]
        background = float(place) * self._batch_factor()
        present = bool(torch.randint(2, (1,), generator=self._coins))
        if present:
            place += self.size  # in place: Opacus marks the tensor itself as used
        self._add_noise()
        assert self._parameter.grad is not None
        self.trials.append(CanaryTrial(present, background, float(self._parameter.grad[self.index])))

    def _batch_factor(self) -> float:
        """Returns the factor by which batch clipping will shrink the sum as it is now."""
        optimizer = self._optimizer
        if not isinstance(optimizer, BatchClipping) or optimizer.batch_clip is None:
            return 1.0
        if id(self._parameter) not in optimizer.shuffled:
            return 1.0
        sums = [each.summed_grad for each in optimizer.params if id(each) in optimizer.shuffled]
        length = math.sqrt(sum(float(torch.linalg.vector_norm(each)) ** 2 for each in sums))
        return min(1.0, optimizer.batch_clip / length) if length else 1.0


def entry(parameter: torch.Tensor, index: int | Sequence[int]) -> tuple[int, ...]:
    """Returns an entry's coordinates; refuses an index that is none."""
    shape, flat = tuple(parameter.shape), isinstance(index, int)
    numbers = [index] if isinstance(index, int) else index
    if not isinstance(numbers, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise ValueError(f"index must be a whole number or one per axis of the parameter's shape {shape}, got {index!r}")
    sizes = (parameter.numel(),) if flat else shape
    if len(numbers) != len(sizes) or any(not 0 <= n < size for n, size in zip(numbers, sizes, strict=True)):
        where = f"in [0, {parameter.numel()}), the parameter's entries" if flat else f"within the parameter's shape {shape}"
        raise ValueError(f"index must lie {where}, got {index!r}")
    return tuple(map(int, np.unravel_index(numbers[0], shape))) if flat else tuple(numbers)
