"""Flower's records: arrays as one vector and back, and what a client's state holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.reporter import Reporter

ARRAYS, SETTINGS, ROUND = "arrays", "config", "round"
"""Under which names a message to a client holds the weights, the settings, and in these the number of the round."""


STATE = "opacus_shuffle"
"""Under which name a client's state holds the rounds that it has answered."""


def reporter_of(format: ReportFormat, context: Context, max_rounds: int) -> tuple[Reporter, Callable[[], None]]:
    """A client as its state knows it, and what notes there which rounds it has answered."""
    known = context.state.config_records.get(STATE, ConfigRecord({"rounds": 0, "last": -1}))
    reporter = Reporter(format, max_rounds=max_rounds, rounds=known["rounds"], last=known["last"])  # type: ignore[arg-type]

    def note() -> None:
        context.state[STATE] = ConfigRecord({"rounds": reporter.rounds, "last": reporter.last})

    return reporter, note


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
