"""Federated training on Flower: what reaches the server, and what clients keep to themselves."""

import http.client
import math

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr.app", reason="needs the extra federated")

from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp  # noqa: E402
from local_grid import LocalGrid  # noqa: E402

import opacus_shuffle  # noqa: E402
from opacus_shuffle.federated import (  # noqa: E402
    GaussianReports,
    Ledger,
    SecretReports,
    ShuffledSumReports,
    Shuffler,
)
from opacus_shuffle.federated.flower import ReportMod, ShuffledStrategy  # noqa: E402
from opacus_shuffle.federated.flower.shuffled_training import as_arrays, as_vector  # noqa: E402

CLIENTS, D = 30, 8
GAUSSIAN = {
    "dimension": D,
    "max_norm": 1.0,
    "noise_multiplier": 1.0,
    "num_users": CLIENTS,
    "sample_rate": 0.5,
}
SUMS = {**GAUSSIAN, "noise_multiplier": 2.0, "delta": 1e-6, "min_reports": 15}


def weights(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord(
        {
            "layer": Array(np.full((2, 3), value, np.float32)),
            "bias": Array(np.full(2, value, np.float32)),
        }
    )


class Federation:
    """Clients, a shuffler and a server in this process.

    Args:
        reports: What clients send.
        train: What a client adds to the weights, by its number.
    """

    def __init__(
        self,
        reports,
        train=lambda client: torch.zeros(D),
        *,
        max_rounds: int = 100,
        book=None,
        learning_rate: float = 1.0,
        **options,
    ):
        self.shuffler, self.trained, self.replies = Shuffler(reports), [], []
        self.submit = lambda context, report: self.shuffler.submit(str(context.node_id), report)
        self.ledger = Ledger(reports, self.shuffler, delta=1e-5, **options)
        self.strategy = ShuffledStrategy(self.ledger, learning_rate=learning_rate)
        self.mod = ReportMod(
            reports,
            lambda *report: self.submit(*report),
            max_rounds=max_rounds,
            book=book,
            always_train=False,
        )
        app = ClientApp(mods=[self.mod])

        @app.train()
        def _(message: Message, context: Context) -> Message:
            client = context.node_config["partition-id"]
            self.trained.append(client)
            arrays = message.content["arrays"]
            moved = as_arrays(as_vector(arrays) + train(client), arrays)
            losses = MetricRecord({"loss": 1.25, "num-examples": 8})
            return Message(RecordDict({"arrays": moved, "metrics": losses}), reply_to=message)

        def answered(message: Message, context: Context) -> Message:
            self.replies.append(app(message, context))
            return self.replies[-1]

        self.grid = LocalGrid(answered, CLIENTS)

    def ask(self, content: RecordDict) -> None:
        """Asks every client to train, as a server may that goes by no strategy of ours."""
        nodes = self.grid.get_node_ids()
        self.grid.send_and_receive(
            [Message(content, message_type=MessageType.TRAIN, dst_node_id=node) for node in nodes]
        )

    def run(self, rounds: int, start: float = 0.0, **options):
        arrays = weights(start)
        return self.strategy.start(
            grid=self.grid, initial_arrays=arrays, num_rounds=rounds, **options
        )

    @property
    def all_answered_alike(self) -> bool:
        """Whether no reply tells more than that a node is there."""
        return all(len(reply.content) == 0 and not reply.has_error() for reply in self.replies)


KINDS = pytest.mark.parametrize(
    "reports",
    [GaussianReports(**GAUSSIAN), ShuffledSumReports(**SUMS), SecretReports(**GAUSSIAN)],
    ids=["gaussian", "sums", "secret"],
)


@KINDS
@pytest.mark.parametrize("connection", ["holds", pytest.param("breaks", marks=pytest.mark.zoo)])
def test_clients_that_train_fail_or_have_nothing_to_say_answer_alike(reports, connection):
    def train(client: int) -> torch.Tensor:
        if client % 3 == 0:
            raise RuntimeError("out of memory")
        return torch.full((D,), math.nan) if client % 3 == 1 else torch.full((D,), float(client))

    def break_down(context: Context, report: bytes) -> None:
        raise http.client.IncompleteRead(b"")

    federation = Federation(reports, train)
    if connection == "breaks":
        federation.submit = break_down
    result = federation.run(3)
    assert len(federation.replies) == 3 * CLIENTS
    assert 0 < len(federation.trained) < 3 * CLIENTS
    assert federation.all_answered_alike
    for name, before in weights().items():
        after = result.arrays[name].numpy()
        assert (after.shape, after.dtype) == (before.numpy().shape, np.float32)
        assert np.isfinite(after).all()


@pytest.mark.parametrize("kind", [MessageType.EVALUATE, MessageType.QUERY])
def test_what_would_be_answered_without_noise_is_refused(kind):
    federation = Federation(GaussianReports(**GAUSSIAN))
    message = Message(RecordDict(), dst_node_id=2, message_type=kind)
    reply = federation.mod(message, None, lambda *_: pytest.fail("it answers"))
    assert f"{kind} would be answered without noise" in reply.error.reason
    assert list(federation.strategy.configure_evaluate(1, weights(), {}, federation.grid)) == []


@pytest.mark.parametrize("kept", ["in files", "in Flower's state"])
def test_a_server_that_begins_another_run_finds_the_same_books_if_they_are_files(kept, tmp_path):
    """In Flower's own state of a client the rounds of one run are all that is there."""
    sent = []
    for _ in range(2):
        book = None if kept != "in files" else lambda context: tmp_path / str(context.node_id)
        federation = Federation(GaussianReports(**GAUSSIAN), max_rounds=2, book=book)
        federation.submit = lambda context, report, take=federation.submit: (
            sent.append(report) or take(context, report)
        )
        federation.run(3)
        assert len(federation.ledger.accountant) == 3
    assert len(sent) == (2 if kept == "in files" else 4) * CLIENTS


@KINDS
def test_weights_of_another_network_are_reported_by_nobody(reports):
    federation, other = Federation(reports), ArrayRecord({"w": Array(np.zeros(3))})
    with pytest.raises(ValueError, match="the model has 3 weights, but the format has dimension=8"):
        federation.strategy.start(grid=federation.grid, initial_arrays=other, num_rounds=1)
    federation.shuffler.open_round(1)
    first = ConfigRecord({"round": 1})
    for broken in ({"arrays": other, "config": first}, {"arrays": weights()}, {"config": first}):
        federation.ask(RecordDict(broken))
    assert federation.all_answered_alike
    assert federation.shuffler.waiting() == 0


@KINDS
def test_every_round_is_accounted_and_when_the_target_is_reached_the_run_is_over(reports, tmp_path):
    """A server that was killed goes on with its weights and its history, and returns them."""
    price = opacus_shuffle.compute_epsilon(reports.mechanism, steps=3, delta=1e-5)
    shuffler, before, last = Shuffler(reports), 0, as_vector(weights())
    for asked, ran in ((1, 1), (6, 2), (6, 0)):
        federation, evaluated = (
            Federation(reports, target_epsilon=price, path=tmp_path / "book"),
            {},
        )
        federation.shuffler = federation.ledger.shuffler = shuffler
        started = 100.0 if before else 0.0  # which is not where it goes on
        result = federation.run(asked, started, evaluate_fn=evaluated.__setitem__)
        assert {number: dict(said) for number, said in result.train_metrics_clientapp.items()} == {
            number: {"reports": CLIENTS, "rounds": before + number} for number in range(1, ran + 1)
        }
        assert len(federation.replies) == ran * CLIENTS
        assert list(evaluated) == list(range(ran + 1))
        assert torch.equal(as_vector(evaluated[0]), last)
        before, last = before + ran, as_vector(result.arrays)
        assert torch.equal(as_vector(evaluated[ran]), last)
        assert last.abs().max() < 50
    assert federation.ledger.epsilon().epsilon == price
