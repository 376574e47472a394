"""Shufflers that share the clients of a round release what one shuffler of all would."""

import threading

import numpy as np
import pytest
import torch
from helpers.federation import CLIENTS, GAUSSIAN, SECRET, SERVER, SUMS, all_report, ledger_of

from opacus_shuffle.federated import RemoteShuffler, Shuffler, ShufflerService
from opacus_shuffle.federated.shuffler import ReleasedRound


def split(reports, shards: int) -> tuple[Shuffler, list[Shuffler]]:
    """A shuffler with shards; each client of number k reports to shard k modulo their number."""
    others = [Shuffler(reports, is_shard=True) for _ in range(shards)]
    return Shuffler(reports, shards=others), others


def sent_to(shufflers: list[Shuffler], number: int) -> list[bytes]:
    """Has every client report to its own shuffler; returns the reports."""
    format = shufflers[0].format
    sent = [format.encode(number, torch.ones(3)) for _ in range(format.num_users)]
    for client, report in enumerate(sent):
        shufflers[client % len(shufflers)].submit(str(client), report)
    return sent


def test_reports_of_all_shards_leave_in_an_order_of_their_own():
    joined = []
    for _ in range(12):  # the first of twenty is one of three in one of 6.7 rounds: 1e-10 in all
        lead, shards = split(SECRET, 3)
        lead.open_round(1)
        sent_to(shards, 1)
        partial = [
            np.frombuffer(shard.close_round(1).mixed, "<f4")[:3].tolist() for shard in shards
        ]
        first = np.frombuffer(lead.close_round(1).mixed, "<f4")[:3].tolist()
        joined.append(first in partial)
    assert not all(joined)


def test_few_reports_leave_no_shuffler_for_the_server():
    lead, shards = split(SUMS, 4)
    ledger = ledger_of(SUMS, lead)

    def nine_report(number: int) -> None:
        for client, shard in enumerate((*shards, *shards, shards[0])):
            shard.submit(str(client), SUMS.encode(number, None))

    released = ledger.run(nine_report, lambda total: total)
    assert (released.num_reports, released.mixed, len(ledger.accountant)) == (0, b"", 1)


def test_a_shard_that_was_started_anew_is_missing_and_a_round_of_too_many_reports_is_dropped(
    caplog,
):
    lead, shards = split(SUMS, 2)
    lead.open_round(1)
    sent_to(shards, 1)
    lead.shards[1] = Shuffler(SUMS, is_shard=True)
    assert lead.close_round(1).num_reports == SUMS.num_users // 2
    lead, shards = split(SUMS, 2)
    ledger = ledger_of(SUMS, lead)

    def everyone_reports_to_both(number: int) -> None:
        for shard in shards:
            all_report(shard, number)

    assert ledger.run(everyone_reports_to_both, lambda total: total) == (1, 0, b"")
    assert (len(ledger.accountant), ledger.result, ledger.begun) == (1, None, False)
    assert '"reports": 40, "num_users": 20' in caplog.text


@pytest.mark.parametrize("reports", [SUMS, GAUSSIAN, SECRET], ids=lambda reports: reports.kind)
def test_what_no_shard_has_mixed_is_refused_and_nothing_is_counted_twice(reports, monkeypatch):
    lead, shards = split(reports, 2)
    lead.open_round(1)
    sent_to(shards, 1)
    half, sound = reports.num_users // 2, shards[1].close_round(1)
    for num_reports, mixed in (
        (half, sound.mixed[:8]),
        (half, sound.mixed + bytes(4)),
        (half, b"\xff" * len(sound.mixed)),
        (-1, sound.mixed),
        (2**32, b""),
    ):
        lie = ReleasedRound(1, num_reports, mixed)
        with monkeypatch.context() as patched:
            patched.setattr(shards[1], "close_round", lambda _, lie=lie: lie)
            with pytest.raises(ValueError, match="report"):
                lead.close_round(1)
    released = lead.close_round(1)
    apart = [reports.estimate(shard.close_round(1).mixed, half) for shard in shards]
    assert torch.allclose(reports.estimate(released.mixed, 2 * half), sum(apart))


def test_while_a_shard_is_waited_for_others_are_heard_and_no_client_piles_up_reports():
    shard = Shuffler(SUMS, is_shard=True)
    asked, answering = threading.Event(), threading.Event()
    shard.open_round = lambda *_: asked.set() or answering.wait(60)
    with ShufflerService(
        Shuffler(SUMS, shards=[shard]), clients=CLIENTS, server=SERVER
    ).start() as service:
        server = threading.Thread(
            target=RemoteShuffler(service.url, SERVER).open_round, args=(1, SUMS.fingerprint)
        )
        server.start()
        asked.wait(60)
        restless = RemoteShuffler(service.url, CLIENTS[0], timeout=0.5, attempts=1)
        for _ in range(2):  # the service keeps what it was sent, until the shard has answered
            with pytest.raises(ConnectionError, match="timed out"):
                restless.submit(SUMS.encode(1, None))
        with pytest.raises(ValueError, match="429"):
            restless.submit(SUMS.encode(1, None))
        answering.set()
        server.join()
        RemoteShuffler(service.url, CLIENTS[1]).submit(SUMS.encode(1, None))
