"""``AccountedStrategy`` and ``AccountedMod``: ε of Flower's own differential privacy.

Flower's strategies and its ``LocalDpMod`` work unchanged. Each round is accounted by the noise that
it really got, before its model is used, and a round that would exceed the budget is not run. What
Flower releases without the noise that it reports is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
)
from flwr.clientapp.mod import LocalDpMod
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)
from flwr.supercore.differential_privacy import KEY_NORM_BIT

from opacus_shuffle.accountants.accountant import ShuffleAccountant
from opacus_shuffle.accountants.bounds.registry import Rounds, compute_bound
from opacus_shuffle.accountants.mechanisms.noised_updates import ClientNoise, ServerNoise
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.validation import integer, open_unit_interval, positive
from opacus_shuffle.federated.flower.shuffled_training import (
    Books,
    as_vector,
    book_of,
    only_arrays,
)

STOCK = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)
ROUND = "server-round"
"""The key of the round in Flower's messages to clients."""
FARTHEST = 5.0
"""The largest noise of the count, in standard deviations, that is accounted for.

With adaptive clipping a round with more noise is dropped: one round of 3 million if all updates are
clipped.
"""
SLACK = 1e-3
"""By which fraction an update may exceed the clipping norm, because of single precision.

It is accounted for: the sensitivity is that much larger.
"""


class AccountedStrategy(Strategy):
    """Accounts for one of Flower's four strategies with differential privacy, round by round.

    Args:
        strategy: One of ``DifferentialPrivacy{Server,Client}Side{Fixed,Adaptive}Clipping`` around a
            strategy that averages as ``FedAvg`` does. Its noise and norms are read in every round.
        num_clients: n, all clients. It does not change ε, only the comparisons in the report.
        delta: δ of the run.
        target_epsilon: The limit of ε. No round that would exceed it is run, and the model stays.
        adjacency: ``"zero_out"`` (one client's update is zero), or ``"replace"``.

    Attributes:
        accountant: The accountant of the rounds that ran.

    Raises:
        ValueError: If the strategy is another one, averages differently, or adds no noise.

    Formal Guarantees:
        Theorems 14.1 and 14.2, for clients' updates, with a trusted server, against an adversary
        who sees the model of every round and which clients participate. Weights (numbers of
        examples) count as public, and whether a client answers must not depend on data. Metrics
        that clients send have no noise.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        num_clients: int,
        delta: float,
        target_epsilon: float = math.inf,
        adjacency: str = "zero_out",
    ) -> None:
        if type(strategy) not in STOCK:
            raise ValueError(
                f"strategy must be one of {', '.join(each.__name__ for each in STOCK)}, got "
                f"{type(strategy).__name__}: wrap one of these, with your strategy inside"
            )
        inner = type(strategy.strategy)
        if not issubclass(inner, FedAvg) or inner.aggregate_train is not FedAvg.aggregate_train:
            raise ValueError(
                f"strategy must wrap one that averages as FedAvg does, got {inner.__name__}: "
                "Flower's noise is for a mean, and other aggregates may depend more on one client"
            )
        self.strategy, self.num_clients = strategy, integer("num_clients", num_clients)
        self.delta, self.adjacency = open_unit_interval("delta", delta), Adjacency(adjacency)
        self.target_epsilon = positive("target_epsilon", target_epsilon, infinite=True)
        self.accountant, self._sent = ShuffleAccountant(ServerNoise), ArrayRecord()
        expected = min(strategy.num_sampled_clients, self.num_clients)
        self._round([1.0] * expected)  # refuses a strategy without noise

    def _least_growth(self, replies: int) -> float:
        """Returns the smallest factor by which a released round may change the clipping norm.

        Flower clips to one norm, and adds the noise of the next one. The factor is 1 if the norm is
        fixed.
        """
        highest = 1 + FARTHEST * getattr(self.strategy, "clipped_count_stddev", 0.0) / replies
        above = highest - getattr(self.strategy, "target_clipped_quantile", 0.0)
        return min(1.0, math.exp(-getattr(self.strategy, "clip_norm_lr", 0.0) * above))

    def _round(self, weights: list[float]) -> ServerNoise:
        """Returns the mechanism of a round that averages clients with these weights."""
        noise = self.strategy.noise_multiplier * self._least_growth(len(weights)) / (1 + SLACK)
        return ServerNoise(
            noise_multiplier=noise
            * sum(weights)
            / max(weights)
            / self.strategy.num_sampled_clients,
            num_users=integer("num_clients", self.num_clients, minimum=len(weights)),
            sample_rate=len(weights) / self.num_clients,
            count_noise=getattr(self.strategy, "clipped_count_stddev", math.inf),
        )

    def _affords(self, one: ServerNoise) -> bool:
        """Whether one more round stays within the target ε."""
        rounds = [*self.accountant.rounds, (one, 1)]
        spent = compute_bound(rounds, delta=self.delta, adjacency=self.adjacency)
        return spent.epsilon <= self.target_epsilon

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks the strategy's clients, or no client once the budget is spent."""
        check_arrays(arrays)
        self._sent = arrays
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if messages and not self._affords(self._round([1.0] * len(messages))):
            log(WARNING, "privacy: no client is asked, because the round would exceed the budget")
            return []
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Accounts for the round, and returns the result of the strategy.

        The model stays unchanged if a client answered with an error, or the weights are so unequal
        that the round would exceed the budget.

        Raises:
            ValueError: If an update was not clipped, or a weight is not a positive number. No model
                is then released.
        """
        answers = list(replies)
        if not answers or any(answer.has_error() for answer in answers):
            return None, None
        if len({answer.metadata.src_node_id for answer in answers}) < len(answers):
            raise ValueError(
                "a client answered twice in a round, which doubles its accounted influence: the "
                "wrapped strategy must ask each node once"
            )
        key = self.strategy.strategy.weighted_by_key
        sent: Any = [next(iter(answer.content.metric_records.values()), {}) for answer in answers]
        one = self._round([positive(f"{key} of a client", each.get(key)) for each in sent])
        if not self._affords(one):
            log(
                WARNING,
                "privacy: the round is dropped, because its weights would exceed the budget",
            )
            return None, None
        norm = self.strategy.clipping_norm
        for answer in answers:  # The rounding of a mean in single precision adds sensitivity.
            for name, trained in list(answer.content.array_records.items()):
                answer.content[name] = in_types(trained, dict.fromkeys(trained, "float64"))
        self.accountant.record(one)  # first: the next norm stays changed if the rest fails
        arrays, metrics = self.strategy.aggregate_train(server_round, answers)
        for answer in answers:
            check_clipped(only_arrays(answer.content), self._sent, norm)
        if arrays is not None:
            arrays = in_types(arrays, {key: array.dtype for key, array in self._sent.items()})
        if metrics is not None:
            metrics.pop(KEY_NORM_BIT, None)  # the share of clipped clients, without its noise
        if self.strategy.clipping_norm < norm * self._least_growth(len(answers)):
            self.strategy.clipping_norm, arrays = norm, None  # less noise than accounted
        spent = self.accountant.bound(self.delta, adjacency=self.adjacency)
        log(
            INFO,
            "privacy: epsilon = %s at delta = %s, %s adjacency, trusting %s, after %s rounds",
            *(round_up(spent.epsilon), spent.delta, spent.adjacency, spent.trusted, spent.rounds),
        )
        return arrays, metrics

    def report(self) -> PrivacyReport:
        """Returns the report of all rounds, with ε under other trust models; print it."""
        return report_of(self.accountant.rounds, self.delta, self.adjacency)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks the strategy's clients; the model that they get is accounted."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Returns the strategy's aggregate of the clients' metrics, which have no noise."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Logs the strategy's settings."""
        self.strategy.summary()


class AccountedMod:
    """Accounts for Flower's ``LocalDpMod`` at a client, and limits the number of answered rounds.

    The mod computes its noise by a formula that is valid for ε < 1 and the given ``sensitivity``.
    The account uses this noise over the clipping norm, with a thousandth for rounding.

    Args:
        mod: The mod.
        num_clients: n, all clients. It does not change ε, only the comparisons in the report.
        delta: δ of all answers of a client.
        max_rounds: The number of rounds that this client agrees to answer. It answers further
            rounds with an error.
        adjacency: ``"zero_out"`` (the client's update is zero), or ``"replace"``.
        book: As for :class:`~opacus_shuffle.federated.flower.ReportMod`.

    Raises:
        ValueError: If the mod adds no noise, or an argument is out of range.

    Formal Guarantees:
        Theorem 14.1, for one client's updates, against everyone who sees its answers, including the
        server. Metrics (numbers of examples, losses), answers to messages other than training, and
        errors of training have no noise.
    """

    def __init__(
        self,
        mod: LocalDpMod,
        *,
        num_clients: int,
        delta: float,
        max_rounds: int,
        adjacency: str = "zero_out",
        book: Books | None,
    ) -> None:
        if type(mod) is not LocalDpMod:
            raise ValueError(
                f"mod must be a LocalDpMod and not of a subclass, got {type(mod).__name__}: the "
                "account does not cover other changes of an update"
            )
        self.mod, self.book = mod, book
        self.delta, self.adjacency = open_unit_interval("delta", delta), Adjacency(adjacency)
        self.max_rounds = integer("max_rounds", max_rounds)
        claimed = open_unit_interval("delta of LocalDpMod", mod.delta)
        noise = mod.sensitivity * math.sqrt(2 * math.log(1.25 / claimed))
        sigma = noise / positive("epsilon of LocalDpMod", mod.epsilon) / mod.clipping_norm
        self.round = ClientNoise(noise_multiplier=sigma / (1 + SLACK), num_users=num_clients)

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Answers as the mod does if the client agreed to the round; ``call_next`` trains.

        Raises:
            ValueError: If the round or all agreed rounds were answered before, or Flower would send
                an update without clipping and noise. Flower then answers with an error.
        """
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return self.mod(message, context, call_next)
        check_arrays(only_arrays(message.content))
        check_precision(only_arrays(message.content), self.mod.clipping_norm)
        settings: Any = next(iter(message.content.config_records.values()), {})
        book_of(context, self.book).note(
            settings.get(ROUND),
            max_rounds=self.max_rounds,
            fingerprint=hashlib.sha256(repr(self.round).encode()).digest()[:8],
        )
        reply = self.mod(message, context, call_next)
        if not (reply.has_error() or as_vector(only_arrays(reply.content)).isfinite().all()):
            raise ValueError("the update is not finite, so Flower did not clip it")
        return reply

    def report(self) -> PrivacyReport:
        """Returns the report of all agreed rounds, with ε under other trust models; print it."""
        return report_of([(self.round, self.max_rounds)], self.delta, self.adjacency)


def report_of(rounds: Rounds, delta: float, adjacency: Adjacency) -> PrivacyReport:
    """Returns the report of rounds whose noise is drawn by NumPy in this process."""
    # After np.random.seed, the generator has no SeedSequence.
    seeded = np.random.get_bit_generator().seed_seq is None  # type: ignore[attr-defined]
    return PrivacyReport(
        rounds,
        delta=delta,
        adjacency=adjacency,
        clients=True,
        numpy_noise=True,
        predictable=("what np.random.seed was given",) if seeded else (),
    )


def check_arrays(arrays: ArrayRecord) -> None:
    """Refuses arrays that Flower releases without clipping or noise.

    Flower clips, and ``LocalDpMod`` noises, only a copy of an array without dimensions. In half
    precision small noise is rounded away.
    """
    for name, array in arrays.items():
        if not array.shape or array.dtype not in ("float32", "float64"):
            raise ValueError(
                f"array {name!r} must have a dimension, and float32 or float64 entries, for Flower "
                f"to clip and noise it, got shape {tuple(array.shape)} and {array.dtype}: do not "
                "send it (for example num_batches_tracked of batch norm), or reshape it"
            )


def check_precision(arrays: ArrayRecord, norm: float) -> None:
    """Refuses arrays that are so large that adding an update of this norm rounds it.

    A server could choose arrays for which the rounded update is twice as long as the clipped one.
    """
    moved = math.hypot(
        *(
            float(np.linalg.norm(array.astype(np.float64))) * float(np.finfo(array.dtype).eps)
            for array in arrays.to_numpy_ndarrays()
        )
    )
    if not moved <= SLACK * norm:
        raise ValueError(
            f"arrays must be small or precise enough to add an update of norm {norm:.6g}, got "
            f"arrays whose rounding may change it by {moved:.6g}: send float64"
        )


def in_types(arrays: ArrayRecord, types: dict[str, str]) -> ArrayRecord:
    """Converts arrays to the given types, by name."""
    return ArrayRecord(
        {name: Array(array.numpy().astype(types[name])) for name, array in arrays.items()}
    )


def check_clipped(trained: ArrayRecord, sent: ArrayRecord, norm: float) -> None:
    """Refuses an update that is longer than accounted, or not finite."""
    check_arrays(trained)
    if [(name, *array.shape) for name, array in trained.items()] != [
        (name, *array.shape) for name, array in sent.items()
    ]:
        raise ValueError(
            f"a client answered with arrays {list(trained)}, which differ from the sent ones, "
            f"{list(sent)}, in names, order or shapes: Flower clips them by their order"
        )
    length = float((as_vector(trained) - as_vector(sent)).norm())
    if not length <= norm * (1 + SLACK):
        raise ValueError(
            f"an update of norm {length:.6g} was averaged, above the clipping norm {norm:.6g}: "
            "install Flower's fixedclipping_mod or adaptiveclipping_mod at all clients, as the "
            "last mod, and send float64 if weights are large"
        )
