"""A shuffler behind its network interface is the shuffler, to those who show their secret."""

import asyncio
import contextlib
import functools
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from helpers.federation import CLIENTS, SERVER, SUMS

from opacus_shuffle.federated import (
    RefusedReportError,
    RemoteShuffler,
    Shuffler,
    ShufflerService,
)
from opacus_shuffle.federated.serve import main
from opacus_shuffle.federated.shuffler import UnknownRoundError


@pytest.fixture
def service():
    with ShufflerService(Shuffler(SUMS), clients=CLIENTS, server=SERVER).start() as service:
        yield service


def test_a_far_shuffler_says_why_it_takes_nothing(service):
    server, client = RemoteShuffler(service.url, SERVER), RemoteShuffler(service.url, CLIENTS[0])
    stranger, report = RemoteShuffler(service.url, "x" * 20), SUMS.encode(1, None)
    with pytest.raises(RefusedReportError, match="the open round is None"):
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
        for asking in (shuffler.close_round, shuffler.forget_round, shuffler.tags):
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
        ({"clients": ["x" * 15, *CLIENTS[:15]]}, "each of clients must be a secret of at least 16"),
        ({"server": "x" * 15}, "server must be a secret of at least 16"),
        ({"clients": ["with a blank in it", *CLIENTS[:15]]}, "each of clients must be a secret"),
        ({"clients": CLIENTS[:10] * 2}, "no two the same"),
        ({"clients": [SERVER, *CLIENTS[:15]]}, "no two the same"),
        ({"clients": CLIENTS[:9]}, "clients must be 10 to 20 secrets"),
        ({"clients": [*CLIENTS, "the-secret-of-one-more"]}, "clients must be 10 to 20 secrets"),
        ({"key": "shuffler.key"}, "requires a certificate"),
        ({"certificate": "no.crt", "key": "no.key"}, "cannot be used"),
        ({"host": "0.0.0.0"}, "host='0.0.0.0' .*requires a certificate"),
        ({"port": -1}, "port"),
        ({"most_connections": 0}, "most_connections"),
        ({"most_connections": 10**12}, "most_connections=1000000000000 requires .* open files"),
        ({"seconds": 0}, "seconds"),
        ({"client_certificates": "ca.crt"}, "requires a certificate"),
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
        ("https://shuffler.example", "x" * 15, "secret of at least 16"),
    ],
)
def test_reports_do_not_travel_in_the_open_nor_secrets_into_messages(url, secret, named):
    with pytest.raises(ValueError, match=named) as error:
        RemoteShuffler(url, secret)
    assert "lines-of" not in str(error.value)


def connected(service: ShufflerService, request: str = "P") -> socket.socket:
    """A connection over which this was sent; who waits a minute for its answer waits in vain."""
    client = socket.create_connection(service.server_address, timeout=60)
    client.sendall(request.encode())
    return client


def asking(path: str, *lines: str, secret: str = CLIENTS[0], method: str = "POST") -> str:
    """A request without its body."""
    head = f"{method} {path} HTTP/1.1", "Host: here", f"Authorization: Bearer {secret}", *lines
    return "\r\n".join((*head, "", ""))


def answer(client: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        *(([f"Content-Length: {length}"], 400) for length in ("9" * 5000, "-1", "", "٣")),
        (["Content-Length: 11111111111"], 413),
        (["Content-Length: 5", "Content-Length: 6"], 400),
        (["Transfer-Encoding: chunked"], 413),
        (["X: " + "x" * 20_000], 400),
    ],
)
def test_a_malformed_request_is_answered_and_who_sent_it_is_not_written_down(
    service, lines, status, capfd
):
    with connected(service, asking("/report", *lines)) as client:
        assert client.recv(1000).startswith(b"HTTP/1.1 %d " % status)
    for path in (f"/rounds/{'9' * 5000}/open", "/rounds/%D9%A3/close", "/rounds/1"):
        with connected(service, asking(path, "Content-Length: 0", secret=SERVER)) as client:
            assert answer(client).startswith(b"HTTP/1.1 404 ")
    assert capfd.readouterr() == ("", "")


def test_a_stranger_is_answered_before_anything_of_a_report_has_come(service):
    for secret, path in (
        ("x" * 20, "/report"),
        (SERVER, "/report"),
        (CLIENTS[0], "/rounds/1/open"),
    ):
        with connected(service, asking(path, "Content-Length: 9", secret=secret)) as client:
            assert client.recv(1000).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("secret", [CLIENTS[0], "a-stranger-of-no-name"])
def test_a_request_that_comes_byte_by_byte_ends_in_its_time(secret):
    head = asking("/report", f"Content-Length: {SUMS.report_size}", secret=secret)
    with (
        ShufflerService(
            Shuffler(SUMS), clients=CLIENTS, server=SERVER, seconds=0.2
        ).start() as service,
        connected(service, head) as client,
    ):
        sent = 0
        with contextlib.suppress(OSError):  # it has ended
            while sent < SUMS.report_size - 1:  # the last byte never comes
                client.sendall(b"x")
                sent += 1
                time.sleep(0.05)
        with contextlib.suppress(ConnectionResetError):
            assert b" 204 " not in answer(client)


def test_a_client_that_asks_too_often_is_refused_alone_and_until_the_next_round(service):
    server, restless, other = (
        RemoteShuffler(service.url, secret) for secret in (SERVER, *CLIENTS[:2])
    )
    for number in (1, 2):
        server.open_round(number, SUMS.fingerprint)
        report = SUMS.encode(number, None)
        for _ in range(100):
            restless.submit(report)
        with pytest.raises(RefusedReportError, match="429"):
            restless.submit(report)
        other.submit(SUMS.encode(number, None))
        assert service.shuffler.waiting() == 2


def test_300_silent_connections_keep_nobody_out():
    with ShufflerService(
        Shuffler(SUMS), clients=CLIENTS, server=SERVER, most_connections=20, seconds=3600
    ).start() as service:
        silent = [connected(service) for _ in range(300)]
        server = RemoteShuffler(service.url, SERVER, attempts=1)
        server.open_round(1, SUMS.fingerprint)
        RemoteShuffler(service.url, CLIENTS[0], attempts=1).submit(SUMS.encode(1, None))
        assert service.shuffler.waiting() == 1
        for client in silent[:-20]:  # the oldest are hung up on
            assert client.recv(1000) == b""


@contextlib.contextmanager
def answering(*parts: bytes, pause: float = 0.0):
    """The address of a server that answers one request with these parts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as client:
                client.recv(65536)
                for part in parts:
                    client.sendall(part)
                    time.sleep(pause)
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):  # closing with an unread body would reset the connection
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield "http://{}:{}".format(*listening.getsockname())
        thread.join()


def test_an_answer_has_a_time_and_a_size_however_its_bytes_come():
    head, slow = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", b"HTTP/1.1 204 No\r\n\r\n"
    with answering(*(slow[place : place + 1] for place in range(len(slow))), pause=0.1) as url:
        far = RemoteShuffler(url, SERVER, timeout=0.5)  # it takes at least two seconds
        with pytest.raises(ConnectionError, match=r"timeout=0\.5 seconds"):
            far.forget_round(1)
    for most, content, said in ((10**6, 65536, "longer than 65536"), (99, 99, "most_bytes=99")):
        with answering(head % content + bytes(content)) as url:
            far = RemoteShuffler(url, SERVER, most_bytes=most)
            with pytest.raises(ValueError, match=said):
                far.forget_round(1) if most > content else far.close_round(1)
    with answering(head % 104 + bytes(104)) as url:
        assert len(RemoteShuffler(url, SERVER, most_bytes=200).close_round(1).mixed) == 100
    with answering(head % 104 + bytes(99)) as url, pytest.raises(ConnectionError, match="5 more"):
        RemoteShuffler(url, SERVER, attempts=1).close_round(1)


def test_a_redirection_is_not_followed_and_a_secret_is_in_no_message():
    """The server accepts one connection: following the redirection would be a ConnectionError."""
    with (
        answering(
            b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
        ) as url,
        pytest.raises(ValueError, match="302") as error,
    ):
        RemoteShuffler(url, CLIENTS[0]).submit(b"report")
    assert CLIENTS[0] not in str(error.value)


def test_a_full_service_ends_a_party_s_second_request_and_then_the_one_longest_under_way():
    with ShufflerService(
        Shuffler(SUMS), clients=CLIENTS, server=SERVER, most_connections=4, seconds=3600
    ).start() as service:
        RemoteShuffler(service.url, SERVER).open_round(1, SUMS.fingerprint)
        slow, ended = [], [2, 0, 1]

        def begin(client: int, under_way: int) -> None:
            head = asking("/report", f"Content-Length: {SUMS.report_size}", secret=CLIENTS[client])
            slow.append(connected(service, head + "x"))
            slow[-1].settimeout(60)
            settle(under_way)

        def settle(under_way: int) -> None:
            while metrics(service)["opacus_shuffle_requests_in_progress"] != under_way:
                time.sleep(0.01)

        def report(client: int) -> None:
            RemoteShuffler(service.url, CLIENTS[client], attempts=1).submit(SUMS.encode(1, None))
            settle(3)

        for under_way, client in enumerate((0, 1, 0, 2), start=1):
            begin(client, under_way)
        with pytest.raises(RefusedReportError, match="503: server busy; retry"):
            report(1)  # its second one
        report(3)
        for client in (4, 5):
            begin(client, 4)
            report(client + 10)
        assert service.shuffler.waiting() == 3
        for place, client in enumerate(slow):
            if place in ended:
                with contextlib.suppress(ConnectionResetError):
                    assert b" 204 " not in answer(client)
            else:
                client.setblocking(False)
                with pytest.raises(BlockingIOError):
                    client.recv(1000)


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1", 200), ("10.77.0.2", 403), ("127.0.0.1.example.org", 403)],
)
def test_metrics_are_for_this_machine_alone(service, host, status):
    send, receive = AsyncMock(), AsyncMock(return_value={"type": "http.disconnect"})
    request = {"method": "GET", "path": "/metrics", "client": (host, 9), "headers": []}
    asyncio.run(service(request, receive, send))
    assert send.await_args_list[0].args[0]["status"] == status


def metrics(service: ShufflerService) -> dict[str, float]:
    with connected(service, asking("/metrics", method="GET", secret="")) as client:
        lines = answer(client).decode().split("\r\n\r\n")[1].splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")
    }


def test_a_service_that_is_ended_answers_what_has_begun_and_says_how_it_is(service):
    with connected(service, asking("/health", method="GET", secret="")) as client:
        assert answer(client).endswith(b"ok\n")
    server = RemoteShuffler(service.url, SERVER)
    server.open_round(1, SUMS.fingerprint)
    report = SUMS.encode(1, None)
    client = connected(service, asking("/report", f"Content-Length: {len(report)}"))
    while not metrics(service)["opacus_shuffle_requests_in_progress"]:
        time.sleep(0.01)
    for wrong in (b"junk", SUMS.encode(2, None)):
        with pytest.raises(RefusedReportError):
            RemoteShuffler(service.url, CLIENTS[1]).submit(wrong)
    said = metrics(service)
    assert said['opacus_shuffle_requests_total{status="204"}'] == 1
    reasons = ("malformed", "another round")
    assert all(said[f'opacus_shuffle_refused_total{{reason="{each}"}}'] == 1 for each in reasons)
    assert said.get("process_resident_memory_bytes", 1e9) > 2**20  # the interpreter's own is more
    end = threading.Thread(target=service.shutdown)
    end.start()
    client.sendall(report)
    assert answer(client).startswith(b"HTTP/1.1 204 ")
    end.join()
    assert service.shuffler.waiting() == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> str:
    """A file of a certificate for this machine, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate by openssl")
    file = str(tmp_path_factory.mktemp("tls") / "both.pem")
    made = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        "-subj /CN=here -addext"
    )
    named = ["subjectAltName=IP:127.0.0.1", "-keyout", file, "-out", f"{file}.crt"]
    subprocess.run([*made.split(), *named], check=True, capture_output=True)
    with open(file, "a") as both:
        both.write(Path(f"{file}.crt").read_text())
    return file


def test_over_tls_a_certificate_is_asked_for_and_silent_clients_hold_up_nobody(certificate):
    trusted = {"certificate": certificate}
    with ShufflerService(
        Shuffler(SUMS), clients=CLIENTS, server=SERVER, **trusted
    ).start() as service:
        assert service.url.startswith("https://")
        silent = [socket.create_connection(service.server_address) for _ in range(5)]
        server = RemoteShuffler(service.url, SERVER, **trusted)
        server.open_round(1, SUMS.fingerprint)
        for secret in CLIENTS:
            RemoteShuffler(service.url, secret, **trusted).submit(SUMS.encode(1, None))
        assert server.close_round(1).num_reports == len(CLIENTS)
        with pytest.raises(OSError, match="certificate"):
            RemoteShuffler(service.url, SERVER, attempts=1).open_round(2, SUMS.fingerprint)
        for client in silent:
            client.close()


def test_over_tls_a_sender_that_does_not_close_holds_nothing_once_it_is_answered(
    certificate, monkeypatch
):
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", 3600.0)  # what else would end it
    trusting = ssl.create_default_context(cafile=certificate)
    with ShufflerService(
        Shuffler(SUMS), clients=CLIENTS, server=SERVER, certificate=certificate, seconds=3600
    ).start() as service:
        RemoteShuffler(service.url, SERVER, certificate=certificate).open_round(1, SUMS.fingerprint)
        for report, said in ((SUMS.encode(1, None), b" 204 "), (SUMS.encode(2, None), b" 400 ")):
            with (
                connected(service, "") as tcp,
                trusting.wrap_socket(tcp, server_hostname="127.0.0.1") as client,
            ):
                client.sendall(
                    asking("/report", f"Content-Length: {len(report)}").encode() + report
                )
                assert said in answer(client)
                # The network could link a client's connections by the tickets of its sessions.
                assert client.session is None or not client.session.has_ticket
                with socket.socket(fileno=client.detach()) as below:  # TLS never says its own end
                    below.settimeout(60)
                    assert below.recv(1000) == b""


def test_where_both_sides_show_certificates_a_secret_is_not_enough(certificate):
    both = {"certificate": certificate, "client_certificates": certificate}
    with ShufflerService(Shuffler(SUMS), clients=CLIENTS, server=SERVER, **both).start() as service:
        trusting = functools.partial(
            RemoteShuffler, service.url, SERVER, certificate=certificate, attempts=1
        )
        trusting(own_certificate=certificate).open_round(1, SUMS.fingerprint)
        with pytest.raises(OSError, match="no shuffler at"):
            trusting().open_round(2, SUMS.fingerprint)


FILES = {"settings": json.dumps(SUMS.settings), "secrets": "\n".join(CLIENTS), "server": SERVER}
PART = '[{"url": "https://x", "secret-file": "server.txt", "own-certificate": "no.pem"}]'


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"settings": "{"}, "settings.txt is not a JSON file"),
        (
            {"settings": json.dumps({**SUMS.settings, "kind": "shared_sum_reports"})},
            "--book is missing",
        ),
        ({"settings": json.dumps({**SUMS.settings, "maxnorm": 1})}, "did you mean max_norm"),
        ({"secrets": "\n".join(CLIENTS[:3])}, "got 3"),
        ({"server": "\n".join(CLIENTS)}, "server must be a secret"),
        ({"server": None}, "server.txt"),
        ({"shards": '["https://elsewhere"]'}, "shards.txt must be a list of shufflers"),
        ({"shards": "["}, "shards.txt is not a JSON file"),
        (
            {"shards": '[{"url": "https://x", "certifcate": "x"}]'},
            "certifcate=.x.; .*did you mean certificate",
        ),
        ({"shards": PART}, "own_certificate='no.pem' cannot be used"),
        ({"book": "{}"}, "--book is for an aggregator"),
    ],
)
def test_the_command_says_in_a_line_what_is_wrong_with_its_files(
    tmp_path, monkeypatch, capsys, changed, said
):
    monkeypatch.chdir(tmp_path)
    for name, content in {**FILES, **changed}.items():
        if content is not None:
            (tmp_path / f"{name}.txt").write_text(content)
    flags = {"--settings": "settings", "--secrets": "secrets", "--server-secret": "server"}
    flags |= {f"--{name}": name for name in ("shards", "book") if name in changed}
    with pytest.raises(SystemExit):
        main([f"{flag}={tmp_path / name}.txt" for flag, name in flags.items()])
    assert re.search(said, capsys.readouterr().err)


def test_every_flag_of_the_command_reaches_the_service(tmp_path, monkeypatch):
    stop = Mock(side_effect=ValueError("the test has seen enough"))
    monkeypatch.setattr("opacus_shuffle.federated.serve.ShufflerService", stop)
    shared = json.dumps({**SUMS.settings, "kind": "shared_sum_reports"})
    shards = json.dumps([{"url": "https://x", "secret-file": str(tmp_path / "server")}])
    for name, content in {**FILES, "shared": shared, "shards": shards}.items():
        (tmp_path / name).write_text(content)
    files = {"--settings": "shared", "--secrets": "secrets", "--server-secret": "server"}
    expected = {
        **{"certificate": "a.crt", "key": "a.key", "client_certificates": "ca.crt"},
        **{"host": "shuffler.example", "port": 7, "most_connections": 8, "seconds": 9.5},
    }
    with pytest.raises(SystemExit):
        main(
            [f"{flag}={tmp_path / name}" for flag, name in files.items()]
            + [f"--{name.replace('_', '-')}={value}" for name, value in expected.items()]
            + [f"--book={tmp_path / 'book'}", "--no-metrics"]
        )
    assert stop.call_args.args[0].book.path == tmp_path.resolve() / "book"
    parties = {"clients": CLIENTS, "server": SERVER}
    assert stop.call_args.kwargs == {**expected, **parties, "metrics": False}
    files |= {"--settings": "settings", "--shards": "shards"}
    with pytest.raises(SystemExit):
        main([*(f"{flag}={tmp_path / name}" for flag, name in files.items()), "--shard"])
    shuffler = stop.call_args.args[0]
    assert ([each.url for each in shuffler.shards], shuffler.is_shard) == (["https://x"], True)
