"""Clips the per-record gradients of a batch and adds them up.

A clipping is a strategy of :class:`~opacus_shuffle.engine.step.private_optimizer.PrivateOptimizer`,
which calls it once for each physical batch. If all gradients are finite, sums are equal to
Opacus's, bit for bit. In Opacus one record whose gradient is NaN or infinite makes the whole sum
NaN, and with it every weight. Here such a record contributes zero to the noised sum, and whether
this happened is not released.

Half precision rounds norms and sums by up to half a percent, so a clipped report could exceed its
norm. In this case everything is computed in single precision, with a margin for its rounding.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
>>> model = GradSampleModule(torch.nn.Linear(2, 1, bias=False))
>>> optimizer = PrivateOptimizer(
...     torch.optim.SGD(model.parameters(), lr=1.0), clipping=FlatClipping(),
...     noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2)
>>> model(torch.tensor([[3.0, 4.0], [float("nan"), 1.0]])).sum().backward()
>>> optimizer.step()
>>> next(model.parameters()).summed_grad.norm().item() <= 1
True
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from opacus.optimizers import get_optimizer_class

from opacus_shuffle.core.opacus_compat import check_unused, mark_as_used, record_counts

HALF = (torch.bfloat16, torch.float16)
MARGIN = 1 - 2**-18
"""Norms in single precision are correct up to this factor."""


class Clipping:
    """A way of clipping, which computes ``summed_grad``, the clipped sum, of each parameter.

    Attributes:
        in_backward: Whether the backward pass clips, and no gradients of records are stored.
    """

    in_backward: ClassVar[bool] = False

    def record_counts(self, optimizer: Any) -> set[int]:
        """Returns the different numbers of records in the parameters' gradients."""
        return record_counts(optimizer)

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Clips one physical batch and adds it to the sum of the logical one.

        Returns:
            The number of records of the batch, and the norm to which each whole report was clipped.
        """
        raise NotImplementedError

    def forget_pass(self) -> None:
        """Drops gradients that a backward pass has clipped and no step has used."""

    def forget_sum(self) -> None:
        """Drops what is stored of a logical batch outside of ``summed_grad``."""


class FlatClipping(Clipping):
    """Clips each record's whole gradient, over all parameters, to one norm."""

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Clips gradients of records; those that are not finite count as zero."""
        parameters = optimizer.params
        for parameter in parameters:
            check_unused(parameter.grad_sample)
            check_unused(parameter.summed_grad)
        samples = optimizer.grad_samples
        half = any(tensor.dtype in HALF for tensor in (*parameters, *samples))
        rows = [sample.reshape(len(sample), math.prod(sample.shape[1:])) for sample in samples]
        # make_private refuses parameters on several devices.
        norms = torch.stack([(row.float() if half else row).norm(2, dim=-1) for row in rows], dim=1)
        finite = torch.isfinite(norms).all(dim=1)
        all_finite = bool(finite.all())
        factors = self.factors(optimizer, norms, MARGIN if half else 1.0)
        totals = []
        for parameter, row, factor in zip(parameters, rows, factors, strict=True):
            row = row.to(sum_dtype(parameter))
            if not all_finite:  # a factor of zero is not enough: zero times infinity is NaN
                factor = factor.masked_fill(~finite, 0.0)
                row = row.masked_fill(~finite[:, None], 0.0)
            # The product to which Opacus's einsum("i,i...") comes down, without the overhead.
            total = torch.bmm(factor.to(row.dtype).view(1, 1, -1), row[None])
            totals.append(total.view(parameter.shape))
        for parameter, total in zip(parameters, totals, strict=True):
            add_to_sum(parameter, total)
            mark_as_used(parameter.grad_sample)
        self.count(optimizer, factors[0], finite)
        return len(samples[0]), self.norm(optimizer)

    def norm(self, optimizer: Any) -> float:
        """Returns the norm that one whole report is clipped to."""
        return float(optimizer.max_grad_norm)

    def factors(self, optimizer: Any, norms: torch.Tensor, margin: float) -> Sequence[torch.Tensor]:
        """Returns each record's factor for its gradient of each parameter, of shape [records].

        Args:
            optimizer: Its ``max_grad_norm`` or ``max_grad_norms`` are the limits.
            norms: Each record's norm for each parameter, of shape [records, parameters].
            margin: A factor of the limit, below 1 if the norms are rounded.
        """
        factors = _factors(margin * optimizer.max_grad_norm, norms.norm(2, dim=1))
        return [factors] * norms.shape[1]

    def count(self, optimizer: Any, factors: torch.Tensor, finite: torch.Tensor) -> None:
        """Counts unclipped records for adaptive clipping; other ways of clipping count nothing."""


class LayerClipping(FlatClipping):
    """Clips each record's gradient of each parameter to a norm of its own."""

    def norm(self, optimizer: Any) -> float:
        """Returns the norm of the vector of all layers' clipping norms."""
        return float(torch.norm(torch.Tensor(optimizer.max_grad_norms), p=2).item())

    def factors(self, optimizer: Any, norms: torch.Tensor, margin: float) -> Sequence[torch.Tensor]:
        """Returns each record's factor for its gradient of each parameter."""
        pairs = zip(optimizer.max_grad_norms, norms.unbind(1), strict=True)
        return [_factors(margin * limit, norm) for limit, norm in pairs]


class AdaptiveClipping(FlatClipping):
    """Clips to a norm that is adapted to the share of unclipped records, as Opacus does."""

    def count(self, optimizer: Any, factors: torch.Tensor, finite: torch.Tensor) -> None:
        """Counts the records that were not clipped, as Opacus does."""
        factors = factors.masked_fill(~finite, 0.0)
        optimizer.sample_size += len(factors)
        optimizer.unclipped_num += len(factors) - (factors < 1).sum()


class GhostClipping(Clipping):
    """Uses sums that the criterion's backward pass has clipped (ghost clipping)."""

    in_backward: ClassVar[bool] = True
    clipped: tuple[int, float] | None = None
    """How many records the criterion has clipped for the next step, and to which norm."""
    clipped_parameters: frozenset[int] = frozenset()
    gradients: Sequence[tuple[torch.Tensor | None, int]] = ()
    sums: Mapping[torch.Tensor, torch.Tensor] = types.MappingProxyType({})

    def forget_pass(self) -> None:
        """Drops the clipped gradients, so that no step uses them."""
        self.clipped, self.clipped_parameters, self.gradients, self.sums = None, frozenset(), (), {}

    def note_pass(
        self, optimizer: Any, module: Any, records: int, sums: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Stores what a backward pass has clipped, which is in ``.grad``.

        Args:
            optimizer: The optimizer whose step releases the sum.
            module: Opacus's wrapper or hooks, with the norm and the parameters.
            records: How many records the batch had.
            sums: Sums that replace ``.grad``, because they are more precise.
        """
        self.clipped = records, float(module.max_grad_norm)
        self.clipped_parameters = frozenset(map(id, module.trainable_parameters))
        self.gradients = [version_of(parameter.grad) for parameter in optimizer.params]
        self.sums = sums

    def record_counts(self, optimizer: Any) -> set[int]:
        """Returns how many records the criterion has clipped."""
        return set() if self.clipped is None else {self.clipped[0]}

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Adds what the criterion has clipped to the sum of the logical batch.

        Raises:
            ValueError: If the gradient was not clipped or has changed since, or the optimizer has a
                parameter that the criterion does not clip.
        """
        clipped, sums, parameters = self.clipped, self.sums, optimizer.params
        if clipped is None:
            raise ValueError(
                "this gradient was not clipped: call the criterion that make_private returned, "
                "then loss.backward(), then optimizer.step(), once each per batch"
            )
        for parameter in parameters:
            check_unused(parameter.summed_grad)
        if not self.clipped_parameters.issuperset(map(id, parameters)):
            raise ValueError(
                "a parameter was made trainable after make_private and is not clipped: call "
                "make_private after"
            )
        seen, gradients = self.gradients, [parameter.grad for parameter in parameters]
        # .grad is the sum itself now. It must not change before noise is added to it.
        optimizer.forget_clipped()
        for gradient, (noted, version) in zip(gradients, seen, strict=True):
            if gradient is not noted or version_of(gradient)[1] != version:
                raise ValueError(
                    "gradients were changed between loss.backward() and optimizer.step() (by "
                    "another loss, or in place, as torch.nn.utils.clip_grad_norm_ does), so they "
                    "are not those that were clipped; backpropagate the criterion's loss alone, "
                    "leave .grad to the optimizer, and set the norm by max_grad_norm"
                )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            add_to_sum(parameter, sums.get(parameter, gradient).detach())
        return clipped


def clipping_for(clipping: str, grad_sample_mode: str, *, distributed: bool) -> Clipping:
    """Returns the strategy for keywords of Opacus's ``make_private``.

    Raises:
        ValueError: If Opacus has no optimizer for them.
    """
    get_optimizer_class(clipping, distributed, grad_sample_mode)  # which refuses them by name
    if grad_sample_mode == "ghost":
        return GhostClipping()
    strategies = {"flat": FlatClipping, "per_layer": LayerClipping, "adaptive": AdaptiveClipping}
    return strategies[clipping]()


def version_of(gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """Returns a gradient with its version counter, which changes when it is written to."""
    return gradient, -1 if gradient is None else gradient._version


def add_to_sum(parameter: Any, total: torch.Tensor) -> None:
    """Adds a physical batch to a parameter's sum."""
    before = parameter.summed_grad
    parameter.summed_grad = total if before is None else before.add_(total)


def _factors(limit: float, norms: torch.Tensor) -> torch.Tensor:
    """Returns the factors that clip vectors of these norms to a limit, by Opacus's formula."""
    return (limit / (norms + 1e-6)).clamp(max=1.0)


def sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the precision of sums: single for half precision, else the parameter's own."""
    return torch.float32 if parameter.dtype in HALF else parameter.dtype
