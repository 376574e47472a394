"""Networks as objectives: θ is the flat vector of a module's trainable parameters."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from opacus_shuffle.core.opacus_compat import forget_broken_pass, refuse_broken_attention, tied_parameters, wrapped_network
from opacus_shuffle.core.validation import instance_of, integer, one_of
from opacus_shuffle.sco.each_record import batch_of_one, no_random_draws, one_loss, refuse_randomness_or_memory
from opacus_shuffle.sco.objective import Objective
from opacus_shuffle.sco.records import described, map_data, number_of_users

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


class ModuleObjective(Objective):
    """The losses ``criterion(module(inputs), targets)`` of single records.

    The module is copied; training changes the copy alone until :meth:`load` writes a θ back. A batch is ``(inputs, targets)``;
    inputs may be a tensor, a tuple of positional or a dict of keyword arguments. Floating-point data are converted to the
    precision and moved to the device of the parameters; θ and gradients stay in double precision, on the CPU. Everything that
    is not trainable stays as it was when the objective was made. (A network's losses are rarely convex: privacy does not ask,
    but the theorems' loss bounds do.)

    Args:
        module: Any that Opacus accepts; a ``GradSampleModule`` is taken for the module that it wraps. Layers that mix records
            (BatchNorm) are refused, and so are dropouts in training mode: the theorems need one fixed loss per record, so
            switch them off (p = 0, or ``module.eval()``).
        criterion: From outputs and targets to a loss; called on batches of one, so its reduction does not matter.
        grad_sample: "functorch" (``torch.func``, vectorised: the fast one) or "hooks" (Opacus's ``GradSampleModule``, for
            modules that ``torch.func`` cannot differentiate; called on one record at a time, which is slow). Both give the same
            gradients, and each record's depends on that record alone, whatever the module does with a batch. Inside Moreau
            envelopes, where every record has a θ of its own, only "functorch" will do.
        chunk_size: How many records are worked on at once.

    Attributes:
        dimension: The number of trainable parameters.
        names: Their names, in θ's order.

    Raises:
        ValueError: The module cannot be used so; the message says why.
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: Callable[..., Tensor],
        *,
        grad_sample: str = "functorch",
        chunk_size: int = 1024,
    ) -> None:
        instance_of("module", module, (nn.Module,))
        if not callable(criterion):
            raise ValueError(f"criterion must be a callable criterion(outputs, targets), got {criterion!r}")
        self._mode = one_of("grad_sample", grad_sample, ("functorch", "hooks"))
        self.chunk_size = integer("chunk_size", chunk_size)
        self._criterion = criterion
        # The copy first: taking the hooks off the original would end the run that it may be in.
        inner: Any = copy.deepcopy(module)
        if isinstance(module, AbstractGradSampleModule):
            inner, module = inner.to_standard_module(), wrapped_network(module)
        elif hasattr(module, "autograd_grad_sample_hooks"):
            raise ValueError(
                "module must not carry Opacus's hooks unless as a GradSampleModule; pass the wrapper, or call its cleanup()"
            )
        self._module, self._copy = module, inner
        own = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        if not own:
            raise ValueError("module must have a trainable parameter, got none; set requires_grad")
        self.names = [name for name, _ in own]
        self.dimension = sum(parameter.numel() for _, parameter in own)
        _check(inner, hooks=self._mode == "hooks")
        self._parameters = [inner.get_parameter(name) for name in self.names]
        self.rounding = max(torch.finfo(parameter.dtype).eps for parameter in self._parameters)
        self._wrapped = self._wrap() if self._mode == "hooks" else None

    @property
    def initial(self) -> Tensor:
        """The module's parameters as they are now, (d,), double precision."""
        own = [self._module.get_parameter(name) for name in self.names]
        return torch.cat([parameter.detach().to("cpu", torch.float64).reshape(-1) for parameter in own])

    def load(self, theta: Tensor) -> nn.Module:
        """Writes a point (d,) into the module, returns the module, and refuses a point that is not finite."""
        if not isinstance(theta, Tensor) or theta.shape != (self.dimension,) or not bool(torch.isfinite(theta).all()):
            raise ValueError(f"theta must be a finite tensor of shape ({self.dimension},), got {described(theta)}")
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
            lambda x: x.detach().to(like.device, like.dtype if x.is_floating_point() else x.dtype), (batch[0], batch[1])
        )

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        before = [(id(buffer), buffer._version) for buffer in self._copy.buffers()]
        try:
            result = self._by_hooks(theta, batch) if self._wrapped is not None else self._by_functorch(theta, batch)
        except RuntimeError as error:
            refuse_randomness_or_memory(error, "module")
            raise ValueError(
                f"module must run on this batch and give each record a gradient by grad_sample={self._mode!r}, but PyTorch "
                f"says: {str(error).splitlines()[0]}"
            ) from error
        if before != [(id(buffer), buffer._version) for buffer in self._copy.buffers()]:
            raise ValueError("module must leave its buffers alone, got one that changes them, so that records mix; call eval()")
        return result

    def _by_functorch(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns losses and gradients by ``torch.func``."""
        inputs, targets = batch
        both = torch.func.vmap(torch.func.grad_and_value(self._one), in_dims=(None if theta.ndim == 1 else 0, 0, 0))
        with torch.enable_grad():
            gradients, losses = both(theta.to(self._parameters[0].device), inputs, targets)
        return losses.detach(), gradients.detach()

    def _one(self, theta: Tensor, inputs: Any, targets: Any) -> Tensor:
        """Returns one record's loss."""
        pieces = zip(self.names, self._pieces(theta), self._parameters, strict=True)
        values = {name: piece.to(own.device, own.dtype) for name, piece, own in pieces}
        args, keywords = _arguments(batch_of_one(inputs))
        outputs = torch.func.functional_call(self._copy, values, args, keywords)
        return one_loss(self._criterion(outputs, batch_of_one(targets)), "criterion")

    def _by_hooks(self, theta: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns losses and gradients by Opacus's hooks, on batches of one, so that a module cannot mix records."""
        if theta.ndim != 1:
            raise ValueError(
                "grad_sample must be 'functorch' where every record has its own theta, as in a Moreau envelope, got 'hooks'"
            )
        with torch.no_grad():
            for parameter, piece in zip(self._parameters, self._pieces(theta), strict=True):
                parameter.copy_(piece)
        count = number_of_users(batch)
        pairs = [self._one_by_hooks(map_data(operator.itemgetter(slice(i, i + 1)), batch)) for i in range(count)]
        return torch.stack([loss for loss, _ in pairs]), torch.stack([row for _, row in pairs])

    def _one_by_hooks(self, record: Any) -> tuple[Tensor, Tensor]:
        """Returns loss () and gradient (d,) of a batch of one, at the copy's parameters."""
        inputs, target = record
        wrapped: Any = self._wrapped
        try:
            with torch.enable_grad(), no_random_draws("module"):
                args, keywords = _arguments(inputs)
                loss = one_loss(self._criterion(wrapped(*args, **keywords), target), "criterion")
                torch.autograd.backward(loss)
            rows = [
                torch.zeros_like(parameter).reshape(-1)
                if parameter.grad_sample is None  # no path from it to the loss
                else parameter.grad_sample.sum(0).reshape(-1)
                for parameter in self._parameters
            ]
        except BaseException:
            forget_broken_pass(wrapped)
            self._wrapped = self._wrap()
            raise
        result = loss.detach(), torch.cat([row.to("cpu", torch.float64) for row in rows])
        wrapped.zero_grad(set_to_none=True)
        return result

    def _wrap(self) -> GradSampleModule:
        """Returns the copy with Opacus's hooks on it, and layers that train in training mode, as the hooks need."""
        for layer in self._copy.modules():
            layer.training = layer.training or _trains(layer)
        try:
            return GradSampleModule(self._copy, loss_reduction="sum")
        except NotImplementedError as error:
            raise ValueError(f"module must suit Opacus's hooks, which says: {error}; try grad_sample='functorch'") from error


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a module's positional and keyword arguments."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _trains(layer: nn.Module) -> bool:
    """Returns whether a layer has trainable parameters of its own."""
    return any(parameter.requires_grad for parameter in layer.parameters(recurse=False))


def _check(module: nn.Module, *, hooks: bool) -> None:
    """Refuses networks without per-record gradients, by Opacus's rules and ours."""
    layers = [(name or "the module itself", layer) for name, layer in module.named_modules()]
    flags = [(layer, layer.training) for _, layer in layers]
    module.train()  # or Opacus would refuse that alone
    try:
        errors = ModuleValidator.validate(module, strict=False)
    finally:
        for layer, training in flags:
            layer.training = training
    norms = [(name, layer) for name, layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    mixing = [name for name, layer in norms if layer.training or not layer.track_running_stats]
    if errors or mixing:
        reasons = "; ".join([str(error) for error in errors] + [f"{name} mixes the records of a batch" for name in mixing])
        raise ValueError(
            f"module must have per-record gradients, but: {reasons}; opacus.validators.ModuleValidator.fix may help"
        )
    refuse_broken_attention(module)
    random = [name for name, layer in layers if (layer.training or (hooks and _trains(layer))) and _draws(layer)]
    if random:
        raise ValueError(
            f"module must give one loss per record, but {', '.join(random)} would draw random numbers; set p=0 or call eval()"
        )
    tied = tied_parameters(module)
    if hooks and any(module.get_parameter(name).requires_grad for name in tied):
        raise ValueError(f"grad_sample must be 'functorch' for tied parameters ({', '.join(tied)}), got 'hooks'")


def _draws(layer: nn.Module) -> bool:
    """Returns whether a layer draws random numbers in training mode."""
    chance = getattr(layer, "p" if isinstance(layer, _RANDOM) else "dropout", 0.0)
    return isinstance(layer, nn.RReLU) or (isinstance(chance, int | float) and chance > 0)
