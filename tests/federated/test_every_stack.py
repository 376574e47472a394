"""Every format of reports through every way from clients to the server: mixed, right, accounted."""

import concurrent.futures
import contextlib
import functools

import numpy as np
import pytest
import torch
from helpers.federation import CLIENTS, SERVER, SUMS, ledger_of

import opacus_shuffle
from opacus_shuffle.federated import (
    GaussianReports,
    Ledger,
    RemoteShuffler,
    Reporter,
    SecretReports,
    ShuffledSumReports,
    Shuffler,
    ShufflerService,
)
from opacus_shuffle.federated.shuffler import UnknownRoundError

SIZES = {"dimension": 3, "max_norm": 1.0, "num_users": 20, "sample_rate": 0.3}
FORMATS = {
    "sums": ShuffledSumReports(**SIZES, noise_multiplier=2.0, delta=1e-6),
    "gaussian": GaussianReports(**SIZES, noise_multiplier=1.0),
    **{
        f"secret, {report}": SecretReports(**SIZES, noise_multiplier=1.0, report=report)
        for report in ("linear", "gaussian", "step")
    },
}
LEAD = "the-secret-of-the-lead"


@contextlib.contextmanager
def near(reports, folder):
    """A shuffler in this process: how client k submits, and what the server asks."""
    shuffler = Shuffler(reports)
    yield (lambda client, report: shuffler.submit(str(client), report)), shuffler


@contextlib.contextmanager
def in_shards(reports, folder):
    shards = [Shuffler(reports, is_shard=True) for _ in range(2)]
    all_three = [Shuffler(reports, shards=shards), *shards]
    yield (lambda client, report: all_three[client % 3].submit(str(client), report)), all_three[0]
    for shard in shards:
        with pytest.raises(UnknownRoundError):  # shards forget as well
            shard.close_round(2)


HALVES = (CLIENTS[:10], CLIENTS[10:])


def far(shard: str, lead: str):
    """How half of the clients submit to a shard and the others to its lead, and the server's view.

    A shard forwards its reports to its lead, never to the server.
    """
    with pytest.raises(ValueError, match="403"):
        RemoteShuffler(shard, SERVER).close_round(1)
    asked = zip((shard, lead), HALVES, strict=True)
    clients = [RemoteShuffler(url, secret) for url, secrets in asked for secret in secrets]
    return (lambda client, report: clients[client].submit(report)), RemoteShuffler(lead, SERVER)


@contextlib.contextmanager
def over_http(reports, folder):
    shuffler = Shuffler(reports, is_shard=True)
    with ShufflerService(shuffler, clients=HALVES[0], server=LEAD).start() as shard:
        shuffler = Shuffler(reports, shards=[RemoteShuffler(shard.url, LEAD)])
        with ShufflerService(shuffler, clients=HALVES[1], server=SERVER).start() as lead:
            yield far(shard.url, lead.url)


def by_hand(ledger: Ledger, submit) -> None:
    """Rounds of clients that report at one time."""
    clients = [Reporter(ledger.format, max_rounds=2) for _ in CLIENTS]
    weights = torch.zeros(3, dtype=torch.float64)

    def ask_everyone(number: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(clients)) as threads:
            for client, reporter in enumerate(clients):
                threads.submit(
                    reporter.answer,
                    number,
                    lambda: torch.ones(3),
                    functools.partial(submit, client),
                )

    for _ in range(2):
        ledger.run(ask_everyone, lambda total: {"weights": weights.add_(total)})


def on_flower(ledger: Ledger, submit) -> None:
    flwr = pytest.importorskip("flwr.app", reason="needs the extra federated")
    from flwr.clientapp import ClientApp
    from local_grid import LocalGrid

    from opacus_shuffle.federated.flower import ReportMod, ShuffledStrategy

    def take(context, report: bytes) -> None:
        submit(context.node_config["partition-id"], report)

    app = ClientApp(mods=[ReportMod(ledger.format, take, max_rounds=2, book=None)])

    @app.train()
    def _(message, context):
        (weights,) = message.content["arrays"].to_numpy_ndarrays()
        trained = flwr.RecordDict({"arrays": flwr.ArrayRecord([weights + 1.0])})
        return flwr.Message(trained, reply_to=message)

    strategy = ShuffledStrategy(ledger, learning_rate=0.3 * 20)  # the sum, not the mean
    strategy.start(LocalGrid(app, 20), flwr.ArrayRecord([np.zeros(3)]), num_rounds=2)


@pytest.mark.parametrize(
    ("reports", "where", "how"),
    [
        pytest.param(
            *(FORMATS[name], where, how),
            id=f"{name}, {where.__name__}, {how.__name__}",
            marks=() if name == "sums" or (where, how) == (near, by_hand) else pytest.mark.zoo,
        )
        for name in FORMATS
        for where in (near, in_shards, over_http)
        for how in (by_hand, on_flower)
    ],
)
def test_every_format_comes_out_of_every_stack_mixed_right_and_accounted(
    reports, where, how, tmp_path
):
    """What is released is the clients' reports without their order, or the sum of their counts."""
    sent, released = [], []
    with where(reports, tmp_path) as (submit, shuffler):
        close = shuffler.close_round
        # It hands over the same again, to a server that was killed.
        shuffler.close_round = lambda number: released.append(close(number)) or close(number)
        ledger = ledger_of(reports, shuffler, path=tmp_path / "book")
        how(ledger, lambda client, report: sent.append(report) or submit(client, report))
        for number in (1, 2):
            with pytest.raises(UnknownRoundError):  # it is forgotten
                close(number)
    assert [(each.round, each.num_reports) for each in released] == [(1, 20), (2, 20)]
    weights, opened = np.zeros(3), [reports.open(report) for report in sent]
    for each in released:
        numbers = [content for number, content in opened if number == each.round]
        if reports.kind == SUMS.kind:
            counts = sum(np.frombuffer(each, reports.count_type).astype(int) for each in numbers)
            assert each.mixed == counts.astype("<i8").tobytes()
        else:
            # A Gaussian report of zeros is one of a client that does not take part.
            own = sorted(content for content in numbers if any(content))
            assert own == sorted(each.mixed[at : at + 12] for at in range(0, len(each.mixed), 12))
        weights += reports.estimate(each.mixed, 20).numpy()
    np.testing.assert_allclose(ledger.result["weights"], weights, rtol=1e-12, atol=1e-12)
    spent = opacus_shuffle.compute_epsilon(reports.mechanism, steps=2, delta=1e-5)
    again = ledger_of(reports, path=tmp_path / "book")
    assert ledger.epsilon().epsilon == again.epsilon().epsilon == spent
    report = ledger.report()
    assert (report.best.epsilon, report.simulated) == (spent, isinstance(shuffler, Shuffler))
    assert report.sent.bytes_per_user == 2 * reports.bytes_per_report
