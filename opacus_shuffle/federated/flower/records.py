"""Flower's records of arrays as one vector, and back."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict

ARRAYS, SETTINGS, ROUND = "arrays", "config", "round"
"""Under which names a message to a client holds the weights, the settings, and in these the number of the round."""


def as_vector(arrays: ArrayRecord) -> torch.Tensor:
    """All entries in the record's order: float64."""
    parts = [torch.from_numpy(np.asarray(each, np.float64).reshape(-1)) for each in arrays.to_numpy_ndarrays()]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def as_arrays(vector: torch.Tensor, like: ArrayRecord) -> ArrayRecord:
    """A record of the same names, shapes and types."""
    entries, place = {}, 0
    for name, old in zip(like.keys(), like.to_numpy_ndarrays(), strict=True):
        values = vector[place : place + old.size].numpy().reshape(old.shape).astype(old.dtype)
        entries[name], place = Array(values), place + old.size
    if place != len(vector):
        raise ValueError(f"vector has {len(vector)} entries, the arrays have {place}: was the format made for another network?")
    return ArrayRecord(entries)


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one record of arrays in a message.

    Raises:
        ValueError: If there is none, or more than one.
    """
    found = list(content.array_records.values())
    if len(found) != 1:
        raise ValueError(f"a message must hold one ArrayRecord, got {len(found)}: reply with the trained weights alone")
    return found[0]
