"""What a server, a client or a passer-by tries, and does not get."""

from __future__ import annotations

import http.server
import json
import math
import os
import socket
import threading

import numpy as np
import pytest
import torch
from helpers.federation import all_report

import opacus_shuffle
from opacus_shuffle.federated import (
    BitSums,
    FarShuffler,
    FileBook,
    GaussianReports,
    Ledger,
    RefusedReportError,
    Reporter,
    Shuffler,
    ShufflerService,
)
from opacus_shuffle.federated.reporter import ClientBook
from opacus_shuffle.federated.serve import main
from opacus_shuffle.federated.shuffler_service import unpacked

COMMON = {"dimension": 3, "max_norm": 1.0, "num_users": 6, "sample_rate": 0.5}
GAUSSIAN = GaussianReports(**COMMON, noise_multiplier=1.0)
SUMS = BitSums(**COMMON, noise_multiplier=1.0, delta=1e-6)
FORMATS = pytest.mark.parametrize("reports", [GAUSSIAN, SUMS], ids=["gaussian", "sums"])
CLIENTS, SERVER = (
    [f"the-secret-of-client-{number}" for number in range(6)],
    "the-secret-of-the-server",
)


# Randomness


@FORMATS
def test_all_randomness_is_the_operating_system_s(reports, monkeypatch):
    """With the same system's bytes everything is the same, whatever PyTorch's generator is at."""
    found = []
    for _ in range(2):
        system = np.random.default_rng(8)
        monkeypatch.setattr(os, "urandom", lambda count, system=system: system.bytes(count))
        shuffler, sent = Shuffler(reports), []
        shuffler.open_round(1)
        for sender in range(6):
            Reporter(reports, max_rounds=1).answer(1, lambda: torch.ones(3), sent.append)
            shuffler.submit(str(sender), sent[-1])
        found.append((sent, shuffler.close_round(1)))
        torch.rand(5)
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 1


def test_a_server_s_selection_is_the_operating_system_s(monkeypatch):
    reports = GaussianReports(**COMMON, noise_multiplier=1.0, server_selects="fixed_size")
    asked = []
    for _ in range(2):
        system = np.random.default_rng(8)
        monkeypatch.setattr(os, "urandom", lambda count, system=system: system.bytes(count))
        asked.append([reports.ask(range(6)) for _ in range(5)])
    assert asked[0] == asked[1]


@FORMATS
def test_a_client_does_the_same_work_whatever_its_coin_says(reports, monkeypatch):
    made = []
    encode = type(reports).encode
    monkeypatch.setattr(
        type(reports),
        "encode",
        lambda self, number, vector: made.append(vector) or encode(self, number, vector),
    )
    reporter = Reporter(reports, max_rounds=30)
    for number in range(30):
        reporter.answer(number, lambda: torch.ones(3), lambda report: None)
    assert len(made) == 60
    assert sum(each is None for each in made) == 30


# One round, once


def test_a_client_s_book_outlives_its_process_and_the_server_s_runs(tmp_path):
    sent = []
    for _ in range(3):
        reporter = Reporter(GAUSSIAN, max_rounds=2, book=FileBook(tmp_path / "book"))
        for number in (4, 5, 6):
            try:
                reporter.answer(number, lambda: torch.ones(3), sent.append)
            except ValueError:
                continue
    assert [GAUSSIAN.open(each).round for each in sent] == [4, 5]


def test_two_processes_of_a_client_answer_a_round_once(tmp_path):
    """Each with a book that it has opened before the other one wrote."""
    books = [FileBook(tmp_path / "book") for _ in range(2)]
    books[0].note(1, max_rounds=9, fingerprint=GAUSSIAN.fingerprint)
    with pytest.raises(ValueError, match="answered already"):
        books[1].note(1, max_rounds=9, fingerprint=GAUSSIAN.fingerprint)


@pytest.mark.parametrize(
    "content", ["", "junk", "[]", '{"settings": "00", "rounds": "many", "last": 1}']
)
def test_a_client_whose_book_is_damaged_sends_nothing(tmp_path, content):
    (tmp_path / "book").write_text(content)
    sent = []
    with pytest.raises(ValueError, match="is no book of a client"):
        Reporter(GAUSSIAN, max_rounds=9, book=FileBook(tmp_path / "book")).answer(
            1, lambda: torch.ones(3), sent.append
        )
    assert sent == []


def test_a_client_s_book_is_of_one_agreement(tmp_path):
    Reporter(GAUSSIAN, max_rounds=9, book=FileBook(tmp_path / "book")).answer(
        1, lambda: torch.ones(3), lambda report: None
    )
    with pytest.raises(ValueError, match="of other settings"):
        Reporter(SUMS, max_rounds=9, book=FileBook(tmp_path / "book")).answer(
            2, lambda: torch.ones(3), lambda report: None
        )
    with pytest.raises(ValueError, match="make the folder"):
        FileBook(tmp_path / "nowhere" / "book")


@pytest.mark.parametrize(
    "returned", [None, [1.0, 2.0, 3.0], torch.ones(4), torch.ones(3, dtype=torch.complex64)]
)
def test_a_client_that_computes_no_vector_sends_nothing_whatever_its_coin_says(returned):
    sent = []
    for number in range(20):
        with pytest.raises(ValueError, match=r"train|vector"):
            Reporter(GAUSSIAN, max_rounds=1).answer(number, lambda: returned, sent.append)
    assert sent == []


class AlwaysAnother(str):
    """A text that equals no other one."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return False


@pytest.mark.parametrize(
    "sender",
    [
        torch.tensor(7),
        np.int64(7),
        7,
        True,
        7.0,
        math.nan,
        None,
        b"7",
        object(),
        (torch.tensor(7),),
        AlwaysAnother("7"),
    ],
    ids=lambda sender: type(sender).__name__,
)
def test_who_is_named_by_anything_but_a_text_has_no_report_counted(sender):
    """Else one client would be as many as it sends reports: two tensors of one value are two keys."""
    shuffler = Shuffler(GAUSSIAN)
    shuffler.open_round(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="sender must be a str"):
            shuffler.submit(sender, GAUSSIAN.encode(1, torch.ones(3)))
    assert shuffler.waiting() == 0


@pytest.mark.parametrize("number", [math.nan, torch.tensor(2), "2", 1.5, -1])
def test_a_round_that_is_no_whole_number_is_not_noted(number):
    """NaN is not after the last round, and not before it: a client would answer it again and again."""
    book = ClientBook()
    with pytest.raises(ValueError, match="number must be"):
        book.note(number, max_rounds=9, fingerprint=GAUSSIAN.fingerprint)
    with pytest.raises(ValueError, match="max_rounds must be"):
        book.note(1, max_rounds=math.nan, fingerprint=GAUSSIAN.fingerprint)
    assert (book.rounds, book.last) == (0, -1)


# One set of settings


@pytest.mark.parametrize(
    "changed",
    [{"noise_multiplier": 0.5}, {"min_reports": 5}, {"max_norm": 2.0}, {"sample_rate": 0.4}],
)
def test_clients_shuffler_and_server_with_other_settings_do_not_meet(changed):
    for reports, kind in ((GAUSSIAN, GaussianReports), (SUMS, BitSums)):
        other = kind(
            **{
                **COMMON,
                "noise_multiplier": 1.0,
                **({"delta": 1e-6} if kind is BitSums else {}),
                **changed,
            }
        )
        shuffler = Shuffler(reports)
        with pytest.raises(ValueError, match="goes by other settings"):
            Ledger(other, shuffler, delta=1e-5).open()
        shuffler.open_round(1)
        with pytest.raises(RefusedReportError, match="goes by other settings"):
            shuffler.submit("0", other.encode(1, torch.ones(3)))
        assert shuffler.waiting() == 0


def test_settings_make_the_format_that_they_are_of():
    for reports in (
        GAUSSIAN,
        SUMS,
        GaussianReports(**COMMON, noise_multiplier=2, server_selects="fixed_size"),
    ):
        again = opacus_shuffle.federated.ReportFormat.of_settings(
            json.loads(json.dumps(reports.settings))
        )
        assert again.fingerprint == reports.fingerprint
        assert again.settings == reports.settings


# The server's book


def run_once(ledger: Ledger) -> None:
    ledger.run(lambda number: all_report(ledger.shuffler, number), lambda total: {"weights": total})


def test_a_run_does_not_go_on_with_other_settings(tmp_path):
    earlier = GaussianReports(**COMMON, noise_multiplier=0.5)
    run_once(Ledger(earlier, Shuffler(earlier), delta=1e-5, path=tmp_path / "book"))
    with pytest.raises(ValueError, match="with other settings than"):
        Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=1e-5, path=tmp_path / "book", target_epsilon=1.0)


def test_a_round_that_cannot_be_written_down_is_not_released(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    ledger = Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=1e-5, path=folder / "book")
    ledger.open()
    all_report(ledger.shuffler, 1)
    folder.rmdir()
    for _ in range(2):
        with pytest.raises(OSError, match="book"):
            ledger.close()
        assert (ledger.round, ledger.begun, len(ledger.accountant), ledger.shuffler.waiting()) == (
            0,
            False,
            0,
            6,
        )
    folder.mkdir()
    assert ledger.close().num_reports == 6


@pytest.mark.parametrize("result", [np.zeros(3), {"a": np.float64(1)}, torch.nn.Linear(1, 1)])
def test_what_a_book_could_not_be_read_with_is_not_written(tmp_path, result):
    ledger = Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=1e-5, path=tmp_path / "book")
    ledger.open()
    ledger.close()
    with pytest.raises(ValueError, match="result must hold tensors and plain values"):
        ledger.finish(result)
    assert ledger.begun
    again = Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=1e-5, path=tmp_path / "book")
    assert (again.round, again.begun) == (1, True)


@pytest.mark.parametrize("damage", ["empty", "junk", "cut", "foreign", "counted less"])
def test_a_damaged_book_is_named_and_not_begun_anew(tmp_path, damage):
    path = tmp_path / "book"
    ledger = Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=1e-5, path=path)
    run_once(ledger)
    content = path.read_bytes()
    if damage == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    elif damage == "counted less":
        torch.save({**torch.load(path, weights_only=True), "round": 3}, path)
    else:
        path.write_bytes(
            {"empty": b"", "junk": b"junk", "cut": content[: len(content) // 2]}[damage]
        )
    with pytest.raises(ValueError, match=f"path='{path}'"):
        Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=1e-5, path=path)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Ledger(SUMS, Shuffler(SUMS), delta=1e-15), "delta"),
        (lambda: Ledger(None, Shuffler(SUMS), delta=1e-5), "format"),
        (lambda: Ledger(SUMS, None, delta=1e-5), "shuffler"),
        (lambda: Ledger(SUMS, Shuffler(SUMS), delta=1e-5, path=3), "path"),
        (lambda: Ledger(SUMS, Shuffler(SUMS), delta=1e-5, path="/nowhere/at/all"), "path"),
        (lambda: Ledger(SUMS, Shuffler(SUMS), delta=math.nan), "delta"),
        (lambda: Ledger(SUMS, Shuffler(SUMS), delta=1e-5, target_epsilon=0.0), "target_epsilon"),
        (lambda: Ledger(SUMS, Shuffler(SUMS), delta=1e-5).finish(), "no round is begun"),
        (lambda: Shuffler(None), "format"),
        (lambda: Shuffler(SUMS, generator=3), "generator"),
        (lambda: Reporter(None, max_rounds=1), "format"),
        (lambda: Reporter(SUMS, max_rounds=1, book="file"), "book"),
        (lambda: SUMS.encode(1, torch.ones(3).to_sparse()), "vector"),
        (lambda: SUMS.encode(1, torch.ones(4)), r"vector must have shape \(3,\), got \(4,\)"),
        (lambda: SUMS.encode(1, torch.ones(3, device="meta")), "vector"),
        (lambda: SUMS.encode(1, None, generator=3), "generator"),
        (
            lambda: GaussianReports(**{**COMMON, "max_norm": 1e-40}, noise_multiplier=1.0),
            "max_norm",
        ),
        (lambda: GaussianReports(**{**COMMON, "max_norm": 1e35}, noise_multiplier=1.0), "max_norm"),
        pytest.param(
            lambda: BitSums(**COMMON, noise_multiplier=1e6, delta=1e-6),
            "noise_multiplier",
            marks=pytest.mark.zoo,
        ),
        (lambda: GAUSSIAN.estimate([np.array([math.nan, 0, 0], "<f4").tobytes()], 6), "report"),
        (lambda: ShufflerService(None, clients=CLIENTS, server=SERVER), "shuffler"),
        (lambda: FarShuffler("https://shuffler.example", "two\nlines-of-a-secret"), "secret"),
        (lambda: FarShuffler("https://shuffler.example", None), "secret"),
        (lambda: FarShuffler("https://", SERVER), "url"),
        (lambda: FarShuffler(None, SERVER), "url"),
        (
            lambda: FarShuffler("https://shuffler.example", SERVER, certificate="no.crt"),
            "certificate",
        ),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_a_shuffler_with_a_generator_of_one_s_own_is_no_secret_as_its_report_says():
    ledger = Ledger(GAUSSIAN, Shuffler(GAUSSIAN, torch.Generator().manual_seed(0)), delta=1e-5)
    run_once(ledger)
    assert "not private: whoever knows the generator of the shuffler" in str(ledger.report())
    assert not ledger.report().to_dict()["private"]


def test_a_result_that_the_caller_changes_later_is_the_book_s_own(tmp_path):
    ledger, kept = (
        Ledger(GAUSSIAN, Shuffler(GAUSSIAN), delta=1e-5, path=tmp_path / "book"),
        torch.zeros(3),
    )
    ledger.run(lambda number: all_report(ledger.shuffler, number), lambda total: kept)
    kept += 5
    assert not ledger.result.any()


def test_a_book_in_memory_takes_any_result_and_numpy_s_numbers_are_settings():
    reports = GaussianReports(
        **{**COMMON, "num_users": np.int64(6)},
        noise_multiplier=np.float64(1),
        min_reports=np.int64(6),
    )
    assert json.loads(json.dumps(reports.settings)) == reports.settings
    assert reports.fingerprint == GAUSSIAN.fingerprint


# The network


def test_a_secret_is_not_sent_where_a_shuffler_sends_its_caller_and_is_in_no_message():
    asked = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(302)
            self.send_header(
                "Location", f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere"
            )
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ValueError, match="302") as error:
            FarShuffler(f"http://127.0.0.1:{server.server_address[1]}", CLIENTS[0] + "\n").submit(
                b"report"
            )
        server.shutdown()
    assert asked == [("/report", f"Bearer {CLIENTS[0]}")]
    assert CLIENTS[0] not in str(error.value)
    with pytest.raises(ValueError, match="secret") as error:
        FarShuffler("https://shuffler.example", "a secret with blanks")
    assert "blanks" not in str(error.value)


def test_nobody_answers_is_said_with_the_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        ConnectionError, match=f"no shuffler at http://127.0.0.1:{port} after 1 attempts"
    ):
        FarShuffler(f"http://127.0.0.1:{port}", SERVER, attempts=1).close_round(1)


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "", "٣", "1" * 11])
def test_a_malformed_request_is_answered_and_who_sent_it_is_not_written_down(length, capfd):
    with ShufflerService(Shuffler(SUMS), clients=CLIENTS, server=SERVER) as service:
        service.start()
        with socket.create_connection(service.server_address[:2]) as client:
            client.sendall(f"POST /report HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
            assert b" 413 " in client.recv(1000)
        with socket.create_connection(service.server_address[:2]) as client:
            client.sendall(
                f"POST /rounds/{'9' * 5000}/open HTTP/1.1\r\nContent-Length: 0\r\n".encode()
            )
            client.sendall(f"Authorization: Bearer {SERVER}\r\n\r\n".encode())
            assert b" 404 " in client.recv(1000)
        service.shutdown()
    service.handle_error(None, ("127.0.0.1", 1))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\1\0\0\0\1\0\0\0", b"\1\0\0\0\1\0\0\0\5\0\0\0\0\0\0\0abc"]
)
def test_an_answer_that_was_cut_off_is_refused(content):
    with pytest.raises(ValueError, match="shuffler's answer"):
        unpacked(1, content)


@pytest.mark.parametrize(
    ("settings", "clients", "server", "said"),
    [
        ("{", "\n".join(CLIENTS), SERVER, "settings.json is no JSON file"),
        (
            json.dumps({**SUMS.settings, "maxnorm": 1}),
            "\n".join(CLIENTS),
            SERVER,
            "did you mean max_norm",
        ),
        (json.dumps(SUMS.settings), "\n".join(CLIENTS[:3]), SERVER, "got 3"),
        (
            json.dumps(SUMS.settings),
            "\n".join(CLIENTS),
            "\n".join(CLIENTS),
            "server must be a secret",
        ),
        (json.dumps(SUMS.settings), "\n".join(CLIENTS), None, "server.txt"),
    ],
)
def test_the_command_says_in_a_line_what_is_wrong_with_its_files(
    tmp_path, capsys, settings, clients, server, said
):
    (tmp_path / "settings.json").write_text(settings)
    (tmp_path / "clients.txt").write_text(clients)
    if server is not None:
        (tmp_path / "server.txt").write_text(server)
    files = {
        "--settings": "settings.json",
        "--secrets": "clients.txt",
        "--server-secret": "server.txt",
    }
    with pytest.raises(SystemExit):
        main([part for flag, name in files.items() for part in (flag, str(tmp_path / name))])
    assert said in capsys.readouterr().err
