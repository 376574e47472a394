"""A shuffler behind its network interface is the shuffler itself, to those who show their secret, and over TLS."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import ipaddress
import socket
import time

import pytest
import torch
from helpers.federation import CLIENTS, SERVER, SUMS, ledger_of

from opacus_shuffle.federated import RefusedReportError, Reporter, Shuffler
from opacus_shuffle.federated.shuffler import UnknownRoundError
from opacus_shuffle.federated.shuffler_service import FarShuffler, ShufflerService


@pytest.fixture
def service():
    with ShufflerService(Shuffler(SUMS), clients=CLIENTS, server=SERVER) as found:
        yield found.start()
        found.shutdown()


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
        assert ledger.run(collect, lambda total: total).num_reports == 20
        assert ledger.result.shape == (3,)
    assert len(ledger.accountant) == 2


def test_a_far_shuffler_says_why_it_takes_nothing(service):
    server, client = FarShuffler(service.url, SERVER), FarShuffler(service.url, CLIENTS[0])
    with pytest.raises(RefusedReportError, match="the open one is None"):
        client.submit(SUMS.encode(1, None))
    server.open_round(1, SUMS.fingerprint)
    with pytest.raises(RefusedReportError, match="bytes"):
        client.submit(b"junk")
    with pytest.raises(ValueError, match="413"):
        client.submit(b"junk" * 1000)
    for forbidden in (
        lambda: client.close_round(1),
        lambda: FarShuffler(service.url, "x" * 20).submit(SUMS.encode(1, None)),
    ):
        with pytest.raises(ValueError, match="403"):
            forbidden()
    with pytest.raises(ValueError, match="403"):
        server.submit(SUMS.encode(1, None))
    with pytest.raises(UnknownRoundError, match="round 9 is not open"):
        server.close_round(9)
    with pytest.raises(ValueError, match="400"):
        server.open_round(0, SUMS.fingerprint)


def test_what_the_server_gets_names_no_sender(service):
    """Not their secrets, nor hashes of these, nor the order in which they came: one sum per coordinate, whoever reported."""
    server = FarShuffler(service.url, SERVER)
    server.open_round(1, SUMS.fingerprint)
    for secret in CLIENTS:
        FarShuffler(service.url, secret).submit(SUMS.encode(1, None))
    assert [len(part) for part in server.close_round(1).mixed] == [8 * 3]
    assert service.shuffler.waiting() == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clients": ["short", *CLIENTS[:15]]}, "each of clients must be a secret"),
        ({"clients": ["with a blank in it", *CLIENTS[:15]]}, "each of clients must be a secret"),
        ({"clients": CLIENTS[:10] * 2}, "no two the same"),
        ({"clients": [SERVER, *CLIENTS[:15]]}, "no two the same"),
        ({"clients": CLIENTS[:9]}, "clients must be 10 to 20 secrets"),
        ({"clients": [*CLIENTS, "the-secret-of-one-more"]}, "clients must be 10 to 20 secrets"),
        ({"clients": CLIENTS, "certificate": "shuffler.crt"}, "certificate"),
        ({"clients": CLIENTS, "certificate": "no.crt", "key": "no.key"}, "cannot be used"),
        ({"clients": CLIENTS, "host": "0.0.0.0"}, "host='0.0.0.0' takes a certificate"),
        ({"clients": CLIENTS, "port": -1}, "port"),
        ({"clients": CLIENTS, "deadline": 0.0}, "deadline"),
        ({"clients": CLIENTS, "most_connections": 0}, "most_connections"),
    ],
)
def test_a_service_with_bad_secrets_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        ShufflerService(Shuffler(SUMS), server=SERVER, **options)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org:9095",
        "http://127.0.0.1:9095@example.org",
        "ftp://127.0.0.1",
        "127.0.0.1",
    ],
)
def test_reports_do_not_travel_in_the_open(url):
    with pytest.raises(ValueError, match="https"):
        FarShuffler(url, SERVER)


def connected(service: ShufflerService, request: bytes = b"P") -> socket.socket:
    """A connection over which this was sent, and nothing else; who waits a minute for its answer waits in vain."""
    client = socket.create_connection(service.server_address[:2], timeout=60)
    client.sendall(request)
    return client


def headers(secret: str, path: str = "/report", length: int = SUMS.report_size) -> bytes:
    """Of a request whose content is yet to come."""
    return f"POST {path} HTTP/1.1\r\nAuthorization: Bearer {secret}\r\nContent-Length: {length}\r\n\r\n".encode()


def ended(client: socket.socket) -> bool:
    """Whether the service has ended a connection, as far as can be seen now."""
    client.setblocking(False)
    try:
        while client.recv(1000):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (headers("x" * 20), 403),
        (headers(SERVER), 403),
        (headers(CLIENTS[0], "/rounds/1/close"), 403),
        (headers(CLIENTS[0]).replace(b"Bearer", b"Basic"), 401),
        (headers(CLIENTS[0], length=SUMS.report_size + 1), 413),
    ],
)
def test_who_may_not_ask_is_answered_before_its_content_is_read(service, request_, status):
    """It never comes: who waits for it does not answer."""
    with connected(service, request_) as client:
        assert f"HTTP/1.1 {status} ".encode() in client.recv(1000)


def test_300_silent_connections_keep_nobody_out(service):
    service.most_connections = 20
    silent = [connected(service) for _ in range(300)]
    server = FarShuffler(service.url, SERVER, attempts=1)
    server.open_round(1, SUMS.fingerprint)
    FarShuffler(service.url, CLIENTS[0], attempts=1).submit(SUMS.encode(1, None))
    assert service.shuffler.waiting() == 1
    assert sum(not ended(each) for each in silent) <= 20  # and so many threads there are
    for each in silent:
        each.close()


def recognised(service: ShufflerService, secret: str) -> socket.socket:
    """A connection of which the service has noted whose it is, while it waits for the content."""
    earlier, later = connected(service, headers(secret)), connected(service, headers(secret))
    assert earlier.recv(1000) == b""  # one place for a secret: so that of the later one is noted
    return later


def test_where_no_place_is_free_newcomers_are_closed_and_may_ask_again(service):
    first = [recognised(service, secret) for secret in CLIENTS[:3]]
    service.most_connections = 3
    with pytest.raises(ConnectionError, match="after 1 attempts"):
        FarShuffler(service.url, SERVER, attempts=1).open_round(1, SUMS.fingerprint)
    for client in first:
        client.close()
    FarShuffler(service.url, SERVER, attempts=20).open_round(1, SUMS.fingerprint)


def test_newcomers_take_the_places_of_strangers_and_never_of_who_has_shown_a_secret(service):
    service.most_connections = 4
    service.shuffler.open_round(1)
    known = [recognised(service, secret) for secret in CLIENTS[:2]]
    strangers = [connected(service) for _ in range(20)]
    FarShuffler(service.url, CLIENTS[2], attempts=1).submit(
        SUMS.encode(1, None)
    )  # is taken after all of them
    assert sum(not ended(stranger) for stranger in strangers) <= 2
    for client in known:
        client.sendall(SUMS.encode(1, None))
        assert client.recv(1000).startswith(b"HTTP/1.1 204 ")
    assert service.shuffler.waiting() == 3


@pytest.mark.parametrize(
    "request_", [b"", b"P", headers(CLIENTS[0])], ids=["silent", "a byte", "a client"]
)
def test_a_request_that_does_not_come_in_time_is_hung_up_on(service, request_):
    service.deadline = 0.01
    with connected(service, request_) as client:
        assert client.recv(1000) == b""


def test_a_byte_now_and_then_does_not_move_the_deadline(service):
    """Each byte comes sooner than any time-out; a header may have more of them than are sent here."""
    service.deadline = 0.2
    with connected(service) as client:
        for _ in range(3000):
            if ended(client):
                return
            with contextlib.suppress(ConnectionError):
                client.sendall(b"P")
            time.sleep(0.01)
    raise AssertionError("after 3,000 bytes the connection is still there")


def test_the_time_that_a_round_takes_to_be_mixed_is_not_the_server_s():
    class Slow(Shuffler):
        def close_round(self, number):
            service.deadline = 1e-9
            service.service_actions()
            return super().close_round(number)

    with ShufflerService(Slow(SUMS), clients=CLIENTS, server=SERVER) as service:
        service.start()
        server = FarShuffler(service.url, SERVER, attempts=1)
        server.open_round(1, SUMS.fingerprint)
        assert server.close_round(1).dropped
        service.shutdown()


def certificate_of_this_machine(folder) -> tuple[str, str]:
    """Files of a certificate that it has signed itself, and of its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, nothing = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "crt").write_bytes(made.public_bytes(pem))
    (folder / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, nothing))
    return str(folder / "crt"), str(folder / "key")


def test_over_tls_a_certificate_is_asked_for_and_silent_clients_hold_up_nobody(tmp_path):
    certificate, key = certificate_of_this_machine(tmp_path)
    with ShufflerService(
        Shuffler(SUMS), clients=CLIENTS, server=SERVER, certificate=certificate, key=key
    ) as service:
        service.start()
        assert service.url.startswith("https://")
        silent = [socket.create_connection(service.server_address[:2]) for _ in range(5)]
        server = FarShuffler(service.url, SERVER, certificate=certificate)
        server.open_round(1, SUMS.fingerprint)
        for secret in CLIENTS:
            FarShuffler(service.url, secret, certificate=certificate).submit(SUMS.encode(1, None))
        assert server.close_round(1).num_reports == len(CLIENTS)
        with pytest.raises(OSError, match="certificate"):
            FarShuffler(service.url, SERVER, attempts=1).open_round(2, SUMS.fingerprint)
        for each in silent:
            each.close()
        service.shutdown()
