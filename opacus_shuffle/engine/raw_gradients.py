"""Lets no raw gradient move a private network: one rule, checked before every optimizer's step.

Between the backward pass and the private step ``.grad`` holds what nobody has clipped or noised,
and any optimizer would take it: the one inside of the private one, called by itself, or another
one, over the same parameters, over those that the private one leaves alone, or over layers that
were put into the network since. So the rule asks for the network's parameters at the moment of
the step: each may be moved by the gradient that the network's private optimizer has released for
this update, and by nothing else. Gradients of two backward passes, which a record might be in
twice, are refused, too.

The same rule holds outside of the network. A classification head, a loss with weights or an adapter
that is no part of the network receives raw gradients of the records. So after a backward pass
through a private network, no other optimizer may step on tensors that received a gradient in that
pass.
``private.disable_hooks()`` exempts a pass that sees no records, such as a generator's.

>>> from types import SimpleNamespace
>>> from opacus import GradSampleModule
>>> network = nn.Linear(2, 1)
>>> private = GradSampleModule(network)
>>> owner = SimpleNamespace(
...     has_released=lambda parameter: False, original_optimizer=None, planned=(), pending=False)
>>> hold(network, private, owner)
>>> sgd = torch.optim.SGD(network.parameters(), lr=1.0)
>>> sgd.step()
Traceback (most recent call last):
    ...
ValueError: SGD.step() would move parameters of a private run ... accounted (weight, bias): ...
>>> network = private.to_standard_module()  # ends it
>>> sgd.step()
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from opacus_shuffle.core.opacus_compat import is_copy, is_used, waits_for_step, wrapped_network
from opacus_shuffle.engine.sampling.tickets import Origin, origin_of

OWNER = "private_optimizer"
"""The attribute of a private network that holds the optimizer that trains it.

It keeps that optimizer alive as long as the network: gradients that wait for its step do not become
anybody's when a script forgets it.
"""
NETWORK = "private_network"
"""The attribute of a trained parameter that refers to its private network."""
END = "cleanup"
"""The method by which Opacus's wrappers and hooks end."""
_HELD: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_OPTIMIZERS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""All optimizers of the process, from the first private run on."""


_RAW: MutableMapping[torch.Tensor, weakref.ref[torch.Tensor]] = WeakTensorKeyDictionary()
"""Leaves outside of private networks, each with a reference to its gradient of records.

They are no attributes, which would be pickled with the leaf."""
_latest = SimpleNamespace(number=-1, leaves=[], private=False)
"""The latest backward pass: the leaves outside of private networks that it has reached so far, and
whether it has reached a private network."""


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
            ticket = owner.tickets.latest.ticket
            ticket.has_gradients = ticket.epoch.has_gradients = True
    elif owner is None and leaf is not None:
        if leaf in _RAW and _RAW[leaf]() is not leaf.grad:
            del _RAW[leaf]  # that gradient was cleared
        _latest.leaves.append(leaf)
    for outside in _latest.leaves if _latest.private else ():
        if outside.grad is None:  # an optimizer has stepped within the pass
            _refuse_outside("An optimizer.", [outside])
        _RAW[outside] = weakref.ref(outside.grad)


def watch_leaves(optimizers: Iterable[torch.optim.Optimizer] = _OPTIMIZERS) -> None:
    """Watches all tensors that optimizers may step on, also those that were frozen earlier."""
    for optimizer in list(optimizers):
        for leaf in (leaf for group in optimizer.param_groups for leaf in group["params"]):
            if leaf.requires_grad and not is_lazy(leaf) and not _is_watched(leaf):
                leaf.register_post_accumulate_grad_hook(note_gradient)


def _is_watched(leaf: torch.Tensor) -> bool:
    return note_gradient in (leaf._post_accumulate_grad_hooks or {}).values()


def hold(network: nn.Module, private: Any, optimizer: Any) -> None:
    """Holds a network: from now on only released gradients may move its parameters.

    Args:
        network: The network itself, without wrappers.
        private: Opacus's wrapper or hooks; their ``cleanup()``, as of ``to_standard_module()``,
            ends it.
        optimizer: A private one, with a method ``has_released(parameter)`` and the parameters that
            it trains, ``planned``; it is told their ``names``.
    """
    _look_at_all_steps()
    vars(network)[OWNER], optimizer.wrapper = optimizer, weakref.ref(private)
    optimizer.names = {id(parameter): name for name, parameter in network.named_parameters()}
    vars(private)[END] = functools.partial(_end, weakref.ref(private), weakref.ref(network))
    for parameter in optimizer.planned:
        vars(parameter)[NETWORK] = weakref.ref(network)
        _RAW.pop(parameter, None)
    watch_leaves()
    _HELD.add(network)


def hold_copy(network: nn.Module) -> None:
    """Holds a copy of a private network: nothing may move its parameters."""
    _HELD.add(network)


def _end(private: Callable[[], Any], network: Callable[[], nn.Module | None]) -> None:
    """Ends a private run: removes Opacus's hooks, and lets go of the network."""
    held = network()
    owner = None if held is None else vars(held).pop(OWNER, None)
    waits = owner is not None and any(map(waits_for_step, owner.planned))
    if owner is not None and (waits or owner.pending):
        owner.forget_batch()  # what waits for a step that will not come is raw
    type(private()).cleanup(private())
    _HELD.discard(held)  # type: ignore[arg-type]


def held_parameters() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Yields network and parameter for every parameter of every held network."""
    for network in list(_HELD):
        owner = vars(network).get(OWNER)
        if owner is not None or is_copy(network):
            # A layer that was taken out may be put back.
            parameters = (*network.parameters(), *getattr(owner, "planned", ()))
            for parameter in {id(parameter): parameter for parameter in parameters}.values():
                yield network, parameter


def private_optimizers(module: Any) -> list[Any]:
    """Returns the private optimizers that train parameters of a module."""
    own = set(map(id, module.parameters())) if isinstance(module, nn.Module) else set()
    owners = [vars(network).get(OWNER) for network in list(_HELD)]
    return [owner for owner in owners if owner and not own.isdisjoint(map(id, owner.planned))]


def names_of(parameters: Iterable[torch.Tensor]) -> str:
    """Returns the names of parameters in a private network, or else their shapes."""
    known: dict[int, str] = {}
    for network in list(_HELD):
        known |= getattr(vars(network).get(OWNER), "names", {})
        known |= {id(parameter): name for name, parameter in network.named_parameters()}
    names = [
        known.get(id(parameter), f"one of shape {tuple(parameter.shape)}")
        for parameter in parameters
    ]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@functools.cache
def _look_at_all_steps() -> None:
    """Finds all optimizers of the process, and registers the check before their steps."""
    # Compiled steps ask outside of their graph, or it would hold the answer of the first one.
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
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # A parameter without a gradient may get one from a closure.
    moved = {id(p) for p in held if p.requires_grad or p.grad is not None}
    # A closure would make other gradients.
    closure = any(value is not None for value in (*args[1:], *keywords.values()))
    raw, inside = [], ""
    for network, parameter in held_parameters():
        owner = vars(network).get(OWNER)
        released = owner is not None and owner.has_released(parameter) and not closure
        if id(parameter) in moved and not released:
            raw.append(parameter)
            if owner is not None and owner.original_optimizer is optimizer and not owner.released:
                inside = "was called on the optimizer inside of a private one, and "
    if raw:
        raise ValueError(
            f"{type(optimizer).__name__}.step() {inside}would move parameters of a private run by "
            f"gradients that are neither clipped, noised nor accounted ({names_of(raw)}): call "
            "step() of the optimizer that make_private returned, and let it hold all that is to be "
            "trained, which must be in the network, adapters too, before make_private; "
            "model.to_standard_module() ends the private run, for training on public data"
        )
    _check_outside(optimizer)
    checked = functools.partial(_checked, optimizer)
    return (args[0], *map(checked, args[1:])), {key: checked(v) for key, v in keywords.items()}


def _checked(optimizer: torch.optim.Optimizer, closure: Any) -> Any:
    """Returns a step's closure that raises if it has computed gradients that may move nothing."""

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
        _refuse_outside(f"{type(optimizer).__name__}.", raw)


def _refuse_outside(optimizer: str, raw: Iterable[torch.Tensor]) -> NoReturn:
    """Refuses to move leaves by gradients of records, and names them.

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
        f"{optimizer}step() would move {', '.join(shown[:4])}, outside of the "
        "private network, by gradients of records from a backward pass through that network, which "
        "nothing has clipped, noised or accounted: put these parameters into the module before "
        "make_private, and let its optimizer hold them; for a pass that sees no records, such as a "
        "generator's, call model.disable_hooks() before and model.enable_hooks() after it"
    )


def cause_of_accumulation(passes: Sequence[Origin], *, used: bool, outside: bool) -> str:
    """Returns the likely cause of accumulated gradients, and what to do about it.

    Args:
        passes: The forward passes on the latest batch, with the one whose gradients come now.
        used: The gradients that wait have been released by a step.
        outside: They are of parameters that the optimizer does not hold, and of no others.
    """
    if outside:
        return (
            "the optimizer does not hold these parameters, so that optimizer.zero_grad() leaves "
            "theirs: freeze them by requires_grad_(False) before make_private, let the optimizer "
            "hold them, or call model.zero_grad() too"
        )
    if "a network" in passes:
        return (
            "a pass went through the output of another network, as a generator's step does: put "
            "the generator's pass between model.disable_hooks() and model.enable_hooks()"
        )
    if "a leaf" in passes:
        return (
            "a pass was for gradients of its inputs: put it between model.disable_hooks() and "
            "model.enable_hooks(), or call optimizer.zero_grad() after it"
        )
    if used:
        return (
            "optimizer.step() has used those: call optimizer.zero_grad() for each batch, "
            "model.zero_grad() is not enough"
        )
    if len(passes) > 1:
        return (
            "the network had two backward passes on this batch: call loss.backward() once for each "
            "optimizer.step(), of the sum of all losses of one forward pass"
        )
    return (
        "those of an earlier batch wait still: call optimizer.step() and optimizer.zero_grad() for "
        "each batch; for larger ones take a larger batch_size, and split them with "
        "BatchMemoryManager where memory is short"
    )


def check_second_pass(
    module: Any, parameters: Iterable[torch.Tensor], current: Sequence[Origin] = ()
) -> None:
    """Refuses a backward pass that would add to gradients of records that wait for a step.

    Args:
        module: Opacus's wrapper or hooks.
        parameters: Those that it comes to now.
        current: What the pass is of, where its forward pass has not begun.

    Raises:
        ValueError: If it would.
    """
    stale = [parameter for parameter in parameters if _waits(parameter)]
    if not stale:
        return
    network = wrapped_network(module)
    optimizers = private_optimizers(network)
    planned = {id(parameter) for optimizer in optimizers for parameter in optimizer.planned}
    books = [optimizer.tickets for optimizer in optimizers if optimizer.tickets is not None]
    unfinished = [layer for layer in network.modules() if vars(layer).get("activations")]
    waiting = [tensor for layer in unfinished for tensor in layer._parameters.values()]
    concerned = (*stale, *filter(_waits, waiting))
    cause = cause_of_accumulation(
        [*(origin for book in books for origin in book.passes), *current],
        used=any(map(is_used, stale)),
        outside=planned.isdisjoint(map(id, concerned)),
    )
    raise ValueError(
        f"gradient accumulation is refused, for a record might be in it twice ({names_of(stale)} "
        f"hold gradients still): {cause}"
    )


def check_second_expansion(module: nn.Module, args: Any, keywords: Any) -> None:
    """Refuses a forward pass with expanded weights while gradients of records wait for a step.

    Raises:
        ValueError: Gradients of records wait.
    """
    if torch.is_grad_enabled():
        check_second_pass(module, module.parameters(), [origin_of((args, keywords))])


def _waits(parameter: torch.Tensor | None) -> bool:
    return getattr(parameter, "grad_sample", None) is not None
