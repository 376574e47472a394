"""Everything that this package knows of Opacus's inside: private names, callers, and defects.

No other module mentions a private name of Opacus; ``tests/core/test_opacus_compat.py`` says, name
by name, what is relied on. What Opacus's attention computes wrongly is found by its effect, so a
repaired Opacus is refused nothing there.

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
"""Opacus's batch samplers in which every record flips a coin of its own."""

WRAPPING_PACKAGES = (
    "opacus.grad_sample",
    "opacus.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.optim.swa_utils",
)
WRAPPER_NAMES = ("_module", "module", "_orig_mod")
"""Where Opacus, distributed training and ``torch.compile`` define their wrappers, and under which
names these keep the network.
"""

ACCOUNTANTS = registry._ACCOUNTANTS
"""What Opacus makes accountants by, under their names: its own, and those registered with it."""

mark_as_used = _mark_as_processed
"""Notes on a gradient, or a list of them, that a step has used it."""
check_unused = _check_processed_flag
"""Raises a ValueError for a gradient, or a list of them, that a step has used."""


@functools.wraps(_generate_noise)
def gaussian_noise(
    std: float, reference: torch.Tensor, generator: Any = None, secure_mode: bool = False
) -> Any:
    """Draws noise of the reference's shape, from our stream if that is the generator."""
    if isinstance(generator, SecretGenerator):
        return draw_noise(float(std), reference, generator)
    return _generate_noise(
        std=std, reference=reference, generator=generator, secure_mode=secure_mode
    )


# Opacus's optimizers call it by its name in their own modules. There it must be ours wherever a
# SecretGenerator can be, or they would draw from the Twister inside of it; for every other
# generator it is Opacus's, bit by bit.
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
    """Returns each record's gradient, as Opacus counts repeated tokens of a record only once."""
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


# Opacus finds its rules by the class of a layer. Layers that are not marked keep these rules. Under
# Opacus's own engine, no layer is marked.
for _rules, _of_norms in (
    (GradSampleHooks.GRAD_SAMPLERS, False),
    (GradSampleHooksFastGradientClipping.NORM_SAMPLERS, True),
):
    _rules.update({kind: _corrected(rule, norms=_of_norms) for kind, rule in _rules.items()})


def compute_functionally(layer: Any, *, batch_first: bool) -> None:
    """Marks a layer so that functional PyTorch computes its gradients, not Opacus's rule.

    An embedding keeps the rule, which is faster and finds norms without gradients, but gets no
    gradients of padding. The mark is removed with Opacus's hooks.
    """
    if type(layer) in (nn.Embedding, nn.EmbeddingBag):
        layer.ft_compute_sample_grad = None
        return
    bare = copy.copy(layer)  # without hooks, which the function must not run
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
    """Returns what Opacus's engine makes of a network, which computes gradients per record."""
    return engine._prepare_model(module, **keywords)


class OpenOptimizer(DPOptimizer):
    """Opacus's optimizer, with public names for the signals of ``BatchMemoryManager``."""

    def signalled(self, *, take: bool = False) -> bool:
        """What ``signal_skip_step`` said of the next step: that it only adds to the sum of a batch.

        Args:
            take: Whether this step is the next one, so that the signal is used up.
        """
        return bool(self._check_skip_next_step(pop_next=take))

    @property
    def last_step_was_skipped(self) -> bool:
        """Whether the last step only added to a batch's sum, which ``zero_grad()`` then keeps."""
        return bool(self._is_last_step_skipped)

    @last_step_was_skipped.setter
    def last_step_was_skipped(self, skipped: bool) -> None:
        self._is_last_step_skipped = skipped

    def refuse_missing(self, parameter: torch.Tensor, *, unfinished: bool) -> None:
        """Refuses a step without gradients of records; Opacus does so too, without a reason.

        Args:
            parameter: Which has none.
            unfinished: Whether it was in a forward pass that no backward pass came back to.
        """

    def _get_flat_grad_sample(self, p: Any) -> Any:
        if getattr(p, "grad_sample", None) is None:
            self.refuse_missing(p, unfinished=bool(getattr(p, "_forward_counter", 0)))
        return super()._get_flat_grad_sample(p)


def build_physical_loaders_with(build: Callable[..., DataLoader]) -> None:
    """Lets ``BatchMemoryManager`` build its loaders by a function."""
    batch_memory_manager.DataLoader = build


def stock_engine_call() -> tuple[DataLoader | None, dict[str, Any]]:
    """Returns the loader and the unread keywords of the stock ``make_private`` that is running.

    Opacus tells accountants nothing of the data but a batch size that float arithmetic has rounded
    down (98 records in batches of 2 become 49 of 1), and of its sampler nothing at all. If it ever
    names these otherwise, nothing is found.
    """
    frame = inspect.currentframe()
    for _ in range(6):  # this function, the accountant's methods, the engine's
        names: dict[str, Any] = frame.f_locals if frame else {}
        if isinstance(names.get("data_loader"), DataLoader):
            return names["data_loader"], dict(names.get("kwargs") or {})
        frame = frame and frame.f_back
    return None, {}


def record_counts(optimizer: DPOptimizer) -> set[int]:
    """How many records each parameter has gradients of; nothing of those that have none."""
    gradients = [getattr(parameter, "grad_sample", None) for parameter in optimizer.params]
    return {
        sum(map(len, gradient)) if isinstance(gradient, list) else len(gradient)
        for gradient in gradients
        if gradient is not None
    }


def drop_sum(optimizer: DPOptimizer) -> None:
    """Forgets the sum of a logical batch that was left before its end."""
    optimizer._is_last_step_skipped = False
    for parameter in optimizer.params:
        parameter.summed_grad = None


def drop_partial_batch(optimizer: DPOptimizer) -> None:
    """Forgets a logical batch that was left before its end, and the steps to be skipped for it."""
    drop_sum(optimizer)
    optimizer._step_skip_queue.clear()
    for parameter in optimizer.params:
        parameter.grad_sample = parameter.grad = None


def clips_adaptively(optimizer: DPOptimizer) -> bool:
    """Whether the clipping norm, and with it the noise, changes from step to step."""
    return isinstance(optimizer, AdaClipDPOptimizer) or hasattr(
        optimizer, "_adjusted_noise_multiplier"
    )


def forget_parameters(module: nn.Module) -> None:
    """Takes off the network's parameters what an optimizer that never ran has put there."""
    for parameter in module.parameters():
        parameter.__dict__.pop("summed_grad", None)


def without_records(state: dict[str, Any]) -> dict[str, Any]:
    """Returns an object's attributes without what Opacus keeps of single records there.

    The object is a network, a layer, a parameter or a wrapper.
    """
    # By "_forward_counter" a parameter is told from one of a copy, which no hook clips.
    left_out = {"_norm_sample", "_current_grad_sample", "max_batch_len", "_forward_counter"}
    if all(
        isinstance(call, list | tuple) for call in state.get("activations") or ()
    ):  # a list of its own stays
        left_out.add("activations")
    reset = {"grad_sample": None, "summed_grad": None, "_per_sample_gradient_norms": None}
    return {name: reset.get(name, value) for name, value in state.items() if name not in left_out}


def is_used(parameter: torch.Tensor) -> bool:
    """Whether a step has used all gradients of records of a parameter."""
    waiting = getattr(parameter, "grad_sample", None)
    return hasattr(waiting[-1] if isinstance(waiting, list) and waiting else waiting, "_processed")


def waits_for_step(parameter: nn.Parameter) -> bool:
    """Whether gradients of records wait for a step here; those that a step has used are marked."""
    total = getattr(parameter, "summed_grad", None)
    if getattr(parameter, "grad_sample", None) is not None and not is_used(parameter):
        return True
    # All ranks but the first add no noise, so that the sum is not marked: there it becomes the
    # gradient itself.
    used = (
        parameter.grad is not None
        and total is not None
        and parameter.grad.data_ptr() == total.data_ptr()
    )
    return isinstance(total, torch.Tensor) and not hasattr(total, "_processed") and not used


def wrapped_network(module: AbstractGradSampleModule) -> nn.Module:
    """The network inside of a grad-sample module, hooks and all."""
    return module._module


def forget_pass(module: Any, *, norms_only: bool = False) -> None:
    """Takes off a network what earlier passes left: norms, and what waits for a backward pass.

    Args:
        module: Opacus's wrapper or hooks.
        norms_only: Leave what waits, and gradients of records, which a pass that failed may have
            left at the layer where it did.
    """
    for parameter in module.trainable_parameters:
        parameter.__dict__.pop("_norm_sample", None)
        if not norms_only:
            parameter.grad_sample = None
    if not norms_only:
        forget_unfinished_passes(wrapped_network(module))


def expect_backward(layer: nn.Module) -> None:
    """Tells a layer's parameters that one more of its calls waits for a backward pass."""
    for _, parameter in trainable_parameters(layer):
        parameter._forward_counter += 1


def norms_of_records(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the norms of records' gradients that ghost clipping found for a parameter, if any."""
    return vars(parameter).get("_norm_sample")


def norms_of_no_records(module: Any, layer: nn.Module) -> bool:
    """Notes that a call of a layer had no records, of which Opacus may find no norms."""
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
    """Raises norms of gradients of a linear layer by what rounding may have taken from them.

    Opacus adds up scalar products of all pairs of rows of a record, which cancel where the rows are
    long and the gradient is short: it has found norms of 0 for gradients of some hundred clipping
    norms. What is added is far below the norm where nothing cancels.

    Args:
        layer: Its parameters have the norms of the call.
        activations: What it was given: [records, rows, features], or [rows, records, features].
        backprops: The gradients of its output, of the same form.
        axis: That of the rows.
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
    """How many records the calls had that wait for a backward pass; None if there are none."""
    sizes = []
    for layer in wrapped_network(module).modules():
        axis = 0 if module.batch_first or type(layer) is RNNLinear else 1
        sizes += [call[-1].shape[axis] for call in layer.__dict__.get("activations", ()) if call]
    return max(sizes, default=None)


def forget_unfinished_passes(network: nn.Module) -> None:
    """Forgets passes that were not finished, whose gradients would be added to the next batch's."""
    for layer in network.modules():
        kept = layer.__dict__.get("activations")  # an attribute of the user's is no list of lists
        if isinstance(kept, list) and all(isinstance(call, list) for call in kept):
            kept.clear()
            layer.__dict__.pop("max_batch_len", None)
        for parameter in layer.parameters(recurse=False):
            if "_forward_counter" in parameter.__dict__:
                parameter.__dict__["_forward_counter"] = 0
            parameter.__dict__.pop("_current_grad_sample", None)


def unknown_to_hooks(network: nn.Module) -> dict[str, torch.Tensor]:
    """Returns, by name, the trainable parameters that the hooks of a private network do not know.

    They were frozen, or not there, when the hooks were made.
    """
    trained = (
        trainable_parameters(network) if hasattr(network, "autograd_grad_sample_hooks") else ()
    )
    return {
        name: parameter for name, parameter in trained if not hasattr(parameter, "_forward_counter")
    }


def is_copy(network: nn.Module) -> bool:
    """Whether a network has the hooks of a private one, and parameters that these do not know."""
    return (
        0 < len(unknown_to_hooks(network)) == sum(1 for _ in trainable_parameters(network))
    )  # some may have been thawed


def watches_gradients(module: Any) -> bool:
    """Whether what wraps a network, or hooks it, still computes gradients per record of it."""
    return hasattr(module, "autograd_grad_sample_hooks") or isinstance(
        module, GradSampleModuleExpandedWeights
    )


def check_attention(module: nn.Module) -> None:
    """Refuses attention layers whose outputs the installed Opacus computes wrongly, by name.

    With ``batch_first=True`` Opacus 1.6.0 splices the heads into the time axis. Attention without
    masks knows no order of time: where its input is turned around, its output is.
    """
    # With a single head there is nothing to splice, and the outputs are right.
    paths = [
        name or "the module itself"
        for name, layer in module.named_modules()
        if isinstance(layer, DPMultiheadAttention) and layer.batch_first and layer.num_heads > 1
    ]
    if not paths:
        return
    # The constructor draws initial weights, from a random state that is not ours to move.
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
        # A recurrent network has its cells' parameters by names of its own, too.
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
