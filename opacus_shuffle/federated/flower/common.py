"""What both ways of training on Flower have in common, by a shuffler and by secure aggregation.

A client's book and update, waiting for nodes, and Flower's records of arrays as one vector and
back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from logging import INFO, WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common.logger import log

from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.reporter import ClientBook, FileBook, Reporter

Arrays = list[npt.NDArray[Any]]
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


def reporter_of(
    format: ReportFormat, context: Context, max_rounds: int, book: Books | None
) -> Reporter:
    """A client with its book."""
    return Reporter(
        format,
        max_rounds=max_rounds,
        book=StateBook(context) if book is None else FileBook(book(context)),
    )


def check_size(weights: torch.Tensor, format: ReportFormat, whose: str = "the server sent") -> None:
    """Refuses weights of another network, before any coin is tossed."""
    if len(weights) != format.dimension:
        raise ValueError(
            f"{whose} {len(weights)} weights, the format has dimension={format.dimension}: change "
            "one of them"
        )


def enough(nodes: Callable[[], Collection[Any]], fewest: int) -> Collection[Any]:
    """The nodes that are there, once they are so many."""
    there = nodes()
    if len(there) < fewest:
        log(INFO, "waiting for %s nodes: %s are there", fewest, len(there))
    while len(there) < fewest:
        time.sleep(0.2)
        there = nodes()
    return there


def trained_update(train: Callable[[], torch.Tensor], received: torch.Tensor) -> torch.Tensor:
    """Trained minus received weights; zeros if training raised."""
    try:
        return train() - received
    except Exception as error:
        log(WARNING, "training failed, the report is zero: %r", error)
        return torch.zeros_like(received)


def flat(arrays: Arrays) -> torch.Tensor:
    """All entries of some arrays, one after the other: float64."""
    parts = [torch.from_numpy(np.asarray(array, np.float64).reshape(-1)) for array in arrays]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def shaped_like(vector: torch.Tensor, arrays: Arrays) -> Arrays:
    """The reverse of :func:`flat`: arrays of the same shapes and types with these entries."""
    sizes = [array.size for array in arrays]
    if sum(sizes) != len(vector):
        raise ValueError(
            f"vector has {len(vector)} entries, the arrays have {sum(sizes)}: was the format made "
            "for another network?"
        )
    parts = torch.split(vector, sizes)
    return [
        part.numpy().reshape(old.shape).astype(old.dtype)
        for part, old in zip(parts, arrays, strict=True)
    ]


def as_vector(arrays: ArrayRecord) -> torch.Tensor:
    """All entries in the record's order: float64."""
    return flat(arrays.to_numpy_ndarrays())


def as_arrays(vector: torch.Tensor, like: ArrayRecord) -> ArrayRecord:
    """A record of the same names, shapes and types."""
    values = shaped_like(vector, like.to_numpy_ndarrays())
    return ArrayRecord(
        {name: Array(array) for name, array in zip(like.keys(), values, strict=True)}
    )


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one record of arrays in a message.

    Raises:
        ValueError: If there is none, or more than one.
    """
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ValueError(
            f"a message must hold one ArrayRecord, got {len(records)}: reply with the trained "
            "weights alone"
        )
    return records[0]
