"""``GradientCanary``: adds an artificial record to the sum of a batch if a secret coin says so.

This is the white-box audit of Nasr et al. 2023 ("Tight Auditing of Differentially Private Machine
Learning") with their Dirac canary. The gradient of the canary is zero except in one entry, whose
size is the clipping norm. It is added to the sum directly before the noise, and before a batch
clipping. It therefore works with Opacus's optimizers and with ours, in every grad-sample mode.

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

import numpy as np
import torch
from opacus.optimizers import DPOptimizer

from opacus_shuffle.core.randomness import SecretGenerator, check_generator, stream_of
from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.engine.step.noise import ClippedSumNoise


@dataclasses.dataclass(frozen=True)
class CanaryTrial:
    """One step of the optimizer, with or without the canary.

    Attributes:
        present: Whether the canary was in the sum.
        background: The released entry without canary and noise, which is the sum of the other
            records, after batch clipping if the optimizer clips batches. An adversary who knows all
            other records can compute it.
        observed: The entry of the noised sum.
    """

    present: bool
    background: float
    observed: float

    @property
    def score(self) -> float:
        """The evidence for the canary: the noise, plus the size of the canary if it is present.

        If the batch was clipped, the canary contributes less than its size.
        """
        return self.observed - self.background


class GradientCanary:
    """Adds a gradient with one nonzero entry to the sums of an optimizer, by fair coins.

    It is active inside a ``with`` statement, which restores the optimizer afterwards. Do not use a
    model that was trained with a canary, because the canary is not a real record.

    Args:
        optimizer: An optimizer of Opacus or of this package, on one process. Its ``add_noise`` is
            wrapped.
        parameter: The tensor that contains the entry, a parameter of the optimizer.
        index: The index of the entry in the flattened tensor.
        generator: A CPU generator for the coins. The default is a secret generator.

    Attributes:
        parameter, index: The tensor, and the coordinates of the entry in it.
        trials: One :class:`CanaryTrial` per step, including steps of empty batches, but not the
            physical batches of a virtual step.

    Raises:
        ValueError: If the optimizer is distributed, its ``add_noise`` is wrapped already, or the
            entry does not exist.

    Note:
        With batch clipping to c′ (Algorithm 1 of Yang, Ji and Xiang) the sum f with the canary is
        multiplied by c′/‖f + canary‖ if this factor is below 1. :attr:`CanaryTrial.background` is
        the entry of f clipped *without* the canary. The score without the canary is pure noise, and
        the mean score with it is smaller than ``size``.
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
                "only a part of the sum; audit the same training on one process"
            )
        instance_of("parameter", parameter, (torch.Tensor,))
        positions = [
            position for position, trained in enumerate(optimizer.params) if trained is parameter
        ]
        if not positions:
            raise ValueError(
                "parameter must be one that optimizer trains: take it from model.parameters()"
            )
        check_generator("generator", generator)
        flat = integer("index", index, minimum=0, maximum=parameter.numel() - 1)
        self.index = tuple(map(int, np.unravel_index(flat, parameter.shape)))
        self.trials: list[CanaryTrial] = []
        self.parameter, self._optimizer, self._position = parameter, optimizer, positions[0]
        self._coins = SecretGenerator() if generator is None else generator

    @property
    def size(self) -> float:
        """The largest entry that the gradient of one record can have."""
        if (norms := getattr(self._optimizer, "max_grad_norms", None)) is not None:
            return float(norms[self._position])
        return float(self._optimizer.max_grad_norm)

    def __enter__(self) -> GradientCanary:
        if "add_noise" in vars(self._optimizer):
            raise ValueError(
                "optimizer.add_noise is already replaced, by another canary or a wrapper: remove "
                "that first"
            )
        self._add_noise = self._optimizer.add_noise
        self._optimizer.add_noise = self._add_noise_with_canary
        return self

    def __exit__(self, *error: object) -> None:
        del self._optimizer.add_noise

    @torch.no_grad()
    def _add_noise_with_canary(self) -> None:
        """Adds the canary if the coin says so, and then the noise."""
        total: torch.Tensor = self.parameter.summed_grad  # type: ignore[attr-defined]
        entry = total.view(self.parameter.shape)[self.index]
        background = float(entry) * self._batch_factor()
        present = bool(stream_of(self._coins).words(1)[0] & 1)
        if present:
            entry += self.size  # In place, because Opacus marks the tensor itself as processed.
        self._add_noise()
        assert self.parameter.grad is not None
        self.trials.append(CanaryTrial(present, background, float(self.parameter.grad[self.index])))

    def _batch_factor(self) -> float:
        """Returns the factor by which batch clipping will multiply the current sum."""
        noise = getattr(self._optimizer, "noise", None)
        if not isinstance(noise, ClippedSumNoise) or id(self.parameter) not in noise.clipped:
            return 1.0  # Only shuffled tensors are clipped as a batch.
        return float(noise.factor(self._optimizer))
