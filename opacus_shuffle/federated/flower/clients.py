"""What both ways of training on Flower have in common, by a shuffler and by secure aggregation: a client's book and update."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ConfigRecord, Context
from flwr.common.logger import log

from opacus_shuffle.federated.client_book import ClientBook, FileBook
from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.reporter import Reporter

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
    """Trained weights minus received ones; zero if training fails, which is nobody's business."""
    try:
        return train() - received
    except Exception as error:
        log(WARNING, "training failed, the report is zero: %r", error)
        return torch.zeros_like(received)
