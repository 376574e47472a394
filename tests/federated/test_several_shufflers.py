"""Shufflers that share the clients of a round release what one shuffler of all would."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from helpers.federation import CLIENTS, GAUSSIAN, SECRET, SERVER, SUMS, all_report, ledger_of

from opacus_shuffle.federated import FarShuffler, Shuffler, ShufflerService
from opacus_shuffle.federated.shuffler import Released


def split(reports, parts: int) -> tuple[Shuffler, list[Shuffler]]:
    """A shuffler with parts; each client of number k reports to part k modulo their number."""
    others = [Shuffler(reports, is_part=True) for _ in range(parts)]
    return Shuffler(reports, parts=others), others


def sent_to(shufflers: list[Shuffler], number: int) -> list[bytes]:
    """Has every client report to its own shuffler; returns the reports."""
    format = shufflers[0].format
    sent = [format.encode(number, torch.ones(3)) for _ in range(format.num_users)]
    for client, report in enumerate(sent):
        shufflers[client % len(shufflers)].submit(str(client), report)
    return sent


def test_reports_of_all_parts_leave_in_an_order_of_their_own():
    joined = []
    for _ in range(12):  # the first of twenty is one of three in one of 6.7 rounds: 1e-10 in all
        lead, parts = split(SECRET, 3)
        lead.open_round(1)
        sent_to(parts, 1)
        partial = [np.frombuffer(part.close_round(1).mixed, "<f4")[:3].tolist() for part in parts]
        first = np.frombuffer(lead.close_round(1).mixed, "<f4")[:3].tolist()
        joined.append(first in partial)
    assert not all(joined)


def test_few_reports_leave_no_shuffler_for_the_server():
    lead, parts = split(SUMS, 4)
    ledger = ledger_of(SUMS, lead)

    def nine_report(number: int) -> None:
        for client, part in enumerate((*parts, *parts, parts[0])):
            part.submit(str(client), SUMS.encode(number, None))

    released = ledger.run(nine_report, lambda total: total)
    assert (released.num_reports, released.mixed, len(ledger.accountant)) == (0, b"", 1)


def test_a_part_that_was_started_anew_is_missing_and_a_round_of_too_many_reports_is_dropped(caplog):
    lead, parts = split(SUMS, 2)
    lead.open_round(1)
    sent_to(parts, 1)
    lead.parts[1] = Shuffler(SUMS, is_part=True)
    assert lead.close_round(1).num_reports == SUMS.num_users // 2
    lead, parts = split(SUMS, 2)
    ledger = ledger_of(SUMS, lead)

    def everyone_reports_to_both(number: int) -> None:
        for part in parts:
            all_report(part, number)

    assert ledger.run(everyone_reports_to_both, lambda total: total) == (1, 0, b"")
    assert (len(ledger.accountant), ledger.result, ledger.begun) == (1, None, False)
    assert '"reports": 40, "num_users": 20' in caplog.text


@pytest.mark.parametrize("reports", [SUMS, GAUSSIAN, SECRET], ids=lambda reports: reports.kind)
def test_what_no_part_has_mixed_is_refused_and_nothing_is_counted_twice(reports, monkeypatch):
    lead, parts = split(reports, 2)
    lead.open_round(1)
    sent_to(parts, 1)
    half, sound = reports.num_users // 2, parts[1].close_round(1)
    for num_reports, mixed in (
        (half, sound.mixed[:8]),
        (half, sound.mixed + bytes(4)),
        (half, b"\xff" * len(sound.mixed)),
        (-1, sound.mixed),
        (2**32, b""),
    ):
        lie = Released(1, num_reports, mixed)
        with monkeypatch.context() as patched:
            patched.setattr(parts[1], "close_round", lambda _, lie=lie: lie)
            with pytest.raises(ValueError, match="report"):
                lead.close_round(1)
    released = lead.close_round(1)
    apart = [reports.estimate(part.close_round(1).mixed, half) for part in parts]
    assert torch.allclose(reports.estimate(released.mixed, 2 * half), sum(apart))


def test_a_ledger_goes_on_with_nothing_that_a_part_has_released_by_itself():
    ledger = ledger_of(SUMS, Shuffler(SUMS, is_part=True))
    with pytest.raises(ValueError, match=r"handed over with 9 reports, and min_reports=10"):
        ledger.run(lambda number: all_report(ledger.shuffler, number, 9), lambda total: total)
    assert len(ledger.accountant) == 1


class SlowPart(Shuffler):
    """A part that answers when it is let."""

    def __init__(self, *of_all, **options):
        super().__init__(*of_all, **options)
        self.asked, self.let = threading.Event(), threading.Event()

    def open_round(self, *asked):
        self.asked.set()
        self.let.wait(60)
        super().open_round(*asked)


def test_while_a_part_is_waited_for_others_are_heard_and_no_client_piles_up_reports():
    part = SlowPart(SUMS, is_part=True)
    with ShufflerService(
        Shuffler(SUMS, parts=[part]), clients=CLIENTS, server=SERVER
    ).start() as service:
        server = threading.Thread(
            target=FarShuffler(service.url, SERVER).open_round, args=(1, SUMS.fingerprint)
        )
        server.start()
        part.asked.wait(60)
        restless = FarShuffler(service.url, CLIENTS[0], timeout=0.5, attempts=1)
        for _ in range(2):  # the service keeps what it was sent, until the part has answered
            with pytest.raises(ConnectionError, match="timed out"):
                restless.submit(SUMS.encode(1, None))
        with pytest.raises(ValueError, match="429"):
            restless.submit(SUMS.encode(1, None))
        part.let.set()
        server.join()
        FarShuffler(service.url, CLIENTS[1]).submit(SUMS.encode(1, None))


def test_one_shuffler_is_no_two_parts():
    for part in (Shuffler(SUMS, is_part=True), FarShuffler("http://localhost:9", SERVER)):
        with pytest.raises(ValueError, match="each once"):
            Shuffler(SUMS, parts=[part, part])
