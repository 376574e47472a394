"""What both ways of training on Flower have in common, by a shuffler and by secure aggregation.

A client's book and update, waiting for nodes, and Flower's records of arrays as one vector and back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from logging import INFO, WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common.logger import log

from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.reporter import ClientBook, FileBook, Reporter

ARRAYS, SETTINGS, ROUND = "arrays", "config", "round"
"""Under which names a message to a client holds the weights, the settings, and in these the number of the round."""
STATE = "opacus_shuffle"
"""Under which name a client's state holds the rounds that it has answered."""
Books = Callable[[Context], "str | os.PathLike[str]"]
"""Gets a client's context, returns the name of the file in which it notes which rounds it has answered."""


class StateBook(ClientBook):
    """The rounds of one client in Flower's state of it, which lasts as long as a run, and whose name the server chooses.

    Args:
        context: Of the client.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.state = context.state

    def read(self, fingerprint: bytes) -> None:
        """Gets what an earlier message has left."""
        if STATE in self.state.config_records:
            known = self.state.config_records[STATE]
            self.rounds, self.last = known["rounds"], known["last"]  # type: ignore[assignment]

    def write(self, rounds: int, last: int, fingerprint: bytes) -> None:
        """Leaves it for later messages."""
        self.state[STATE] = ConfigRecord({"rounds": rounds, "last": last})


def reporter_of(format: ReportFormat, context: Context, max_rounds: int, book: Books | None) -> Reporter:
    """A client with its book."""
    return Reporter(format, max_rounds=max_rounds, book=StateBook(context) if book is None else FileBook(book(context)))


def check_size(weights: torch.Tensor, format: ReportFormat, whose: str = "the server sent") -> None:
    """Refuses weights of another network, before any coin is tossed."""
    if len(weights) != format.dimension:
        raise ValueError(f"{whose} {len(weights)} weights, the format has dimension={format.dimension}: change one of them")


def enough(nodes: Callable[[], Collection[Any]], fewest: int) -> Collection[Any]:
    """The nodes that are there, once they are so many."""
    found = nodes()
    if len(found) < fewest:
        log(INFO, "waiting for %s nodes: %s are there", fewest, len(found))
    while len(found) < fewest:
        time.sleep(0.2)
        found = nodes()
    return found


def trained_update(train: Callable[[], torch.Tensor], received: torch.Tensor) -> torch.Tensor:
    """Trained minus received weights; zeros if training raised."""
    try:
        return train() - received
    except Exception as error:
        log(WARNING, "training failed, the report is zero: %r", error)
        return torch.zeros_like(received)


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
