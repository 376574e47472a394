"""Only the batch that was drawn last is trained on: inputs of earlier ones are refused, and what they left half done goes.

A step checks its ticket, but not what the gradients are of: a batch that was kept would pass under the ticket of another one.
So a network in training refuses tensors that the loader yielded before. What a pass has left that was never finished would be
added, row by row, to the gradients of the next batch: it is forgotten when that one comes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from opacus_shuffle.core.opacus_compat import forget_unfinished_passes, watches_gradients
from opacus_shuffle.engine.sampling.tickets import REMEDY, Part, TicketBook

_HANDLES: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


class FreshInputs:
    """What PyTorch calls before a network's forward pass; copies of the network do nothing.

    Args:
        tickets: Of the loader.
        private: What ``make_private`` returned for the network; once its hooks are gone, nothing is checked any more.
    """

    def __init__(self, tickets: TicketBook | None = None, private: Any = None) -> None:
        self._tickets = tickets
        self._private = None if private is None else weakref.ref(private)
        self._last: Part | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __call__(self, network: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuse inputs of an earlier batch, and forget passes of it that were never finished.

        Raises:
            ValueError: If a tensor belongs to an earlier batch.
        """
        private = None if self._private is None else self._private()
        if private is None or self._tickets is None or not network.training or not torch.is_grad_enabled():
            return
        if not watches_gradients(private):
            return
        latest = self._tickets.latest
        if self._tickets.tensors.is_stale((inputs, keywords), latest):
            raise ValueError(
                "the model was given a batch that was drawn before the last one, or by another data loader: its records are "
                "accounted no more; " + REMEDY
            )
        if latest is not self._last:
            self._last = latest
            forget_unfinished_passes(network)


def watch_inputs(network: nn.Module, private: Any, tickets: TicketBook | None) -> None:
    """Lets a network be trained on fresh batches alone, in the place of what was watched before."""
    if (earlier := _HANDLES.pop(network, None)) is not None:
        earlier.remove()
    if tickets is not None:
        _HANDLES[network] = network.register_forward_pre_hook(FreshInputs(tickets, private), with_kwargs=True)
