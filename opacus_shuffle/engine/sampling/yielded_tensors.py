"""The memory of the tensors that a loader has yielded, by weak references: which of them belong to an earlier batch.

Copies, such as those on another device, are not recognised.

>>> yielded, first, second = YieldedTensors(), torch.zeros(3), torch.zeros(3)
>>> yielded.remember([first], "first")
>>> yielded.remember([second], "second")
>>> yielded.is_stale(first[:2], "second"), yielded.is_stale(second, "second")
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class YieldedTensors:
    """The memory of the tensors of batches, and the tickets that these came with."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._kept = 0

    def remember(self, batch: Any, ticket: Any) -> None:
        """Note a batch's tensors; what is gone is forgotten now and then."""
        if len(self._known) > 2 * self._kept + 16:
            self._known = {key: each for key, each in self._known.items() if not each[0].expired()}
            self._kept = len(self._known)
        for storage in _storages(batch):
            self._known[storage._cdata] = StorageWeakRef(storage), ticket  # type: ignore[no-untyped-call]

    def is_stale(self, inputs: Any, latest: Any) -> bool:
        """Whether any of these tensors came with another ticket than the latest."""
        known = [self._known.get(storage._cdata) for storage in _storages(inputs)]
        return any(each is not None and each[1] is not latest and not each[0].expired() for each in known)


def _storages(batch: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        try:
            yield batch.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse ones, and those inside of functorch, have none
            return
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _storages(each)
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _storages(each)
