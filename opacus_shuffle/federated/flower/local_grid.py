"""``LocalGrid``: runs a Flower ``ClientApp`` for many virtual clients in this process, one after the other, without Ray.

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

    Args:
        client_app: What clients run; it is called in this process.
        num_clients: How many there are. Each finds its number as ``partition-id`` in
            ``context.node_config``.
        run_config: What the app's ``context.run_config`` holds.
    """

    def __init__(
        self, client_app: Any, num_clients: int, run_config: dict[str, Any] | None = None
    ) -> None:
        self.client_app, self.num_clients = client_app, integer("num_clients", num_clients)
        self.run_config = dict(run_config or {})
        self._contexts: dict[int, Context] = {}
        self._run: Any = types.SimpleNamespace(run_id=0)
        _be_a_task()

    def set_run(self, run: Any) -> None:
        """Keeps the run."""
        self._run = run

    @property
    def run(self) -> Any:
        """What :meth:`set_run` got, else a run of number 0."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a client."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Of all clients."""
        return list(range(FIRST_NODE, FIRST_NODE + self.num_clients))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Not here.

        Raises:
            NotImplementedError: Always: clients answer at once.
        """
        raise NotImplementedError("clients of a LocalGrid answer at once: use send_and_receive")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Not here; see :meth:`push_messages`."""
        raise NotImplementedError("clients of a LocalGrid answer at once: use send_and_receive")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """What the clients answer; a client that fails answers with an error, as on Flower's own grid."""
        replies = []
        for sent in messages:
            message = copy.deepcopy(
                sent
            )  # as if it had travelled: no client sees what another one did to it
            node = message.metadata.dst_node_id
            if node not in self._contexts:
                place: dict[str, Any] = {
                    "partition-id": node - FIRST_NODE,
                    "num-partitions": self.num_clients,
                }
                self._contexts[node] = Context(
                    run_id=0,
                    node_id=node,
                    node_config=place,
                    state=RecordDict(),
                    run_config=self.run_config,
                )
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            try:
                replies.append(self.client_app(message, self._contexts[node]))
            except Exception as error:
                replies.append(Message(Error(code=0, reason=repr(error)), reply_to=message))
        return replies


def _be_a_task() -> None:
    """Lets messages be made outside of Flower's own processes, where they ask which task makes them."""
    with contextlib.suppress(ImportError):  # an older or a newer Flower, whose messages may not ask
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("task_id", "run_id", "node_id"):
            try:
                getattr(TaskIdentity, name)
            except RuntimeError:
                setattr(TaskIdentity, name, 1)
