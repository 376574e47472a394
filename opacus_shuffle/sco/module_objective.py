"""Networks as objectives: θ is the flat vector of a module's trainable parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from opacus_shuffle.core.opacus_compat import refuse_broken_attention, wrapped_network
from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.sco.objective import RecordObjective
from opacus_shuffle.sco.records import batch_of_one, map_data, one_loss, refuse_unless_finite


class ModuleObjective(RecordObjective):
    """The losses ``criterion(module(inputs), targets)`` of single records.

    Gradients come from ``torch.func``, which runs the module on one record at a time: each depends
    on that record alone, whatever the module does with a batch. The module is copied, and stays as
    it is until :meth:`load` writes a θ into it. A batch is ``(inputs, targets)``; inputs may be a
    tensor, a tuple of positional or a dict of keyword arguments. Floating-point data take the
    precision and device of the parameters; θ and gradients stay in double precision, on the CPU. (A
    network's losses are rarely convex: privacy does not ask, but the theorems' loss bounds do.)

    Args:
        module: Any that Opacus accepts and ``torch.func`` can differentiate; a ``GradSampleModule``
            is taken for the module that it wraps. Layers that mix records (BatchNorm) are refused,
            and so are, when gradients are first asked for, dropouts in training mode: the theorems
            need one fixed loss per record, so switch them off (p = 0, or ``module.eval()``).
        criterion: From outputs and targets to a loss; called on batches of one, so its reduction
            does not matter.

    Attributes:
        dimension: The number of trainable parameters.
        names: Their names, in θ's order.

    Raises:
        ValueError: The module cannot be used so; the message says why.
    """

    what = "module"
    remedy = "; the inputs must have a shape that it takes"

    def __init__(self, module: nn.Module, criterion: Callable[..., Tensor]) -> None:
        instance_of("module", module, (nn.Module,))
        if not callable(criterion):
            raise ValueError(
                f"criterion must be a callable criterion(outputs, targets), got {criterion!r}"
            )
        self._criterion = criterion
        # The copy first: taking the hooks off the original would end the run that it may be in.
        inner: Any = copy.deepcopy(module)
        if isinstance(module, AbstractGradSampleModule):
            inner, module = inner.to_standard_module(), wrapped_network(module)
        elif hasattr(module, "autograd_grad_sample_hooks"):
            raise ValueError(
                "module must not carry Opacus's hooks unless as a GradSampleModule; pass the "
                "wrapper, or call its cleanup()"
            )
        self._module, self._copy = module, inner
        own = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        if not own:
            raise ValueError("module must have a trainable parameter, got none; set requires_grad")
        self.names = [name for name, _ in own]
        self.dimension = sum(parameter.numel() for _, parameter in own)
        _check(inner)
        self._parameters = [inner.get_parameter(name) for name in self.names]
        self.rounding = max(torch.finfo(parameter.dtype).eps for parameter in self._parameters)

    @property
    def initial(self) -> Tensor:
        """The module's parameters as they are now, (d,), double precision."""
        own = [self._module.get_parameter(name) for name in self.names]
        return torch.cat(
            [parameter.detach().to("cpu", torch.float64).reshape(-1) for parameter in own]
        )

    def load(self, theta: Tensor) -> nn.Module:
        """Writes a point into the module.

        Args:
            theta: Shape (d,), in the order of ``names``.

        Returns:
            The module.

        Raises:
            ValueError: The point is not finite, or of another shape.
        """
        refuse_unless_finite("theta must be", theta, (self.dimension,))
        with torch.no_grad():
            for name, piece in zip(self.names, self._pieces(theta), strict=True):
                self._module.get_parameter(name).copy_(piece)
        return self._module

    def _pieces(self, theta: Tensor) -> list[Tensor]:
        """Returns θ, cut into parameters."""
        cuts = torch.split(theta, [parameter.numel() for parameter in self._parameters])
        return [piece.view(own.shape) for piece, own in zip(cuts, self._parameters, strict=True)]

    def _prepare(self, batch: Any) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("batch must be a pair (inputs, targets) for a module")
        like = self._parameters[0]
        return map_data(
            lambda x: x.detach().to(like.device, like.dtype if x.is_floating_point() else x.dtype),
            (batch[0], batch[1]),
        )

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        before = [(id(buffer), buffer._version) for buffer in self._copy.buffers()]
        losses, gradients = super()._evaluate(theta, batch)
        if before != [(id(buffer), buffer._version) for buffer in self._copy.buffers()]:
            raise ValueError(
                "module must leave its buffers alone, got one that changes them, so that records "
                "mix; call eval()"
            )
        return losses.detach(), gradients.detach()

    def _one(self, theta: Tensor, record: Any) -> Tensor:
        inputs, targets = batch_of_one(record)
        pieces = zip(self.names, self._pieces(theta), self._parameters, strict=True)
        values = {name: piece.to(own.device, own.dtype) for name, piece, own in pieces}
        by_name = inputs if isinstance(inputs, dict) else {}
        by_position = (
            ()
            if isinstance(inputs, dict)
            else tuple(inputs)
            if isinstance(inputs, list)
            else inputs
        )
        outputs = torch.func.functional_call(self._copy, values, by_position, by_name)
        return one_loss(self._criterion(outputs, targets), "criterion")


def _check(module: nn.Module) -> None:
    """Refuses networks without per-record gradients, by Opacus's rules and ours."""
    errors = ModuleValidator.validate(
        copy.deepcopy(module).train(), strict=False
    )  # it refuses evaluation mode alone
    mixing = [
        name or "the module itself"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and (layer.training or not layer.track_running_stats)
    ]
    if errors or mixing:
        reasons = "; ".join(
            [str(error) for error in errors]
            + [f"{name} mixes the records of a batch" for name in mixing]
        )
        raise ValueError(
            f"module must have per-record gradients, but: {reasons}; "
            "opacus.validators.ModuleValidator.fix may help"
        )
    refuse_broken_attention(module)
