"""``LocalGrid``: runs a Flower ``ClientApp`` for many virtual clients in this process, without Ray.

Copy this file next to an app to try it on one machine. A round with a thousand clients takes as
long as their training and encoding; Flower's own simulation adds most of a minute.
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

FIRST_NODE = 2
"""The node id of the first client. Flower itself uses the smaller ids."""


class LocalGrid(Grid):
    """A grid of virtual clients that answer one after the other.

    Each client has a state of its own, which lasts as long as the grid.

    Args:
        client_app: What clients run; it is called in this process.
        num_clients: The number of clients. Each finds its number as ``partition-id`` in
            ``context.node_config``.
        run_config: The content of the app's ``context.run_config``.
    """

    run: Any = types.SimpleNamespace(run_id=0)

    def __init__(
        self, client_app: Any, num_clients: int, run_config: dict[str, Any] | None = None
    ) -> None:
        self.client_app = client_app
        self.contexts = {
            FIRST_NODE + client: Context(
                run_id=0,
                node_id=FIRST_NODE + client,
                node_config={"partition-id": client, "num-partitions": num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for client in range(num_clients)
        }
        _set_task_identity()

    def set_run(self, run: Any) -> None:
        self.run = run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("a LocalGrid answers at once: use send_and_receive")

    pull_messages = push_messages

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Returns the clients' replies; a client that fails replies with an error."""
        replies = []
        for sent in messages:
            # As over a network, each client gets a copy: no client sees another one's changes.
            message = copy.deepcopy(sent)
            context = self.contexts[message.metadata.dst_node_id]
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            try:
                replies.append(self.client_app(message, context))
            except Exception as error:
                replies.append(Message(Error(code=0, reason=repr(error)), reply_to=message))
        return replies


def _set_task_identity() -> None:
    """Sets the ids that Flower's messages look up, which only its own processes have."""
    with contextlib.suppress(ImportError):  # other versions of Flower may not have them
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("task_id", "run_id", "node_id"):
            try:
                getattr(TaskIdentity, name)
            except RuntimeError:
                setattr(TaskIdentity, name, 1)
