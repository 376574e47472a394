"""``ReportMod``: a Flower client whose update leaves it only as a report to the shuffler.

The reply to the server is empty and the same from every client, whether its coin let it take part
or not, whether it trained, failed or had nothing to say: no arrays, no losses, no numbers of
examples.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import WARNING
from typing import Any

import torch
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.logger import log

from opacus_shuffle.core.validation import boolean, instance_of, integer
from opacus_shuffle.federated.flower.common import (
    ROUND,
    SETTINGS,
    Books,
    as_vector,
    check_size,
    only_arrays,
    reporter_of,
    trained_update,
)
from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.shuffler import RefusedReportError

REFUSED = 451
"""The code of the error that answers everything but training."""


class ReportMod:
    """A mod for ``ClientApp(mods=[...])``; the app's ``train`` replies with its trained weights, as for any strategy.

    Args:
        format: What reports look like. It is this client's own: nothing that a server sends changes
            it.
        submit: Sends a report to the shuffler; gets the context of the client, which tells its
            node's settings, and the report.
        max_rounds: Rounds that this client agrees to take part in.
        book: Gets the context, returns the name of the file in which this client notes which rounds
            it has answered. None notes them in Flower's state, for simulations alone: a server that
            starts another run, or a node that is started anew, finds that empty.
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
        for name, value in (("submit", submit), ("book", book)):
            if not (callable(value) or (name == "book" and value is None)):
                raise ValueError(
                    f"{name} must take a client's context, got {value!r}: pass a function"
                )
        self.submit, self.book = submit, book
        self.max_rounds, self.always_train = (
            integer("max_rounds", max_rounds),
            boolean("always_train", always_train),
        )

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Answers the server's message; ``call_next`` trains."""
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            reason = f"{message.metadata.message_type} would send what has no noise: evaluate on data of the server's own"
            return Message(Error(code=REFUSED, reason=reason), reply_to=message)
        reply = Message(
            RecordDict(), reply_to=message
        )  # now: its time stamp must not tell how long this took
        try:
            self._report(message, context, call_next)
        except RefusedReportError as error:
            log(WARNING, "the shuffler took no report: %s", error)
        except Exception as error:  # of which the server learns nothing
            log(WARNING, "no report was sent: %r", error)
        return reply

    def _report(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> None:
        """Takes part in the round, or not."""
        number = message.content.config_records[SETTINGS][ROUND]
        received = as_vector(only_arrays(message.content))
        check_size(received, self.format)

        def train() -> torch.Tensor:
            return trained_update(
                lambda: as_vector(only_arrays(call_next(message, context).content)), received
            )

        reporter = reporter_of(self.format, context, self.max_rounds, self.book)
        reporter.answer(
            number,
            train,
            lambda report: self.submit(context, report),
            always_train=self.always_train,
        )  # type: ignore[arg-type]
