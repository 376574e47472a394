"""``SecureSums``: sums of bits by Flower's SecAgg+ in the place of a shuffler, at the same ε.

A round of :class:`~opacus_shuffle.federated.report_formats.BitSums` tells its server one count for
each coordinate. A secure aggregation that reveals only the sum of the clients' counts shows just
that, so that no shuffler is needed. Flower has SecAgg+ for its older workflow alone, in
``flwr.client.mod`` and ``flwr.server.workflow``. This module carries counts through it without a
loss: every client sends whole numbers, and the average that the workflow computes is turned back
into their sum.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from logging import INFO
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import FitIns, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.logger import log
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage
from flwr.server.strategy import Strategy
from flwr.server.workflow import SecAggPlusWorkflow

from opacus_shuffle.core.validation import boolean, instance_of, integer, positive
from opacus_shuffle.federated.flower.shuffled_training import (
    ROUND,
    Arrays,
    Books,
    check_size,
    close_round,
    enough,
    flat,
    reporter_of,
    shaped_like,
)
from opacus_shuffle.federated.ledger import Ledger
from opacus_shuffle.federated.report_formats import BitSums
from opacus_shuffle.federated.shuffler import Released, UnknownRoundError
from opacus_shuffle.protocols.modular_sums import smallest_modulus, unwrapped


class SecureSums:
    """The settings that clients and server agree on, and the server's rounds.

    Args:
        format: What reports look like.
        largest_coordinate: No coordinate of the sum of all updates is larger, in the updates' own
            unit; a smaller modulus follows. By default the modulus has room for every sum.
        simulated: Clients and server are in one process, as a report then says.

    Attributes:
        modulus: M, which masked counts travel by.

    Formal Guarantees:
        Against a server that **follows the protocol** SecAgg+ shows each coordinate's sum of counts
        modulo M, and no more: the round of ``shuffled_sums`` that ``format`` accounts for. Flower's
        own (1.42) does not hold against another one: the server hands out the clients' public keys,
        masks are drawn from 32 bits of a shared secret, and clients never compare what they were
        told. :meth:`mod` refuses a server that is set up otherwise than agreed or says what no
        honest one says; one that lies to each client differently can still have the sum of fewer
        than ``format.min_reports``. A client that drops out once it has shared its keys takes
        its noise with it, as with a shuffler; one that is gone before halts the round, which stays
        accounted.

    Raises:
        ValueError: If half of the clients may be missing.
    """

    def __init__(
        self, format: BitSums, *, largest_coordinate: float | None = None, simulated: bool = False
    ) -> None:
        self.format = instance_of("format", format, (BitSums,))
        dishonest = format.min_reports - format.honest_reports
        if 2 * format.min_reports <= format.num_users + dishonest:
            raise ValueError(
                f"format has min_reports={format.min_reports} of {format.num_users} clients, "
                f"{dishonest} of which may be "
                "dishonest: more than half must be there, and the dishonest ones besides, or two "
                "sums could be unmasked"
            )
        self.simulated, self.predictable = boolean("simulated", simulated), ()
        self._levels = 1 << max(1, format.bits.bit_length())  # more than any count
        fewest = smallest_modulus(format.protocol, largest_coordinate)
        # Flower asks for a modulus above the levels, and divides by the number of clients modulo
        # it.
        self.modulus = max(fewest, 2 * self._levels, 1 << format.num_users.bit_length())
        self._masked = contextvars.ContextVar("masked", default=False)
        self._open: int | None = None
        self._released: Released | None = None

    # What a client does

    def arrays_of(self, report: bytes) -> Arrays:
        """Returns a report's counts as arrays that SecAgg+ rounds to these very counts.

        Raises:
            ValueError: If nothing would mask them.
        """
        if not self._masked.get():
            raise ValueError(
                "nothing masks what this client sends: make its app with ClientApp(client_fn=..., "
                "mods=[sums.mod])"
            )
        counts = self.format.counts_of(self.format.open(report)[1])
        return [(counts - self._levels / 2) * self._levels]

    def mod(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Flower's SecAgg+ mod for ``ClientApp(client_fn=..., mods=[sums.mod])``.

        Raises:
            ValueError: If the server asks for another modulus or scale, for a lower threshold or
                fewer neighbours, or to unmask anything but the sum of enough clients.
        """
        for record in message.content.config_records.values():
            asked: dict[str, Any] = dict(record)
            stage = asked.get(Key.STAGE)
            if stage == Stage.SETUP:
                self._check_settings(asked)
            elif stage == Stage.COLLECT_MASKED_VECTORS:
                self._check_clients(
                    "whose keys were shared",
                    [*asked[Key.SOURCE_LIST], message.metadata.dst_node_id],
                )
            elif stage == Stage.UNMASK:
                self._check_clients("in the sum", asked[Key.ACTIVE_NODE_ID_LIST])
                if both := set(asked[Key.ACTIVE_NODE_ID_LIST]) & set(asked[Key.DEAD_NODE_ID_LIST]):
                    raise ValueError(
                        f"the server says of {len(both)} clients that they are there and that they "
                        "are not"
                    )
        masked = self._masked.set(True)
        try:
            answer: Message = secaggplus_mod(message, context, call_next)
        finally:
            self._masked.reset(masked)
        return answer

    def _check_clients(self, which: str, clients: Sequence[int]) -> None:
        if len(set(clients)) != len(clients) or len(clients) < self.format.min_reports:
            raise ValueError(
                f"the server names {len(set(clients))} clients {which}, this one agreed to "
                f"{self.format.min_reports} at "
                "least, each once: it sends nothing"
            )

    def _check_settings(self, asked: dict[str, Any]) -> None:
        expected = {
            Key.CLIPPING_RANGE: self._levels / 2,
            Key.TARGET_RANGE: self._levels,
            Key.MOD_RANGE: self.modulus,
            Key.MAX_WEIGHT: float(self._levels),
            Key.SHARE_NUMBER: asked.get(
                Key.SAMPLE_NUMBER
            ),  # everyone is everyone's neighbour, and sees how many are there
        }
        for name, value in expected.items():
            if asked.get(name) != value:
                raise ValueError(
                    f"the server asks for {name}={asked.get(name)}, this client agreed to {value}: "
                    "it sends nothing"
                )
        if (
            asked[Key.SAMPLE_NUMBER] > self.format.num_users
            or asked[Key.THRESHOLD] < self.format.min_reports
        ):
            raise ValueError(
                f"the server would unmask the sum of {asked[Key.THRESHOLD]} of "
                f"{asked[Key.SAMPLE_NUMBER]} clients, this one "
                f"agreed to {self.format.min_reports} of {self.format.num_users}: it sends "
                "nothing"
            )

    # What the server does

    def workflow(self, *, timeout: float | None = None) -> SecAggPlusWorkflow:
        """Returns Flower's workflow for ``DefaultWorkflow(fit_workflow=...)``.

        Args:
            timeout: Seconds to wait for the answers of each stage; None waits for all.
        """
        if timeout is not None:
            positive("timeout", timeout)
        return SecAggPlusWorkflow(
            num_shares=1.0,
            reconstruction_threshold=self.format.min_reports,
            max_weight=float(self._levels),
            clipping_range=self._levels / 2,
            quantization_range=self._levels,
            modulus_range=self.modulus,
            timeout=timeout,
        )

    def aggregated(self, average: Arrays, num_reports: int) -> None:
        """Takes the workflow's average over ``clients`` clients, for :meth:`close_round`."""
        if self._open is None:
            raise ValueError("no round is open: open it with the ledger first")
        reports = integer(
            "num_reports",
            num_reports,
            minimum=self.format.min_reports,
            maximum=self.format.num_users,
        )
        weights = flat(average).numpy()
        exact = weights * (reports / self._levels) + reports * (self._levels / 2)
        if (
            weights.shape != (self.format.dimension,)
            or not np.abs(exact - np.rint(exact)).max() < 1e-3
        ):  # nor is NaN
            raise ValueError(
                "average is none of whole counts: clients and server must go by the same SecureSums"
            )
        residues = torch.from_numpy(np.rint(exact).astype(np.int64))
        counts = unwrapped(self.format.protocol, residues, reports, self.modulus)
        self._released = Released(self._open, reports, counts.numpy().astype("<i8").tobytes())

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Begins a round, if the ledger goes by the same settings."""
        self.format.check_fingerprint("the server", fingerprint)
        self._open, self._released = number, None

    def close_round(self, number: int) -> Released:
        """Returns the round's sum.

        Raises:
            UnknownRoundError: If the aggregation was halted, as too few clients were there.
        """
        if self._released is None or self._released.round != number:
            raise UnknownRoundError(
                f"round {number} was not aggregated: too few clients, or another process's"
            )
        return self._released

    def forget_round(self, number: int) -> None:
        """Forgets the round's sum."""
        self._open, self._released = None, None


class SecureSumClient(NumPyClient):
    """A client of the older workflow: it trains, and sends its counts through SecAgg+.

    Args:
        sums: What was agreed on.
        context: The client's, in whose state the rounds are noted that it has answered.
        train: Gets the weights, returns the trained ones.
        max_rounds: Rounds that this client agrees to take part in.
        book: Gets the context, returns the book in which this client notes which rounds it has
            answered: a :class:`~opacus_shuffle.federated.FileBook`, or its file's name. None notes
            them in Flower's state, for simulations alone.
        always_train: Train whatever the coin says, so that the time it takes tells nothing.
    """

    def __init__(
        self,
        sums: SecureSums,
        context: Context,
        train: Callable[[Arrays], Arrays],
        *,
        max_rounds: int,
        book: Books | None,
        always_train: bool = True,
    ) -> None:
        self.sums = instance_of("sums", sums, (SecureSums,))
        self.train = instance_of("train", train, (Callable,))
        self.reporter = reporter_of(sums.format, context, integer("max_rounds", max_rounds), book)
        self.always_train = boolean("always_train", always_train)

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        """Returns this client's counts, which the mod masks.

        No losses are sent, and no numbers of examples.
        """
        received, sent = flat(parameters), list[bytes]()
        check_size(received, self.sums.format)

        self.reporter.answer(
            config[ROUND],
            lambda: flat(self.train([array.copy() for array in parameters])) - received,
            sent.append,
            always_train=self.always_train,
        )
        return self.sums.arrays_of(sent[0]), 1, {}


class SecureSumStrategy(Strategy):
    """The older workflow's strategy: adds the mean of the clients' updates to the weights.

    Args:
        ledger: The book of the run, with a :class:`SecureSums` as its shuffler.
        weights: Where training starts, if the book does not say.
        learning_rate: What the mean is multiplied by: the sum over the expected number of clients
            that take part.
        min_nodes: Nodes to wait for before a round; by default as many as a round needs.

    Formal Guarantees:
        A round is in the book before any client is asked. When the target ε is reached nobody is
        asked any more. The older workflow then goes through the rounds that are left, which cost
        nothing: ask it for ``ledger.affordable(num_rounds)`` of them.
    """

    def __init__(
        self,
        ledger: Ledger,
        weights: Arrays,
        *,
        learning_rate: float = 1.0,
        min_nodes: int | None = None,
    ) -> None:
        self.ledger = instance_of("ledger", ledger, (Ledger,))
        self.sums = instance_of("ledger.shuffler", ledger.shuffler, (SecureSums,))
        self.learning_rate = positive("learning_rate", learning_rate)
        needed = ledger.format.min_reports if min_nodes is None else min_nodes
        self.min_nodes = integer("min_nodes", needed)
        self.weights = (
            weights if ledger.result is None else shaped_like(ledger.result["weights"], weights)
        )
        check_size(flat(self.weights), ledger.format, "the model has")

    def initialize_parameters(self, client_manager: Any) -> Parameters:
        """Returns the weights that training starts from."""
        return ndarrays_to_parameters(self.weights)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: Any
    ) -> list[Any]:
        """Opens the next round and asks every client; nobody if the target ε is reached."""
        if self.ledger.begun:  # it was halted, or its server was killed
            self._release()
        if not self.ledger.affords_another():
            log(
                INFO,
                "target epsilon is reached after %s rounds: nobody is asked any more",
                self.ledger.round,
            )
            return []
        clients = enough(lambda: client_manager.all().values(), self.min_nodes)
        if len(clients) > self.ledger.format.num_users:
            raise ValueError(
                f"{len(clients)} nodes are there, num_users={self.ledger.format.num_users} were "
                "agreed on: every client "
                "would refuse; end the others"
            )
        number = self.ledger.open()
        self.ledger.begin()
        asked = FitIns(ndarrays_to_parameters(self.weights), {ROUND: number})
        return [(client, asked) for client in clients]

    def aggregate_fit(
        self, server_round: int, results: list[Any], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """Closes the round and moves the weights."""
        average = parameters_to_ndarrays(
            results[0][1].parameters
        )  # the workflow gives all of them the same
        self.sums.aggregated(average, len(results))
        return ndarrays_to_parameters(self.weights), self._release()

    def _release(self) -> dict[str, int]:
        """Moves the weights by the open round's mean update, and returns the metrics."""
        new, metrics = close_round(
            self.ledger, flat(self.weights), lambda old, mean: old + self.learning_rate * mean
        )
        self.weights = shaped_like(new, self.weights)
        return metrics

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: Any
    ) -> list[Any]:
        """Asks nobody, because the clients' answers would have no noise."""
        return []

    def aggregate_evaluate(
        self, server_round: int, results: Any, failures: Any
    ) -> tuple[float | None, dict[str, Any]]:
        """Does nothing, as no client evaluates."""
        return None, {}

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        """Does nothing: evaluate :attr:`weights` on the server's own data."""
