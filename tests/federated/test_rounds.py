"""Rounds between clients, shuffler and server: whole, mixed, accounted, whoever fails or tries."""

import concurrent.futures
import contextlib
import functools
import math
import os
import stat
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.federation import GAUSSIAN, SECRET, SERVER, SUMS, all_report, ledger_of, run_once
from scipy import stats

import opacus_shuffle
from opacus_shuffle.federated import (
    FileBook,
    GaussianReports,
    RefusedReportError,
    RemoteShuffler,
    Reporter,
    SecretReports,
    ShuffledSumReports,
    Shuffler,
)
from opacus_shuffle.federated.reporter import ClientBook
from opacus_shuffle.federated.shuffler import ReleasedRound

if os.name != "nt":
    import fcntl

FORMATS = pytest.mark.parametrize(
    "reports", [GAUSSIAN, SUMS, SECRET], ids=["gaussian", "sums", "secret"]
)
COIN = GaussianReports(
    dimension=3, max_norm=1.0, noise_multiplier=1.0, num_users=20, sample_rate=0.3
)
ONCE = ShuffledSumReports(
    dimension=3,
    max_norm=1.0,
    noise_multiplier=2.0,
    num_users=20,
    sample_rate=0.25,
    sampling="random_allocation",
    delta=1e-6,
    rounds=8,
)
BARE = SecretReports(  # of so little noise that a test sees the coins
    dimension=3,
    max_norm=1.0,
    noise_multiplier=0.02,
    num_users=20,
    sample_rate=0.3,
    report="gaussian",
)


@pytest.fixture
def shuffler():
    """A shuffler of six clients, whose first round is open."""
    shuffler = Shuffler(GAUSSIAN)
    shuffler.open_round(1)
    return shuffler


# The shuffler


REPORT, SECOND, LATER = (GAUSSIAN.encode(number, torch.zeros(3)) for number in (1, 1, 2))
LIFE = [
    (lambda shuffler: shuffler.submit("0", REPORT), "the open round is None", 0),
    (lambda shuffler: shuffler.open_round(1), None, 0),
    (lambda shuffler: shuffler.submit("0", LATER), "for round 2, but the open round is 1", 0),
    (lambda shuffler: shuffler.submit("0", REPORT), None, 1),
    (lambda shuffler: shuffler.submit("0", REPORT), None, 1),
    (lambda shuffler: shuffler.submit("0", SECOND), "this sender already sent", 1),
    (lambda shuffler: shuffler.submit(torch.tensor(7), SECOND), "sender must be a str", 1),
    (lambda shuffler: shuffler.submit(math.nan, SECOND), "sender must be a str", 1),
    (lambda shuffler: shuffler.open_round(1), None, 1),  # by a server that was killed
    (lambda shuffler: all_report(shuffler, 1, 5, start=1), None, 6),
    (lambda shuffler: shuffler.submit("another", SECOND), "already has all 6 reports", 6),
    (lambda shuffler: shuffler.close_round(2), "round 2 is not open", 6),
    (lambda shuffler: shuffler.close_round(1), None, 0),
    (lambda shuffler: shuffler.close_round(1), None, 0),  # the same again, until it is forgotten
    (lambda shuffler: shuffler.forget_round(1), None, 0),
    (lambda shuffler: shuffler.close_round(1), "round 1 is not open", 0),
    (lambda shuffler: shuffler.submit("0", REPORT), "the open round is None", 0),
    (lambda shuffler: shuffler.open_round(1), "each round is opened once", 0),
    (lambda shuffler: shuffler.open_round(3), None, 0),
    (lambda shuffler: shuffler.open_round(2), "each round is opened once", 0),
]


def test_a_round_has_one_report_of_each_sender_from_its_beginning_to_its_end():
    shuffler = Shuffler(GAUSSIAN)
    for act, said, waiting in LIFE:
        with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
            act(shuffler)
        assert shuffler.waiting() == waiting


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


# A client


@FORMATS
def test_all_randomness_is_the_operating_system_s(reports, monkeypatch):
    """With the same system's bytes everything is the same, whatever PyTorch's generator is at."""
    runs = []
    for _ in range(2):
        system = np.random.default_rng(8)
        monkeypatch.setattr(os, "urandom", lambda count, system=system: system.bytes(count))
        shuffler, sent = Shuffler(reports), []
        shuffler.open_round(1)
        for sender in range(reports.num_users):
            Reporter(reports, max_rounds=1).answer(1, lambda: torch.ones(3), sent.append)
            shuffler.submit(str(sender), sent[-1])
        runs.append((sent, shuffler.close_round(1)))
        torch.rand(5)
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) > 1


@pytest.mark.parametrize(
    "reports",
    [COIN, pytest.param(SUMS, marks=pytest.mark.zoo), BARE],
    ids=["gaussian", "sums", "secret"],
)
@pytest.mark.parametrize("always_train", [True, False])
def test_every_client_reports_and_its_coin_says_whether_its_vector_is_in_it(reports, always_train):
    """400 coins of rate 0.3: refused by chance once in 10⁹."""
    trained, sent = [], []
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
    assert len({len(report) for report in sent}) == 1
    # The same work whatever the coin says, or work for a coin's yes alone.
    assert len(trained) == 400 if always_train else few <= len(trained) <= many
    if reports is not SUMS:
        numbers = [np.frombuffer(reports.open(report)[1], "<f4") for report in sent]
        noise_alone = 0.0 if reports is COIN else 0.3  # of 15 deviations there is none
        taking_part = sum(np.abs(report).max() > noise_alone for report in numbers)
        assert few <= taking_part <= many
        assert always_train or taking_part == len(trained)


@pytest.mark.parametrize("kept", ["in memory", "in a file"])
def test_a_client_answers_a_round_once_and_no_more_rounds_than_it_agreed_to(kept, tmp_path):
    """In a file the rounds of earlier processes count, too."""
    sent, memory = [], ClientBook()
    for number, said in ((1, None), (0, "answered"), (1, "answered"), (5, None), (6, "=2 rounds")):
        book = memory if kept == "in memory" else FileBook(tmp_path / "book")
        with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
            Reporter(GAUSSIAN, max_rounds=2, book=book).answer(
                number, lambda: torch.ones(3), sent.append
            )
    assert [GAUSSIAN.open(report)[0] for report in sent] == [1, 5]


def test_a_book_for_all_of_a_person_s_runs_is_good_for_so_many_rounds_of_all_together(tmp_path):
    """No run can have a round again, be it after another run; and each has its own max_rounds."""
    asked = [
        *((GAUSSIAN, 1, None), (GAUSSIAN, 4, None), (GAUSSIAN, 5, "all max_rounds=2")),
        *((COIN, 1, None), (COIN, 1, "already answered"), (GAUSSIAN, 4, "all max_rounds|answered")),
        *((BARE, 7, None), (BARE, 8, "limited to most_rounds=4 rounds of all runs, and has 4")),
        *((COIN, 2, "most_rounds=4"), (SUMS, 1, "most_rounds=4")),
    ]
    sent = []
    for reports, number, said in asked:
        book = FileBook(tmp_path / "book", most_rounds=4)
        with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
            Reporter(reports, max_rounds=2, book=book).answer(
                number, lambda: torch.ones(3), sent.append
            )
    assert len(sent) == 4
    with pytest.raises(ValueError, match="of other settings"):  # nor does it forget the others
        Reporter(SUMS, max_rounds=2, book=FileBook(tmp_path / "book")).answer(9, list, sent.append)


def test_processes_of_a_client_that_answer_at_one_time_answer_a_round_once(tmp_path):
    """A lock is of a file that is open, so that threads stand for processes here."""
    start, answered = threading.Barrier(4), []

    def answer(book: FileBook) -> None:
        start.wait()
        for number in range(30):
            with contextlib.suppress(ValueError):
                book.note(number, max_rounds=1000, fingerprint=GAUSSIAN.fingerprint)
                answered.append(number)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(answer, [FileBook(tmp_path / "book") for _ in range(4)]))
    assert sorted(answered) == sorted(set(answered))
    assert 29 in answered


def test_a_book_is_one_file_by_all_its_names_and_stays_where_it_is(tmp_path, monkeypatch):
    """So its lock is one, too. Frameworks that give each run a folder move the process there."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    book, ledger = FileBook("book"), ledger_of(GAUSSIAN, path="ledger")
    assert FileBook("link/book").path == FileBook(tmp_path / "elsewhere/../book").path == book.path
    book.note(1, max_rounds=5, fingerprint=GAUSSIAN.fingerprint)
    run_once(ledger)
    monkeypatch.chdir("elsewhere")
    with pytest.raises(ValueError, match="already answered"):
        book.note(1, max_rounds=5, fingerprint=GAUSSIAN.fingerprint)
    run_once(ledger)
    assert ledger_of(GAUSSIAN, path=tmp_path / "ledger").round == 2


@pytest.mark.skipif(os.name == "nt", reason="permissions, links and locks of POSIX")
@pytest.mark.parametrize(
    "write",
    [
        lambda path: FileBook(path).note(1, max_rounds=5, fingerprint=GAUSSIAN.fingerprint),
        lambda path: ledger_of(GAUSSIAN, path=path).begin(),
    ],
)
def test_a_book_is_its_owner_s_alone_and_locked_while_it_is_written(write, tmp_path, monkeypatch):
    """Links in its folder cannot make the book overwrite another file."""
    book, lock, victim = (tmp_path / name for name in ("book", "book.lock", "victim"))
    victim.write_text("precious")
    for link, said in ((book, "no symbolic link"), (lock, "symbolic links")):
        link.symlink_to(victim)
        with pytest.raises((ValueError, OSError), match=said):
            write(book)
        link.unlink()
    assert [victim.read_text(), book.exists()] == ["precious", False]
    lock.touch()
    looks = []

    def look(_) -> None:
        with open(lock) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        looks.append(book)

    monkeypatch.setattr(os, "fsync", look)
    write(book)
    monkeypatch.undo()
    assert looks
    write(tmp_path / "new")
    for name in ("book", "new", "new.lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def takes_part(book: ClientBook, number: int) -> bool | None:
    return book.note(number, max_rounds=12, fingerprint=ONCE.fingerprint, num_batches=4)


def test_a_client_takes_part_once_in_every_epoch_however_often_it_is_restarted(tmp_path):
    took = [takes_part(FileBook(tmp_path / "book"), number) for number in range(1, 13)]
    assert [sum(took[start : start + 4]) for start in (0, 4, 8)] == [1, 1, 1]
    assert not any(takes_part(ClientBook(), 0) for _ in range(40))  # that is in no epoch


def test_a_client_that_has_lost_its_draw_takes_no_part_until_the_next_epoch(tmp_path):
    """Each book of a round alone would draw again: the coins of another mechanism, at its ε."""
    for number in (2, 3, 4):
        assert not any(takes_part(ClientBook(), number) for _ in range(40))
    for _ in range(20):
        book = ClientBook()
        took = takes_part(book, 1)
        older = ClientBook(dict(book.state))
        took += sum(takes_part(book, number) for number in (2, 3, 4))
        assert took + sum(takes_part(older, number) for number in (6, 7, 8)) == 1


def test_numbers_that_leave_rounds_out_begin_no_more_epochs_than_were_agreed_to():
    book = ClientBook()
    for number in (1, 5, 9):
        takes_part(book, number)
    with pytest.raises(ValueError, match="all max_rounds=12 rounds"):
        takes_part(book, 13)


def test_which_round_of_an_epoch_it_is_comes_from_a_uniform_draw():
    books = [ClientBook() for _ in range(400)]
    counts = [sum(takes_part(book, number) for book in books) for number in (1, 2, 3, 4)]
    assert stats.chisquare(counts).pvalue > 1e-9


def test_a_report_says_how_many_rounds_ran_and_how_many_are_accounted():
    for reports, ran, accounted in ((ONCE, 5, 8), (ONCE, 1, 4), (ONCE, 4, 4), (SUMS, 1, 1)):
        ledger = ledger_of(reports)
        for _ in range(ran):
            run_once(ledger)
        report, both = ledger.report(), ran < accounted
        price = opacus_shuffle.compute_epsilon(reports.mechanism, steps=accounted, delta=1e-5)
        assert ledger.epsilon().epsilon == price
        assert (report.to_dict()["ran"], report.to_dict()["rounds"]) == (ran, accounted)
        said = f"{ran} round{'s' * (ran > 1)} ran; begun epochs are accounted in full: {accounted}"
        for text in (str(report), report.statement(), report.statement(format="registry")):
            assert (said in " ".join(text.split())) == both


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not a client's book"),
        ("[]", "not a client's book"),
        ('{"settings": "00", "rounds": 1, "last": 1}', "not a client's book"),
        ('{"0": {"settings": "00", "rounds": "many", "last": 1}}', "not a client's book"),
        ('{"0": {"settings": "00", "rounds": 1}}', "not a client's book"),
        ('{"0": {"settings": "00", "rounds": 1, "last": 1, "epoch": 0}}', "not a client's book"),
        ('{"0": {"settings": "00", "rounds": 1, "last": 1}}', "of other settings"),
    ],
)
def test_a_client_whose_book_is_damaged_or_another_agreement_s_sends_nothing(
    tmp_path, content, said
):
    (tmp_path / "book").write_text(content)
    sent = []
    with pytest.raises(ValueError, match=said):
        Reporter(GAUSSIAN, max_rounds=9, book=FileBook(tmp_path / "book")).answer(
            2, lambda: torch.ones(3), sent.append
        )
    assert sent == []
    assert (tmp_path / "book").read_text() == content


@pytest.mark.parametrize(
    "returned",
    [
        *(RuntimeError("out of memory"), None, [1.0] * 3, torch.ones(4), torch.ones(3).to_sparse()),
        *(torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta")),
    ],
    ids=str,
)
@pytest.mark.parametrize("always_train", [True, False])
def test_a_client_whose_training_fails_reports_zero_with_its_noise_and_logs_why(
    returned, always_train, caplog
):
    """A missing report would reveal its data or its coin. Noise never has 15 deviations."""
    quiet = GaussianReports(dimension=3, max_norm=1.0, noise_multiplier=0.02, num_users=6)

    def train():
        if isinstance(returned, Exception):
            raise returned
        return returned

    sent = []
    Reporter(quiet, max_rounds=1).answer(1, train, sent.append, always_train=always_train)
    (numbers,) = (np.abs(np.frombuffer(quiet.open(report)[1], "<f4")) for report in sent)
    assert 0 < numbers.min() <= numbers.max() < 0.3
    assert "training failed; reporting zero" in caplog.text


@pytest.mark.parametrize(("train", "submit"), [(None, print), (torch.ones(3), print), (list, "x")])
def test_a_round_is_not_noted_if_a_client_could_not_answer_it(train, submit):
    reporter, sent = Reporter(GAUSSIAN, max_rounds=1), []
    with pytest.raises(ValueError, match="must be a Callable"):
        reporter.answer(1, train, submit)
    reporter.answer(1, lambda: torch.ones(3), sent.append)
    assert len(sent) == 1


# The server's book


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize(
    "failing",
    [
        "opacus_shuffle.accountants.accountant.ShuffleAccountant.record",
        "opacus_shuffle.federated.ledger.atomic_write",
    ],
)
def test_a_round_that_cannot_be_accounted_on_the_disk_is_not_released_and_may_be_closed_again(
    error, failing, shuffler, monkeypatch, tmp_path
):
    ledger = ledger_of(GAUSSIAN, shuffler, path=tmp_path / "book")
    all_report(shuffler, 1)
    monkeypatch.setattr(failing, Mock(side_effect=error("no accounting today")))
    with pytest.raises(error):
        ledger.close()
    monkeypatch.undo()
    assert (ledger.round, ledger.begun, len(ledger.accountant)) == (0, False, 0)
    assert shuffler.waiting() == 6  # nothing was released
    assert not (tmp_path / "book").exists()
    assert ledger.close().num_reports == 6
    assert (ledger.round, ledger.begun, len(ledger.accountant)) == (1, True, 1)
    with pytest.raises(ValueError, match="round 1 is already begun"):
        ledger.begin()


@pytest.mark.parametrize(("reports", "paid"), [(GAUSSIAN, 2), (SUMS, 3), (ONCE, 8)])
@pytest.mark.parametrize("begun", [False, True])
def test_a_ledger_foresees_how_many_rounds_its_target_pays_for_and_begins_no_other(
    reports, paid, begun
):
    """An epoch of four is paid for as a whole. The price of a begun round is paid."""
    price = opacus_shuffle.compute_epsilon(reports.mechanism, steps=paid, delta=1e-5)
    ledger = ledger_of(reports, target_epsilon=price)
    for left in range(paid, -1, -1):
        if begun and left:
            ledger.open(), ledger.begin()
        foreseen = [ledger.affordable(wanted) for wanted in (0, 1, 5, 20)]
        assert foreseen == [min(wanted, left) for wanted in (0, 1, 5, 20)]
        if left:
            run_once(ledger)
    with pytest.raises(ValueError, match="would exceed target_epsilon"):
        ledger.open()
    assert ledger.epsilon().epsilon == price
    assert ledger_of(reports).affordable(10**9) == 10**9


def test_a_ledger_foresees_it_also_where_so_many_rounds_have_no_epsilon_at_its_delta():
    assert ledger_of(ONCE, target_epsilon=1.0).affordable(10**6) < 10**4


@pytest.mark.parametrize(
    ("reports", "count", "size", "said"),
    [
        *((GAUSSIAN, count, 12 * count, "6 are accounted for") for count in (7, 5, -1)),
        *(
            (reports, 20, 239, "does not match its stated report count")
            for reports in (SUMS, SECRET, COIN)
        ),
        *((reports, 20, 0, "does not match its stated report count") for reports in (SUMS, SECRET)),
        *(
            (reports, 20, 252, "does not match its stated report count")
            for reports in (SUMS, SECRET, COIN)
        ),
        (SUMS, 21, 24, "min_reports=10 to num_users=20 are accounted for"),
        *(
            (SECRET, 20, 240, None),
            (COIN, 20, 0, None),
            (COIN, 20, 228, None),
            (SUMS, 10, 24, None),
        ),
    ],
)
def test_a_server_takes_no_round_of_more_reports_than_clients_or_of_another_length(
    reports, count, size, said
):
    ledger = ledger_of(reports)
    ledger.open()
    ledger.shuffler.close_round = lambda number: ReleasedRound(number, count, bytes(abs(size)))
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        ledger.close()
    assert ledger.begun


class Killed(BaseException):
    """Ends the server's process: only the book remains of its ledger."""


@pytest.mark.parametrize(
    "instant",
    [
        *("after open_round", "before close_round", "after close_round"),
        *("in update", "after forget_round"),
    ],
)
def test_a_server_that_is_killed_comes_back_to_the_same_history(instant, tmp_path):
    shuffler, released, killed = Shuffler(GAUSSIAN), {}, []

    def strike(at: str, number: int) -> None:
        if not killed and (at, number) == (instant, 2):
            killed.append(at)
            raise Killed

    def call(name: str, method, number: int, *rest):
        strike(f"before {name}", number)
        result = method(number, *rest)
        if name == "close_round":  # never two sums of one round
            assert released.setdefault(number, result) == result
        strike(f"after {name}", number)
        return result

    for name in ("open_round", "close_round", "forget_round"):
        setattr(shuffler, name, functools.partial(call, name, getattr(shuffler, name)))
    for _ in range(2):
        ledger = ledger_of(GAUSSIAN, shuffler, path=tmp_path / "book")
        assert len(ledger.accountant) >= len(released)  # what was released is accounted
        with contextlib.suppress(Killed):
            while ledger.round < 3 or ledger.begun:
                ledger.run(
                    lambda number: all_report(shuffler, number),
                    lambda total, ledger=ledger: strike("in update", ledger.round) or {"w": total},
                )
    assert killed
    assert (ledger.round, len(ledger.accountant), sorted(released)) == (3, 3, [1, 2, 3])
    last = GAUSSIAN.estimate(released[3].mixed, 6)
    assert torch.equal(ledger_of(GAUSSIAN, path=tmp_path / "book").result["w"], last)


def test_two_servers_with_one_book_do_not_undo_what_the_other_has_written(tmp_path):
    one, other = (ledger_of(GAUSSIAN, path=tmp_path / "book") for _ in range(2))
    run_once(one)
    other.open()
    with pytest.raises(ValueError, match=r"written by another server.*stop one"):
        other.close()
    assert len(ledger_of(GAUSSIAN, path=tmp_path / "book").accountant) == 1


def test_a_shuffler_that_was_started_anew_loses_a_round_that_stays_accounted(shuffler, tmp_path):
    ledger = ledger_of(GAUSSIAN, shuffler, path=tmp_path / "book")
    all_report(shuffler, ledger.open())
    ledger.shuffler = Shuffler(GAUSSIAN)
    assert ledger.close().dropped
    ledger.finish()
    assert len(ledger_of(GAUSSIAN, path=tmp_path / "book").accountant) == 1


def test_a_book_keeps_its_own_copy_of_a_result_and_refuses_what_it_could_not_be_read_with(tmp_path):
    ledger, kept = ledger_of(GAUSSIAN, path=tmp_path / "book"), torch.zeros(3)
    ledger.run(lambda number: None, lambda total: kept)
    kept += 5
    assert not ledger.result.any()
    ledger.open()
    ledger.close()
    for result in (np.zeros(3), {"a": np.float64(1)}, torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="result must hold tensors and plain values"):
            ledger.finish(result)
    again = ledger_of(GAUSSIAN, path=tmp_path / "book")
    assert (ledger.begun, again.round, again.begun) == (True, 2, True)


@pytest.mark.parametrize(
    ("damage", "reports"),
    [
        (lambda path: path.write_bytes(b""), GAUSSIAN),
        (lambda path: path.write_bytes(path.read_bytes()[:500]), GAUSSIAN),
        (lambda path: torch.save({"weights": torch.zeros(3)}, path), GAUSSIAN),
        (lambda path: torch.save({**torch.load(path), "round": 3}, path), GAUSSIAN),
        (lambda path: None, COIN),
    ],
    ids=["empty", "cut", "foreign", "counted less", "other settings"],
)
def test_a_damaged_or_another_run_s_book_is_named_and_not_begun_anew(tmp_path, damage, reports):
    path = tmp_path / "book"
    run_once(ledger_of(GAUSSIAN, path=path))
    damage(path)
    with pytest.raises(ValueError, match=f"path='{path}'"):
        ledger_of(reports, path=path)


@pytest.mark.parametrize(
    ("reports", "changed"),
    [
        *((reports, {"noise_multiplier": 0.5}) for reports in (GAUSSIAN, SUMS)),
        *((reports, {"max_norm": 2.0}) for reports in (GAUSSIAN, SUMS)),
        *((reports, {"sample_rate": 0.4}) for reports in (GAUSSIAN, SUMS)),
        *((reports, {"num_users": 21}) for reports in (GAUSSIAN, SUMS)),
        *((GAUSSIAN, {"min_reports": 5}), (SUMS, {"min_reports": 15})),
        *((SUMS, {"delta": 1e-7}), (SUMS, {"rounds": 2}), (SUMS, {"honest_fraction": 0.95})),
    ],
)
def test_clients_shuffler_and_server_with_other_settings_do_not_meet(reports, changed):
    other, shuffler = type(reports).of_settings({**reports.settings, **changed}), Shuffler(reports)
    with pytest.raises(ValueError, match="uses other settings"):
        ledger_of(other, shuffler).open()
    shuffler.open_round(1)
    with pytest.raises(RefusedReportError, match="uses other settings"):
        shuffler.submit("0", other.encode(1, torch.ones(3)))
    assert shuffler.waiting() == 0


def test_a_shuffler_with_a_generator_of_one_s_own_is_no_secret_as_its_report_says():
    ledger = ledger_of(GAUSSIAN, Shuffler(GAUSSIAN, torch.Generator().manual_seed(0)))
    run_once(ledger)
    assert "not private: whoever knows the generator of the shuffler" in str(ledger.report())
    assert not ledger.report().to_dict()["private"]


AT = "http://localhost:9", SERVER
NOTED = {"number": 1, "max_rounds": 9, "fingerprint": GAUSSIAN.fingerprint}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ledger_of(SUMS, delta=1e-15), "delta"),
        (lambda: ledger_of(SUMS, delta=math.nan), "delta"),
        (lambda: ledger_of(None, Shuffler(SUMS)), "format"),
        (lambda: ledger_of(SUMS, "near"), "shuffler must be a Shuffler"),
        (lambda: ledger_of(SUMS, path=3), "path"),
        (lambda: ledger_of(SUMS, path="/nowhere/at/all"), "path"),
        (lambda: ledger_of(SUMS, target_epsilon=0.0), "target_epsilon"),
        (lambda: ledger_of(SUMS).finish(), "no round is begun"),
        (lambda: Shuffler(None), "format"),
        (lambda: Shuffler(SUMS, shards=2 * [Shuffler(SUMS)]), "each once"),
        (lambda: Shuffler(SUMS, shards=[RemoteShuffler(*AT), RemoteShuffler(*AT)]), "each once"),
        (lambda: Shuffler(SUMS, generator=3), "generator"),
        (lambda: SUMS.encode(1, None, generator=3), "generator"),
        (lambda: SUMS.encode(2**32, None), "number"),
        (lambda: Reporter(None, max_rounds=1), "format"),
        (lambda: Reporter(SUMS, max_rounds=0), "max_rounds"),
        (lambda: Reporter(SUMS, max_rounds=1, book="file"), "book"),
        # NaN is not before the last round: a client would answer it again and again.
        *(
            (functools.partial(ClientBook().note, **{**NOTED, "number": number}), "number")
            for number in (math.nan, "2", 1.5, -1, 2**32)
        ),
        (lambda: ClientBook().note(**{**NOTED, "max_rounds": math.nan}), "max_rounds"),
        (lambda: FileBook("/nowhere/at/all"), "make the folder"),
        (lambda: FileBook("book", most_rounds=0), "most_rounds"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
