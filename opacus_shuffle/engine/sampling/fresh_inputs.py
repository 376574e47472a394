"""Refuses to train a private network on any batch but the one that was drawn last.

A step checks its ticket, but not what the gradients are of: a batch that was kept would pass under
the ticket of another one. So a network in training refuses tensors that the loader yielded before,
and a backward pass through what it answered to them, alone or added to the loss of the next batch.
What a pass has left that was never finished would be added, row by row, to the gradients of the
next batch: it is forgotten when that one comes.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from opacus_shuffle.core.opacus_compat import forget_unfinished_passes, watches_gradients
from opacus_shuffle.engine.raw_gradients import note_gradient, watch_leaves
from opacus_shuffle.engine.sampling.tickets import REMEDY, TicketBook, origin_of
from opacus_shuffle.networks.running import results

_HANDLES: weakref.WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]] = (
    weakref.WeakKeyDictionary()
)


class FreshInputs:
    """Hooks that look at every forward pass of a private network.

    Args:
        tickets: Of the loader.
        private: What ``make_private`` returned for the network; once its hooks are gone, nothing is
            checked any more.
        network: The network itself; what else is called is a layer of it.
    """

    def __init__(
        self, tickets: TicketBook | None = None, private: Any = None, network: Any = None
    ) -> None:
        self._tickets = tickets
        self._private = (lambda: None) if private is None else weakref.ref(private)
        self._network = (lambda: None) if network is None else weakref.ref(network)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def before(self, part: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuses inputs of an earlier batch, and notes the weights that the pass sees.

        Raises:
            ValueError: If a tensor belongs to an earlier batch.
        """
        tickets = self._tickets
        if not self._watches():
            return
        if part is self._network():
            watch_leaves()
        if tickets is None:
            return
        if part.training and tickets.is_stale((inputs, keywords)):
            raise ValueError(
                "the model was given a batch that was drawn before the last one, or by another "
                "data loader: its records are accounted no more; " + REMEDY
            )
        if not is_tracing():  # type: ignore[no-untyped-call]
            tickets.see()
            if part is self._network():
                tickets.passes.append(origin_of((inputs, keywords)))

    def after(
        self, network: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """Has a backward pass through this output refused once the next batch is drawn."""
        tickets = self._tickets
        if not self._watches():
            return
        # Expanded weights have gradients of records in evaluation mode too, where old batches may
        # be looked at.
        latest = tickets and tickets.latest
        stale = tickets is not None and tickets.is_stale((inputs, keywords))

        def check_batch(_: torch.Tensor) -> None:
            note_gradient(None, network)  # expanded weights accumulate no gradient in any parameter
            if stale or (tickets and tickets.latest) is not latest:
                raise ValueError(
                    "loss.backward() goes through what the model answered to a batch before the "
                    "last one (a loss that is kept, or added up over several batches), whose "
                    "records are accounted no more; " + REMEDY
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
        """Tells whether a forward pass now would lead to gradients of records."""
        private = self._private()
        return private is not None and torch.is_grad_enabled() and watches_gradients(private)


def watch_inputs(network: nn.Module, private: Any, tickets: TicketBook | None) -> None:
    """Attaches the hooks to a network, in the place of earlier ones."""
    for earlier in _HANDLES.pop(network, ()):
        earlier.remove()
    _stay_out_of_graphs()
    fresh = FreshInputs(tickets, private, network)
    if tickets is not None:
        tickets.when_issued = fresh.forget_unfinished
    # Layers with hooks of their own may be called without the whole network; expanded weights know
    # the whole alone. Opacus keeps nothing of what layers without parameters see.
    alone = network.modules() if hasattr(private, "autograd_grad_sample_hooks") else ()
    entrances = {network, *(layer for layer in alone if layer._parameters)}
    before = [part.register_forward_pre_hook(fresh.before, with_kwargs=True) for part in entrances]
    after = network.register_forward_hook(fresh.after, with_kwargs=True)
    _HANDLES[network] = *before, after


@functools.cache
def _stay_out_of_graphs() -> None:
    """Keeps the hooks out of graphs that ``torch.compile`` makes."""
    for name in ("before", "after"):
        setattr(FreshInputs, name, torch.compiler.disable(getattr(FreshInputs, name)))  # type: ignore[no-untyped-call]
