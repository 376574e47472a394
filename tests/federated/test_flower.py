"""Federated training on Flower: what reaches the server, what it makes of it, and what clients keep to themselves."""

from __future__ import annotations

import http.client
import logging
import math

import numpy as np
import pytest
import torch
from scipy import stats

flwr = pytest.importorskip("flwr.app", reason="needs the extra federated")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

import opacus_shuffle  # noqa: E402
from opacus_shuffle.federated import BitSums, GaussianReports, Ledger, Shuffler  # noqa: E402
from opacus_shuffle.federated.flower import LocalGrid, ReportMod, ShuffledStrategy  # noqa: E402
from opacus_shuffle.federated.flower.records import as_arrays, as_vector  # noqa: E402

CLIENTS, D = 30, 8
GAUSSIAN = {"dimension": D, "max_norm": 1.0, "noise_multiplier": 1.0, "num_users": CLIENTS, "sample_rate": 0.5}
SUMS = {**GAUSSIAN, "noise_multiplier": 2.0, "delta": 1e-6, "min_reports": 15}


def weights(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({"layer": Array(np.full((2, 3), value, np.float32)), "bias": Array(np.full(2, value, np.float32))})


class Federation:
    """Clients, a shuffler and a server in this process.

    Args:
        reports: What clients send.
        train: What a client adds to the weights, by its number.
    """

    def __init__(
        self, reports, train=lambda client: torch.zeros(D), *, max_rounds: int = 100, delta: float = 1e-5, book=None, **options
    ):
        self.shuffler = Shuffler(reports)
        self.trained: list[int] = []
        strategy = {name: options.pop(name) for name in ("learning_rate", "epsilon_every") if name in options}
        self.ledger = Ledger(reports, self.shuffler, delta=delta, **options)
        self.strategy = ShuffledStrategy(self.ledger, **strategy)
        mod = ReportMod(reports, lambda *report: self.submit(*report), max_rounds=max_rounds, book=book, always_train=False)
        app = ClientApp(mods=[mod])

        @app.train()
        def _(message: Message, context: Context) -> Message:
            client = context.node_config["partition-id"]
            self.trained.append(client)
            arrays = message.content["arrays"]
            moved = as_arrays(as_vector(arrays) + train(client), arrays)
            losses = MetricRecord({"loss": 1.25, "num-examples": 8})
            return Message(RecordDict({"arrays": moved, "metrics": losses}), reply_to=message)

        @app.evaluate()
        def _(message: Message, context: Context) -> Message:
            return Message(RecordDict({"metrics": MetricRecord({"loss": 1.25})}), reply_to=message)

        self.app, self.grid, self.replies = app, LocalGrid(app, CLIENTS), []
        answers = self.grid.send_and_receive
        self.grid.send_and_receive = lambda *args, **keywords: self._watched(answers(*args, **keywords))

    def submit(self, context: Context, report: bytes) -> None:
        self.shuffler.submit(str(context.node_id), report)

    def _watched(self, replies):
        self.replies += replies
        return replies

    def run(self, rounds: int, start: float = 0.0):
        return self.strategy.start(grid=self.grid, initial_arrays=weights(start), num_rounds=rounds)


KINDS = pytest.mark.parametrize("reports", [GaussianReports(**GAUSSIAN), BitSums(**SUMS)], ids=["gaussian", "sums"])


@KINDS
def test_nothing_that_reaches_the_server_tells_more_than_that_a_node_is_there(reports):
    federation = Federation(reports, lambda client: torch.full((D,), float(client)))
    federation.run(3)
    assert len(federation.replies) == 3 * CLIENTS
    assert 0 < len(federation.trained) < 3 * CLIENTS
    for reply in federation.replies:
        assert not reply.has_error()
        assert len(reply.content) == 0


@KINDS
def test_clients_that_fail_or_have_nothing_to_say_answer_like_all_others(reports):
    def train(client: int) -> torch.Tensor:
        if client % 3 == 0:
            raise RuntimeError("out of memory")
        return torch.full((D,), math.nan) if client % 3 == 1 else torch.zeros(D)

    federation = Federation(reports, train)
    result = federation.run(3)
    assert all(len(reply.content) == 0 and not reply.has_error() for reply in federation.replies)
    assert np.isfinite(as_vector(result.arrays).numpy()).all()


@KINDS
def test_evaluation_by_clients_is_refused(reports):
    federation = Federation(reports)
    message = Message(RecordDict(), message_type=MessageType.EVALUATE, dst_node_id=2)
    (reply,) = federation.grid.send_and_receive([message])
    assert reply.has_error()
    assert "has no noise" in reply.error.reason


@KINDS
def test_a_server_cannot_have_a_round_twice_nor_more_rounds_than_agreed(reports):
    federation = Federation(reports, max_rounds=2)
    federation.run(2)
    trained = len(federation.trained)
    settings = ConfigRecord({"round": 2})
    for number in (2, 3, 10):
        federation.shuffler._open, federation.shuffler._digests = number, {}  # a server that has its way with the shuffler
        settings["round"] = number
        content = RecordDict({"arrays": weights(), "config": settings})
        replies = federation.grid.send_and_receive(
            [Message(content, message_type=MessageType.TRAIN, dst_node_id=node) for node in federation.grid.get_node_ids()]
        )
        assert all(len(reply.content) == 0 and not reply.has_error() for reply in replies)
        assert federation.shuffler.waiting() == 0
    assert len(federation.trained) == trained


@KINDS
def test_a_server_that_begins_another_run_finds_the_same_books(reports, tmp_path):
    """In Flower's own state of a client the rounds of one run are all that is there."""
    sent = []
    for _ in range(2):
        federation = Federation(reports, max_rounds=2, book=lambda context: tmp_path / str(context.node_id))
        federation.submit = lambda context, report, take=federation.submit: sent.append(report) or take(context, report)
        federation.run(3)
        assert len(federation.ledger.accountant) == 3
    assert len(sent) == 2 * CLIENTS


@KINDS
def test_weights_of_another_network_are_reported_by_nobody(reports):
    federation = Federation(reports)
    with pytest.raises(ValueError, match="the model has 3 weights, the format has dimension=8"):
        federation.strategy.start(grid=federation.grid, initial_arrays=ArrayRecord({"w": Array(np.zeros(3))}), num_rounds=1)
    federation.shuffler.open_round(1)
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(3))}), "config": ConfigRecord({"round": 1})})
    for broken in (content, RecordDict({"arrays": weights()}), RecordDict({"config": ConfigRecord({"round": 1})})):
        replies = federation.grid.send_and_receive(
            [Message(broken, message_type=MessageType.TRAIN, dst_node_id=node) for node in federation.grid.get_node_ids()]
        )
        assert all(len(reply.content) == 0 and not reply.has_error() for reply in replies)
    assert federation.shuffler.waiting() == 0


def test_a_client_whose_connection_breaks_answers_like_all_others():
    federation = Federation(GaussianReports(**GAUSSIAN))

    def submit(context, report):
        raise http.client.IncompleteRead(b"")

    federation.submit = submit
    federation.run(1)
    assert all(len(reply.content) == 0 and not reply.has_error() for reply in federation.replies)


def test_a_grid_with_fewer_clients_than_a_round_needs_is_refused():
    reports = GaussianReports(**{**GAUSSIAN, "num_users": CLIENTS + 1})
    with pytest.raises(ValueError, match="min_nodes=31 never are on a LocalGrid of 30"):
        Federation(reports).run(1)


def test_a_dropped_round_is_said_aloud(caplog):
    reports = GaussianReports(**{**GAUSSIAN, "num_users": CLIENTS + 1})
    federation = Federation(reports)
    federation.strategy.min_nodes = 1
    with caplog.at_level("WARNING", logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        federation.run(1)
    assert "round 1 was dropped, fewer than 31 clients reported: it is accounted" in caplog.text


@KINDS
def test_every_round_is_in_the_metrics_and_in_epsilon(reports):
    federation = Federation(reports, epsilon_every=2)
    result = federation.run(4)
    metrics = result.train_metrics_clientapp
    assert [metrics[number]["rounds"] for number in (1, 2, 3, 4)] == [1, 2, 3, 4]
    spent = opacus_shuffle.compute_epsilon(reports.mechanism, steps=4, delta=1e-5)
    assert spent <= metrics[4]["epsilon-certified"] <= spent * (1 + 1e-3)
    assert "epsilon-published" in metrics[4]
    assert "epsilon-certified" not in metrics[3]
    assert metrics[1]["reports"] == CLIENTS
    assert ("taking-part" in metrics[1]) == isinstance(reports, GaussianReports)


@pytest.mark.parametrize("selects", ["poisson", "fixed_size"])
def test_a_server_that_selects_is_a_simulation_as_its_report_says(selects):
    federation = Federation(GaussianReports(**GAUSSIAN, server_selects=selects))
    federation.run(3)
    assert len(federation.trained) == len(federation.replies)
    assert len(federation.replies) == 45 if selects == "fixed_size" else len(federation.replies) < 90
    report = federation.ledger.report()
    assert report.selected
    assert "the server drew who takes part" in str(report)
    assert "the server drew who takes part" in report.statement()


def test_when_the_target_is_reached_nobody_is_asked_any_more():
    reports = GaussianReports(**GAUSSIAN)
    price = opacus_shuffle.compute_epsilon(reports.mechanism, steps=3, delta=1e-5)
    federation = Federation(reports, target_epsilon=price)
    result = federation.run(6)
    assert len(federation.ledger.accountant) == 3
    assert len(federation.replies) == 3 * CLIENTS
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]


def test_a_killed_server_goes_on_with_its_weights_and_its_history(tmp_path):
    reports = GaussianReports(**GAUSSIAN)
    first = Federation(reports, path=tmp_path / "book")
    found = first.run(2)
    again = Federation(reports, path=tmp_path / "book")
    again.shuffler = again.ledger.shuffler = first.shuffler
    before = as_vector(found.arrays)
    again.strategy.moved = lambda weights, mean: weights  # so that what it starts from is seen
    result = again.run(1, start=100.0)
    assert torch.allclose(as_vector(result.arrays), before)
    assert len(again.ledger.accountant) == 3


def updates(reports, rounds: int, vectors: torch.Tensor) -> torch.Tensor:
    """The sum that each of so many rounds moves the weights by."""
    federation = Federation(
        reports,
        lambda client: vectors[client],
        max_rounds=rounds,
        learning_rate=float(reports.sample_rate * CLIENTS),
    )
    found: list[torch.Tensor] = []
    move = federation.strategy.moved

    def moved(weights: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        found.append(move(torch.zeros(D), mean))
        return weights

    federation.strategy.moved = moved
    federation.run(rounds)
    return torch.stack(found)


def central_updates(accountant: str, rounds: int, vectors: torch.Tensor, **options) -> torch.Tensor:
    """The sums of a run in one process, in which each vector is one record's gradient."""
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(D, 1, bias=False)
    model, optimizer, loader = opacus_shuffle.PrivacyEngine(accountant=accountant).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(vectors), batch_size=CLIENTS // 2),
        max_grad_norm=1.0,
        loss_reduction="sum",
        **options,
    )
    found = []
    while len(found) < rounds:
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            found.append(optimizer.params[0].grad.flatten().clone())
            optimizer.zero_grad()
    return torch.stack(found[:rounds])


@pytest.mark.parametrize("kind", ["gaussian", "sums"])
def test_a_federated_run_and_one_in_one_process_have_the_same_updates_and_epsilon(kind):
    """Two-sample Kolmogorov-Smirnov tests of 100 rounds, along three directions: each refuses by chance once in 10⁹."""
    rounds, generator = 100, torch.Generator().manual_seed(0)
    vectors = torch.randn(CLIENTS, D, generator=generator)
    vectors *= torch.rand(CLIENTS, 1, generator=generator) * 2 / vectors.norm(dim=1, keepdim=True)  # some longer than the norm
    vectors += 0.3
    if kind == "gaussian":
        reports = GaussianReports(**GAUSSIAN)
        options = {"accountant": "shuffled_checkin", "noise_multiplier": 1.0, "local_noise": True}
    else:
        reports = BitSums(**{**SUMS, "min_reports": CLIENTS})
        options = {"accountant": "shuffled_sums", "noise_multiplier": 2.0}
    ours = updates(reports, rounds, vectors).double()
    theirs = central_updates(rounds=rounds, vectors=vectors, **options).double()
    for direction in (torch.ones(D), torch.eye(D)[0], torch.randn(D, generator=generator)):
        one, two = (each @ direction.double() for each in (ours, theirs))
        assert stats.ks_2samp(one.numpy(), two.numpy()).pvalue > 1e-9
    engine = opacus_shuffle.PrivacyEngine(accountant=options.pop("accountant"))
    model = torch.nn.Linear(D, 1, bias=False)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(vectors), batch_size=CLIENTS // 2),
        max_grad_norm=1.0,
        **options,
    )
    planned = engine.accountant.planned
    assert planned.same_run_as(reports.mechanism) or kind == "sums"
    assert math.isclose(planned.noise_multiplier, reports.mechanism.noise_multiplier, rel_tol=0.05)


def test_vectors_come_back_as_the_arrays_they_were():
    arrays = weights(2.0)
    again = as_arrays(as_vector(arrays), arrays)
    assert list(again.keys()) == list(arrays.keys())
    for one, two in zip(again.to_numpy_ndarrays(), arrays.to_numpy_ndarrays(), strict=True):
        assert one.dtype == two.dtype
        assert np.array_equal(one, two)
    with pytest.raises(ValueError, match="another network"):
        as_arrays(torch.zeros(D + 1), arrays)
