"""Only the batch that was drawn last is trained on: inputs of earlier ones are refused, and what they left half done goes.

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
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from opacus_shuffle.core.opacus_compat import forget_unfinished_passes, watches_gradients
from opacus_shuffle.engine.sampling.tickets import REMEDY, Origin, TicketBook

_HANDLES: weakref.WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]] = (
    weakref.WeakKeyDictionary()
)


class FreshInputs:
    """What PyTorch calls before a network's forward pass; copies of the network do nothing.

    Args:
        tickets: Of the loader.
        private: What ``make_private`` returned for the network; once its hooks are gone, nothing is
            checked any more.
        whole: The network itself; what else is called is a layer of it.
    """

    def __init__(
        self, tickets: TicketBook | None = None, private: Any = None, whole: nn.Module | None = None
    ) -> None:
        self._tickets = tickets
        self._private, self._whole = (
            None if each is None else weakref.ref(each) for each in (private, whole)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __call__(
        self, network: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Refuse inputs of an earlier batch, and note what the pass sees of the weights.

        Raises:
            ValueError: If a tensor belongs to an earlier batch.
        """
        if self._tickets is not None and network.training and self._is_stale((inputs, keywords)):
            raise ValueError(
                "the model was given a batch that was drawn before the last one, or by another "
                "data loader: its records are "
                "accounted no more; " + REMEDY
            )
        if self._tickets is not None and self._watches() and not is_tracing():  # type: ignore[no-untyped-call]
            whole = self._whole is not None and network is self._whole()
            self._tickets.weights.look(network, whole=whole)
            if whole:
                self._tickets.passes.append(origin_of((inputs, keywords)))

    def answered(
        self, network: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """What PyTorch calls after it: a backward pass through this output is refused once the next batch is drawn."""
        tickets = self._tickets
        if tickets is None or not self._watches():
            return
        latest = tickets.latest
        # Expanded weights have gradients of records in evaluation mode too, where old batches may
        # be looked at.
        stale = not network.training and self._is_stale((inputs, keywords))

        def refuse_late(_: torch.Tensor) -> None:
            if stale or tickets.latest is not latest:
                raise ValueError(
                    "loss.backward() goes through what the model answered to a batch before the "
                    "last one (a loss that is kept, "
                    "or added up over several batches), whose records are accounted no more; "
                    + REMEDY
                )

        for tensor in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(refuse_late)  # type: ignore[no-untyped-call]

    def _watches(self) -> bool:
        """Whether a forward pass has gradients of records."""
        private = None if self._private is None else self._private()
        return private is not None and torch.is_grad_enabled() and watches_gradients(private)

    def _is_stale(self, inputs: Any) -> bool:
        """Whether any of this would have gradients of records, and belongs to an earlier batch."""
        assert self._tickets is not None
        return self._watches() and self._tickets.tensors.is_stale(inputs, self._tickets.latest)


def origin_of(inputs: Any) -> Origin:
    """What the inputs of a forward pass are."""
    asked = [
        tensor
        for tensor in tree_leaves(inputs)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]
    return (
        "records"
        if not asked
        else "a leaf"
        if all(tensor.is_leaf for tensor in asked)
        else "a network"
    )


def watch_inputs(network: nn.Module, private: Any, tickets: TicketBook | None) -> None:
    """Lets a network be trained on fresh batches alone, in the place of what was watched before."""
    for earlier in _HANDLES.pop(network, ()):
        earlier.remove()
    if tickets is not None:
        _stay_out_of_graphs()
        fresh = FreshInputs(tickets, private, network)
        tickets.when_issued = functools.partial(_forget, weakref.ref(network), weakref.ref(private))
        # Layers with hooks of their own may be called without the whole; expanded weights know the
        # whole alone.
        called = (
            _entrances(network) if hasattr(private, "autograd_grad_sample_hooks") else [network]
        )
        before = [layer.register_forward_pre_hook(fresh, with_kwargs=True) for layer in called]
        _HANDLES[network] = *before, network.register_forward_hook(fresh.answered, with_kwargs=True)


def _entrances(network: nn.Module) -> list[nn.Module]:
    """The network, and its layers that have parameters, as Opacus keeps nothing of what others see."""
    return [layer for layer in network.modules() if layer is network or layer._parameters]


@functools.cache
def _stay_out_of_graphs() -> None:
    """Lets ``torch.compile`` call the hooks as they are; not on import, which would take a second more."""
    for name in ("__call__", "answered"):
        setattr(FreshInputs, name, torch.compiler.disable(getattr(FreshInputs, name)))  # type: ignore[no-untyped-call]


def _forget(network: weakref.ref[nn.Module], private: weakref.ref[Any]) -> None:
    """Forgets passes that were never finished when a batch is drawn, for parts of a network may be called without the whole."""
    trained, watching = network(), private()
    if trained is not None and watching is not None and watches_gradients(watching):
        forget_unfinished_passes(trained)
