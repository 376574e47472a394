"""What a private network must be, and how its passes must go together, said in time.

Whether a network's records can be clipped at all is told by :mod:`~opacus_shuffle.networks.check`.
Here it is asked, when ``make_private`` begins; and here stands what Opacus would fail at without a
reason, or compute wrongly in silence, in the middle of training.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from opacus.utils.module_utils import trainable_modules
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import (
    check_attention,
    check_ghost_ties,
    is_copy,
    unknown_to_hooks,
    watches_gradients,
    wrapped_network,
)
from opacus_shuffle.engine.raw_gradients import (
    check_second_expansion,
    check_second_pass,
    held_parameters,
    hold_copy,
    names_of,
    private_optimizers,
)
from opacus_shuffle.networks.check import SORT_BEFORE
from opacus_shuffle.networks.loader_check import check_collate, check_criterion_on, check_padding
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.training_check import TrainingCheck


def check_network(
    module: nn.Module,
    data_loader: DataLoader,
    *,
    criterion: Any,
    batch_first: bool,
    grad_sample_mode: str,
    trained: Sequence[torch.Tensor],
    accountant: Any,
) -> TrainingCheck | None:
    """Refuses networks that cannot be trained as asked.

    Args:
        module: As of ``make_private``; so are the next four.
        data_loader: Its first records run through the network.
        criterion: The loss, or None.
        batch_first: Whether the first dimension of the network's inputs is the batch.
        grad_sample_mode: How each record's gradient is found.
        trained: The optimizer's parameters that require a gradient.
        accountant: Of the engine that asks.

    Returns:
        The check that runs again when the network's modes change, or on the first batch if the
        network does not take the loader's first records. None if nothing can be checked.

    Raises:
        ValueError: The network cannot be trained, with its part that cannot.
    """
    network = unwrap(module)
    check_earlier_runs(module, trained, accountant)
    check_attention(network)
    check_embeddings(network)
    if grad_sample_mode == "ghost":  # which divides by no more than the number of records
        check_ghost_ties(network)
    else:
        check_denominators(network, criterion)
    if grad_sample_mode == "no_op" or any(map(is_lazy, network.parameters())):
        return None
    check = TrainingCheck(network, batch_first=batch_first, mode=grad_sample_mode, trained=trained)
    if idle := check.idle_layers(network):
        raise ValueError(
            f"module has layers in evaluation mode that the optimizer trains, {', '.join(idle)}: "
            "call module.train(), or freeze their parameters by requires_grad_(False) and leave "
            "them out of the optimizer"
        )
    check.check_loader(network, data_loader, criterion)
    check_collate(data_loader)
    check_padding(network, data_loader)
    if grad_sample_mode != "ghost" and criterion is not None:  # ghost clipping checks it later
        check_criterion_on(criterion, network, data_loader)
    return check


def check_embeddings(network: nn.Module) -> None:
    """Refuses embeddings that write, without noise, to the rows of the records' tokens.

    Raises:
        ValueError: There are some, trained or frozen.
    """
    named = [
        name or "the module itself"
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
    if named:
        raise ValueError(
            f"module has embeddings with max_norm at {', '.join(named)}: every forward pass "
            "rescales the rows of the batch's tokens, with no noise, so that the weights show "
            "which these are; set max_norm to None, and bound the rows between epochs, all of "
            "them, if you must"
        )


def check_denominators(network: nn.Module, criterion: Any) -> None:
    """Refuses losses that are divided by what the other records of the batch are.

    Args:
        network: Its parts are looked at.
        criterion: As is this one. What is no class of PyTorch's cannot be seen beforehand.

    Raises:
        ValueError: There is one.
    """
    parts = {f"module's {name}": part for name, part in network.named_modules()}
    for name, loss in {"criterion": criterion, **parts}.items():
        if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss.reduction != "mean":
            continue
        how = f"ignore_index={loss.ignore_index}" if loss.weight is None else "weight=..."
        if how != "ignore_index=-100":
            raise ValueError(
                f"{name} is {type(loss).__name__}({how}, reduction='mean'), which divides by what "
                "the batch's labels weigh: one record's label rescales the gradients of all "
                "others, after which clipping bounds nobody's influence; use reduction='none' and "
                "take the mean yourself, or grad_sample_mode='ghost', which does so itself"
            )


def check_earlier_runs(module: nn.Module, trained: Sequence[torch.Tensor], accountant: Any) -> None:
    """Refuses what an earlier ``make_private`` holds, but for what it returned to the same engine.

    Args:
        module: As of ``make_private``.
        trained: The optimizer's parameters that require a gradient.
        accountant: Of the engine that asks.

    Raises:
        ValueError: It is held, or trains more than before; the earlier run goes on as it was.
    """
    network = unwrap(module)
    remedy = "call its to_standard_module() (cleanup() with wrap_model=False) first"
    own, inside = set(map(id, module.parameters())), hasattr(network, "autograd_grad_sample_hooks")
    for other, parameter in held_parameters():
        inside |= other is network and id(parameter) in own
        if id(parameter) in own and other is not network and parameter.requires_grad:
            raise ValueError(
                f"module shares {names_of([parameter])} with a {type(other).__name__} that an "
                "earlier make_private has made private, and trains by itself: make one network "
                f"private that has both parts, or {remedy}"
            )
    if module is network and inside:
        raise ValueError(
            f"module is a {type(network).__name__} that an earlier make_private has made private: "
            f"pass what that returned, with which the earlier run ends, or {remedy}"
        )
    identities = set(map(id, trained))
    unknown = {} if is_copy(network) else unknown_to_hooks(network)
    if thawed := [name for name, parameter in unknown.items() if id(parameter) in identities]:
        raise ValueError(
            f"parameters {', '.join(thawed[:3])} were frozen when module was made private, so that "
            "nobody computes their gradients per record: pass model.to_standard_module() to "
            "make_private, and a new optimizer of all that is to be trained"
        )
    if any(optimizer.accountant is not accountant for optimizer in private_optimizers(module)):
        raise ValueError(
            "module was made private by another engine, whose epsilon would say nothing of the "
            "steps to come, nor this one's of those before: call make_private of the engine that "
            f"accounts for it, or {remedy}; then what both spend adds up"
        )


def check_supported(engine: Any, module: nn.Module) -> None:
    """Refuses layers as Opacus does, which says why, and names them, which it does not.

    Raises:
        UnsupportedModuleError: A ``ValueError`` of Opacus's.
    """
    try:
        engine.validate(module=module, optimizer=None, data_loader=None)
    except UnsupportedModuleError as error:
        if not module.training:
            raise UnsupportedModuleError(
                "module is in evaluation mode, in which no per-sample gradients are kept: call "
                "module.train() before make_private"
            ) from error
        checks = ModuleValidator.VALIDATORS
        named = [
            f"{name or 'the module itself'} ({type(layer).__name__})"
            for name, layer in trainable_modules(module)
            if type(layer) in checks and checks[type(layer)](layer)
        ]
        raise UnsupportedModuleError(
            f"module has layers that Opacus does not support, {', '.join(named)}: {error}; replace "
            "them by hand or by module = PrivacyEngine.get_compatible_module(module), and make the "
            "optimizer for its parameters"
        ) from error


def explain_missing_calls(module: Any) -> None:
    """Has backward passes that do not match the forward passes fail with an explanation.

    Args:
        module: Opacus's wrapper or hooks.
    """
    watched, hook = module, check_second_expansion
    if hasattr(module, "rearrange_grad_samples"):
        module.rearrange_grad_samples = types.MethodType(_rearranged, module)
        watched, hook = wrapped_network(module), check_hooked
    if watches_gradients(module) and hook not in watched._forward_pre_hooks.values():
        watched.register_forward_pre_hook(hook, with_kwargs=True)


def check_hooked(module: nn.Module, args: Any, keywords: Any) -> None:
    """Refuses, as a hook before a forward pass, to train parameters that no hook of Opacus knows.

    A copy that has gradients without being trained is held, so that no optimizer moves it by them.

    Raises:
        ValueError: There are some: those of a copy, or put in later.
    """
    unknown = unknown_to_hooks(module) if torch.is_grad_enabled() else {}
    if not unknown:
        return
    if is_copy(module):
        hold_copy(module)
        if module.training:
            raise ValueError(
                f"this {type(module).__name__} is a copy of a private network, whose hooks do not "
                "know its parameters: train the one that make_private returned, use copies under "
                "torch.no_grad() or in evaluation mode, and to train one load its state_dict into "
                "a new network"
            )
        return
    later = [
        parameter
        for layer in module.modules()
        for hook in layer._forward_hooks.values()
        if getattr(hook, "__name__", "") == "capture_activations_hook"
        for parameter in layer.parameters()
        if id(parameter) in map(id, unknown.values())
    ]
    if module.training and later:
        raise ValueError(
            f"parameters {names_of(later)} came into the network, or were thawed, after "
            "make_private, so that nobody computes their gradients per record: put them there "
            "before, or freeze them; to end the private run call model.to_standard_module()"
        )


def _rearranged(self: Any, *, module: nn.Module, **keywords: Any) -> Any:
    """Calls Opacus's method of this name, and says first what is wrong where that would fail."""
    kind, calls, why = type(module).__name__, vars(module).get("activations"), ""
    if not calls and not module.training:
        why = (
            f"{kind} ran in evaluation mode; call model.train() before the forward pass, or, for "
            "gradients that train nothing here, model.disable_hooks()"
        )
    elif not calls:
        why = (
            f"the backward pass comes to a {kind} more often than it ran on this batch (a second "
            "backward pass, gradients of gradients, or a loss of an earlier batch), or was frozen "
            "meanwhile; call loss.backward() once for each forward pass, and for gradients that "
            "train nothing here model.disable_hooks()"
        )
    if why:
        raise ValueError(f"no gradient per record can be had: {why}")
    if not self.grad_accumulation_allowed:
        check_second_pass(self, module.parameters())
    return type(self).rearrange_grad_samples(self, module=module, **keywords)


# Under this name a copy that is pickled finds Opacus's own.
_rearranged.__name__ = "rearrange_grad_samples"


def check_packs(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuses, as a hook before a recurrent layer, sequences that are sorted within the network.

    Raises:
        ValueError: Some are.
    """
    packs = [value for value in inputs if isinstance(value, PackedSequence)]
    if layer.training and any(pack.sorted_indices is not None for pack in packs):
        raise ValueError(
            "pack_padded_sequence(enforce_sorted=False) shows records in another order than the "
            f"batch's to a {type(layer).__name__}, {SORT_BEFORE} (by length, the longest first; "
            "then pack with enforce_sorted=True)"
        )


def watch_packs(network: nn.Module) -> None:
    """Has Opacus's recurrent layers check their sequences; once is enough."""
    for layer in network.modules():
        known = check_packs in layer._forward_pre_hooks.values()
        if isinstance(layer, DPRNNBase) and not known:
            layer.register_forward_pre_hook(check_packs)
