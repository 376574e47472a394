"""``GradientCanary``: adds one more record to a batch's sum, or not, as a secret coin says.

The white-box audit of Nasr et al. 2023 ("Tight Auditing of Differentially Private Machine
Learning") with their Dirac canary: the record's gradient is zero but for one entry, of the clipping
norm's size. It is put into the sum just before noise is added (before a batch clipping too), so it
works on stock Opacus optimizers as on ours, in every grad-sample mode.

>>> import torch
>>> from opacus import GradSampleModule
>>> from opacus.optimizers import DPOptimizer
>>> model = GradSampleModule(torch.nn.Linear(3, 2, bias=False))
>>> weight = next(model.parameters())
>>> options = {"noise_multiplier": 0.5, "max_grad_norm": 1.0, "expected_batch_size": 4}
>>> optimizer = DPOptimizer(torch.optim.SGD([weight], lr=1.0), **options)
>>> with GradientCanary(optimizer, weight, 5, generator=torch.Generator().manual_seed(0)) as canary:
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

import numpy as np
import torch
from opacus.optimizers import DPOptimizer

from opacus_shuffle.core.randomness import SecretGenerator, check_generator, stream_of
from opacus_shuffle.core.validation import instance_of, integer


@dataclasses.dataclass(frozen=True)
class CanaryTrial:
    """One step of the optimizer, with or without the canary.

    Attributes:
        present: Whether the canary was in the sum.
        background: What the released entry would be without canary and noise: the other records'
            sum, clipped as a batch where the optimizer does that. An adversary who knows all other
            records can compute it.
        observed: The entry of the noised sum.
    """

    present: bool
    background: float
    observed: float

    @property
    def score(self) -> float:
        """The evidence for the canary: the noise, plus the canary's size if it is there.

        (Less than its size if the batch was clipped.)
        """
        return self.observed - self.background


class GradientCanary:
    """Puts a gradient of one entry into the sums of an optimizer's batches, as fair coins say.

    It does so inside of a ``with`` statement, which leaves the optimizer as it was. A training with
    a canary has seen a record that does not exist; do not use its model.

    Args:
        optimizer: Any of Opacus's or ours on one process: its ``add_noise`` is wrapped.
        parameter: Of the optimizer; the tensor in which the entry is.
        index: Of the entry, along the flattened tensor.
        generator: Of the coins, on the CPU; by default a secret one.

    Attributes:
        parameter, index: Where it is: the tensor, and the entry's coordinates, one per axis.
        trials: One :class:`CanaryTrial` per step so far, empty batches included, physical batches
            of a virtual step not.

    Raises:
        ValueError: If the optimizer is distributed or its ``add_noise`` is wrapped, or there is no
            such entry.

    Note:
        With batch clipping to c′ (WS Algorithm 1) the sum f with the canary shrinks by c′/‖f +
        canary‖ where that is below 1. :attr:`CanaryTrial.background` is the entry of f clipped
        *without* the canary: the score without it is pure noise, and with it is smaller than
        ``size``.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        parameter: torch.Tensor,
        index: int = 0,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        instance_of("optimizer", optimizer, (DPOptimizer,))
        if getattr(optimizer, "world_size", 1) > 1:
            raise ValueError(
                f"optimizer must run on one process, got {type(optimizer).__name__}: each rank has "
                "a part of the sum; audit "
                "the same training on one"
            )
        instance_of("parameter", parameter, (torch.Tensor,))
        numbers = [
            number for number, trained in enumerate(optimizer.params) if trained is parameter
        ]
        if not numbers:
            raise ValueError(
                "parameter must be one that optimizer trains: take it from model.parameters()"
            )
        check_generator("generator", generator)
        flat = integer("index", index, minimum=0, maximum=parameter.numel() - 1)
        self.index = tuple(map(int, np.unravel_index(flat, parameter.shape)))
        self.trials: list[CanaryTrial] = []
        self.parameter, self._optimizer, self._number = parameter, optimizer, numbers[0]
        self._coins = SecretGenerator() if generator is None else generator

    @property
    def size(self) -> float:
        """The largest entry that a record's gradient can have.

        With a larger one the audit would be of more than one record.
        """
        if (norms := getattr(self._optimizer, "max_grad_norms", None)) is not None:
            return float(norms[self._number])
        return float(self._optimizer.max_grad_norm)

    def __enter__(self) -> GradientCanary:
        if "add_noise" in vars(self._optimizer):
            raise ValueError(
                "optimizer has an add_noise of its own, another canary's or a wrapper: take that "
                "away first"
            )
        self._add_noise = self._optimizer.add_noise
        self._optimizer.add_noise = self._add_noise_with_canary
        return self

    def __exit__(self, *error: object) -> None:
        del self._optimizer.add_noise

    @torch.no_grad()
    def _add_noise_with_canary(self) -> None:
        """Adds the canary if the coin says so, then the noise."""
        total: torch.Tensor = self.parameter.summed_grad  # type: ignore[attr-defined]
        place = total.view(self.parameter.shape)[self.index]
        background = float(place) * self._batch_factor()
        present = bool(stream_of(self._coins).words(1)[0] & 1)
        if present:
            place += self.size  # in place: Opacus marks the tensor itself as used
        self._add_noise()
        assert self.parameter.grad is not None
        self.trials.append(CanaryTrial(present, background, float(self.parameter.grad[self.index])))

    def _batch_factor(self) -> float:
        """Returns the factor by which batch clipping will shrink the sum as it is now."""
        optimizer = self._optimizer
        if (
            getattr(optimizer, "batch_clip", None) is None
            or id(self.parameter) not in optimizer.shuffled
        ):
            return 1.0  # what stays where it is is not clipped as a batch
        sums = [
            moving.summed_grad for moving in optimizer.params if id(moving) in optimizer.shuffled
        ]
        length = math.sqrt(sum(float(torch.linalg.vector_norm(total)) ** 2 for total in sums))
        return min(1.0, optimizer.batch_clip / length) if length else 1.0
