"""A shuffler behind its network interface is the shuffler, to those who show their secret."""

from __future__ import annotations

import concurrent.futures
import http.server
import json
import shutil
import socket
import subprocess
import threading

import pytest
import torch
from helpers.federation import CLIENTS, SERVER, SUMS, ledger_of

from opacus_shuffle.federated import (
    FarShuffler,
    RefusedReportError,
    Reporter,
    Shuffler,
    ShufflerService,
)
from opacus_shuffle.federated.serve import main
from opacus_shuffle.federated.shuffler import UnknownRoundError


@pytest.fixture
def service():
    with ShufflerService(Shuffler(SUMS), clients=CLIENTS, server=SERVER) as service:
        yield service.start()
        service.shutdown()


def test_a_far_shuffler_is_a_near_one(service):
    ledger = ledger_of(SUMS, FarShuffler(service.url, SERVER))
    clients = [
        (Reporter(SUMS, max_rounds=5), FarShuffler(service.url, secret)) for secret in CLIENTS
    ]

    def collect(number: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(clients)) as threads:
            for reporter, shuffler in clients:
                threads.submit(reporter.answer, number, lambda: torch.ones(3), shuffler.submit)

    for _ in range(2):
        released = ledger.run(collect, lambda total: total)
        assert released.num_reports == 20
        assert len(released.mixed) == 3 * 8  # one sum a coordinate: no order, no names
        assert torch.equal(ledger.result, SUMS.estimate(released.mixed, 20))
    assert len(ledger.accountant) == 2
    assert service.shuffler.waiting() == 0


def test_a_far_shuffler_says_why_it_takes_nothing(service):
    server, client = FarShuffler(service.url, SERVER), FarShuffler(service.url, CLIENTS[0])
    stranger, report = FarShuffler(service.url, "x" * 20), SUMS.encode(1, None)
    with pytest.raises(RefusedReportError, match="the open one is None"):
        client.submit(report)
    server.open_round(1, SUMS.fingerprint)
    for shuffler, content, said in (
        (client, b"junk", "400: report must be"),
        (client, report * 1000, "413"),
        (stranger, report, "403"),
        (server, report, "403"),
    ):
        with pytest.raises(RefusedReportError, match=said):
            shuffler.submit(content)
    assert service.shuffler.waiting() == 0
    for shuffler in (client, stranger):
        for asking in (shuffler.close_round, shuffler.forget_round):
            with pytest.raises(ValueError, match="403"):
                asking(1)
    with pytest.raises(ValueError, match="400: round 0 is not after round 1"):
        server.open_round(0, SUMS.fingerprint)
    with pytest.raises(UnknownRoundError, match="404: round 9 is not open"):
        server.close_round(9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clients": ["short", *CLIENTS[:15]]}, "each of clients must be a secret"),
        ({"clients": ["with a blank in it", *CLIENTS[:15]]}, "each of clients must be a secret"),
        ({"clients": CLIENTS[:10] * 2}, "no two the same"),
        ({"clients": [SERVER, *CLIENTS[:15]]}, "no two the same"),
        ({"clients": CLIENTS[:9]}, "clients must be 10 to 20 secrets"),
        ({"clients": [*CLIENTS, "the-secret-of-one-more"]}, "clients must be 10 to 20 secrets"),
        ({"key": "shuffler.key"}, "takes a certificate"),
        ({"certificate": "no.crt", "key": "no.key"}, "cannot be used"),
        ({"host": "0.0.0.0"}, "host='0.0.0.0' .*takes a certificate"),
        ({"port": -1}, "port"),
        ({"most_connections": 0}, "most_connections"),
        ({"shuffler": None}, "shuffler"),
    ],
)
def test_a_service_that_is_badly_set_up_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        ShufflerService(
            **{"shuffler": Shuffler(SUMS), "clients": CLIENTS, "server": SERVER, **options}
        )


@pytest.mark.parametrize(
    ("url", "secret", "named"),
    [
        ("http://example.org:9095", SERVER, "https"),
        ("http://127.0.0.1:9095@example.org", SERVER, "https"),
        ("ftp://127.0.0.1", SERVER, "https"),
        ("127.0.0.1", SERVER, "https"),
        ("https://", SERVER, "url"),
        (None, SERVER, "url"),
        ("https://shuffler.example", "two\nlines-of-a-secret", "secret"),
        ("https://shuffler.example", None, "secret"),
    ],
)
def test_reports_do_not_travel_in_the_open_nor_secrets_into_messages(url, secret, named):
    with pytest.raises(ValueError, match=named) as error:
        FarShuffler(url, secret)
    assert "lines-of" not in str(error.value)


def test_a_secret_is_not_sent_where_a_shuffler_sends_its_caller_and_is_in_no_message():
    asked = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(302)
            address = f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere"
            self.send_header("Location", address)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(ValueError, match="302") as error:
            FarShuffler(url, CLIENTS[0] + "\n").submit(b"report")
        server.shutdown()
    assert asked == [("/report", f"Bearer {CLIENTS[0]}")]
    assert CLIENTS[0] not in str(error.value)


def connected(service: ShufflerService, request: bytes = b"P") -> socket.socket:
    """A connection over which this was sent; who waits a minute for its answer waits in vain."""
    client = socket.create_connection(service.server_address[:2], timeout=60)
    client.sendall(request)
    return client


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "", "٣", "1" * 11])
def test_a_malformed_request_is_answered_and_who_sent_it_is_not_written_down(
    service, length, capfd
):
    asked = f"POST /report HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode()
    with connected(service, asked) as client:
        assert b" 413 " in client.recv(1000)
    head = f"Content-Length: 0\r\nAuthorization: Bearer {SERVER}\r\n\r\n"
    for path in (f"/rounds/{'9' * 5000}/open", "/rounds/٣/close", "/rounds/1"):
        with connected(service, f"POST {path} HTTP/1.1\r\n{head}".encode()) as client:
            assert b" 404 " in client.recv(1000)
    service.handle_error(None, ("127.0.0.1", 1))
    assert capfd.readouterr() == ("", "")


def test_300_silent_connections_keep_nobody_out(service):
    service.most_connections = 20
    silent = [connected(service) for _ in range(300)]
    server = FarShuffler(service.url, SERVER, attempts=1)
    server.open_round(1, SUMS.fingerprint)
    FarShuffler(service.url, CLIENTS[0], attempts=1).submit(SUMS.encode(1, None))
    assert service.shuffler.waiting() == 1
    for client in silent[:-20]:  # the oldest are hung up on, and so many threads there are
        assert client.recv(1000) == b""
    for client in silent[-18:]:
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1000)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate by openssl")
def test_over_tls_a_certificate_is_asked_for_and_silent_clients_hold_up_nobody(tmp_path):
    files = {"certificate": str(tmp_path / "crt"), "key": str(tmp_path / "key")}
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -addext"
    named = ["subjectAltName=IP:127.0.0.1", "-keyout", files["key"], "-out", files["certificate"]]
    subprocess.run([*made.split(), *named], check=True, capture_output=True)
    trusted = {"certificate": files["certificate"]}
    with ShufflerService(Shuffler(SUMS), clients=CLIENTS, server=SERVER, **files) as service:
        service.start()
        assert service.url.startswith("https://")
        silent = [socket.create_connection(service.server_address[:2]) for _ in range(5)]
        server = FarShuffler(service.url, SERVER, **trusted)
        server.open_round(1, SUMS.fingerprint)
        for secret in CLIENTS:
            FarShuffler(service.url, secret, **trusted).submit(SUMS.encode(1, None))
        assert server.close_round(1).num_reports == len(CLIENTS)
        with pytest.raises(OSError, match="certificate"):
            FarShuffler(service.url, SERVER, attempts=1).open_round(2, SUMS.fingerprint)
        with pytest.raises(ValueError, match=r"certificate=.no\.crt. cannot be used"):
            FarShuffler(service.url, SERVER, certificate="no.crt")
        for client in silent:
            client.close()
        service.shutdown()


FILES = {"settings": json.dumps(SUMS.settings), "secrets": "\n".join(CLIENTS), "server": SERVER}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"settings": "{"}, "settings.txt is no JSON file"),
        ({"settings": json.dumps({**SUMS.settings, "maxnorm": 1})}, "did you mean max_norm"),
        ({"secrets": "\n".join(CLIENTS[:3])}, "got 3"),
        ({"server": "\n".join(CLIENTS)}, "server must be a secret"),
        ({"server": None}, "server.txt"),
    ],
)
def test_the_command_says_in_a_line_what_is_wrong_with_its_files(tmp_path, capsys, changed, said):
    for name, content in {**FILES, **changed}.items():
        if content is not None:
            (tmp_path / f"{name}.txt").write_text(content)
    flags = {"--settings": "settings", "--secrets": "secrets", "--server-secret": "server"}
    with pytest.raises(SystemExit):
        main([f"{flag}={tmp_path / name}.txt" for flag, name in flags.items()])
    assert said in capsys.readouterr().err
