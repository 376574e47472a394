"""``ReportMod`` for clients and ``ShuffledStrategy`` for servers: Flower with a shuffler.

A client's update leaves it only as a report to the shuffler. The reply to the server is empty and
the same from every client, whether its coin let it take part or not, whether it trained, failed or
had nothing to say: no arrays, no losses, no numbers of examples.
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

# Under which names a message to a client holds the weights, the settings, and in these the number
# of the round.
ARRAYS, SETTINGS, ROUND = "arrays", "config", "round"
STATE = "opacus_shuffle"
"""Under which name a client's state holds the rounds that it has answered."""
Books = Callable[[Context], "str | os.PathLike[str] | FileBook"]
"""Gets a client's context, returns its book, or the name of the file in which it notes rounds."""
REFUSED = 451
"""The code of the error that answers everything but training."""


class ReportMod:
    """A Flower mod that turns what a client's ``train`` replies into a noised report.

    That are its trained weights, as for any strategy.

    Args:
        format: What reports look like. It is this client's own: nothing that a server sends changes
            it.
        submit: Sends a report to the shuffler; gets the context of the client, which tells its
            node's settings, and the report.
        max_rounds: Rounds that this client agrees to take part in.
        book: Gets the context, returns the book in which this client notes which rounds it has
            answered: a :class:`~opacus_shuffle.federated.FileBook`, or its file's name. None notes
            them in Flower's state, for simulations alone: a server that starts another run, or a
            node that is started anew, finds that empty.
        always_train: Train whatever the coin says, so that the time it takes tells nothing. In a
            simulation, where nobody watches, False spares it.

    Formal Guarantees:
        The server sees an empty reply, and the shuffler one report of the update (trained weights
        minus received ones), clipped and noised here. Evaluation and queries are refused: their
        answers would carry no noise.
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
        kind = message.metadata.message_type
        if kind.split(".")[0] != MessageType.TRAIN:
            reason = f"{kind} would send what has no noise: evaluate on data of the server's own"
            return Message(Error(code=REFUSED, reason=reason), reply_to=message)
        # The reply is made now: its time stamp must not tell how long training took.
        reply = Message(RecordDict(), reply_to=message)
        try:
            self._report(message, context, call_next)
        except Exception as error:  # of which the server learns nothing
            log(WARNING, "no report was sent or taken: %r", error)
        return reply

    def _report(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> None:
        """Trains and reports, if the coin says so."""
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
    """A Flower strategy that moves the weights by the clients' mean report, and accounts for it.

    Each round's metrics are ``reports``, that clients sent (0: the round was dropped), and
    ``rounds`` that were accounted. What they cost, ``ledger.report()`` says.

    Args:
        ledger: The book of the run, with its format, shuffler, δ and target ε.
        learning_rate: What the mean is multiplied by. It is the sum over the expected number of
            clients that take part, γ·n, which is public; how many did is not used.
        min_nodes: Nodes to wait for before a round; by default as many as a round needs.

    Formal Guarantees:
        The server learns what the shuffler hands over: the replies of the nodes are not looked at.
        When the target ε is reached no node is asked any more, and :meth:`start` returns.
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
        """Trains as Flower's own ``start`` does, for as many rounds as the target ε pays for.

        Args:
            grid: Of the nodes.
            initial_arrays: Where training starts, if the book does not say.
            num_rounds: Rounds to run at most.
            *others: As Flower's own.
            **options: As Flower's own, such as ``evaluate_fn``.

        Returns:
            The weights of the last round, or those of the start if there was none, and the metrics
            of the rounds that ran.
        """
        known, rounds = self.ledger.result, self.ledger.affordable(num_rounds)
        start = initial_arrays if known is None else as_arrays(known["weights"], initial_arrays)
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
        """Returns a sentence on what every round is."""
        log(INFO, "\t└──> Every round: %s", self.ledger.format.mechanism)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Opens the next round at the shuffler, and asks every node.

        Nobody is asked if the target ε is reached, or if a process that was killed had begun the
        round: its reports are at the shuffler.
        """
        known = self.ledger.result
        self.arrays = arrays if known is None else as_arrays(known["weights"], arrays)
        check_size(as_vector(self.arrays), self.ledger.format, "the model has")
        self._asked = self.ledger.affords_another()
        if not self._asked:
            log(
                INFO,
                "target epsilon is reached after %s rounds: nobody is asked any more",
                self.ledger.round,
            )
        if not self._asked or self.ledger.begun:
            return []
        while len(nodes := list(grid.get_node_ids())) < self.min_nodes:
            log(INFO, "waiting for %s nodes: %s are there", self.min_nodes, len(nodes))
            time.sleep(1.0)
        number = self.ledger.open()
        settings = ConfigRecord({**config, ROUND: number})
        content = RecordDict({ARRAYS: self.arrays, SETTINGS: settings})
        return [Message(content, node, MessageType.TRAIN, group_id=str(number)) for node in nodes]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Accounts for the round, takes it from the shuffler, and moves the weights."""
        list(replies)  # waits for them; they say nothing
        if not self._asked:
            return self.arrays, None
        weights, released = as_vector(self.arrays), self.ledger.close()
        mean = self.ledger.estimated_mean(released)
        if mean is None:
            log(
                WARNING,
                "round %s was dropped, fewer than %s clients reported: it is accounted",
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
        """Asks nobody, because the clients' answers would have no noise.

        Pass ``evaluate_fn`` to ``start``, with data of the server's own.
        """
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Does nothing, as no client evaluates."""
        return None


def book_of(context: Context, book: Books | None) -> ClientBook:
    """Returns a client's book, in a file or in Flower's state.

    That state lasts as long as a run, whose name the server chooses.
    """
    if book is not None:
        own = book(context)
        return own if isinstance(own, FileBook) else FileBook(own)
    state: Any = context.state.config_records.setdefault(STATE, ConfigRecord())
    return ClientBook(state)


def check_size(weights: torch.Tensor, format: ReportFormat, whose: str = "the server sent") -> None:
    """Refuses weights of another size, before any coin is tossed."""
    if len(weights) != format.dimension:
        raise ValueError(
            f"{whose} {len(weights)} weights, the format has dimension={format.dimension}: change "
            "one of them"
        )


def as_vector(arrays: ArrayRecord) -> torch.Tensor:
    """Returns all entries of a record in one vector: float64."""
    parts = [
        torch.from_numpy(np.asarray(array, np.float64).reshape(-1))
        for array in arrays.to_numpy_ndarrays()
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def as_arrays(vector: torch.Tensor, like: ArrayRecord) -> ArrayRecord:
    """Cuts a flat vector into a record of the same names, shapes and types."""
    arrays = like.to_numpy_ndarrays()
    sizes = [array.size for array in arrays]
    if sum(sizes) != len(vector):
        raise ValueError(
            f"vector has {len(vector)} entries, the arrays have {sum(sizes)}: was the format made "
            "for another network?"
        )
    return ArrayRecord(
        {
            name: Array(part.numpy().reshape(old.shape).astype(old.dtype))
            for name, part, old in zip(like.keys(), torch.split(vector, sizes), arrays, strict=True)
        }
    )


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Returns the one record of arrays in a message.

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
