"""Keeps raw gradients from the steps of optimizers, and from copies and files.

One rule is checked before every step of any optimizer.

Between the backward pass and the private step, ``.grad`` is neither clipped nor noised, and any
optimizer would use it: the plain optimizer inside of the private one, or another one over the same
parameters, over parameters that the private one does not train, or over layers that were added to
the network later. The rule therefore reads the network's parameters at the moment of the step. Each
of them may be moved only by the gradient that the private optimizer has released for this update.
Accumulating gradients of two backward passes is refused, too, because a record might be in both.

The same rule holds outside of the network. A classification head, a loss with weights or an adapter
outside of the network receives raw gradients of the records. After a backward pass through a
private network, no other optimizer may step on tensors that received a gradient in that pass.
``private.disable_hooks()`` exempts a pass that sees no records, such as a generator's.

Opacus stores gradients of records on parameters and inputs on layers, from the forward pass to the
step. ``torch.save`` of a whole model would write them to the file, and ``copy.deepcopy`` in the
middle of a batch would copy them. Therefore every parameter and every module of a private model
gets a ``__getstate__`` that leaves them out.

>>> from types import SimpleNamespace
>>> from opacus import GradSampleModule
>>> network = nn.Linear(2, 1)
>>> private = GradSampleModule(network)
>>> owner = SimpleNamespace(
...     has_released=lambda parameter: False, original_optimizer=None, planned=(), pending=False)
>>> protect(network, private, owner)
>>> sgd = torch.optim.SGD(network.parameters(), lr=1.0)
>>> sgd.step()
Traceback (most recent call last):
    ...
ValueError: SGD.step() would move parameters of a private run ... accounted (weight, bias): ...
>>> network = private.to_standard_module()  # ends it
>>> sgd.step()
>>> import pickle
>>> exclude_records(network)
>>> network.weight.grad_sample = torch.ones(3, 1, 2)
>>> pickle.loads(pickle.dumps(network)).weight.grad_sample is None
True
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from opacus_shuffle.core.opacus_compat import waits_for_step, without_records, wrapped_network

OWNER = "private_optimizer"
"""The attribute of a private network that holds the optimizer that trains it.

It keeps that optimizer alive as long as the network. Otherwise gradients that wait for its step
would be unprotected after a script has deleted it.
"""
NETWORK = "private_network"
"""The attribute of a trained parameter that refers to its private network."""
END = "cleanup"
"""The method by which Opacus's wrappers and hooks end."""
_STATE = "__getstate__"
_OF_THIS_OBJECT = (_STATE, "get_clipping_coef", OWNER, END, NETWORK)
"""Attributes that concern this object and none of its copies."""
_PROTECTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_OPTIMIZERS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""All optimizers of the process, from the first private run on."""


_RAW: MutableMapping[torch.Tensor, weakref.ref[torch.Tensor]] = WeakTensorKeyDictionary()
"""Leaves outside of private networks, each with a reference to its gradient of records.

They are no attributes, which would be pickled with the leaf."""
_latest = SimpleNamespace(number=-1, leaves=[], private=False)
"""The latest backward pass: its number, the leaves outside of private networks that it has reached,
and whether it has reached a private network."""


def note_gradient(leaf: torch.Tensor | None, network: nn.Module | None = None) -> None:
    """Notes, as a hook of a leaf tensor, that a backward pass has accumulated a gradient there.

    Gradients of leaves outside of a private network are marked if the same pass, before or after,
    reaches the network.

    Args:
        leaf: The tensor with the gradient; None if only the network is given.
        network: The private network that the pass has reached; by default that of the leaf.
    """
    if (number := torch._C._current_graph_task_id()) != _latest.number:
        vars(_latest).update(number=number, leaves=[], private=False)
    network = network or vars(leaf).get(NETWORK, lambda: None)()
    owner = None if network is None else vars(network).get(OWNER)
    if owner is not None and getattr(owner.wrapper(), "hooks_enabled", True):
        _latest.private = True
        if owner.tickets is not None and owner.tickets.latest is not None:
            ticket = owner.tickets.latest
            ticket.has_gradients = ticket.epoch.has_gradients = True
    elif owner is None and leaf is not None:
        if leaf in _RAW and _RAW[leaf]() is not leaf.grad:
            del _RAW[leaf]  # that gradient was cleared
        _latest.leaves.append(leaf)
    for outside in _latest.leaves if _latest.private else ():
        if outside.grad is None:  # an optimizer has stepped within the pass
            _refuse_outside("An optimizer", [outside])
        _RAW[outside] = weakref.ref(outside.grad)


def watch_leaves(optimizers: Iterable[torch.optim.Optimizer] = _OPTIMIZERS) -> None:
    """Watches all tensors that optimizers may step on, also those that were frozen earlier."""
    for optimizer in list(optimizers):
        for leaf in (leaf for group in optimizer.param_groups for leaf in group["params"]):
            if leaf.requires_grad and not is_lazy(leaf) and not _is_watched(leaf):
                leaf.register_post_accumulate_grad_hook(note_gradient)


def _is_watched(leaf: torch.Tensor) -> bool:
    return note_gradient in (leaf._post_accumulate_grad_hooks or {}).values()


def protect(network: nn.Module, private: Any, optimizer: Any) -> None:
    """Protects a network: from now on only released gradients may move its parameters.

    Args:
        network: The network itself, without wrappers.
        private: Opacus's wrapper or hooks; their ``cleanup()``, which ``to_standard_module()``
            calls, ends the protection.
        optimizer: The private optimizer, with a method ``has_released(parameter)`` and the
            parameters that it trains, ``planned``. Its attribute ``names`` is set.
    """
    _watch_all_optimizers()
    vars(network)[OWNER], optimizer.wrapper = optimizer, weakref.ref(private)
    optimizer.names = {id(parameter): name for name, parameter in network.named_parameters()}
    vars(private)[END] = functools.partial(_release, weakref.ref(private), weakref.ref(network))
    for parameter in optimizer.planned:
        vars(parameter)[NETWORK] = weakref.ref(network)
        _RAW.pop(parameter, None)
    watch_leaves()
    _PROTECTED.add(network)


def _release(private: Callable[[], Any], network: Callable[[], nn.Module | None]) -> None:
    """Ends a private run: removes Opacus's hooks and the protection of the network."""
    released = network()
    owner = None if released is None else vars(released).pop(OWNER, None)
    if owner is not None and (owner.pending or any(map(waits_for_step, owner.planned))):
        owner.forget_batch()  # raw gradients, whose step will not come
    type(private()).cleanup(private())
    _PROTECTED.discard(released)  # type: ignore[arg-type]


def protected_parameters() -> Iterator[tuple[nn.Module, torch.Tensor, Any]]:
    """Yields every parameter of every protected network, with the network and its optimizer."""
    for network in list(_PROTECTED):
        if (owner := vars(network).get(OWNER)) is not None:
            # A planned parameter may be in a layer that was removed, and be put back later.
            for parameter in dict.fromkeys((*network.parameters(), *owner.planned)):
                yield network, parameter, owner


def private_optimizers(module: Any) -> list[Any]:
    """Returns the private optimizers that train parameters of a module."""
    parameters = set(module.parameters()) if isinstance(module, nn.Module) else set()
    owners = [vars(network).get(OWNER) for network in list(_PROTECTED)]
    return [owner for owner in owners if owner and not parameters.isdisjoint(owner.planned)]


def names_of(parameters: Iterable[torch.Tensor]) -> str:
    """Returns the names of parameters in a private network, or else their shapes."""
    by_id: dict[int, str] = {}
    for network in list(_PROTECTED):
        by_id |= getattr(vars(network).get(OWNER), "names", {})
        by_id |= {id(parameter): name for name, parameter in network.named_parameters()}
    names = [by_id.get(id(each), f"one of shape {tuple(each.shape)}") for each in parameters]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@functools.cache
def _watch_all_optimizers() -> None:
    """Finds all optimizers of the process, and registers the check before their steps."""
    # Compiled steps call it outside of their graph, which would keep the result of the first call.
    register_optimizer_step_pre_hook(torch.compiler.disable(_check_raw))  # type: ignore[no-untyped-call]
    add_group = torch.optim.Optimizer.add_param_group

    @functools.wraps(add_group)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add_group(self, param_group)
        _OPTIMIZERS.add(self)
        watch_leaves([self])

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    optimizers = (
        each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)
    )
    _OPTIMIZERS.update(each for each in optimizers if "param_groups" in vars(each))


def _check_raw(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Refuses a step that would move a private network by a gradient that was not released.

    Returns:
        The arguments, with closures that check the gradients that they compute.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A closure would compute other gradients, also of parameters that have none yet.
    moved = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
    closure = any(value is not None for value in (*args[1:], *keywords.values()))
    raw = [
        parameter
        for _, parameter, owner in protected_parameters()
        if id(parameter) in moved and (closure or not owner.has_released(parameter))
    ]
    if raw:
        raise ValueError(
            f"{type(optimizer).__name__}.step() would move parameters of a private run by "
            f"gradients that are neither clipped, noised nor accounted ({names_of(raw)}): call "
            "step() of the optimizer that make_private returned; add everything that is to be "
            "trained, adapters too, to the network and to that optimizer before make_private; for "
            "training on public data, end the private run by model.to_standard_module()"
        )
    _check_outside(optimizer)
    checked = functools.partial(_checked, optimizer)
    return (args[0], *map(checked, args[1:])), {key: checked(v) for key, v in keywords.items()}


def _checked(optimizer: torch.optim.Optimizer, closure: Any) -> Any:
    """Returns a step's closure that also refuses raw gradients outside of the network."""

    def evaluate() -> Any:
        loss = closure()
        _check_outside(optimizer)
        return loss

    return evaluate if callable(closure) else closure


def _check_outside(optimizer: torch.optim.Optimizer) -> None:
    """Refuses a step on gradients that a backward pass through a private network has made.

    Raises:
        ValueError: The optimizer holds tensors outside of the network with such a gradient.
    """
    # A leaf that was created in the pass, such as a lazy layer's, is not watched yet.
    if raw := [
        leaf
        for group in optimizer.param_groups
        for leaf in group["params"]
        if leaf.grad is not None
        and ((_RAW and leaf in _RAW) or (_latest.private and not _is_watched(leaf)))
    ]:
        _refuse_outside(type(optimizer).__name__, raw)


def _refuse_outside(optimizer: str, raw: Iterable[torch.Tensor]) -> NoReturn:
    """Refuses to move tensors outside of the network by gradients of records, and names them.

    Raises:
        ValueError: Always.
    """
    names = {
        id(parameter): f"{type(module).__name__}.{name}"
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)
        for name, parameter in vars(module).get("_parameters", {}).items()
    }
    shown = [names.get(id(leaf), f"a tensor of shape {tuple(leaf.shape)}") for leaf in raw]
    raise ValueError(
        f"{optimizer}.step() would move {', '.join(shown[:4])}, outside of the private network, by "
        "gradients of records from a backward pass through that network, which are neither "
        "clipped, noised nor accounted: add these parameters to the module and to its optimizer "
        "before make_private; for a pass that sees no records, such as a generator's, call "
        "model.disable_hooks() before and model.enable_hooks() after it"
    )


def check_second_pass(module: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Refuses a backward pass that would add to gradients of records that wait for a step.

    Args:
        module: Opacus's wrapper or hooks.
        parameters: The parameters that the pass reaches.

    Raises:
        ValueError: Gradients of records wait at some of them.
    """
    waiting = [each for each in parameters if getattr(each, "grad_sample", None) is not None]
    if not waiting:
        return
    optimizers = private_optimizers(wrapped_network(module))
    planned = {id(parameter) for optimizer in optimizers for parameter in optimizer.planned}
    remedy = (
        "call loss.backward() once for each batch, on the sum of all losses, then optimizer.step() "
        "and optimizer.zero_grad() (model.zero_grad() is not enough); for larger batches use a "
        "larger batch_size, and BatchMemoryManager if memory is short; put passes that train "
        "nothing here, such as those of a generator or for gradients of inputs, between "
        "model.disable_hooks() and model.enable_hooks()"
    )
    if planned.isdisjoint(map(id, waiting)):
        remedy = (
            "the optimizer does not hold these parameters, so that optimizer.zero_grad() does not "
            "clear them: freeze them by requires_grad_(False) before make_private, add them to the "
            "optimizer, or call model.zero_grad() too"
        )
    raise ValueError(
        "gradient accumulation is refused, because a record may be in both batches: "
        f"{names_of(waiting)} have gradients already; {remedy}"
    )


def check_second_expansion(module: nn.Module, _: Any) -> None:
    """Refuses a forward pass with expanded weights while gradients of records wait for a step.

    Raises:
        ValueError: Gradients of records wait.
    """
    if torch.is_grad_enabled():
        check_second_pass(module, module.parameters())


# ---- copies and pickles ------------------------------------------------------------------------


def _state(reference: Callable[[], Any]) -> Any:
    """Returns the state of an object for copies and pickles; see :func:`exclude_records`."""
    owner = reference()
    owner_class = type(owner)
    state = owner_class.__getstate__(owner) if hasattr(owner_class, _STATE) else vars(owner)
    if isinstance(state, tuple) and isinstance(state[0], dict):  # a class with slots
        return copied_attributes(state[0]), *state[1:]
    return copied_attributes(state) if isinstance(state, dict) else state


def copied_attributes(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes that may be copied: without gradients of records and protection."""
    state = without_records(state)
    return {name: value for name, value in state.items() if name not in _OF_THIS_OBJECT}


def exclude_records(model: Any) -> None:
    """Excludes single records from copies and pickles of a model, its layers and parameters.

    Args:
        model: A network, or Opacus's wrapper or hooks of one.
    """
    parts = [*model.modules(), *model.parameters()] if isinstance(model, nn.Module) else [model]
    for part in parts:
        # A weak reference, because an object that refers to itself is freed late.
        vars(part)[_STATE] = functools.partial(_state, weakref.ref(part))
