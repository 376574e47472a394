"""A record whose gradient is not finite costs its own report, never the run; and no rounding lets a report exceed the norm.

NaN or infinity in one record's gradient makes the sum of the whole batch NaN in Opacus, and with it every weight. Here such a
report is zero, and is noised like the others: whether it happened is not released. Where all gradients are finite, sums are
Opacus's, bit for bit, unless gradients are of half precision, in which Opacus rounds norms and sums by up to half a percent:
they are clipped and summed in single precision.

>>> from opacus import GradSampleModule
>>> model = GradSampleModule(torch.nn.Linear(2, 1, bias=False))
>>> sgd = torch.optim.SGD(model.parameters(), lr=1.0)
>>> optimizer = UsableRecords(sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2)
>>> model(torch.tensor([[3.0, 4.0], [float("nan"), 1.0]])).sum().backward()
>>> optimizer.step()
>>> next(model.parameters()).summed_grad.norm().item() <= 1
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opacus.optimizers import AdaClipDPOptimizer, FSDPOptimizerFastGradientClipping

from opacus_shuffle.core.opacus_compat import gaussian_noise, mark_as_used, refuse_used
from opacus_shuffle.engine.optimizers.planned_parameters import PlannedParameters

HALF = (torch.bfloat16, torch.float16)
MARGIN = 1 - 2**-18
"""Norms in single precision are right to this factor."""


class UsableRecords(PlannedParameters):
    """Mixin for any Opacus optimizer.

    Attributes:
        sums_by_itself: Whether a subclass clips and sums in its own way, with its own eye on what is not finite.
    """

    sums_by_itself: bool = False
    _noted: list[tuple[torch.Tensor, torch.Tensor | None, int]] | None = None
    _single: dict[torch.Tensor, torch.Tensor] | None = None

    def clip_and_accumulate(self) -> None:
        """Clip and sum one physical batch, without the records that cannot be clipped."""
        parameters = self.params
        if self.sums_by_itself or not parameters:
            super().clip_and_accumulate()
            return
        if any(map(_is_half, parameters)) or (isinstance(self, AdaClipDPOptimizer) and not any(map(len, self.grad_samples))):
            self._clip_in_single()
            return
        sums, counts = [each.summed_grad for each in parameters], dict(vars(self))
        for each in parameters:
            each.summed_grad = None
        try:
            super().clip_and_accumulate()
            if not _are_finite([each.summed_grad for each in parameters]):
                for name in _COUNTS & counts.keys():
                    setattr(self, name, counts[name])
                for each in parameters:
                    each.summed_grad = None
                zero_unusable(parameters)
                super().clip_and_accumulate()
        except BaseException:
            for each, before in zip(parameters, sums, strict=True):
                each.summed_grad = before
            raise
        for each, before in zip(parameters, sums, strict=True):
            if before is not None:
                each.summed_grad = before.add_(each.summed_grad)

    def add_noise(self) -> None:
        """Add the noise; to sums in single precision before they are rounded to the parameter's."""
        parameters = self.params
        if all(each.summed_grad is None or each.summed_grad.dtype == each.dtype for each in parameters):
            super().add_noise()
            return
        for each in parameters:
            refuse_used(each.summed_grad)
            noise = gaussian_noise(
                std=self.noise_multiplier * self.max_grad_norm,
                reference=each.summed_grad,
                generator=self.generator,
                secure_mode=self.secure_mode,
            )
            each.grad = (each.summed_grad + noise).view_as(each).to(each.dtype)
            mark_as_used(each.summed_grad)

    def note_clipped(self, sums: dict[torch.Tensor, torch.Tensor]) -> None:
        """Remember the gradients that ghost clipping has clipped, and their sums where these are more precise."""
        self._noted = [(each, each.grad, -1 if each.grad is None else each.grad._version) for each in self.params]
        self._single = {each: sums[each] for each in self.params if each in sums and self.sum_dtype(each) != each.dtype}

    def forget_clipped(self) -> None:
        """Have nothing clipped: the backward pass has failed, or its gradients are used, which no other step may take."""
        self._noted = self._single = None
        for each in self.params:
            each.grad = None

    def accumulate(self) -> None:
        """Add what ghost clipping has clipped to the sum of the logical batch.

        Raises:
            ValueError: If it was changed since.
        """
        if isinstance(self, FSDPOptimizerFastGradientClipping):
            super().accumulate()  # which keeps the sums of shards elsewhere
            return
        parameters, single = self.params, self._single or {}
        for each, gradient, version in self._noted or ():
            if each.grad is not gradient or (gradient is not None and gradient._version != version):
                self.forget_clipped()
                raise ValueError(
                    "gradients were changed between loss.backward() and optimizer.step() (by another loss, or in place), so "
                    "they are no longer clipped; backpropagate the criterion's loss alone, and leave .grad to the optimizer"
                )
        for each in parameters:
            total = single[each] if each in single else each.grad.detach()
            each.summed_grad = total if each.summed_grad is None else each.summed_grad.add_(total)
        self.forget_clipped()  # .grad is the sum itself now, which nobody may change before there is noise on it

    def sum_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The precision of sums: single for half-precision parameters, where the noise is ours to add."""
        others_add_noise = isinstance(self, AdaClipDPOptimizer) or hasattr(self, "world_size")
        return torch.float32 if parameter.dtype in HALF and not others_add_noise else parameter.dtype

    def _clip_in_single(self) -> None:
        """Opacus's clipping and summing, in single precision."""
        parameters = self.params
        for each in parameters:
            refuse_used(each.grad_sample)
        samples, device = self.grad_samples, parameters[0].device
        rows = [sample.reshape(len(sample), -1) if len(sample) else sample.new_zeros(0, 1) for sample in samples]
        norms = torch.stack([torch.linalg.vector_norm(row.float(), dim=1).to(device) for row in rows], dim=1)
        unusable = ~torch.isfinite(norms).all(dim=1)
        limits = torch.tensor(getattr(self, "max_grad_norms", [self.max_grad_norm]), device=device, dtype=norms.dtype)
        if len(limits) == 1:
            norms = torch.linalg.vector_norm(norms, dim=1, keepdim=True)
        factors = (MARGIN * limits / (norms + 1e-6)).clamp(max=1.0).masked_fill(unusable[:, None], 0.0)
        if isinstance(self, AdaClipDPOptimizer):
            self.sample_size = max(1, self.sample_size + len(factors))  # Opacus divides by it, also where nobody came
            self.unclipped_num += (norms < limits).sum()
        for each, sample, factor in zip(parameters, samples, factors.expand(-1, len(parameters)).unbind(1), strict=True):
            usable = _without(sample.float(), unusable)
            total = torch.einsum("i,i...", factor.to(usable.device), usable).to(self.sum_dtype(each))
            each.summed_grad = total if each.summed_grad is None else each.summed_grad.add_(total)
            mark_as_used(each.grad_sample)


_COUNTS = {"sample_size", "unclipped_num"}
"""What adaptive clipping counts while it clips."""


def zero_unusable(parameters: Sequence[Any]) -> None:
    """Replaces the gradients of a record that are not all finite by zeros, over all parameters."""
    stacks = [each.grad_sample if isinstance(each.grad_sample, list) else [each.grad_sample] for each in parameters]
    device = parameters[0].device
    for number, pieces in enumerate(zip(*stacks, strict=True)):  # the pieces of one backward pass
        finite = [torch.isfinite(piece).reshape(len(piece), -1).all(dim=1).to(device) for piece in pieces if len(piece)]
        if finite:
            unusable = ~torch.stack(finite).all(dim=0)
            for stack, piece in zip(stacks, pieces, strict=True):
                stack[number] = _without(piece, unusable)
    for each, stack in zip(parameters, stacks, strict=True):
        each.grad_sample = stack if isinstance(each.grad_sample, list) else stack[0]


def _without(sample: torch.Tensor, unusable: torch.Tensor) -> torch.Tensor:
    """A copy with zeros for these records: no factor of zero would do, for zero times infinity is NaN."""
    return sample.masked_fill(unusable.to(sample.device).view(-1, *[1] * (sample.dim() - 1)), 0.0)


def _are_finite(sums: list[torch.Tensor | None]) -> bool:
    """Whether all are, as their own sums show, in one look at the device."""
    totals = [each.sum() for each in sums if each is not None]
    return not totals or bool(torch.isfinite(torch.stack([each.to(totals[0].device) for each in totals])).all())


def _is_half(parameter: Any) -> bool:
    """Whether the parameter or its waiting gradients are of half precision."""
    waiting = getattr(parameter, "grad_sample", None)
    pieces = waiting if isinstance(waiting, list) else [waiting]
    return parameter.dtype in HALF or any(isinstance(piece, torch.Tensor) and piece.dtype in HALF for piece in pieces)
