"""Refuses to train a private network on any batch but the one that was drawn last.

A step checks its ticket, but not which records the gradients are of: a batch that was kept would
pass under the ticket of another one. Therefore a network in training refuses tensors that the
loader yielded before. A backward pass through an output for an earlier batch is refused, too, also
if its loss was added to the loss of the next batch. A forward pass without a backward pass is
forgotten when the next batch is drawn. Otherwise its rows would be added to the gradients of that
batch.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from opacus_shuffle.core.opacus_compat import forget_unfinished_passes, watches_gradients
from opacus_shuffle.engine.batches.tickets import REMEDY, TicketBook
from opacus_shuffle.engine.guards.network_checks import check_packs
from opacus_shuffle.engine.guards.raw_gradients import note_gradient, watch_leaves
from opacus_shuffle.networks.running import results

_HANDLES: weakref.WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]] = (
    weakref.WeakKeyDictionary()
)


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
    for name in ("before", "after"):
        setattr(FreshInputs, name, torch.compiler.disable(getattr(FreshInputs, name)))  # type: ignore[no-untyped-call]
