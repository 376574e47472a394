"""Checks of the arguments and the network when ``make_private`` begins, and of passes in training.

Whether the records of a network can be clipped is decided in :mod:`~opacus_shuffle.networks.check`,
which ``make_private`` calls from here. The other checks refuse networks and passes on which
Opacus would fail without an explanation, or compute wrong gradients without an error.

A step checks its ticket, but not to which records the gradients belong: a script could keep a batch
and train on it with the ticket of another one. Therefore a network in training refuses tensors of
earlier batches. A backward pass through an output for an earlier batch is refused, too, even if
its loss was added to the loss of the next batch. A forward pass without a backward pass is
forgotten when the next batch is drawn. Otherwise its rows would be added to the gradients of that
batch.
"""

from __future__ import annotations

import functools
import types
import weakref
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
from torch.utils.hooks import RemovableHandle

from opacus_shuffle.core.opacus_compat import (
    check_attention,
    check_ghost_ties,
    forget_unfinished_passes,
    unknown_to_hooks,
    watches_gradients,
    wrapped_network,
)
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import boolean, instance_of, one_of, positive
from opacus_shuffle.engine.batches.tickets import REMEDY, TicketBook
from opacus_shuffle.engine.guards.raw_gradients import (
    OWNER,
    check_second_expansion,
    check_second_pass,
    names_of,
    note_gradient,
    private_optimizers,
    protected_parameters,
    watch_leaves,
)
from opacus_shuffle.engine.step.weight_shuffler import innermost
from opacus_shuffle.networks.check import SORT_BEFORE
from opacus_shuffle.networks.loader_check import check_criterion_on, check_loader
from opacus_shuffle.networks.running import results, unwrap
from opacus_shuffle.networks.training_check import TrainingCheck

MODES = ("hooks", "functorch", "ew", "ghost", "no_op")
ADAPTIVE = (  # the keywords of clipping="adaptive": Opacus hands these to its optimizer
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "max_clipbound",
    "min_clipbound",
    "unclipped_num_std",
)
_HANDLES: weakref.WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]] = (
    weakref.WeakKeyDictionary()
)
"""The hooks of each private network's forward passes."""


def check_arguments(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    *,
    max_grad_norm: float | Sequence[float],
    clipping: str,
    criterion: Any = None,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    poisson_sampling: bool | None = None,
    noise_generator: torch.Generator | None = None,
    grad_sample_mode: str = "hooks",
    wrap_model: bool = True,
    rand_on_empty: bool = False,
    local_noise: bool = False,
) -> list[torch.Tensor]:
    """Refuses arguments of ``make_private`` that no scheme can train with.

    Returns:
        The optimizer's parameters that require a gradient.

    Raises:
        ValueError: If an argument has a wrong type or value, or the optimizer does not go with the
            module.
    """
    instance_of("module", module, (nn.Module,))
    instance_of("optimizer", optimizer, (torch.optim.Optimizer,))
    instance_of("data_loader", data_loader, (DataLoader,))
    if isinstance(innermost(optimizer), torch.optim.LBFGS):
        raise ValueError(
            "optimizer is LBFGS, which looks at the records several times in one step, where "
            "only one noisy gradient is released: use SGD, Adam or another one that steps "
            "without a closure"
        )
    flags = {
        "local_noise": local_noise,
        "wrap_model": wrap_model,
        "batch_first": batch_first,
        "rand_on_empty": rand_on_empty,
        "poisson_sampling": False if poisson_sampling is None else poisson_sampling,
    }
    for name, value in flags.items():
        boolean(name, value)
    one_of("loss_reduction", loss_reduction, ("mean", "sum"))
    one_of("grad_sample_mode", grad_sample_mode, MODES)
    if noise_generator is not None:
        instance_of("noise_generator", noise_generator, (torch.Generator, SecretGenerator))
    if criterion is not None and not callable(criterion):
        raise ValueError(
            f"criterion must be a loss such as nn.CrossEntropyLoss(), got {criterion!r}: "
            "leave it out?"
        )
    if criterion is not None and grad_sample_mode == "ghost":
        reduction = getattr(criterion, "reduction", loss_reduction)
        one_of("criterion.reduction", reduction, [loss_reduction])
    trained = check_parameters(module, optimizer)
    check_norms(max_grad_norm, clipping, len(trained))
    return trained


def check_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Refuses complex parameters, parameters of other networks, and parameters on several devices.

    Returns:
        The optimizer's parameters that require a gradient.

    Raises:
        ValueError: If the optimizer has any of these.
    """
    identities = set(map(id, module.parameters()))
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if any(id(parameter) not in identities for parameter in parameters):
        raise ValueError(
            "Module parameters are different than optimizer Parameters: make the optimizer for "
            "this module, as in torch.optim.SGD(module.parameters(), lr=...), once all of its "
            "layers exist"
        )
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    devices = {parameter.device for parameter in trained}
    if len(devices) != 1:
        raise ValueError(
            "optimizer must hold trainable parameters, all on one device, got "
            f"{sorted(map(str, devices))}"
        )
    if any(parameter.is_complex() for parameter in trained):
        raise ValueError(
            "optimizer holds complex parameters. PyTorch splits their noise between the real and "
            "the imaginary part, and each gets only half of the accounted variance: keep each "
            "as two real parameters"
        )
    return trained


def check_norms(max_grad_norm: float | Sequence[float], clipping: str, parameters: int) -> None:
    """Refuses norms that are not positive, or not one per parameter with per-layer clipping.

    Raises:
        ValueError: If a norm is not positive, or their number is wrong.
    """
    if clipping != "per_layer":
        positive("max_grad_norm", max_grad_norm)
    elif not isinstance(max_grad_norm, Sequence) or len(max_grad_norm) != parameters:
        raise ValueError(
            f"max_grad_norm must list {parameters} norms, one per trainable parameter, got "
            f"{max_grad_norm!r}"
        )
    else:
        for norm in max_grad_norm:
            positive("max_grad_norm", norm)


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
    """Refuses networks that cannot be trained with these arguments.

    Args:
        module: As of ``make_private``; so are the next four.
        data_loader: Its first records run through the network.
        criterion: The loss, or None.
        batch_first: Whether the first dimension of the network's inputs is the batch.
        grad_sample_mode: How each record's gradient is found.
        trained: The optimizer's parameters that require a gradient.
        accountant: Of the engine that will train the network.

    Returns:
        The check that runs again when the network's modes change, or on the first batch if the
        network does not take the loader's first records. None if nothing can be checked.

    Raises:
        ValueError: The network cannot be trained. The message names the module.
    """
    network = unwrap(module)
    check_earlier_runs(module, trained, accountant)
    check_attention(network)
    check_embeddings(network, grad_sample_mode)
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
    check_loader(network, data_loader)
    if grad_sample_mode != "ghost" and criterion is not None:  # ghost clipping checks it later
        check_criterion_on(criterion, network, data_loader)
    return check


def check_embeddings(network: nn.Module, grad_sample_mode: str) -> None:
    """Refuses embeddings with options that training cannot keep private or cannot sum.

    Args:
        network: The network; its frozen embeddings are checked, too.
        grad_sample_mode: How each record's gradient is found.

    Raises:
        ValueError: There are some.
    """
    refused = {
        "max_norm": "every forward pass rescales the rows of the batch's tokens without noise, so "
        "that the weights reveal these tokens; set max_norm to None, and if you need bounded rows, "
        "bound all of them between epochs"
    }
    if grad_sample_mode == "ghost":
        refused["sparse"] = (
            "ghost clipping adds dense gradients to their sparse ones; set sparse to False, which "
            "gives the same sums, or use grad_sample_mode='hooks'"
        )
    for option, why in refused.items():
        named = [
            name or "the module itself"
            for name, module in network.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and getattr(module, option) not in (None, False)
        ]
        if named:
            raise ValueError(f"module has embeddings with {option} at {', '.join(named)}: {why}")


def check_denominators(network: nn.Module, criterion: Any) -> None:
    """Refuses losses that divide by a number that depends on the other records of the batch.

    Args:
        network: Its modules are checked.
        criterion: Likewise. Only losses of PyTorch's classes are recognised.

    Raises:
        ValueError: There is one.
    """
    modules = {f"module's {name}": module for name, module in network.named_modules()}
    for name, loss in {"criterion": criterion, **modules}.items():
        if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss.reduction != "mean":
            continue
        option = f"ignore_index={loss.ignore_index}" if loss.weight is None else "weight=..."
        if option != "ignore_index=-100":
            raise ValueError(
                f"{name} is {type(loss).__name__}({option}, reduction='mean'), which divides by "
                "the weight of the batch's labels: one record's label rescales the gradients of "
                "all others, so that clipping does not bound a record's influence; use "
                "reduction='none' and take the mean yourself, or use grad_sample_mode='ghost', "
                "which does this itself"
            )


def check_earlier_runs(module: nn.Module, trained: Sequence[torch.Tensor], accountant: Any) -> None:
    """Refuses networks of an earlier ``make_private``, except its result for the same engine.

    Args:
        module: As of ``make_private``.
        trained: The optimizer's parameters that require a gradient.
        accountant: Of the engine that will train the network.

    Raises:
        ValueError: The network is private already, or has parameters that were thawed since. The
            earlier run continues.
    """
    network = unwrap(module)
    remedy = "call its to_standard_module() (cleanup() with wrap_model=False) first"
    parameters = set(module.parameters())
    is_private = hasattr(network, "autograd_grad_sample_hooks")
    for other, parameter, _ in protected_parameters():
        if parameter not in parameters:
            continue
        is_private |= other is network
        if other is not network and parameter.requires_grad:
            raise ValueError(
                f"module shares {names_of([parameter])} with a {type(other).__name__} that an "
                "earlier make_private has made private and that is trained separately: make one "
                f"network private that contains both, or {remedy}"
            )
    if module is network and is_private:
        raise ValueError(
            f"module is a {type(network).__name__} that an earlier make_private has made private: "
            f"pass the model that it returned, which ends the earlier run, or {remedy}"
        )
    if any(optimizer.accountant is not accountant for optimizer in private_optimizers(module)):
        raise ValueError(
            "module was made private by another engine, whose epsilon would not cover the steps of "
            "this engine, or the other way round: call make_private of the engine that accounts "
            f"for it, or {remedy} and add up the epsilons of both engines"
        )


def check_supported(engine: Any, module: nn.Module) -> None:
    """Refuses layers that Opacus does not support, and names them.

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
            "optimizer for the new parameters"
        ) from error


def explain_missing_calls(module: Any) -> None:
    """Adds hooks that refuse passes on which Opacus would fail without an explanation.

    Args:
        module: Opacus's wrapper or hooks.
    """
    if not watches_gradients(module):
        return
    network: nn.Module = wrapped_network(module)
    # The names are checked first, because another check of the wrapper runs the network.
    whole = module if isinstance(module, nn.Module) else network
    hooks = [(whole, check_names), (module, check_second_expansion)]
    if hasattr(module, "rearrange_grad_samples"):
        module.rearrange_grad_samples = types.MethodType(_rearranged, module)
        hooks[1] = (network, check_hooked)
    for watched, check in hooks:
        if check not in watched._forward_pre_hooks.values():
            watched.register_forward_pre_hook(check)


def check_names(module: nn.Module, _: Any) -> None:
    """Refuses, as a hook before a forward pass, parameters that were added or renamed.

    Pruning renames a parameter and computes another tensor from it.

    Raises:
        ValueError: There are some since ``make_private``.
    """
    network = unwrap(module)
    names = getattr(vars(network).get(OWNER), "names", None)
    if names is None or not (network.training and torch.is_grad_enabled()):
        return
    if changed := [p for name, p in network.named_parameters() if names.get(id(p)) != name]:
        raise ValueError(
            "parameters were added to the network or renamed after make_private, as adapters and "
            f"pruning do: {names_of(changed)}; add adapters and prune before make_private, and "
            "make the optimizer for the network as it is then; model.to_standard_module() ends the "
            "private run"
        )


def check_hooked(module: nn.Module, _: Any) -> None:
    """Refuses, as a hook before a forward pass, to train parameters that have no hooks of Opacus.

    Raises:
        ValueError: There are some. They are those of a copy, or were added or thawed later.
    """
    if not (module.training and torch.is_grad_enabled()):
        return
    if unknown := unknown_to_hooks(module):
        raise ValueError(
            f"no gradients per record are computed for {names_of(unknown.values())}: this "
            f"{type(module).__name__} is a copy of a private network, or these parameters were "
            "added or thawed after make_private; train the network that make_private returned (use "
            "copies under torch.no_grad() or in evaluation mode, and load their state_dict into a "
            "new network to train them), and add parameters before make_private, or freeze them; "
            "model.to_standard_module() ends the private run"
        )


def _rearranged(self: Any, *, module: nn.Module, **keywords: Any) -> Any:
    """Calls Opacus's method of this name, after checks that explain its failures."""
    if not vars(module).get("activations"):
        raise ValueError(
            f"a backward pass reached a {type(module).__name__} without a forward pass in training "
            "mode (it ran in evaluation mode, was frozen meanwhile, or this is a second backward "
            "pass, one for gradients of gradients, or one for a loss of an earlier batch): call "
            "model.train() before the forward pass, and loss.backward() once for each forward "
            "pass; for gradients that train nothing here, call model.disable_hooks() first"
        )
    if not self.grad_accumulation_allowed:
        check_second_pass(self, module.parameters())
    return type(self).rearrange_grad_samples(self, module=module, **keywords)


# So that an unpickled copy has Opacus's method of this name.
_rearranged.__name__ = "rearrange_grad_samples"


def check_packs(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuses packed sequences that the network has sorted, before recurrent layers of Opacus.

    Raises:
        ValueError: The layer is one of Opacus's recurrent layers, and a sequence is sorted.
    """
    packs = [value for value in inputs if isinstance(value, PackedSequence)]
    is_sorted = any(pack.sorted_indices is not None for pack in packs)
    if is_sorted and layer.training and isinstance(layer, DPRNNBase):
        raise ValueError(
            "pack_padded_sequence(enforce_sorted=False) passes records in another order than the "
            f"batch's to a {type(layer).__name__}, {SORT_BEFORE} (by length, the longest first; "
            "then pack with enforce_sorted=True)"
        )


# ---- inputs of the latest batch ----------------------------------------------------------------


class FreshInputs:
    """Hooks that check every forward pass of a private network.

    Args:
        tickets: Of the loader.
        private: What ``make_private`` returned for the network. Nothing is checked after its hooks
            are removed.
        network: The network itself. The hook runs before its layers, too.
    """

    def __init__(
        self, tickets: TicketBook | None = None, private: Any = None, network: Any = None
    ) -> None:
        self._tickets = tickets
        self._private = (lambda: None) if private is None else weakref.ref(private)
        self._network = (lambda: None) if network is None else weakref.ref(network)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def before(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuses inputs of an earlier batch, and notes the weights that the pass uses.

        Raises:
            ValueError: If a tensor belongs to an earlier batch, or a recurrent layer gets records
                in another order.
        """
        tickets, is_whole = self._tickets, module is self._network()
        if not self._watches():
            return
        if is_whole:
            watch_leaves()
        check_packs(module, inputs)
        if tickets is None:
            return
        if module.training and tickets.is_stale((inputs, keywords)):
            raise ValueError(
                "the model was given a batch that was drawn before the last one, or by another "
                "data loader: its records are no longer accounted for; " + REMEDY
            )
        tickets.note_versions()
        tickets.forward_passes += is_whole

    def after(
        self, network: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """Refuses a backward pass through this output after the next batch was drawn."""
        tickets = self._tickets
        if not self._watches():
            return
        # Expanded weights have gradients of records in evaluation mode, too, in which the network
        # may run on old batches.
        issues = tickets and tickets.issues
        stale = tickets is not None and tickets.is_stale((inputs, keywords))

        def check_batch(_: torch.Tensor) -> None:
            note_gradient(None, network)  # expanded weights accumulate no gradient in any parameter
            if stale or (tickets and tickets.issues) != issues:
                raise ValueError(
                    "loss.backward() goes through an output of the model for a batch before the "
                    "last one (a loss that is kept, or added up over several batches), whose "
                    "records are no longer accounted for; " + REMEDY
                )

        for tensor in results(output):
            if tensor.requires_grad:
                tensor.register_hook(check_batch)  # type: ignore[no-untyped-call]

    def forget_unfinished(self) -> None:
        """Forgets forward passes that had no backward pass."""
        network, private = self._network(), self._private()
        if network is not None and private is not None and watches_gradients(private):
            forget_unfinished_passes(network)

    def _watches(self) -> bool:
        """Returns whether a forward pass now would lead to gradients of records."""
        private = self._private()
        return private is not None and torch.is_grad_enabled() and watches_gradients(private)


def watch_inputs(network: nn.Module, private: Any, tickets: TicketBook | None) -> None:
    """Attaches the hooks to a network, and removes those of an earlier call."""
    for earlier in _HANDLES.pop(network, ()):
        earlier.remove()
    _stay_out_of_graphs()
    fresh = FreshInputs(tickets, private, network)
    if tickets is not None:
        tickets.when_issued = fresh.forget_unfinished
    # Layers with hooks of Opacus's may be called without the whole network. Expanded weights know
    # only the whole. Opacus keeps nothing of what layers without parameters see.
    layers = network.modules() if hasattr(private, "autograd_grad_sample_hooks") else ()
    entrances = {network, *(layer for layer in layers if layer._parameters)}
    before = [each.register_forward_pre_hook(fresh.before, with_kwargs=True) for each in entrances]
    after = network.register_forward_hook(fresh.after, with_kwargs=True)
    _HANDLES[network] = *before, after


@functools.cache
def _stay_out_of_graphs() -> None:
    """Keeps the hooks out of graphs that ``torch.compile`` makes."""
    for owner, name in (
        (FreshInputs, "before"),
        (FreshInputs, "after"),
        (TrainingCheck, "__call__"),
    ):
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))  # type: ignore[no-untyped-call]
