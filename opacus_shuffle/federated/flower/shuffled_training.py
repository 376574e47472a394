"""``ReportMod`` for clients and ``ShuffledStrategy`` for servers: Flower with a shuffler.

A client sends its update only as a report to the shuffler. Its reply to the server is empty, and
the same whether it participated, trained or failed: no arrays, no losses, no numbers of examples.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from opacus_shuffle.core.validation import boolean, instance_of, integer, positive
from opacus_shuffle.federated.ledger import Ledger
from opacus_shuffle.federated.report_formats import ReportFormat
from opacus_shuffle.federated.reporter import ClientBook, FileBook, Reporter

# The keys of the weights and settings in a message to a client, and of the round in the settings.
ARRAYS, SETTINGS, ROUND = "arrays", "config", "round"
STATE = "opacus_shuffle"
"""The key of the answered rounds in a client's state."""
Books = Callable[[Context], "str | os.PathLike[str] | FileBook"]
"""Returns the book of a client, or the name of its file, for a client's context."""
REFUSED = 451
"""The code of the error with which everything except training is answered."""


class ReportMod:
    """A Flower mod that turns the trained weights of a client into a noised report.

    Args:
        format: The format of the reports. It belongs to the client: no message of a server changes
            it.
        submit: Sends a report to the shuffler. Its arguments are the client's context and the
            report.
        max_rounds: The number of rounds that this client agrees to answer.
        book: Returns, for a context, the client's record of answered rounds: a
            :class:`~opacus_shuffle.federated.FileBook`, or the name of its file. None records them
            in Flower's state, for simulations alone: this state is empty after a restart, and in
            every new run.
        always_train: Whether to train also in rounds without participation, so that the time
            reveals nothing. False saves this work in simulations.

    Formal Guarantees:
        The server gets an empty reply. The shuffler gets one report of the update (trained minus
        received weights), clipped and noised here. Evaluation and queries are refused, because
        their answers would have no noise.
    """

    def __init__(
        self,
        format: ReportFormat,
        submit: Callable[[Context, bytes], Any],
        *,
        max_rounds: int,
        book: Books | None,
        always_train: bool = True,
    ) -> None:
        self.format = instance_of("format", format, (ReportFormat,))
        self.submit = instance_of("submit", submit, (Callable,))
        self.book = instance_of("book", book, (Callable, type(None)))
        self.max_rounds = integer("max_rounds", max_rounds)
        self.always_train = boolean("always_train", always_train)

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Answers the server's message; ``call_next`` trains."""
        message_type = message.metadata.message_type
        if message_type.split(".")[0] != MessageType.TRAIN:
            reason = f"{message_type} would be answered without noise: evaluate at the server"
            return Message(Error(code=REFUSED, reason=reason), reply_to=message)
        # Created before training, so that its time stamp does not reveal the time of training.
        reply = Message(RecordDict(), reply_to=message)
        try:
            self._report(message, context, call_next)
        except Exception as error:  # The server must not learn of it.
            log(WARNING, "no report was accepted: %r", error)
        return reply

    def _report(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> None:
        """Trains and submits a report."""
        number: Any = message.content.config_records[SETTINGS][ROUND]
        received = as_vector(only_arrays(message.content))
        check_size(received, self.format)

        def train() -> torch.Tensor:
            return as_vector(only_arrays(call_next(message, context).content))

        book = book_of(context, self.book)
        Reporter(self.format, max_rounds=self.max_rounds, book=book).answer(
            number,
            lambda: train() - received,
            lambda report: self.submit(context, report),
            always_train=self.always_train,
        )


class ShuffledStrategy(Strategy):
    """A Flower strategy that updates the weights by the mean report, and accounts for each round.

    The metrics of a round are ``reports``, the number of reports (0 if the round was dropped), and
    ``rounds``, the number of accounted rounds. ``ledger.report()`` returns their ε.

    Args:
        ledger: The ledger of the run, with its format, shuffler, δ and target ε.
        learning_rate: The factor of the mean. The mean is the sum over γ·n, the public expected
            number of participants; their actual number is not used.
        min_nodes: The number of nodes to wait for before a round; by default ``min_reports``.

    Formal Guarantees:
        The server learns the output of the shuffler alone, as the replies of the nodes are ignored.
        When the target ε is reached, no further round is run, and :meth:`start` returns.
    """

    def __init__(
        self, ledger: Ledger, *, learning_rate: float = 1.0, min_nodes: int | None = None
    ) -> None:
        self.ledger = instance_of("ledger", ledger, (Ledger,))
        self.learning_rate = positive("learning_rate", learning_rate)
        needed = ledger.format.min_reports if min_nodes is None else min_nodes
        self.min_nodes = integer("min_nodes", needed)
        self.arrays: Any = None
        self._asked = False

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *others: Any,
        **options: Any,
    ) -> Result:
        """Trains as Flower's ``start`` does, for as many rounds as the target ε allows.

        Args:
            grid: The grid of the nodes.
            initial_arrays: The initial weights, unless the ledger has weights of an earlier round.
            num_rounds: The largest number of rounds.
            *others: Further arguments of Flower's ``start``.
            **options: Further arguments, such as ``evaluate_fn``.

        Returns:
            The weights of the last round, or the initial ones if there was none, and the metrics of
            the rounds.
        """
        stored, rounds = self.ledger.result, self.ledger.affordable(num_rounds)
        start = initial_arrays if stored is None else as_arrays(stored["weights"], initial_arrays)
        result = super().start(grid, start, rounds, *others, **options)
        if not rounds:
            result.arrays = start
        if rounds < num_rounds:
            log(
                INFO,
                "target epsilon is reached after %s rounds: %s of num_rounds=%s ran",
                self.ledger.round,
                rounds,
                num_rounds,
            )
        return result

    def summary(self) -> None:
        """Logs the mechanism of a round."""
        log(INFO, "\t└──> Every round: %s", self.ledger.format.mechanism)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Opens the next round at the shuffler, and sends the weights to every node.

        No node is asked if the target ε is reached, or if the round was begun by a process that was
        killed: its reports are at the shuffler.
        """
        stored = self.ledger.result
        self.arrays = arrays if stored is None else as_arrays(stored["weights"], arrays)
        check_size(as_vector(self.arrays), self.ledger.format, "the model has")
        self._asked = self.ledger.affords_another()
        if not self._asked:
            log(
                INFO,
                "target epsilon is reached after %s rounds: no further round is run",
                self.ledger.round,
            )
        if not self._asked or self.ledger.begun:
            return []
        while len(nodes := list(grid.get_node_ids())) < self.min_nodes:
            log(INFO, "waiting for %s nodes: %s are connected", self.min_nodes, len(nodes))
            time.sleep(1.0)
        number = self.ledger.open()
        settings = ConfigRecord({**config, ROUND: number})
        content = RecordDict({ARRAYS: self.arrays, SETTINGS: settings})
        return [Message(content, node, MessageType.TRAIN, group_id=str(number)) for node in nodes]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Accounts for the round, closes it at the shuffler, and updates the weights."""
        list(replies)  # only waits for the empty replies
        if not self._asked:
            return self.arrays, None
        weights, released = as_vector(self.arrays), self.ledger.close()
        mean = self.ledger.estimated_mean(released)
        if mean is None:
            log(
                WARNING,
                "round %s was dropped and is accounted: fewer than %s clients reported",
                released.round,
                self.ledger.format.min_reports,
            )
        else:
            weights = self.moved(weights, mean)
        self.ledger.finish({"weights": weights})
        self.arrays = as_arrays(weights, self.arrays)
        return self.arrays, MetricRecord(
            {"reports": released.num_reports, "rounds": self.ledger.round}
        )

    def moved(self, weights: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Returns the new weights; override it for another server optimizer."""
        return weights + self.learning_rate * mean

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks no node, because the answers would have no noise.

        Pass ``evaluate_fn`` to ``start`` to evaluate on data of the server.
        """
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Does nothing, because no client evaluates."""
        return None


def book_of(context: Context, book: Books | None) -> ClientBook:
    """Returns a client's book, in a file or in Flower's state.

    Flower's state lasts for one run, and the server chooses which messages are of one run.
    """
    if book is not None:
        client_book = book(context)
        return client_book if isinstance(client_book, FileBook) else FileBook(client_book)
    state: Any = context.state.config_records.setdefault(STATE, ConfigRecord())
    return ClientBook(state)


def check_size(weights: torch.Tensor, format: ReportFormat, whose: str = "the server sent") -> None:
    """Refuses weights of another size, before a coin is tossed."""
    if len(weights) != format.dimension:
        raise ValueError(
            f"{whose} {len(weights)} weights, but the format has dimension={format.dimension}: use "
            "the same network and format everywhere"
        )


def as_vector(arrays: ArrayRecord) -> torch.Tensor:
    """Returns all entries of a record in one vector: float64."""
    flat = [
        torch.from_numpy(np.asarray(array, np.float64).reshape(-1))
        for array in arrays.to_numpy_ndarrays()
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *flat])


def as_arrays(vector: torch.Tensor, like: ArrayRecord) -> ArrayRecord:
    """Splits a flat vector into a record with the names, shapes and types of ``like``."""
    arrays = like.to_numpy_ndarrays()
    sizes = [array.size for array in arrays]
    if sum(sizes) != len(vector):
        raise ValueError(
            f"vector has {len(vector)} entries, the arrays have {sum(sizes)}: was the format made "
            "for another network?"
        )
    return ArrayRecord(
        {
            name: Array(entries.numpy().reshape(old.shape).astype(old.dtype))
            for name, entries, old in zip(
                like.keys(), torch.split(vector, sizes), arrays, strict=True
            )
        }
    )


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Returns the single record of arrays of a message.

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
