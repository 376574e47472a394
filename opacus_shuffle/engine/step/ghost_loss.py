"""The loss of ghost clipping, which clips every record in two backward passes.

The first pass finds the norm of each record's gradient without storing the gradient. The second
pass computes the sum of the losses, each multiplied by its record's clipping factor. Opacus's loss
clips nothing if the losses have the shape ``[B, 1]``, which broadcasts, or are already reduced.
After an exception its hooks stay disabled, and later batches get old norms. One loss that is not
finite makes the sum NaN, because zero times infinity is NaN.

Here losses must have the shape ``[B]``, hooks are enabled again, and norms belong to the current
pass. Two kinds of batches are summed from each record's gradients instead, layer by layer: a
batch with a record that cannot be clipped, which is left out; and a batch in half precision, whose
second pass would round by more than the noise covers.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from opacus.utils.module_utils import trainable_parameters
from torch import nn

from opacus_shuffle.accountants import ShuffleAccountant
from opacus_shuffle.core.opacus_compat import (
    expect_backward,
    forget_pass,
    norms_of_no_records,
    norms_of_records,
    raise_norms,
    records_of_calls,
    wrapped_network,
)
from opacus_shuffle.engine.guards.raw_gradients import names_of
from opacus_shuffle.engine.step.clipping import HALF
from opacus_shuffle.networks.loader_check import check_criterion

HALF_MARGIN = 1 - 2**-7
"""Norms in half precision are correct up to this factor."""


class GhostPasses:
    """The layers' calls in the first backward pass, and the clipped sums of the second one.

    Args:
        module: Opacus's wrapper or hooks of ghost clipping.
    """

    rows_checked: bool = False
    """Whether :meth:`check_rows` has passed for a batch."""
    raises_norms: bool = False
    """Whether norms are raised by a bound on their rounding errors; Opacus's own are not."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the layers' calls, which contain data."""
        return {**vars(GhostPasses(self.module)), "rows_checked": self.rows_checked}

    def reset(self) -> None:
        """Drops the calls and sums of the passes."""
        self.calls: list[tuple[nn.Module, list[torch.Tensor], int | None]] = []
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self.factors: torch.Tensor | None = None
        self.half_precision = False

    def note_norms(self, layer: nn.Module, inputs: Any, output: Any, **keywords: Any) -> None:
        """Stores a layer's call in the first pass, and has Opacus compute the norms.

        Raises:
            ValueError: If no forward pass belongs to this backward pass.
        """
        if not vars(layer).get("activations"):
            self.module.rearrange_grad_samples(module=layer, backprops=output[0], **keywords)
        if norms_of_no_records(self.module, layer):
            return
        self.calls.append((layer, layer.activations[-1], getattr(layer, "max_batch_len", None)))  # type: ignore[index, arg-type]
        self.half_precision = self.half_precision or output[0].dtype in HALF
        seen, output = layer.activations[-1][0], self._in_single_precision(layer, output)  # type: ignore[index]
        hook = GradSampleHooksFastGradientClipping.capture_backprops_hook
        hook(self.module, layer, inputs, output, **keywords)
        summed = type(layer) is nn.Linear and output[0].dim() == 3
        if self.raises_norms and summed and not self.module.force_functorch:
            records, rows = (0, 1) if self.module.batch_first else (1, 0)
            mean = keywords["loss_reduction"] == "mean"  # then Opacus takes norms of n times these
            scale = output[0].shape[records] if mean else 1
            raise_norms(layer, seen, scale * output[0], axis=rows)

    def replay(self, factors: torch.Tensor) -> None:
        """Restores the activations that the first pass has removed from the layers."""
        self.factors = factors
        for layer, activations, length in reversed(self.calls):
            layer.activations = [*getattr(layer, "activations", []), activations]  # type: ignore[assignment, misc]
            if length is not None:
                layer.max_batch_len = length  # type: ignore[assignment]
            expect_backward(layer)

    def add_sums(self, layer: nn.Module, inputs: Any, output: Any, **keywords: Any) -> None:
        """Sums a layer's gradients in the second pass, without records whose factor is zero.

        If a parameter is used several times, Opacus adds up the gradients of all uses and provides
        the sum at the last one. The gradients are freed afterwards.
        """
        assert self.factors is not None
        hook = GradSampleHooks.capture_backprops_hook
        hook(self.module, layer, inputs, self._in_single_precision(layer, output), **keywords)
        for _, parameter in trainable_parameters(layer):
            sample = parameter.grad_sample
            if sample is not None:
                sample = sample.float() if sample.dtype in HALF else sample
                factors = self.factors.to(sample.device, sample.dtype)
                left_out = (factors == 0).view(-1, *[1] * (sample.dim() - 1))
                # In place: Opacus has added them up in memory of their own.
                sample.masked_fill_(left_out, 0.0)
                self.sums[parameter] = torch.einsum("i,i...", factors, sample)
                parameter.grad_sample = None

    def check_rows(self, losses: torch.Tensor, reduced: Any) -> None:
        """Refuses losses whose gradients are not those of the layers' rows, in the same order.

        The gradient of the losses' sum with random factors must be the sum of the layers'
        gradients of records with the same factors. This detects losses in another order than the
        network's rows, penalties, and weights that are used outside of their layers.

        Raises:
            ValueError: If the two sums differ.
        """
        parameters = self.module.trainable_parameters
        drawn = torch.rand(len(losses), generator=torch.Generator().manual_seed(0), device="cpu")
        factors = 0.5 + 0.5 * drawn.to(losses.device, losses.dtype)
        self.module.disable_hooks()
        plain = torch.autograd.grad(
            torch.sum(factors * losses), parameters, retain_graph=True, materialize_grads=True
        )
        self.module.enable_hooks()
        self.replay(factors)
        reduced.backward(retain_graph=True)
        odd = []
        for parameter, gradient in zip(parameters, plain, strict=True):
            gap = gradient - self.sums.get(parameter, torch.zeros_like(gradient))
            # The tolerance is relative to the norms of whole gradients. The sum may cancel down to
            # rounding errors, and so may all gradients of one parameter.
            if float(gap.norm()) > 1e-3 * float(self.module.per_sample_gradient_norms.sum()):
                odd.append(parameter)
            parameter.grad = None
        self.sums, self.rows_checked = {}, not odd
        if odd:
            raise ValueError(
                f"the gradients of the losses for {names_of(odd)} are not those of the network's "
                "rows in the same order, so ghost clipping would not clip them: keep the losses in "
                "the order of the network's outputs, use the optimizer's weight_decay for "
                "penalties, and use weights only in their own layers; or use "
                "grad_sample_mode='hooks'"
            )

    def _in_single_precision(self, layer: nn.Module, output: Any) -> Any:
        """Returns the gradients of a layer's output, in single precision if Opacus has a rule."""
        ruled = type(layer) in self.module.GRAD_SAMPLERS and not self.module.force_functorch
        return (output[0].float(), *output[1:]) if output[0].dtype in HALF and ruled else output

    def check_losses(self, losses: torch.Tensor) -> None:
        """Refuses losses that factors per record would not clip, before any backward pass.

        Raises:
            ValueError: If there is not one loss per record, the network ran in evaluation mode, or
                hooks change its gradients.
        """
        network = wrapped_network(self.module)
        hooked = [
            name
            for name, parameter in network.named_parameters()
            if parameter.requires_grad
            # One hook is our own, and changes nothing.
            and (parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1)
        ]
        if hooked:
            raise ValueError(
                f"parameters {', '.join(hooked[:3])} have gradient hooks of their own, which would "
                "change what ghost clipping has clipped: remove them, or use "
                "grad_sample_mode='hooks', where they change nothing"
            )
        records = records_of_calls(self.module)
        if records is None:
            layers = network.named_modules()
            evaluating = [
                name or "the module itself" for name, layer in layers if not layer.training
            ]
            raise ValueError(
                f"there are no gradients per record: {', '.join(evaluating[:3])} ran in evaluation "
                "mode; call model.train() before the forward pass"
                if evaluating
                else "there are no gradients per record: the network did not run since the last "
                "backward pass, or ran without gradients, or under torch.utils.checkpoint; call "
                "loss.backward() once for each forward pass"
            )
        if losses.dim() != 1 or len(losses) != records:
            raise ValueError(
                f"criterion must give one loss per record, of shape ({records},), with "
                f"reduction='none', got {tuple(losses.shape)}: ghost clipping would not clip; "
                "flatten the network's output and the targets, or use a criterion that heeds its "
                "attribute reduction"
            )


def _capture_backprops(
    self: Any, module: nn.Module, forward_input: Any, forward_output: Any, **keywords: Any
) -> None:
    """Calls Opacus's hook by way of the module's passes."""
    if self.hooks_enabled:
        passes: GhostPasses = self.ghost_passes
        hook = passes.note_norms if passes.factors is None else passes.add_sums
        hook(module, forward_input, forward_output, **keywords)


# A pickled copy finds Opacus's own method under this name.
_capture_backprops.__name__ = "capture_backprops_hook"


def attach_passes(module: Any) -> GhostPasses:
    """Attaches the passes to the hooks of ghost clipping, if that was not done before."""
    if "ghost_passes" not in vars(module):
        module.ghost_passes = GhostPasses(module)
        module.remove_hooks()
        name = _capture_backprops.__name__
        setattr(module, name, types.MethodType(_capture_backprops, module))
        settings = ("loss_reduction", "batch_first", "force_functorch")
        try:
            module.add_hooks(**{key: getattr(module, key) for key in settings})
        finally:
            delattr(module, name)
    return module.ghost_passes  # type: ignore[no-any-return]


class GhostLoss(DPTensorFastGradientClipping):
    """One loss per record; sums, differences and multiples of these losses have the same type."""

    def backward(self, **keywords: Any) -> None:
        """Clips every record's gradient in two backward passes.

        With Opacus's own accountants the results are Opacus's, bit for bit, if all values are
        finite. With accountants of this package, rounding makes no norm too small.

        Raises:
            ValueError: If the losses are not one per record, or a parameter has no gradient per
                record.
        """
        if keywords:
            raise ValueError(
                f"backward() of a loss of ghost clipping takes no {', '.join(keywords)}: it makes "
                "two passes of its own; call it once for each forward pass"
            )
        module, optimizer, losses = self.module, self.optimizer, self.loss_per_sample
        passes = attach_passes(module)
        passes.check_losses(losses)
        passes.reset()
        passes.raises_norms = isinstance(optimizer.accountant, ShuffleAccountant)
        forget_pass(module, norms_only=True)
        done = False
        try:
            reduce = torch.mean if self.loss_reduction == "mean" else torch.sum
            reduced: Any = reduce(losses, dim=0)
            reduced.backward(retain_graph=True)
            # None, because adding to zeros would take a pass over all weights.
            optimizer.zero_grad(set_to_none=True)
            parameters = module.trainable_parameters
            if missing := [p for p in parameters if norms_of_records(p) is None]:
                raise ValueError(
                    f"this batch's loss does not depend on parameters {names_of(missing)}, so "
                    "ghost clipping has no norms for them: use them in every forward pass, or "
                    "freeze them before make_private; do not replace parameters after it"
                )
            factors = module.get_clipping_coef()
            usable = _usable_records(module.per_sample_gradient_norms, losses.detach())
            exact = usable is None and not passes.half_precision
            if exact and len(losses) and not passes.rows_checked:
                passes.check_rows(losses, reduced)
            if exact:
                passes.reset()  # frees memory for the second pass
                clipped = torch.sum(factors.to(losses.device) * losses)
                module.disable_hooks()
                clipped.backward()  # type: ignore[no-untyped-call]
                for parameter in parameters:  # a comparison may read it without a gradient
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
            else:
                factors = HALF_MARGIN * factors.float() if passes.half_precision else factors
                passes.replay(factors if usable is None else factors.masked_fill(~usable, 0.0))
                if len(losses):  # without records there are no calls
                    reduced.backward()
                for parameter in parameters:  # PyTorch has put the raw sum there
                    total = passes.sums.get(parameter)
                    parameter.grad = None if total is None else total.to(parameter.dtype)
            optimizer.clipping.note_pass(optimizer, module, len(factors), passes.sums)
            done = True
        finally:
            passes.reset()
            module.enable_hooks()
            if not done:
                forget_pass(module)
                optimizer.forget_clipped()


def _usable_records(norms: torch.Tensor, losses: torch.Tensor) -> torch.Tensor | None:
    """Returns which records' norms and losses are finite; None if all are."""
    usable = torch.isfinite(norms) & torch.isfinite(losses.to(norms.device))
    return None if bool(usable.all()) else usable


def _with_type_kept(name: str) -> Any:
    """Returns an operation of Opacus's loss whose result is a :class:`GhostLoss`."""

    def operation(self: GhostLoss, *others: Any) -> GhostLoss:
        for other in others:
            of_criterion = isinstance(other, DPTensorFastGradientClipping)
            other = other.loss_per_sample if of_criterion else other
            same_records = of_criterion and other.shape == self.loss_per_sample.shape
            # A number of another tensor may depend on several records.
            if isinstance(other, torch.Tensor) and other.requires_grad and not same_records:
                raise ValueError(
                    "a loss of ghost clipping goes with numbers and losses of the same records, "
                    f"got a tensor of shape {tuple(other.shape)} that requires a gradient and "
                    "would not be clipped: use the optimizer's weight_decay for penalties, or "
                    "grad_sample_mode='hooks'"
                )
        result = getattr(DPTensorFastGradientClipping, name)(self, *others)
        return GhostLoss(
            result.module, result.optimizer, result.loss_per_sample, result.loss_reduction
        )

    operation.__name__ = name
    return operation


for _name in ["truediv", "mul", "rmul", "add", "radd", "sub", "rsub", "neg"]:
    setattr(GhostLoss, f"__{_name}__", _with_type_kept(f"__{_name}__"))


class GhostCriterion(DPLossFastGradientClipping):
    """Opacus's criterion of ghost clipping, whose losses are :class:`GhostLoss`."""

    checked = False

    def __init__(self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str) -> None:
        super().__init__(module, optimizer, criterion, loss_reduction)
        attach_passes(module)

    def __call__(self, *args: Any, shape: Any = None, **keywords: Any) -> GhostLoss:
        """Returns the losses of a batch.

        Raises:
            ValueError: If a record's loss depends on other records.
        """
        reduction = self.criterion.reduction
        try:
            loss = super().__call__(*args, shape=shape, **keywords)
            if not self.checked and loss.loss_per_sample.requires_grad:
                self.criterion.reduction = "none"
                self.checked = check_criterion(self.criterion, args, keywords)
        finally:
            self.criterion.reduction = reduction
        losses = loss.loss_per_sample
        # Means of equally many numbers per record; ignored targets would make these numbers fewer.
        if losses.dim() > 1 and len(losses) and not hasattr(self.criterion, "ignore_index"):
            rows = losses.flatten(1)
            losses = rows.mean(1) if loss.loss_reduction == "mean" else rows.sum(1)
        return GhostLoss(loss.module, loss.optimizer, losses, loss.loss_reduction)
