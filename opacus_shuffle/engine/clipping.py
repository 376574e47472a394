"""Clipping: how the gradients of one batch's records become a sum that no record moves far.

A strategy of :class:`~opacus_shuffle.engine.private_optimizer.PrivateOptimizer`, which asks it once
for each physical batch. Where all gradients are finite, sums are Opacus's, bit for bit. Opacus lets
one record whose gradient is NaN or infinite make the whole sum NaN, and with it every weight; here
such a record's report is zero, and is noised like the others: whether it happened is not released.

Half precision rounds norms and sums by up to half a percent, so that a clipped report may exceed
its norm. There everything is computed in single precision, with a margin for its own rounding.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.private_optimizer import PrivateOptimizer
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
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed
from opacus.optimizers import FSDPOptimizerFastGradientClipping, get_optimizer_class

from opacus_shuffle.core.opacus_compat import mark_as_used, refuse_used, rows_waiting

HALF = (torch.bfloat16, torch.float16)
MARGIN = 1 - 2**-18
"""Norms in single precision are right to this factor."""


class Clipping:
    """One way of making a clipped sum: ``summed_grad`` of each parameter of an optimizer.

    Attributes:
        in_backward: Whether the backward pass clips, so that there are no gradients of records.
    """

    in_backward: ClassVar[bool] = False

    def rows(self, optimizer: Any) -> set[int]:
        """How many records each parameter has gradients of, that the next step will clip."""
        return rows_waiting(optimizer)

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Clips one physical batch and adds it to the sum of the logical one.

        Returns:
            How many records it had, and the norm that one whole report was clipped to.
        """
        raise NotImplementedError

    def check_release(self, optimizer: Any) -> None:
        """Refuses a sum that the noise is not made for; raises a ValueError."""

    def forget_pass(self) -> None:
        """Forgets what a backward pass has clipped and no step has taken."""

    def forget_sum(self) -> None:
        """Forgets the sum of a logical batch, where it is not ``summed_grad``."""


class FlatClipping(Clipping):
    """A record's whole gradient, over all parameters, is clipped to one norm."""

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Clips gradients of records, and leaves out those that are not finite."""
        parameters = optimizer.params
        for parameter in parameters:
            refuse_used(parameter.grad_sample)
            refuse_used(parameter.summed_grad)
        samples = optimizer.grad_samples
        dtypes = {tensor.dtype for tensor in (*parameters, *samples)}
        half = not dtypes.isdisjoint(HALF)
        norms = [_row_norms(sample.float() if half else sample) for sample in samples]
        device = norms[0].device
        finite = torch.isfinite(torch.stack([norm.to(device) for norm in norms])).all(dim=0)
        spoilt = not bool(finite.all())
        factors = self.factors(optimizer, norms, MARGIN if half else 1.0)
        if spoilt:
            factors = [factor.masked_fill(~finite.to(factor.device), 0.0) for factor in factors]
        self.count(optimizer, factors)
        totals = []
        for parameter, sample, factor in zip(parameters, samples, factors, strict=True):
            sample = sample.to(_sum_dtype(parameter))
            if spoilt:  # no factor of zero would do, for zero times infinity is NaN
                unusable = ~finite.to(sample.device).view(-1, *[1] * (sample.dim() - 1))
                sample = sample.masked_fill(unusable, 0.0)
            totals.append(torch.einsum("i,i...", factor.to(sample.device, sample.dtype), sample))
        for parameter, total in zip(parameters, totals, strict=True):
            _add_to_sum(parameter, total)
            mark_as_used(parameter.grad_sample)
        return len(samples[0]), self.norm(optimizer)

    def norm(self, optimizer: Any) -> float:
        """The norm that one whole report is clipped to."""
        return float(optimizer.max_grad_norm)

    def factors(
        self, optimizer: Any, norms: list[torch.Tensor], margin: float
    ) -> list[torch.Tensor]:
        """What each record's gradient of each parameter is multiplied by, of shape [records].

        Args:
            optimizer: Its norms are clipped to.
            norms: Each record's norms, for one parameter after another.
            margin: By how much less to clip, for norms that are rounded.
        """
        device = norms[0].device
        whole = torch.stack([norm.to(device) for norm in norms], dim=1).norm(2, dim=1)
        return [_factors(margin * optimizer.max_grad_norm, whole)] * len(norms)

    def count(self, optimizer: Any, factors: list[torch.Tensor]) -> None:
        """Notes how many records were clipped, where the norm adapts to it."""


class LayerClipping(FlatClipping):
    """The gradient of each parameter is clipped to a norm of its own."""

    def norm(self, optimizer: Any) -> float:
        """The norm of the layers' norms, which schedulers do not reach."""
        return float(torch.norm(torch.Tensor(optimizer.max_grad_norms), p=2).item())

    def factors(
        self, optimizer: Any, norms: list[torch.Tensor], margin: float
    ) -> list[torch.Tensor]:
        """What each record's gradient is multiplied by, another one for each parameter."""
        limits = optimizer.max_grad_norms
        pairs = zip(limits, norms, strict=True)
        return [_factors(margin * limit, norm) for limit, norm in pairs]


class AdaptiveClipping(FlatClipping):
    """Opacus's adaptive clipping, whose norm follows how many records were clipped."""

    def count(self, optimizer: Any, factors: list[torch.Tensor]) -> None:
        """Counts, as Opacus, the records that were not clipped."""
        optimizer.sample_size += len(factors[0])
        optimizer.unclipped_num += len(factors[0]) - (factors[0] < 1).sum()


class GhostClipping(Clipping):
    """Ghost clipping: the criterion's backward pass clips, and says what it has clipped."""

    in_backward: ClassVar[bool] = True

    def __init__(self) -> None:
        self.forget_pass()

    def forget_pass(self) -> None:
        """Forgets what the criterion has clipped: no step takes it any more."""
        self.records: int | None = None
        self.norm = 0.0
        self.known: frozenset[int] = frozenset()
        self.gradients: list[tuple[Any, torch.Tensor | None, int]] = []
        self.single: dict[torch.Tensor, torch.Tensor] = {}

    def note(
        self, optimizer: Any, module: Any, records: int, sums: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Takes over what a backward pass has clipped, which is in ``.grad``.

        Args:
            optimizer: Whose step is to release it.
            module: Opacus's wrapper or hooks, which knows the norm and the parameters.
            records: How many records the batch had.
            sums: Sums that are more precise than ``.grad`` of parameters in half precision.
        """
        self.records, self.norm = records, float(module.max_grad_norm)
        self.known = frozenset(map(id, module.trainable_parameters))
        self.gradients = [
            (parameter, parameter.grad, _version(parameter.grad)) for parameter in optimizer.params
        ]
        self.single = {
            parameter: sums[parameter]
            for parameter in optimizer.params
            if parameter in sums and parameter.dtype in HALF
        }

    def rows(self, optimizer: Any) -> set[int]:
        """How many records the criterion has clipped."""
        return set() if self.records is None else {self.records}

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Adds what the criterion has clipped to the sum of the logical batch.

        Raises:
            ValueError: If the gradient was not clipped, or changed since, or holds a parameter that
                the criterion does not know.
        """
        if self.records is None:
            raise ValueError(
                "this gradient was not clipped: call the criterion that make_private returned, "
                "then loss.backward(), then optimizer.step(), once each per batch"
            )
        for parameter in optimizer.params:
            refuse_used(parameter.summed_grad)
        if not self.known.issuperset(map(id, optimizer.params)):
            raise ValueError(
                "a parameter was made trainable after make_private and is not clipped: call "
                "make_private after"
            )
        changed = any(
            parameter.grad is not gradient or _version(gradient) != version
            for parameter, gradient, version in self.gradients
        )
        noted = self.records, self.norm
        totals = [
            (parameter, self.single.get(parameter, parameter.grad))
            for parameter in optimizer.params
        ]
        # .grad is the sum itself now, which nobody may change before there is noise on it.
        optimizer.forget_clipped()
        if changed:
            raise ValueError(
                "gradients were changed between loss.backward() and optimizer.step() (by another "
                "loss, or in place), so they are no longer clipped; backpropagate the criterion's "
                "loss alone, and leave .grad to the optimizer"
            )
        for parameter, total in totals:
            _add_to_sum(parameter, total.detach())
        return noted


class ShardedClipping(Clipping):
    """Ghost clipping of sharded networks, as Opacus does it, which keeps sums in the optimizer."""

    in_backward: ClassVar[bool] = True

    def __init__(self) -> None:
        self.sums: dict[torch.Tensor, dict[str, Any]] = {}

    def clip(self, optimizer: Any) -> tuple[int, float]:
        """Adds what Opacus's criterion has clipped; how many records that were is not known."""
        if not self.sums:
            self.sums = {parameter: {"summed_grad": None} for parameter in optimizer.params}
        # Opacus's own optimizer of sharded networks has these.
        optimizer.grad_state, optimizer.world_size = self.sums, torch.distributed.get_world_size()
        FSDPOptimizerFastGradientClipping.accumulate(optimizer)
        return 0, float(optimizer.max_grad_norm)

    def forget_sum(self) -> None:
        """Forgets the sums of shards."""
        self.sums = {}


def clipping_for(*, clipping: str, grad_sample_mode: str, distributed: bool) -> Clipping:
    """The strategy for keywords of Opacus's ``make_private``.

    Raises:
        ValueError: If Opacus has no optimizer for them.
    """
    get_optimizer_class(clipping, distributed, grad_sample_mode)  # which refuses them by name
    if grad_sample_mode == "ghost":
        return GhostClipping()
    if grad_sample_mode == "ghost_fsdp":
        return ShardedClipping()
    kinds = {"flat": FlatClipping, "per_layer": LayerClipping, "adaptive": AdaptiveClipping}
    return kinds[clipping]()


def _row_norms(sample: torch.Tensor) -> torch.Tensor:
    """The norm of each record's gradient of one parameter, of shape [records]."""
    return sample.reshape(len(sample), math.prod(sample.shape[1:])).norm(2, dim=-1)


def _factors(limit: float, norms: torch.Tensor) -> torch.Tensor:
    """What clips vectors of these norms to a limit; Opacus's formula."""
    return (limit / (norms + 1e-6)).clamp(max=1.0)


def _sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The precision of sums: single for parameters in half precision, else the parameter's own."""
    return torch.float32 if parameter.dtype in HALF else parameter.dtype


def _add_to_sum(parameter: Any, total: torch.Tensor) -> None:
    """Adds a physical batch to a parameter's sum."""
    before = parameter.summed_grad
    parameter.summed_grad = total if before is None else before.add_(total)


def _version(gradient: torch.Tensor | None) -> int:
    """How often a gradient was written to."""
    return -1 if gradient is None else gradient._version
