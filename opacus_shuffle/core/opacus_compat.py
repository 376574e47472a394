"""Everything that depends on Opacus's internals: private names, callers, and known defects.

No other module uses a private name of Opacus. ``tests/core/test_opacus_compat.py`` tests each name
that this module relies on. The defect of Opacus's attention is detected by its effect, so a version
without it is not refused.

>>> network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
>>> network[1].weight = network[0].weight
>>> check_ghost_ties(network)
Traceback (most recent call last):
ValueError: module has tied parameters, 0.weight = 1.weight, which grad_sample_mode='ghost' ...
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import opacus
import torch
from opacus.accountants import registry
from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModuleExpandedWeights,
)
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.layers import DPMultiheadAttention
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise, _mark_as_processed
from opacus.utils import batch_memory_manager
from opacus.utils.module_utils import trainable_parameters
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.core.gaussian_noise import draw_noise
from opacus_shuffle.core.randomness import SecretGenerator

POISSON_SAMPLERS = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
"""Opacus's batch samplers in which every record takes part independently of the others."""

WRAPPING_PACKAGES = (
    "opacus.grad_sample",
    "opacus.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.optim.swa_utils",
)
WRAPPER_NAMES = ("_module", "module", "_orig_mod")
"""The attributes in which wrappers from those packages (of Opacus, of distributed training and of
``torch.compile``) store the network.
"""

ACCOUNTANTS = registry._ACCOUNTANTS
"""Opacus's registry of accountants by name: its own, and those registered with it."""

mark_as_used = _mark_as_processed
"""Marks a gradient, or a list of them, as used by a step."""
check_unused = _check_processed_flag
"""Raises a ValueError for a gradient, or a list of them, that a step has already used."""


@functools.wraps(_generate_noise)
def gaussian_noise(
    std: float, reference: torch.Tensor, generator: Any = None, secure_mode: bool = False
) -> Any:
    """Draws noise of the reference's shape; our own functions draw from our generator."""
    if isinstance(generator, SecretGenerator):
        return draw_noise(float(std), reference, generator)
    return _generate_noise(
        std=std, reference=reference, generator=generator, secure_mode=secure_mode
    )


# Opacus's optimizers look up _generate_noise in their own modules, so it is replaced in each of
# them: Opacus's function cannot draw from a SecretGenerator. For every other generator the result
# is Opacus's, bit by bit.
for _name, _module in list(sys.modules.items()):
    if (
        _name.startswith("opacus.optimizers.")
        and getattr(_module, "_generate_noise", None) is _generate_noise
    ):
        _module._generate_noise = gaussian_noise  # type: ignore[attr-defined]


def _corrected(sampler: Callable[..., Any], *, norms: bool) -> Callable[..., Any]:
    """Returns Opacus's rule for a layer, changed to respect :func:`compute_functionally`."""

    @functools.wraps(sampler)
    def rule(layer: Any, activations: list[torch.Tensor], backprops: torch.Tensor) -> Any:
        if not hasattr(layer, "ft_compute_sample_grad"):
            return sampler(layer, activations, backprops)
        if type(layer) is nn.Embedding and layer.ft_compute_sample_grad is None:
            indices = activations[0].contiguous()  # Opacus finds norms of no others
            padding = indices == (-1 if layer.padding_idx is None else layer.padding_idx)
            return sampler(layer, [indices], backprops.masked_fill(padding.unsqueeze(-1), 0))
        backprops = backprops.to(next(layer.parameters()).dtype)
        if type(layer) is nn.EmbeddingBag:
            return {layer.weight: _gradients_of_bags(layer, backprops, *activations)}
        gradients = {p: p.new_zeros(0, *p.shape) for p in layer.parameters()}
        if len(backprops):
            gradients = ft_compute_per_sample_gradient(layer, activations, backprops)
        return {p: g.flatten(1).norm(dim=1) for p, g in gradients.items()} if norms else gradients

    return rule


def _gradients_of_bags(
    layer: nn.EmbeddingBag, backprops: torch.Tensor, indices: torch.Tensor, *offsets: torch.Tensor
) -> torch.Tensor:
    """Returns each record's gradient; Opacus would count repeated tokens of a record only once."""
    rows = torch.arange(len(indices), device=indices.device)
    rows = torch.searchsorted(offsets[0], rows, right=True) - 1 if offsets else rows[:, None]
    # Each record has its own copy of the weights, for which autograd computes a gradient.
    copies = layer.weight.detach().repeat(len(backprops), 1).requires_grad_()
    with torch.enable_grad():
        indices = indices + layer.num_embeddings * rows
        starts = offsets[0] if offsets else None
        bags = nn.functional.embedding_bag(indices, copies, starts, mode=layer.mode)
    (gradient,) = torch.autograd.grad(bags, copies, backprops)
    return gradient.view(len(backprops), *layer.weight.shape)


# Opacus looks up its rules by the class of a layer. The replaced rules only differ for marked
# layers, and Opacus's own engine marks none.
for _rules, _of_norms in (
    (GradSampleHooks.GRAD_SAMPLERS, False),
    (GradSampleHooksFastGradientClipping.NORM_SAMPLERS, True),
):
    _rules.update({kind: _corrected(rule, norms=_of_norms) for kind, rule in _rules.items()})


def compute_functionally(layer: Any, *, batch_first: bool) -> None:
    """Marks a layer so that functional PyTorch computes its gradients, not Opacus's rule.

    An embedding keeps the rule, which is faster and computes norms without gradients, but its
    padding gets no gradients. The mark is removed with Opacus's hooks.
    """
    if type(layer) in (nn.Embedding, nn.EmbeddingBag):
        layer.ft_compute_sample_grad = None
        return
    bare = copy.copy(layer)  # without hooks, because the function must not run them
    vars(bare).update({k: v for k, v in vars(nn.Module()).items() if k.endswith("_hooks")})
    prepare_layer(bare, batch_first=batch_first)
    layer.ft_compute_sample_grad = bare.ft_compute_sample_grad


def correct_layers(module: Any, functional: Collection[nn.Module] = ()) -> None:
    """Corrects what Opacus's hooks compute: padding, keyword arguments, and layers without a rule.

    Args:
        module: Opacus's wrapper or hooks.
        functional: The layers that get functional gradients.
    """
    if not hasattr(module, "autograd_grad_sample_hooks"):
        return
    for layer in module.iterate_submodules(wrapped_network(module)):
        handle = layer.register_forward_pre_hook(by_position, with_kwargs=True)
        module.autograd_grad_sample_hooks.append(handle)  # so that it is removed with them
        padded = type(layer) is nn.Embedding and layer.padding_idx is not None
        if (padded or layer in functional) and not hasattr(layer, "ft_compute_sample_grad"):
            compute_functionally(layer, batch_first=module.batch_first)


def by_position(layer: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
    """Passes keyword arguments by position, where Opacus's hooks expect them; a pre-hook."""
    if args or not keywords:
        return None
    bound = inspect.signature(layer.forward).bind(**keywords)
    return bound.args, bound.kwargs


def wrap_network(engine: opacus.PrivacyEngine, module: nn.Module, **keywords: Any) -> Any:
    """Returns Opacus's wrapper of a network, which computes gradients per record."""
    return engine._prepare_model(module, **keywords)


class OpenOptimizer(DPOptimizer):
    """Opacus's optimizer, with public names for the signals of ``BatchMemoryManager``."""

    def signalled(self, *, take: bool = False) -> bool:
        """Tells whether ``signal_skip_step`` was called: the next step only adds to a batch's sum.

        Args:
            take: Whether to remove the signal, because this is the next step.
        """
        return bool(self._check_skip_next_step(pop_next=take))

    @property
    def last_step_was_skipped(self) -> bool:
        """Whether the last step only added to a batch's sum; ``zero_grad()`` then keeps the sum."""
        return bool(self._is_last_step_skipped)

    @last_step_was_skipped.setter
    def last_step_was_skipped(self, skipped: bool) -> None:
        self._is_last_step_skipped = skipped

    def refuse_missing(self, parameter: torch.Tensor, *, unfinished: bool) -> None:
        """Refuses a step without gradients of records; Opacus's error gives no reason.

        Args:
            parameter: The parameter without gradients.
            unfinished: Whether it was used in a forward pass without a backward pass.
        """

    def _get_flat_grad_sample(self, p: Any) -> Any:
        if getattr(p, "grad_sample", None) is None:
            self.refuse_missing(p, unfinished=bool(getattr(p, "_forward_counter", 0)))
        return super()._get_flat_grad_sample(p)


def build_physical_loaders_with(build: Callable[..., DataLoader]) -> None:
    """Makes ``BatchMemoryManager`` build its loaders by a function."""
    batch_memory_manager.DataLoader = build


def stock_engine_call() -> tuple[DataLoader | None, dict[str, Any]]:
    """Returns the loader and the unused keywords of the running call of Opacus's ``make_private``.

    Opacus passes accountants only a sample rate, from a batch size that float arithmetic may have
    rounded down (98 records in batches of 2 become 49 of 1), and nothing about the sampler. If
    Opacus renames its variables, nothing is found.
    """
    frame = inspect.currentframe()
    for _ in range(6):  # this function, the methods of the accountant and of the engine
        names: dict[str, Any] = frame.f_locals if frame else {}
        if isinstance(names.get("data_loader"), DataLoader):
            return names["data_loader"], dict(names.get("kwargs") or {})
        frame = frame and frame.f_back
    return None, {}


def record_counts(optimizer: DPOptimizer) -> set[int]:
    """Returns the numbers of records for which parameters have gradients."""
    gradients = [getattr(parameter, "grad_sample", None) for parameter in optimizer.params]
    return {
        sum(map(len, gradient)) if isinstance(gradient, list) else len(gradient)
        for gradient in gradients
        if gradient is not None
    }


def drop_sum(optimizer: DPOptimizer) -> None:
    """Discards the sum of a logical batch that was not completed."""
    optimizer._is_last_step_skipped = False
    for parameter in optimizer.params:
        parameter.summed_grad = None


def drop_partial_batch(optimizer: DPOptimizer) -> None:
    """Discards a logical batch that was not completed, and its signals to skip steps."""
    drop_sum(optimizer)
    optimizer._step_skip_queue.clear()
    for parameter in optimizer.params:
        parameter.grad_sample = parameter.grad = None


def clips_adaptively(optimizer: DPOptimizer) -> bool:
    """Tells whether the clipping norm, and with it the noise, changes from step to step."""
    return isinstance(optimizer, AdaClipDPOptimizer) or hasattr(
        optimizer, "_adjusted_noise_multiplier"
    )


def forget_parameters(module: nn.Module) -> None:
    """Removes the attributes that an unused optimizer has set on the network's parameters."""
    for parameter in module.parameters():
        parameter.__dict__.pop("summed_grad", None)


def without_records(state: dict[str, Any]) -> dict[str, Any]:
    """Returns an object's attributes without Opacus's data of single records.

    The object is a network, a layer, a parameter or a wrapper.
    """
    # Parameters of a copy, which no hook clips, are recognised by their lack of "_forward_counter".
    left_out = {"_norm_sample", "_current_grad_sample", "max_batch_len", "_forward_counter"}
    if all(
        isinstance(call, list | tuple) for call in state.get("activations") or ()
    ):  # an attribute of the user's stays
        left_out.add("activations")
    reset = {"grad_sample": None, "summed_grad": None, "_per_sample_gradient_norms": None}
    return {name: reset.get(name, value) for name, value in state.items() if name not in left_out}


def is_used(parameter: torch.Tensor) -> bool:
    """Tells whether a step has used all gradients of records of a parameter."""
    waiting = getattr(parameter, "grad_sample", None)
    return hasattr(waiting[-1] if isinstance(waiting, list) and waiting else waiting, "_processed")


def waits_for_step(parameter: nn.Parameter) -> bool:
    """Tells whether a parameter has gradients of records that no step has used."""
    total = getattr(parameter, "summed_grad", None)
    if getattr(parameter, "grad_sample", None) is not None and not is_used(parameter):
        return True
    # Only the first rank adds noise and marks the sum. On the other ranks the sum becomes the
    # gradient itself.
    used = (
        parameter.grad is not None
        and total is not None
        and parameter.grad.data_ptr() == total.data_ptr()
    )
    return isinstance(total, torch.Tensor) and not hasattr(total, "_processed") and not used


def wrapped_network(module: AbstractGradSampleModule) -> nn.Module:
    """Returns the network inside a grad-sample module, with its hooks."""
    return module._module


def forget_pass(module: Any, *, norms_only: bool = False) -> None:
    """Removes the data of earlier passes from a network: norms, gradients and unfinished passes.

    Args:
        module: Opacus's wrapper or hooks.
        norms_only: Keep gradients of records and unfinished passes.
    """
    for parameter in module.trainable_parameters:
        parameter.__dict__.pop("_norm_sample", None)
        if not norms_only:
            parameter.grad_sample = None
    if not norms_only:
        forget_unfinished_passes(wrapped_network(module))


def expect_backward(layer: nn.Module) -> None:
    """Counts one more call of a layer that needs a backward pass."""
    for _, parameter in trainable_parameters(layer):
        parameter._forward_counter += 1


def norms_of_records(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the norms of a parameter's gradients per record from ghost clipping, if any."""
    return vars(parameter).get("_norm_sample")


def norms_of_no_records(module: Any, layer: nn.Module) -> bool:
    """Sets empty norms if a call of a layer had no records; returns whether it did.

    Opacus may fail for such a call.
    """
    axis = 0 if module.batch_first or type(layer) is RNNLinear else 1
    if hasattr(layer, "max_batch_len") or any(call[-1].shape[axis] for call in layer.activations):  # type: ignore[union-attr]
        return False
    layer.activations.pop()  # type: ignore[operator, union-attr]
    for _, parameter in trainable_parameters(layer):
        parameter._norm_sample = parameter.new_zeros(0)
        parameter._forward_counter -= 1
    return True


def raise_norms(
    layer: nn.Module, activations: torch.Tensor, backprops: torch.Tensor, *, axis: int
) -> None:
    """Increases the norms of a linear layer's gradients by a bound on their rounding error.

    Opacus adds up scalar products of all pairs of rows of a record. These cancel if the rows are
    long and the gradient is short: Opacus has computed norms of 0 for gradients of some hundred
    clipping norms. Without cancellation the increase is far below the norm.

    Args:
        layer: The layer; its parameters have the norms of the call.
        activations: Its input: [records, rows, features], or [rows, records, features].
        backprops: The gradients of its output, in the same layout.
        axis: The axis of the rows.
    """
    lengths = backprops.norm(dim=-1)
    terms = max(backprops.shape[axis], backprops.shape[-1], activations.shape[-1])
    rounding = 4 * terms * torch.finfo(backprops.dtype).eps
    for name, parameter in trainable_parameters(layer):
        sizes = lengths
        if name == "weight":
            sizes = lengths * activations.to(lengths.dtype).norm(dim=-1)
        slack = rounding**0.5 * sizes.sum(axis)
        parameter._norm_sample = torch.hypot(parameter._norm_sample, slack)


def records_of_calls(module: Any) -> int | None:
    """Returns the number of records in calls that need a backward pass; None without such calls."""
    sizes = []
    for layer in wrapped_network(module).modules():
        axis = 0 if module.batch_first or type(layer) is RNNLinear else 1
        sizes += [call[-1].shape[axis] for call in layer.__dict__.get("activations", ()) if call]
    return max(sizes, default=None)


def forget_unfinished_passes(network: nn.Module) -> None:
    """Discards unfinished passes; their gradients would be added to those of the next batch."""
    for layer in network.modules():
        kept = layer.__dict__.get(
            "activations"
        )  # an attribute of the user's is not a list of lists
        if isinstance(kept, list) and all(isinstance(call, list) for call in kept):
            kept.clear()
            layer.__dict__.pop("max_batch_len", None)
        for parameter in layer.parameters(recurse=False):
            if "_forward_counter" in parameter.__dict__:
                parameter.__dict__["_forward_counter"] = 0
            parameter.__dict__.pop("_current_grad_sample", None)


def unknown_to_hooks(network: nn.Module) -> dict[str, torch.Tensor]:
    """Returns, by name, the trainable parameters of a private network without gradients per record.

    They were frozen, or did not exist, when the hooks were added.
    """
    trained = (
        trainable_parameters(network) if hasattr(network, "autograd_grad_sample_hooks") else ()
    )
    return {
        name: parameter for name, parameter in trained if not hasattr(parameter, "_forward_counter")
    }


def watches_gradients(module: Any) -> bool:
    """Tells whether a network's wrapper or hooks still compute gradients per record."""
    return hasattr(module, "autograd_grad_sample_hooks") or isinstance(
        module, GradSampleModuleExpandedWeights
    )


def check_attention(module: nn.Module) -> None:
    """Refuses attention layers whose outputs the installed Opacus computes wrongly, by name.

    With ``batch_first=True`` Opacus 1.6.0 splices the heads into the time axis. Attention without
    masks is equivariant in time: if the input is reversed, so is the output.
    """
    # With a single head the outputs are correct.
    paths = [
        name or "the module itself"
        for name, layer in module.named_modules()
        if isinstance(layer, DPMultiheadAttention) and layer.batch_first and layer.num_heads > 1
    ]
    if not paths:
        return
    # The constructor draws initial weights, which must not change the global random state.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        attention = DPMultiheadAttention(4, 2, batch_first=True).double().eval()
        x = torch.randn(2, 3, 4, dtype=torch.float64)  # batch, time, features
        forth, back = attention(x, x, x)[0], attention(*[x.flip(1)] * 3)[0]
    if not torch.allclose(forth, back.flip(1), atol=1e-9):
        raise ValueError(
            f"module has DPMultiheadAttention with batch_first=True at {', '.join(paths)}, which "
            "the installed Opacus computes wrongly (it splices the heads into the time axis, see "
            "Opacus pull request #825); write the attention with nn.Linear; or build the network "
            "with batch_first=False, pass [time, batch, features] through every layer and "
            "batch_first=False to make_private; or install an Opacus that has the repair"
        )


def check_ghost_ties(module: nn.Module) -> None:
    """Refuses layers that share a trainable parameter, which ghost clipping cannot train."""
    names = defaultdict[torch.Tensor, list[str]](list)
    for path, layer in module.named_modules():
        # A recurrent network has its cells' parameters under names of its own as well.
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.requires_grad and not isinstance(layer, DPRNNBase):
                names[parameter].append(f"{path}.{name}" if path else name)
    tied = [" = ".join(several) for several in names.values() if len(several) > 1]
    if tied:
        raise ValueError(
            f"module has tied parameters, {'; '.join(tied)}, which grad_sample_mode='ghost' does "
            "not support; use "
            "grad_sample_mode='hooks', freeze them, or untie them (tie_word_embeddings=False in a "
            "Hugging Face configuration)"
        )
