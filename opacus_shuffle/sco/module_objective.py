"""Networks as objectives: θ is the flat vector of a module's trainable parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import Tensor, nn

from opacus_shuffle.core.opacus_compat import check_attention
from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.sco.objective import RecordObjective
from opacus_shuffle.sco.records import map_data, real_vector


class ModuleObjective(RecordObjective):
    """The losses ``criterion(module(inputs), targets)`` of single records.

    Gradients come from ``torch.func``, which runs the module on one record at a time: each depends
    on that record alone, whatever the module does with a batch. The module stays as it is until
    :meth:`load` writes a θ into it. A batch is ``(inputs, targets)``; inputs may be a tensor, a
    tuple of positional or a dict of keyword arguments. Floating-point data take the precision and
    device of the parameters; θ and gradients stay in double precision, on the CPU. (A network's
    losses are rarely convex: privacy does not ask, but the theorems' loss bounds do.)

    Args:
        module: Any that ``torch.func`` can differentiate. Layers that mix records (BatchNorm) are
            refused, and so are, when gradients are first asked for, dropouts in training mode: the
            theorems need one fixed loss per record, so switch them off (p = 0, or
            ``module.eval()``).
        criterion: From outputs and targets to a loss; called on batches of one, so its reduction
            does not matter.

    Attributes:
        dimension: The number of trainable parameters.
        names: Their names, in θ's order.

    Raises:
        ValueError: The module cannot be used so; the message says why.
    """

    def __init__(self, module: nn.Module, criterion: Callable[..., Tensor]) -> None:
        instance_of("module", module, (nn.Module,))
        if not callable(criterion):
            raise ValueError(
                f"criterion must be a callable criterion(outputs, targets), got {criterion!r}"
            )
        hooked = hasattr(module, "autograd_grad_sample_hooks")
        if hooked or isinstance(module, AbstractGradSampleModule):
            raise ValueError(
                "module must not carry Opacus's hooks, which torch.func does not need: pass the "
                "network that was wrapped, after to_standard_module() or cleanup()"
            )
        _check_layers(module)
        self._module, self._criterion = module, criterion
        named = [pair for pair in module.named_parameters() if pair[1].requires_grad]
        if not named:
            raise ValueError("module must have a trainable parameter, got none; set requires_grad")
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self.rounding = max(torch.finfo(parameter.dtype).eps for parameter in self._parameters)
        super().__init__(
            self._loss_of_module,
            sum(parameter.numel() for parameter in self._parameters),
            what="module with its criterion",
            remedy="; the inputs must have a shape that it takes",
        )

    @property
    def initial(self) -> Tensor:
        """The module's parameters as they are now, (d,), double precision."""
        return torch.cat(
            [
                parameter.detach().to("cpu", torch.float64).reshape(-1)
                for parameter in self._parameters
            ]
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
        point = real_vector("theta", theta, self.dimension)
        with torch.no_grad():
            for parameter, piece in zip(self._parameters, self._pieces(point), strict=True):
                parameter.copy_(piece)
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
            lambda tensor: tensor.detach().to(
                like.device, like.dtype if tensor.is_floating_point() else tensor.dtype
            ),
            (batch[0], batch[1]),
        )

    def _loss_of_module(self, theta: Tensor, batch: Any) -> Tensor:
        """Returns the loss of a batch of one record at θ."""
        inputs, targets = batch
        # Copies of the buffers: what a record leaves in one is not there for the next.
        values = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        for name, piece, own in zip(self.names, self._pieces(theta), self._parameters, strict=True):
            values[name] = piece.to(own.device, own.dtype)
        by_name = inputs if isinstance(inputs, dict) else {}
        by_position = () if isinstance(inputs, dict) else inputs
        if isinstance(by_position, list):
            by_position = tuple(by_position)
        outputs = torch.func.functional_call(self._module, values, by_position, by_name)
        return self._criterion(outputs, targets)


def _check_layers(module: nn.Module) -> None:
    """Raises a ValueError for layers that mix the records of a batch, or are known to be wrong."""
    mixing = [
        name or "the module itself"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and (layer.training or not layer.track_running_stats)
    ]
    if mixing:
        raise ValueError(
            f"module must have per-record gradients, but {', '.join(mixing)} mixes the records of "
            "a batch; opacus.validators.ModuleValidator.fix may help"
        )
    check_attention(module)
