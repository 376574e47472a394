"""Rounds between clients, shuffler and server: whole, mixed, accounted, whoever fails."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import tracemalloc

import pytest
import torch
from helpers.federation import CLIENTS, GAUSSIAN, SERVER, SUMS, all_report, ledger_of
from scipy import stats

import opacus_shuffle
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.federated import (
    BitSums,
    GaussianReports,
    RefusedReportError,
    Reporter,
    Shuffler,
)
from opacus_shuffle.federated.shuffler import UnknownRoundError
from opacus_shuffle.federated.shuffler_service import FarShuffler, ShufflerService, packed, unpacked


@pytest.fixture
def shuffler():
    """A shuffler of six clients, whose first round is open."""
    shuffler = Shuffler(GAUSSIAN)
    shuffler.open_round(1)
    return shuffler


def test_a_round_is_taken_from_its_beginning_to_its_end(shuffler):
    report = GAUSSIAN.encode(1, torch.zeros(3))
    with pytest.raises(RefusedReportError, match="the open one is None"):
        Shuffler(GAUSSIAN).submit("0", report)
    with pytest.raises(RefusedReportError, match="of round 2, the open one is 1"):
        shuffler.submit("0", GAUSSIAN.encode(2, torch.zeros(3)))
    all_report(shuffler, 1)
    with pytest.raises(RefusedReportError, match="has all of its 6 reports"):
        shuffler.submit("another", report)
    released = shuffler.close_round(1)
    assert released.num_reports == len(released.mixed) == 6
    assert shuffler.close_round(1) is released  # unchanged until it is forgotten
    shuffler.forget_round(1)
    with pytest.raises(UnknownRoundError, match="round 1 is not open"):
        shuffler.close_round(1)
    with pytest.raises(RefusedReportError, match="is not taken"):
        shuffler.submit("0", report)
    with pytest.raises(ValueError, match="none is taken twice"):
        shuffler.open_round(1)


def test_a_sender_has_one_report_and_may_repeat_it(shuffler):
    report = GAUSSIAN.encode(1, torch.zeros(3))
    shuffler.submit("0", report)
    shuffler.submit("0", report)
    with pytest.raises(RefusedReportError, match="from this sender already"):
        shuffler.submit("0", GAUSSIAN.encode(1, torch.zeros(3)))
    assert shuffler.waiting() == 1


@pytest.mark.parametrize(("reports", "fewest"), [(GAUSSIAN, 6), (SUMS, 10)])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_round_below_its_minimum_releases_nothing(reports, fewest, missing):
    shuffler = Shuffler(reports)
    shuffler.open_round(1)
    all_report(shuffler, 1, fewest - missing)
    released = shuffler.close_round(1)
    assert released.dropped == (missing > 0)
    assert released.num_reports == (0 if missing else fewest)
    assert bool(released.mixed) == (not missing)


def test_a_client_answers_a_round_once_and_no_more_rounds_than_it_agreed_to():
    reporter, sent = Reporter(GAUSSIAN, max_rounds=2), []
    reporter.answer(1, lambda: torch.ones(3), sent.append)
    for number in (0, 1):
        with pytest.raises(ValueError, match="was answered already"):
            reporter.answer(number, lambda: torch.ones(3), sent.append)
    reporter.answer(5, lambda: torch.ones(3), sent.append)
    with pytest.raises(ValueError, match="max_rounds=2"):
        reporter.answer(6, lambda: torch.ones(3), sent.append)
    assert [GAUSSIAN.open(each).round for each in sent] == [1, 5]


COIN = GaussianReports(
    dimension=3, max_norm=1.0, noise_multiplier=1.0, num_users=20, sample_rate=0.3
)


@pytest.mark.parametrize("reports", [COIN, SUMS], ids=["gaussian", "sums"])
@pytest.mark.parametrize("always_train", [True, False])
def test_every_client_reports_and_its_coin_says_whether_its_vector_is_in_it(reports, always_train):
    """400 coins of rate 0.3: refused by chance once in 10⁹."""
    trained, sent, held = [], [], []
    reporter = Reporter(reports, max_rounds=400)
    for number in range(400):
        reporter.answer(
            number,
            lambda: trained.append(1) or torch.ones(3),
            sent.append,
            always_train=always_train,
        )
    coins = stats.binom(400, 0.3)
    few, many = coins.ppf(5e-10), coins.isf(5e-10)
    assert len(sent) == 400
    assert len({len(each) for each in sent}) == 1
    assert len(trained) == 400 if always_train else few <= len(trained) <= many
    if reports is COIN:
        for each in sent:
            reports.keep(held, reports.open(each).numbers)
        taking_part = len(reports.mix(held, SecretGenerator()))
        assert few <= taking_part <= many
        assert always_train or taking_part == len(trained)


def test_a_round_in_which_no_coin_says_yes_is_released_and_not_dropped():
    shuffler = Shuffler(COIN)
    shuffler.open_round(1)
    for sender in range(20):
        shuffler.submit(str(sender), COIN.encode(1, None))
    released = shuffler.close_round(1)
    assert (released.num_reports, released.mixed, released.dropped) == (20, (), False)
    assert unpacked(1, packed(released)) == released
    assert not ledger_of(COIN).estimate(released).any()


@pytest.mark.parametrize("kind", [GaussianReports, BitSums])
def test_the_shuffler_does_the_same_for_a_report_whatever_its_coin_says(kind):
    """The same lines, the same calls into C, and memory kept: who watches how long it takes learns no coin."""
    sizes = {
        "dimension": 500,
        "max_norm": 1.0,
        "noise_multiplier": 1.0,
        "num_users": 8,
        "sample_rate": 0.5,
    }
    reports = kind(**sizes, **({"delta": 1e-6} if kind is BitSums else {}))
    found = []

    def take(shuffler: Shuffler, number: int, sent: list[bytes]) -> None:
        shuffler.open_round(number)
        for sender, report in enumerate(sent):
            shuffler.submit(str(sender), report)

    for vector in (None, torch.ones(500)):
        shuffler, work = Shuffler(reports), []
        rounds = [[reports.encode(number, vector) for _ in range(8)] for number in (1, 2, 3)]
        take(shuffler, 1, rounds[0])  # what is made once is there now

        def note(frame, event, arg, work=work):
            if frame.f_globals.get("__name__", "").startswith(
                "opacus_shuffle."
            ):  # and not the collector of rubbish, which comes when it likes
                work.append(
                    (event, frame.f_code.co_name, frame.f_lineno, getattr(arg, "__name__", ""))
                )
            return note

        sys.setprofile(note), sys.settrace(note)
        try:
            take(shuffler, 2, rounds[1])
        finally:
            sys.settrace(None), sys.setprofile(None)
        shuffler.open_round(3)
        tracemalloc.start()
        take(shuffler, 3, rounds[2])
        found.append((work, tracemalloc.get_traced_memory()[0]))
        tracemalloc.stop()
    (absent, memory), (there, more_memory) = found
    assert absent == there
    assert len(absent) > 100
    assert abs(more_memory - memory) < reports.bytes_per_report  # not one report more is held


@pytest.mark.parametrize("reports", [GAUSSIAN, SUMS])
def test_the_ledger_spends_what_the_library_says_of_so_many_rounds(reports):
    ledger = ledger_of(reports)
    for _ in range(3):
        ledger.run(lambda number: all_report(ledger.shuffler, number), lambda total: total)
    spent = opacus_shuffle.privacy_bound(reports.mechanism, steps=3, delta=1e-5)
    assert ledger.epsilon() == spent
    assert ledger.report().best.epsilon == spent.epsilon
    assert ledger.report().simulated  # this process has the shuffler in it
    ledger.shuffler = FarShuffler("https://shuffler.example", SERVER)
    assert not ledger.report().simulated
    assert ledger.result.shape == (3,)


def test_a_dropped_round_is_accounted_and_gives_no_estimate():
    ledger, seen = ledger_of(GAUSSIAN), []
    assert ledger.run(lambda number: all_report(ledger.shuffler, number, 2), seen.append).dropped
    assert seen == [None]
    assert len(ledger.accountant) == 1


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt])
def test_a_round_whose_accounting_fails_is_not_released_and_may_be_closed_again(
    error, shuffler, monkeypatch, tmp_path
):
    ledger = ledger_of(GAUSSIAN, shuffler, path=tmp_path / "book")
    all_report(shuffler, 1)

    def fail(*_):
        raise error("no accounting today")

    monkeypatch.setattr(type(ledger.accountant), "record", fail)
    with pytest.raises(error, match="no accounting"):
        ledger.close()
    monkeypatch.undo()
    assert (ledger.round, ledger.begun, len(ledger.accountant)) == (0, False, 0)
    assert shuffler.waiting() == 6  # nothing was handed over
    assert not (tmp_path / "book").exists()
    assert ledger.close().num_reports == 6
    assert (ledger.round, ledger.begun, len(ledger.accountant)) == (1, True, 1)


def test_no_round_begins_that_the_target_does_not_pay_for():
    price = opacus_shuffle.compute_epsilon(GAUSSIAN.mechanism, steps=2, delta=1e-5)
    ledger = ledger_of(GAUSSIAN, target_epsilon=price)
    for _ in range(2):
        ledger.run(lambda number: all_report(ledger.shuffler, number), lambda total: None)
    assert not ledger.affords_another()
    with pytest.raises(ValueError, match="would exceed target_epsilon"):
        ledger.open()
    assert ledger.epsilon().epsilon <= price


class Killing(Shuffler):
    """A shuffler whose clients report as soon as a round is open, and which kills the server's process at one instant."""

    def __init__(self, instant: str):
        super().__init__(GAUSSIAN)
        self.instant, self.armed, self.released = instant, queue.Queue(), {}
        self.clients = [Reporter(GAUSSIAN, max_rounds=3) for _ in range(6)]

    def strike(self, instant: str, number: int) -> None:
        if (instant, number) == (self.instant, 2):
            os.kill(self.armed.get(), signal.SIGKILL)

    def open_round(self, number, fingerprint=None):
        super().open_round(number, fingerprint)
        for name, client in enumerate(self.clients):
            if client.book.last < number:
                client.answer(
                    number,
                    lambda: torch.ones(3),
                    lambda report, name=name: self.submit(str(name), report),
                )
        self.strike("open", number)

    def close_round(self, number):
        self.strike("before the release", number)
        released = super().close_round(number)
        assert self.released.setdefault(number, released) == released  # never two sums of one round
        self.strike("after the release", number)
        return released

    def forget_round(self, number):
        super().forget_round(number)
        self.strike("forgotten", number)


def serve_three_rounds(url: str, path: str, instant: str) -> None:
    ledger = ledger_of(GAUSSIAN, FarShuffler(url, SERVER), path=path)

    def update(total: torch.Tensor | None) -> dict:
        if (instant, ledger.round) == ("updating", 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"weights": total}

    while ledger.round < 3 or ledger.begun:
        ledger.run(lambda number: None, update)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts the server by fork")
@pytest.mark.parametrize(
    "instant", ["open", "before the release", "after the release", "updating", "forgotten"]
)
def test_a_server_process_that_is_killed_comes_back_to_the_same_history(instant, tmp_path):
    shuffler = Killing(instant)
    context, path = multiprocessing.get_context("fork"), str(tmp_path / "book")
    with ShufflerService(shuffler, clients=CLIENTS[:6], server=SERVER) as service:
        service.start()
        for _ in range(2):
            server = context.Process(
                target=serve_three_rounds, args=(service.url, path, shuffler.instant)
            )
            server.start()
            shuffler.armed.put(server.pid)
            server.join()
            if server.exitcode == 0:
                break
            assert server.exitcode == -signal.SIGKILL
            ledger = ledger_of(GAUSSIAN, shuffler, path=path)
            assert len(ledger.accountant) >= len(
                shuffler.released
            )  # what was released is accounted
            shuffler.instant = "never again"
        else:
            raise AssertionError("the second server ended, too")
        service.shutdown()
    assert shuffler.instant == "never again"
    ledger = ledger_of(GAUSSIAN, shuffler, path=path)
    assert (ledger.round, len(ledger.accountant), sorted(shuffler.released)) == (3, 3, [1, 2, 3])
    assert all(client.book.rounds == 3 for client in shuffler.clients)
    last = GAUSSIAN.estimate(shuffler.released[3].mixed, 6)
    assert torch.equal(ledger.result["weights"], last)


def test_a_shuffler_that_was_started_anew_loses_a_round_that_stays_accounted(shuffler, tmp_path):
    ledger = ledger_of(GAUSSIAN, shuffler, path=tmp_path / "book")
    all_report(shuffler, ledger.open())
    ledger.shuffler = Shuffler(GAUSSIAN)
    assert ledger.close().dropped
    ledger.finish()
    assert len(ledger_of(GAUSSIAN, path=tmp_path / "book").accountant) == 1
