"""``ShuffledStrategy``: the server asks every node to train, and learns what the shuffler hands over, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.validation import instance_of, integer, positive
from opacus_shuffle.federated.flower.common import (
    ARRAYS,
    ROUND,
    SETTINGS,
    as_arrays,
    as_vector,
    check_size,
    enough,
)
from opacus_shuffle.federated.flower.local_grid import LocalGrid
from opacus_shuffle.federated.ledger import Ledger


class ShuffledStrategy(Strategy):
    """Adds the mean of the clients' reported updates to the weights, and accounts for every round.

    Args:
        ledger: The book of the run, with its format, shuffler, δ and target ε.
        learning_rate: What the mean is multiplied by. It is the sum over the expected number of
            clients that take part, γ·n, which is public; how many did is not used.
        min_nodes: Nodes to wait for before a round; by default as many as a round needs.
        epsilon_every: In every so many rounds all of the mechanism's bounds are computed for the
            metrics.

    Metrics of each round: ``reports`` that clients sent (0: the round was dropped), ``rounds``
    accounted, and every few rounds ``epsilon-certified`` (proved for every data set) and the
    mechanism's other bounds under their names, which are guarantees only as far as
    ``ledger.epsilon(bound=...)`` says.

    Formal Guarantees:
        The replies of the nodes are not looked at. When the target ε is reached no node is asked
        any more, and the weights stay as they are.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        learning_rate: float = 1.0,
        min_nodes: int | None = None,
        epsilon_every: int = 10,
    ) -> None:
        self.ledger = instance_of("ledger", ledger, (Ledger,))
        self.learning_rate = positive("learning_rate", learning_rate)
        needed = ledger.format.num_users if ledger.format.selected else ledger.format.fewest_reports
        self.min_nodes = needed if min_nodes is None else integer("min_nodes", min_nodes)
        self.epsilon_every = integer("epsilon_every", epsilon_every)
        self.arrays: ArrayRecord | None = None
        self._asked = True

    def summary(self) -> None:
        """Says what every round is."""
        log(INFO, "\t├──> Every round: %s", self.ledger.format.mechanism)
        log(INFO, "\t└──> Released with %s reports at least", self.ledger.format.fewest_reports)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Opens the next round at the shuffler and asks every node; none if the target ε is reached."""
        known = self.ledger.result
        self.arrays = as_arrays(known["weights"], arrays) if known is not None else arrays
        check_size(as_vector(self.arrays), self.ledger.format, "the model has")
        if self._asked and not self.ledger.affords_another():
            log(
                INFO,
                "target epsilon is reached after %s rounds: nobody is asked any more",
                self.ledger.round,
            )
        self._asked = self.ledger.affords_another()
        if (
            not self._asked or self.ledger.begun
        ):  # by a process that was killed: its reports are at the shuffler
            return []
        there = len(list(grid.get_node_ids()))
        if isinstance(grid, LocalGrid) and there < self.min_nodes:
            raise ValueError(
                f"min_nodes={self.min_nodes} never are on a LocalGrid of {there}: give it as many "
                "clients"
            )
        nodes = self.ledger.format.ask(
            list(enough(lambda: list(grid.get_node_ids()), self.min_nodes))
        )
        number = self.ledger.open()
        settings = ConfigRecord({**config, ROUND: number})
        content = RecordDict({ARRAYS: self.arrays, SETTINGS: settings})
        return [
            Message(
                content=content,
                message_type=MessageType.TRAIN,
                dst_node_id=node,
                group_id=str(number),
            )
            for node in nodes
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Accounts for the round, takes it from the shuffler, and moves the weights."""
        for _ in replies:
            pass  # they say nothing
        if not self._asked or self.arrays is None:
            return self.arrays, None
        released = self.ledger.close()
        if released.dropped:
            fewest = self.ledger.format.fewest_reports
            log(
                WARNING,
                "round %s was dropped, fewer than %s clients reported: it is accounted",
                released.round,
                fewest,
            )
        mean = self.ledger.estimated_mean(released)
        if mean is not None:
            self.arrays = as_arrays(self.moved(as_vector(self.arrays), mean), self.arrays)
        self.ledger.finish({"weights": as_vector(self.arrays)})
        metrics: dict[str, Any] = {"reports": released.num_reports, "rounds": self.ledger.round}
        if server_round % self.epsilon_every == 0 or not self.ledger.affords_another():
            for bound in bounds_of(type(self.ledger.format.mechanism)):
                metrics[f"epsilon-{bound}"] = float(
                    round_up(self.ledger.epsilon(bound=bound).epsilon)
                )
        return self.arrays, MetricRecord(metrics)

    def moved(self, weights: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """The new weights, from the old ones and the mean update: override it for another server optimizer."""
        return weights + self.learning_rate * mean

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: what clients would answer has no noise. Pass ``evaluate_fn`` to ``start``, with data of the server's own."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing."""
        return None
