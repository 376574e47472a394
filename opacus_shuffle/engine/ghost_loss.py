"""The loss of ghost clipping, whose two backward passes clip every record, whatever happens in them.

Opacus multiplies one clipping factor per record by one loss per record. That clips nothing where
the losses have the shape ``[B, 1]`` (they broadcast) or none at all; where an exception leaves the
hooks off, so that later batches are weighed with old norms; and where one record's loss is not
finite, for zero times infinity is NaN. Here losses have the shape ``[B]`` or are refused, hooks
come back on, norms are those of this pass, and a batch with a record that cannot be clipped is
summed from the gradients of each record, layer by layer, without that one. So is a batch in half
precision, whose second pass would round by more than the noise is made for.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleHooksFastGradientClippingFSDP,
)
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from opacus.utils.module_utils import trainable_parameters
from torch import nn

from opacus_shuffle.core.opacus_compat import (
    expect_backward,
    forget_pass,
    norms_of_no_records,
    records_of_calls,
    without_norm,
    wrapped_network,
)
from opacus_shuffle.engine.clipping import HALF
from opacus_shuffle.engine.raw_gradients import names_of
from opacus_shuffle.networks.check import check_criterion

HALF_MARGIN = 1 - 2**-7
"""A norm in half precision is right to this factor."""


class GhostPasses:
    """What the layers show in a first backward pass, and the clipped sums of a second one.

    Args:
        module: Opacus's wrapper or hooks of ghost clipping.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.end()

    def __getstate__(self) -> dict[str, Any]:
        """Without what the layers have shown: that is data."""
        return vars(GhostPasses(self.module))

    def end(self) -> None:
        """Forgets the passes."""
        self.calls: list[tuple[nn.Module, list[torch.Tensor], int | None]] = []
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self.factors: torch.Tensor | None = None
        self.half = False

    def first(
        self, layer: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...], **keywords: Any
    ) -> None:
        """Notes a layer's call, and lets Opacus compute the norms.

        Raises:
            ValueError: If no call waits for this backward pass; Opacus says why where it looks for
                one.
        """
        if not vars(layer).get("activations"):
            self.module.rearrange_grad_samples(module=layer, backprops=output[0], **keywords)
        if norms_of_no_records(self.module, layer):
            return
        self.calls.append((layer, layer.activations[-1], getattr(layer, "max_batch_len", None)))  # type: ignore[index, arg-type]
        if output[0].dtype in HALF:
            self.half = True
            if type(layer) in self.module.GRAD_SAMPLERS and not self.module.force_functorch:
                output = (output[0].float(), *output[1:])
        GradSampleHooksFastGradientClipping.capture_backprops_hook(
            self.module, layer, inputs, output, **keywords
        )

    def replay(self, factors: torch.Tensor) -> None:
        """Puts back what the first pass has taken from the layers."""
        self.factors = factors
        for layer, activations, length in reversed(self.calls):
            layer.activations = [*getattr(layer, "activations", []), activations]  # type: ignore[assignment, misc]
            if length is not None:
                layer.max_batch_len = length  # type: ignore[assignment]
            expect_backward(layer)

    def second(
        self, layer: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...], **keywords: Any
    ) -> None:
        """Sums the gradients of a layer's parameters, with the factors, without the records whose factor is zero."""
        assert self.factors is not None
        if (
            output[0].dtype in HALF
            and type(layer) in self.module.GRAD_SAMPLERS
            and not self.module.force_functorch
        ):
            output = (output[0].float(), *output[1:])
        GradSampleHooks.capture_backprops_hook(self.module, layer, inputs, output, **keywords)
        for _, parameter in trainable_parameters(layer):
            if parameter.grad_sample is not None:
                sample = parameter.grad_sample.to(
                    torch.float32 if parameter.grad_sample.dtype in HALF else None
                )
                factors = self.factors.to(sample.device, sample.dtype)
                left_out = (factors == 0).view(-1, *[1] * (sample.dim() - 1))
                self.sums[parameter] = torch.einsum(
                    "i,i...", factors, sample.masked_fill(left_out, 0.0)
                )
                parameter.grad_sample = None

    def refuse(self, losses: torch.Tensor) -> None:
        """Refuses, before any backward pass, losses that factors per record would not clip.

        Raises:
            ValueError: There is not one loss per record, the network ran in evaluation mode, or
                hooks change its gradients.
        """
        network = wrapped_network(self.module)
        hooked = [
            name
            for name, parameter in network.named_parameters()
            if parameter.requires_grad
            and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
        ]
        if hooked:
            raise ValueError(
                f"parameters {', '.join(hooked[:3])} have gradient hooks of their own, which would "
                "change what ghost clipping "
                "has clipped: remove them, or use grad_sample_mode='hooks', where they change "
                "nothing"
            )
        records = records_of_calls(self.module)
        if records is None:
            asleep = [
                name or "the module itself"
                for name, layer in network.named_modules()
                if not layer.training
            ]
            raise ValueError(
                f"no gradient per record can be had: {', '.join(asleep[:3])} ran in evaluation "
                "mode; call model.train() before "
                "the forward pass"
                if asleep
                else "no gradient per record can be had: the network did not run since the last backward pass, or ran without "
                "gradients, or under torch.utils.checkpoint; call loss.backward() once for each "
                "forward pass"
            )
        if losses.dim() != 1 or len(losses) != records:
            raise ValueError(
                f"criterion must give one loss per record, of shape ({records},), with "
                "reduction='none', got "
                f"{tuple(losses.shape)}: ghost clipping would not clip; flatten the network's "
                "output and the targets, or use a "
                "criterion that heeds its attribute reduction"
            )


def _capture_backprops(
    self: Any,
    module: nn.Module,
    _forward_input: Any,
    forward_output: Any,
    loss_reduction: str,
    batch_first: bool,
) -> None:
    """Opacus's hook, through the passes that it belongs to."""
    if self.hooks_enabled:
        passes: GhostPasses = self.ghost_passes
        what = passes.first if passes.factors is None else passes.second
        what(
            module,
            _forward_input,
            forward_output,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )


def _capture_activations(self: Any, module: nn.Module, forward_input: Any, output: Any) -> None:
    """Opacus's hook; embeddings get their indices written out in memory, as their norms need them."""
    if isinstance(module, nn.Embedding):
        forward_input = [tensor.contiguous() for tensor in forward_input]
    try:
        GradSampleHooksFastGradientClipping.capture_activations_hook(
            self, module, forward_input, output
        )
    except NotImplementedError as error:
        name = next(
            name for name, layer in wrapped_network(self).named_modules() if layer is module
        )
        raise ValueError(
            f"{name or 'the module itself'} ({type(module).__name__}) runs twice before a backward "
            "pass, which "
            "grad_sample_mode='ghost' does not support: run what is not trained on under "
            "torch.no_grad() or in evaluation "
            "mode, and use grad_sample_mode='hooks' for a layer that is called several times"
        ) from error


# Under these names a copy that is pickled finds Opacus's own.
_capture_activations.__name__ = "capture_activations_hook"
_capture_backprops.__name__ = "capture_backprops_hook"


def watch_passes(module: Any) -> GhostPasses:
    """Has the hooks of ghost clipping tell their passes what they see; once is enough."""
    if "ghost_passes" not in vars(module):
        module.ghost_passes = GhostPasses(module)
        module.remove_hooks()
        for hook in (_capture_activations, _capture_backprops):
            setattr(module, hook.__name__, types.MethodType(hook, module))
        try:
            module.add_hooks(
                loss_reduction=module.loss_reduction,
                batch_first=module.batch_first,
                force_functorch=module.force_functorch,
            )
        finally:
            del module.capture_activations_hook, module.capture_backprops_hook
    passes: GhostPasses = module.ghost_passes
    return passes


def _not_finite(norms: torch.Tensor, losses: torch.Tensor) -> torch.Tensor | None:
    """Which records' norms or losses are not finite; None if all are, which one look at their sums nearly always tells."""
    if math.isfinite(float(norms.sum() + losses.sum().to(norms.device))):
        return None
    usable = torch.isfinite(norms) & torch.isfinite(losses).to(norms.device)
    return None if bool(usable.all()) else ~usable


class GhostLoss(DPTensorFastGradientClipping):
    """One loss per record; sums, differences and multiples of such are such."""

    def backward(self, **keywords: Any) -> None:
        """Clips every record's gradient: two backward passes, as Opacus's, bit for bit where all is finite.

        Raises:
            ValueError: If the losses are not one per record, or a parameter has no gradient per
                record.
        """
        if keywords:
            raise ValueError(
                f"backward() of a loss of ghost clipping takes no {', '.join(keywords)}: it makes "
                "two passes of its own; call "
                "it once for each forward pass"
            )
        module, optimizer, losses = self.module, self.optimizer, self.loss_per_sample
        passes = watch_passes(module)
        passes.refuse(losses)
        passes.end()
        forget_pass(module, norms_only=True)
        done = False
        try:
            reduced = (
                torch.mean(losses, dim=0)
                if self.loss_reduction == "mean"
                else torch.sum(losses, dim=0)
            )
            reduced.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            optimizer.zero_grad(
                set_to_none=True
            )  # nothing to add to, which would take a pass over all weights
            if missing := without_norm(module):
                raise ValueError(
                    f"parameters {names_of(missing)} took no part in this batch's loss, so ghost "
                    "clipping has no norms for "
                    "them; use them in every forward pass, freeze them before make_private, and "
                    "replace none of them after it"
                )
            factors = module.get_clipping_coef()
            unusable = _not_finite(module.per_sample_gradient_norms, losses.detach())
            if unusable is None and not passes.half:
                passes.end()  # lest it keep memory that the second pass could use
                clipped = torch.sum(factors.to(losses.device) * losses)
                module.disable_hooks()
                clipped.backward()  # type: ignore[no-untyped-call]
            else:
                factors = HALF_MARGIN * factors.float() if passes.half else factors
                passes.replay(factors if unusable is None else factors.masked_fill(unusable, 0.0))
                reduced.backward()  # type: ignore[no-untyped-call]
                for parameter, total in passes.sums.items():
                    parameter.grad = total.to(parameter.dtype)
            optimizer.clipping.note(optimizer, module, len(factors), passes.sums)
            done = True
        finally:
            passes.end()
            module.enable_hooks()
            if not done:
                forget_pass(module)
                optimizer.forget_clipped()


def _keeping(name: str) -> Any:
    """An operation of Opacus's loss whose result is a :class:`GhostLoss`."""

    def operation(self: GhostLoss, *others: Any) -> GhostLoss:
        for other in others:
            of_criterion = isinstance(other, DPTensorFastGradientClipping)
            other = other.loss_per_sample if of_criterion else other
            # Of a tensor of as many numbers nobody knows whether each is of one record alone.
            unknown = isinstance(other, torch.Tensor) and (
                not of_criterion or other.shape != self.loss_per_sample.shape
            )
            if unknown and other.requires_grad:
                raise ValueError(
                    "a loss of ghost clipping goes with numbers and losses of the same records, "
                    "got a tensor of shape "
                    f"{tuple(other.shape)} that requires a gradient, which nobody would clip: "
                    "compute it in the criterion, use "
                    "the optimizer's weight_decay for penalties, or grad_sample_mode='hooks'"
                )
        result = getattr(DPTensorFastGradientClipping, name)(self, *others)
        return GhostLoss(
            result.module, result.optimizer, result.loss_per_sample, result.loss_reduction
        )

    operation.__name__ = name
    return operation


for _name in (
    "__truediv__",
    "__mul__",
    "__rmul__",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__neg__",
):
    setattr(GhostLoss, _name, _keeping(_name))


class GhostCriterion(DPLossFastGradientClipping):
    """Opacus's criterion of ghost clipping, whose losses are :class:`GhostLoss`, and whose first ones are looked at."""

    looked_at = False

    def __call__(self, *args: Any, shape: Any = None, **keywords: Any) -> GhostLoss:
        """The losses of a batch.

        Raises:
            ValueError: If a record's loss depends on other records.
        """
        reduction = self.criterion.reduction
        try:
            loss = super().__call__(*args, shape=shape, **keywords)
            if not self.looked_at and loss.loss_per_sample.requires_grad:
                self.criterion.reduction = "none"
                self.looked_at = check_criterion(self.criterion, args, keywords)
        finally:
            self.criterion.reduction = reduction
        return GhostLoss(loss.module, loss.optimizer, loss.loss_per_sample, loss.loss_reduction)


def clipped_whatever_happens(criterion: Any) -> Any:
    """Opacus's criterion as ours; others, of sharded networks and of engines with a way of their own, as they are."""
    sharded = isinstance(
        getattr(criterion, "module", None), GradSampleHooksFastGradientClippingFSDP
    )
    if type(criterion) is DPLossFastGradientClipping and not sharded:
        criterion.__class__ = GhostCriterion
        watch_passes(criterion.module)
    return criterion
