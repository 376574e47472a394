"""Noticing what a network keeps in Python from one call to the next: a count of its calls, a flag, what the first one made."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from opacus_shuffle.networks.running import ATTRIBUTES, CLOSED
from opacus_shuffle.permutation.finding.comparisons import noticed
from opacus_shuffle.permutation.network import tensors_in

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, MethodType)
"""Types of values that are the same where they are equal."""

Holder = dict[Any, Any] | list[Any] | deque[Any]


class EarlierCalls:
    """Knows what of a network's attributes its calls change.

    Args:
        network: Before it is called.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._before = self.state()
        self._buffers = [(buffer, buffer._version) for buffer in network.buffers()]
        self._changing: list[tuple[Holder, Any]] = []
        self._known: set[tuple[int, Any]] = set()

    def __bool__(self) -> bool:
        return bool(self._changing)

    def state(self) -> dict[tuple[int, Any], Any]:
        """Returns what the network keeps now, such that equal states are equal."""
        return {(id(holder), key): content for holder, key, content in _contents(self._network)}

    def plain_changes(self) -> dict[tuple[int, Any], Any] | None:
        """Returns what is not as it was before all calls where that is flags, numbers and texts alone; None if it is more."""
        changed = {key: content for key, content in self.state().items() if self._before.get(key, self) != content}
        buffers = list(self._network.buffers())
        same = len(buffers) == len(self._buffers) and all(
            buffer is before and buffer._version == version
            for buffer, (before, version) in zip(buffers, self._buffers, strict=True)
        )
        return changed if same and not any(map(_holds_tensors, changed.values())) else None

    def compare(self) -> None:
        """Notes what has changed, besides what did before."""
        for holder, key, content in list(_contents(self._network)):
            if self._before.get((id(holder), key), holder) != content and (id(holder), key) not in self._known:
                self._known.add((id(holder), key))
                self._changing.append((holder, key))

    def count(self) -> list[torch.Tensor]:
        """Has numbers that change ask what they compare as; returns the tensors that change."""
        found = []
        for holder, key in self._changing:
            value = dict(holder if isinstance(holder, dict) else enumerate(holder)).get(key)
            if isinstance(value, torch.Tensor | tuple | set | frozenset):
                found += tensors_in(list(value) if isinstance(value, set | frozenset) else value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                holder[key] = noticed(value, by_values=False)
        return found


class _Same:
    """An object that is equal to nothing but itself; it lives as long as this, so that no other one gets its address."""

    def __init__(self, value: Any, state: Any = None) -> None:
        self._value, self._state = value, state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value and bool(self._state == other._state)

    def __hash__(self) -> int:
        return id(self._value)


class _Tensor(_Same):
    """A tensor, which is not the same when it was written to."""


def _contents(network: nn.Module) -> Iterator[tuple[Holder, Any, Any]]:
    """Yields what modules keep as plain attributes, and what is in lists, dictionaries and helpers there, with its place.

    And of which form buffers are: one of the same form that is put in place of another, as running means are, is traced in the
    pass that makes it, and moves with what it comes of.
    """
    waiting: list[tuple[Any, bool]] = [(vars(module), True) for module in network.modules()]
    seen = set()
    for module in network.modules():
        yield from ((module._buffers, name, _form(each)) for name, each in module._buffers.items())
    while waiting:
        holder, own = waiting.pop()
        if id(holder) in seen or not isinstance(holder, dict | list | deque):
            continue
        seen.add(id(holder))
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if own and key in ATTRIBUTES:
                continue
            yield holder, key, _content(value)
            if isinstance(value, dict | list | deque):
                waiting.append((value, False))
            elif isinstance(value, tuple | set | frozenset):
                waiting += ((each, False) for each in value)
            elif not isinstance(value, CLOSED) and type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
                waiting.append((getattr(value, "__dict__", None), False))


def _form(buffer: torch.Tensor | None) -> Any:
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype, buffer.device)


def _content(value: Any) -> Any:
    """Returns what is equal for equal values, and for others as long as they are the same object."""
    if isinstance(value, torch.Tensor):
        return _Tensor(value, 0 if value.is_inference() else value._version)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict | list | deque):
        return len(value)  # and what is in it has a place of its own
    if isinstance(value, tuple):
        return tuple(map(_content, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_content, value))
    return _Same(value, value.tobytes() if isinstance(value, np.ndarray) else None)


def _holds_tensors(content: Any) -> bool:
    if isinstance(content, tuple | frozenset):
        return any(map(_holds_tensors, content))
    return isinstance(content, _Tensor)
