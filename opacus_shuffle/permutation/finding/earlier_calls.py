"""Noticing what a network keeps in Python from one call to the next: a count of its calls, a flag, what the first one made."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from opacus_shuffle.permutation.finding.comparisons import noticed
from opacus_shuffle.permutation.network import ATTRIBUTES, CLOSED

PLAIN = (bool, int, float, str, type(None))
Holder = dict[Any, Any] | list[Any]


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
        return changed if same and not any(isinstance(content, tuple) for content in changed.values()) else None

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
            value = dict(enumerate(holder) if isinstance(holder, list) else holder).get(key)
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                holder[key] = noticed(value, by_values=False)
        return found


def _contents(network: nn.Module) -> Iterator[tuple[Holder, Any, Any]]:
    """Yields what modules keep as plain attributes, and what is in lists, dictionaries and helpers there, with its place."""
    waiting: list[tuple[Any, bool]] = [(vars(module), True) for module in network.modules()]
    seen = set()
    while waiting:
        holder, own = waiting.pop()
        if id(holder) in seen or not isinstance(holder, dict | list):
            continue
        seen.add(id(holder))
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if own and key in ATTRIBUTES:
                continue
            if isinstance(value, torch.Tensor):
                yield holder, key, (id(value), value._version)
            elif isinstance(value, PLAIN):
                yield holder, key, value
            elif isinstance(value, dict | list | set | deque):
                yield holder, key, len(value)
                waiting.append((value, False))
            elif not isinstance(value, CLOSED) and type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
                waiting.append((getattr(value, "__dict__", None), False))
