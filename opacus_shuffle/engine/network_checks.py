"""What a network must be for its records to be clipped, looked at before anything of it is changed.

Each check refuses by name what Opacus would compute wrongly in silence, or fail at in the middle of
the first step: attention that mixes the batch, embeddings that write to their weights, parameters
tied under ghost clipping. Whether gradients are of one record each,
:mod:`~opacus_shuffle.networks.check` tells by running the network: on the loader's first records,
or, where it does not take them, on the first batch that trains it.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from opacus.utils.module_utils import trainable_modules
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.core.opacus_compat import (
    is_copy,
    refuse_broken_attention,
    refuse_tied_ghost,
    refuse_unclipped_engine,
    unknown_to_hooks,
    watches_gradients,
    wrapped_network,
)
from opacus_shuffle.engine.raw_gradients import (
    held_parameters,
    hold_copy,
    names_of,
    private_optimizers,
    refuse_second_expansion,
    refuse_second_pass,
)
from opacus_shuffle.engine.training_plan import Request
from opacus_shuffle.networks.batch_state import check_batch_state
from opacus_shuffle.networks.check import FEWEST, SORT_BEFORE, NetworkCheck, per_sample_check
from opacus_shuffle.networks.running import has_records, unwrap
from opacus_shuffle.networks.sample_input import Call, first_records, from_batch


def check_network(request: Request, engine: Any) -> FirstBatch | None:
    """Refuses networks that cannot be trained as asked.

    Args:
        request: What ``make_private`` got.
        engine: The engine that asks.

    Returns:
        What is to look at the first batch, if the loader's first records are not what the network
        takes.

    Raises:
        ValueError: The network cannot be trained, with its part that cannot.
    """
    network = unwrap(request.module)
    refuse_unclipped_engine(engine)
    refuse_second_run(request, engine.accountant)
    refuse_renormalised(network)
    refuse_broken_attention(network)
    if request.grad_sample_mode != "ghost":  # which divides by no more than the number of records
        refuse_shared_denominators(network, request.criterion)
    if request.grad_sample_mode == "ghost":
        refuse_tied_ghost(network)
    sharded = any(
        isinstance(each, FSDPModule) for each in network.modules()
    )  # which a pass would start, on all ranks together
    if request.grad_sample_mode == "no_op" or sharded or any(map(is_lazy, network.parameters())):
        return None
    first = FirstBatch(request)
    try:
        call = from_batch(network, first_records(request.data_loader, FEWEST))
    except (
        Exception
    ):  # the training loop may make arguments of the loader's batches that are others
        return first
    return None if first.check(network, call, batch=request.data_loader.batch_size).seen else first


def refuse_second_run(request: Request, accountant: Any) -> None:
    """Refuses what an earlier ``make_private`` holds, unless the same engine gets what that returned, and trains no more.

    Args:
        request: What ``make_private`` got.
        accountant: Of the engine that asks.

    Raises:
        ValueError: It is one; the earlier run goes on as it was.
    """
    module, network = request.module, unwrap(request.module)
    own, remedy = (
        set(map(id, module.parameters())),
        "call its to_standard_module() (cleanup() with wrap_model=False) first",
    )
    held = [(other, name, each) for other, name, each in held_parameters() if id(each) in own]
    for other, name, each in held:
        if other is not network and each.requires_grad:
            raise ValueError(
                f"module shares {name} with a {type(other).__name__} that an earlier make_private "
                "has made private, and "
                f"trains by itself: make one network private that has both parts, or {remedy}"
            )
    if module is network and (
        any(other is network for other, *_ in held)
        or hasattr(network, "autograd_grad_sample_hooks")
    ):
        raise ValueError(
            f"module is a {type(network).__name__} that an earlier make_private has made private: "
            "pass what that returned, "
            f"with which the earlier run ends, or {remedy}"
        )
    trained = set(map(id, request.trainable))
    unknown = {} if is_copy(network) else unknown_to_hooks(network)
    thawed = [name for name, each in unknown.items() if id(each) in trained]
    if thawed:
        raise ValueError(
            f"parameters {', '.join(thawed[:3])} were frozen when module was made private, so that "
            "nobody computes their "
            "gradients per record: pass model.to_standard_module() to make_private, and a new "
            "optimizer of all that is to be "
            "trained"
        )
    if any(each.accountant is not accountant for each in private_optimizers(module)):
        raise ValueError(
            "module was made private by another engine, whose epsilon would say nothing of the "
            "steps to come, nor this one's "
            f"of those before: call make_private of the engine that accounts for it, or {remedy}; "
            "then what both spend adds up"
        )


def refuse_shared_denominators(network: nn.Module, criterion: Any) -> None:
    """Refuses losses that are divided by what the other records of the batch are, as far as they can be seen beforehand.

    Args:
        network: Its parts are looked at.
        criterion: As is this one.

    Raises:
        ValueError: There is one.
    """
    losses = {
        "criterion": criterion,
        **{f"module's {name}": each for name, each in network.named_modules()},
    }
    for name, each in losses.items():
        if not isinstance(each, nn.CrossEntropyLoss | nn.NLLLoss) or each.reduction != "mean":
            continue
        if each.weight is not None or each.ignore_index != -100:
            how = "weight=..." if each.weight is not None else f"ignore_index={each.ignore_index}"
            raise ValueError(
                f"{name} is {type(each).__name__}({how}, reduction='mean'), which divides by what "
                "the batch's labels weigh: "
                "one record's label rescales the gradients of all others, after which clipping "
                "bounds nobody's influence; use "
                "reduction='none' and take the mean yourself, or grad_sample_mode='ghost', which "
                "does so itself"
            )


def refuse_renormalised(network: nn.Module) -> None:
    """Refuses embeddings whose forward pass writes to their weights: to the rows of the records' tokens, without any noise.

    Raises:
        ValueError: There are some, trained or frozen.
    """
    named = [
        name or "the module itself"
        for name, each in network.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
    ]
    if named:
        raise ValueError(
            f"module has embeddings with max_norm at {', '.join(named)}: every forward pass "
            "rescales the rows of the batch's "
            "tokens, with no noise, so that the weights show which these are; set max_norm to "
            "None, and bound the rows between "
            "epochs, all of them, if you must"
        )


def refuse_unsupported(engine: Any, module: nn.Module) -> None:
    """Refuses layers as Opacus does, which says why, and names them, which it does not.

    Raises:
        UnsupportedModuleError: A ``ValueError`` of Opacus's.
    """
    try:
        engine.validate(module=module, optimizer=None, data_loader=None)
    except UnsupportedModuleError as error:
        checks = ModuleValidator.VALIDATORS
        named = [
            f"{name or 'the module itself'} ({type(layer).__name__})"
            for name, layer in trainable_modules(module)
            if type(layer) in checks and checks[type(layer)](layer)
        ]
        if not named:
            raise
        raise UnsupportedModuleError(
            f"module has layers that Opacus does not support, {', '.join(named)}: {error}; replace "
            "them by hand or by "
            "module = PrivacyEngine.get_compatible_module(module), and make the optimizer for its "
            "parameters"
        ) from error


def explain_missing_calls(module: Any) -> None:
    """Has backward passes that do not match the forward passes fail with an explanation, not by shapes of tensors.

    Args:
        module: Opacus's wrapper or hooks.
    """
    if hasattr(module, "rearrange_grad_samples"):
        module.rearrange_grad_samples = types.MethodType(_rearranged, module)
        network = wrapped_network(module)
        sharded = isinstance(
            network, FSDPModule
        )  # whose parameters are others in the forward pass, and which nobody can copy
        if not sharded and refuse_copies not in network._forward_pre_hooks.values():
            network.register_forward_pre_hook(refuse_copies)
    elif (
        watches_gradients(module)
        and refuse_second_expansion not in module._forward_pre_hooks.values()
    ):
        module.register_forward_pre_hook(refuse_second_expansion, with_kwargs=True)


def refuse_copies(network: nn.Module, *_: Any) -> None:
    """Refuses, as a hook before a forward pass, to train parameters that no hook knows: of a copy, or put in later.

    A copy that has gradients without being trained is held, so that no optimizer moves it by them.

    Raises:
        ValueError: There are some.
    """
    if not torch.is_grad_enabled() or not (
        unknown := {id(each) for each in unknown_to_hooks(network).values()}
    ):
        return
    if not is_copy(network):
        hooked = [
            layer
            for layer in network.modules()
            if "capture_activations_hook" in map(_name, layer._forward_hooks.values())
        ]
        if network.training and (
            later := [
                each for layer in hooked for each in layer.parameters() if id(each) in unknown
            ]
        ):
            raise ValueError(
                f"parameters {names_of(later)} came into the network, or were thawed, after "
                "make_private, so that nobody "
                "computes their gradients per record: put them there before, or freeze them; to "
                "end the private run call "
                "model.to_standard_module()"
            )
        return
    hold_copy(network)
    if network.training:
        raise ValueError(
            f"this {type(network).__name__} is a copy of a private network, whose hooks do not "
            "know its parameters: train the "
            "one that make_private returned, use copies under torch.no_grad() or in evaluation "
            "mode, and to train one load its "
            "state_dict into a new network"
        )


def _name(hook: Any) -> str:
    return getattr(hook, "__name__", "")


def _rearranged(
    self: Any, *, module: nn.Module, backprops: torch.Tensor, batch_first: bool, **keywords: Any
) -> Any:
    """Calls Opacus's method of this name, and says first what is wrong where that would fail or be wrong."""
    kind, calls = type(module).__name__, vars(module).get("activations")
    if not calls:
        raise ValueError(
            f"no gradient per record can be had: {kind} ran in evaluation mode; call model.train() "
            "before the forward pass, "
            "or, for gradients that train nothing here, model.disable_hooks()"
            if not module.training
            else f"no gradient per record can be had: the backward pass comes to a {kind} more often than it ran on this batch "
            "(a second backward pass, gradients of gradients, or a loss of an earlier batch), or "
            "was frozen meanwhile; "
            "call loss.backward() once for each forward pass, and for gradients that train nothing "
            "here model.disable_hooks()"
        )
    axis = 0 if batch_first else 1
    rows = [each.shape[axis] for each in (calls[-1][0], backprops) if each.dim() > axis]
    if (
        type(module).__module__.startswith("torch.nn.modules")
        and len(set(rows)) > 1
        and len(calls[-1]) == 1
    ):
        raise ValueError(
            f"no gradient per record can be had: {kind} ran last on {rows[0]} records, and the "
            f"loss is of {rows[1]}; run what "
            "is not trained on under torch.no_grad() or in evaluation mode"
        )
    if not self.grad_accumulation_allowed:
        refuse_second_pass(self, module.parameters())
    return type(self).rearrange_grad_samples(
        self, module=module, backprops=backprops, batch_first=batch_first, **keywords
    )


_rearranged.__name__ = (
    "rearrange_grad_samples"  # under which a copy that is pickled finds Opacus's own
)


def refuse_unsorted_packs(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuses, as a hook before a recurrent layer's forward pass, packed sequences that are sorted within the network.

    Raises:
        ValueError: Some are.
    """
    if layer.training and any(
        isinstance(each, PackedSequence) and each.sorted_indices is not None for each in inputs
    ):
        raise ValueError(
            "pack_padded_sequence(enforce_sorted=False) shows records in another order than the "
            "batch's to a "
            f"{type(layer).__name__}, {SORT_BEFORE} (by length, the longest first; then pack with "
            "enforce_sorted=True)"
        )


def watch_packs(network: nn.Module) -> None:
    """Has Opacus's recurrent layers refuse sequences that are sorted within the network; once is enough."""
    for layer in network.modules():
        if (
            isinstance(layer, DPRNNBase)
            and refuse_unsorted_packs not in layer._forward_pre_hooks.values()
        ):
            layer.register_forward_pre_hook(refuse_unsorted_packs)


class FirstBatch:
    """The check that needs a run of the network; as a forward pre-hook, on the first batch that trains, and then no more.

    Args:
        request: What ``make_private`` got.
    """

    def __init__(self, request: Request) -> None:
        self.axis = 0 if request.batch_first else 1
        self.modes = {
            "ghost": request.grad_sample_mode == "ghost",
            "expanded": request.grad_sample_mode == "ew",
        }
        network = unwrap(request.module)
        trained = set(map(id, request.trainable))
        self.trained = frozenset(
            name for name, each in network.named_parameters() if id(each) in trained
        )

    def check(self, network: nn.Module, call: Call, *, batch: int | None = None) -> NetworkCheck:
        """Looks at per-sample gradients, and at what stays in the network from one batch to the next.

        Args:
            network: What is trained.
            call: Its arguments for some records, which are taken again and again where more are
                asked for.
            batch: How many there are in a batch, if that is known.

        Raises:
            ValueError: One record's gradient is not its own, or depends on those of an earlier
                batch.
        """
        tensors = [
            leaf for leaf in tree_leaves(call, is_leaf=_is_packed) if isinstance(leaf, torch.Tensor)
        ]
        whole = next(
            (tensor.shape[self.axis] for tensor in tensors if _has_several(tensor, self.axis)), 0
        )
        if not whole:
            return NetworkCheck(seen=False)

        def call_of(records: int) -> Call:
            rows = torch.arange(records) % whole

            def cut(leaf: torch.Tensor) -> torch.Tensor:
                return (
                    leaf.index_select(self.axis, rows.to(leaf.device))
                    if has_records(leaf, whole, self.axis)
                    else leaf
                )

            return tree_map_only(torch.Tensor, cut, call)  # type: ignore[no-any-return]

        sizes = [size for size in (whole, batch) if size]
        seen = per_sample_check(
            network, call_of, axis=self.axis, **self.modes, more=sizes, trained=self.trained
        )
        if seen.problem:
            raise ValueError(seen.problem)
        check_batch_state(network, seen.changed, seen.call, seen.records, axis=self.axis)
        return seen

    def wait_on(self, module: Any) -> None:
        """Registers itself as a forward pre-hook, to check the first batch that trains this module."""
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Checks the batch of a forward pass if it trains, and removes itself; what PyTorch calls before that pass.

        Raises:
            ValueError: The network cannot be trained.
        """
        tensors = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, torch.Tensor)]
        too_few = tensors and not any(_has_several(tensor, self.axis) for tensor in tensors)
        if not module.training or not torch.is_grad_enabled() or too_few:
            return
        self.leave(module)
        try:
            seen = self.check(unwrap(module), (args, keywords))
        except BaseException:
            self.wait_on(module)
            raise
        if not seen.seen:
            warnings.warn(
                "module's layers were not looked at with several numbers of records "
                f"({seen.failure or 'no argument has an axis of them'}): no ε holds unless every "
                "layer sees [batch, ...] and "
                "each record's output is its own; see to both yourself, or have the loader yield "
                "tensors with an axis of "
                "records",
                stacklevel=2,
            )

    def leave(self, module: nn.Module) -> None:
        """Removes itself from the module's forward pre-hooks."""
        for key in [
            key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, FirstBatch)
        ]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _has_several(tensor: torch.Tensor, axis: int) -> bool:
    return tensor.dim() > axis and tensor.shape[axis] > 1


def _is_packed(value: Any) -> bool:
    """Whether a value holds sequences of several records in one tensor, which cannot be cut into records."""
    return isinstance(value, PackedSequence)
