"""``LocalGrid``: runs a Flower ``ClientApp`` for many virtual clients in this process, without Ray.

With a thousand clients a round takes what they train and encode; Flower's own simulation takes most
of a minute besides.
"""

from __future__ import annotations

import contextlib
import copy
import types
import uuid
from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from opacus_shuffle.core.validation import integer

FIRST_NODE = 2
"""The number of the first client's node; Flower's own are below."""


class LocalGrid(Grid):
    """A grid of virtual clients, each with a state of its own that lasts as long as the grid.

    They answer one after the other.

    Args:
        client_app: What clients run; it is called in this process.
        num_clients: How many there are. Each finds its number as ``partition-id`` in
            ``context.node_config``.
        run_config: What the app's ``context.run_config`` holds.

    Attributes:
        run: What :meth:`set_run` got, else a run of number 0.
        contexts: By node the context of its client.
    """

    run: Any = types.SimpleNamespace(run_id=0)

    def __init__(
        self, client_app: Any, num_clients: int, run_config: dict[str, Any] | None = None
    ) -> None:
        self.client_app, self.num_clients = client_app, integer("num_clients", num_clients)
        self.contexts = {
            FIRST_NODE + client: Context(
                run_id=0,
                node_id=FIRST_NODE + client,
                node_config={"partition-id": client, "num-partitions": self.num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for client in range(self.num_clients)
        }
        _be_a_task()

    def set_run(self, run: Any) -> None:
        """Keeps the run."""
        self.run = run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Returns a message to a client."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Returns the ids of all clients."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Is not available on this grid.

        Raises:
            NotImplementedError: Always: clients answer at once.
        """
        raise NotImplementedError("clients of a LocalGrid answer at once: use send_and_receive")

    pull_messages = push_messages

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Returns the clients' answers; a client that fails answers with an error."""
        replies = []
        for sent in messages:
            # A copy, as if it had travelled: no client sees what another one did to it.
            message = copy.deepcopy(sent)
            context = self.contexts[message.metadata.dst_node_id]
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            try:
                replies.append(self.client_app(message, context))
            except Exception as error:
                replies.append(Message(Error(code=0, reason=repr(error)), reply_to=message))
        return replies


def _be_a_task() -> None:
    """Lets messages be made outside of Flower's own processes."""
    with contextlib.suppress(ImportError):  # an older or a newer Flower, whose messages may not ask
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("task_id", "run_id", "node_id"):
            try:
                getattr(TaskIdentity, name)
            except RuntimeError:
                setattr(TaskIdentity, name, 1)
