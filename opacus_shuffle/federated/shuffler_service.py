r"""``ShufflerService``: a shuffler in a process of its own, behind HTTP with TLS or local.

* ``POST /report``: from a client, one report. 204, or 400 and why it is not taken.
* ``POST /rounds/R/open``: from the server, the fingerprint of its format (8 bytes). 204, or 400 and
  why not.
* ``POST /rounds/R/close``: from the server. 200, and how many clients reported (4 bytes,
  little-endian), then what was mixed; 404 if there is no such round.
* ``POST /rounds/R/forget``: from the server. 204.

Everyone shows a secret of its own, ``Authorization: Bearer SECRET``: a client's says who it is, to
the shuffler alone, which keeps hashes of them; the server's opens and closes rounds, and takes no
part in any. Who shows no such secret, or another party's, is answered 403, and who announces more
than a report 413. A connection is for one request. So many may wait for theirs to come: the next
one takes the place of the oldest.

The process is started by ``python -m opacus_shuffle.federated.serve``, whose ``--help`` names the
files it reads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import random
import socket
import ssl
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opacus_shuffle.core.validation import instance_of, integer, positive
from opacus_shuffle.federated.shuffler import (
    RefusedReportError,
    Released,
    Shuffler,
    UnknownRoundError,
)

_HERE = ("127.0.0.1", "localhost")
SHORTEST_SECRET = 16
"""Characters of a secret, at least."""
_SERVER = "the server"
"""What the server is called among the parties; clients are called by their numbers."""


def checked_secret(name: str, secret: Any) -> str:
    """Returns a secret without white space around it, or refuses it without showing it."""
    stripped: str = instance_of(name, secret, (str,)).strip()
    if (
        len(stripped) < SHORTEST_SECRET
        or not stripped.isascii()
        or not stripped.isprintable()
        or " " in stripped
    ):
        raise ValueError(
            f"{name} must be a secret of {SHORTEST_SECRET} letters and digits at least, in one "
            "line: make it with "
            "python -c 'import secrets; print(secrets.token_hex())'"
        )
    return stripped


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class ShufflerService(ThreadingHTTPServer):
    """Serves one shuffler over HTTP until :meth:`shutdown`.

    Args:
        shuffler: What reports go to.
        clients: The clients' secrets, one each: no more than the format has users, no fewer than a
            round needs.
        server: The server's secret.
        host: Where to listen.
        port: 0 for any free one; :attr:`url` says which.
        certificate: File of a TLS certificate; None for a connection that anyone on its way can
            read, which is for one machine.
        key: File of its key; None if the certificate's file has it, too.
        most_connections: So many may wait for their requests to come.

    Raises:
        ValueError: If a secret is unfit or is two parties', there are too many or too few clients,
            or there is no certificate where there is a key or other machines can reach the service.
    """

    daemon_threads = True
    request_queue_size = 4096  # all clients of a round may come at once

    def __init__(
        self,
        shuffler: Shuffler,
        *,
        clients: Iterable[str],
        server: str,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        most_connections: int = 512,
    ) -> None:
        self.most_connections = integer("most_connections", most_connections)
        # Connections whose requests have not come, the oldest first.
        self._waiting: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.shuffler = instance_of("shuffler", shuffler, (Shuffler,))
        secrets = [
            *(checked_secret("each of clients", secret) for secret in clients),
            checked_secret("server", server),
        ]
        if len(set(secrets)) < len(secrets):
            raise ValueError(
                "clients and server must have a secret each, and no two the same one: make as many "
                "as there are"
            )
        format, count = shuffler.format, len(secrets) - 1
        if not format.min_reports <= count <= format.num_users:
            raise ValueError(
                f"clients must be {format.min_reports} to {format.num_users} secrets, as the "
                "format says (min_reports, "
                f"num_users), got {count}: more clients may hold more dishonest ones than are "
                "accounted for"
            )
        if certificate is None and (key is not None or host not in _HERE):
            raise ValueError(
                f"host={host!r} with key={key!r} takes a certificate: else whoever is on the way "
                f"sees who reports; without both the host is {_HERE[0]}"
            )
        context = None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                context.load_cert_chain(certificate, key)
            except OSError as error:
                raise ValueError(
                    f"certificate={str(certificate)!r} and key={str(key)!r} cannot be used: {error}"
                ) from None
        self.parties = {_hash(secret): str(number) for number, secret in enumerate(secrets)}
        self.parties[_hash(secrets[-1])] = _SERVER
        super().__init__(
            (instance_of("host", host, (str,)), integer("port", port, minimum=0, maximum=65535)),
            _Handler,
        )
        if context is not None:
            # The handshake waits for the thread of its request, so that a client that says nothing
            # holds up nobody.
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"{'http' if certificate is None else 'https'}://{host}:{self.server_address[1]}"

    def start(self) -> ShufflerService:
        """Serves in a thread of this process."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own; closes the oldest one if there are too many.

        So whoever floods the service has to open as many connections as it has places in the time
        that an honest client takes for its request.
        """
        with self._lock:
            if len(self._waiting) >= self.most_connections:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with contextlib.suppress(OSError):  # it has ended already
                    # The socket below TLS, in which its thread may be reading; the thread then
                    # ends by itself.
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
            self._waiting[request] = None
        super().process_request(request, client_address)

    def heard(self, request: socket.socket) -> None:
        """Notes that a connection's request has arrived, so that it no longer counts as waiting."""
        with self._lock:
            self._waiting.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Notes that a connection has ended."""
        self.heard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error of this program, without saying who sent what when."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            print(f"a request failed: {type(error).__name__}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    """Answers one HTTP request."""

    server: ShufflerService
    protocol_version = "HTTP/1.1"
    timeout = 20  # seconds that a client may say nothing

    def do_POST(self) -> None:
        """Answers a POST request; the module's table lists them."""
        self.close_connection = True
        longest = self.server.shuffler.format.report_size
        length = self.headers.get("Content-Length", "")
        if not _is_number(length) or int(length) > longest:
            self._answer(413, b"Content-Length must be that of a report at most, %d" % longest)
            # What still comes is thrown away, lest the answer be lost with the connection.
            socket.socket.shutdown(self.connection, socket.SHUT_WR)
            left = longest + 65536
            while left > 0 and (thrown := self.rfile.read1(min(left, 65536))):
                left -= len(thrown)
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            return  # it was cut off
        self.server.heard(self.connection)
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        party = self.server.parties.get(_hash(shown))
        if party is None or (party == _SERVER) == (self.path == "/report"):
            return self._answer(403, b"clients report, and the server has rounds; show your secret")
        try:
            content = self._act(party, body)
        except UnknownRoundError as error:
            return self._answer(404, str(error).encode())
        except ValueError as error:
            return self._answer(400, str(error).encode())
        self._answer(200 if content else 204, content)

    def _act(self, party: str, body: bytes) -> bytes:
        """Does what the request asks of the shuffler, and returns the answer's content."""
        shuffler = self.server.shuffler
        match self.path.split("/"):
            case ["", "report"]:
                shuffler.submit(party, body)
            case ["", "rounds", number, "open"] if _is_number(number):
                shuffler.open_round(int(number), body)
            case ["", "rounds", number, "close"] if _is_number(number):
                released = shuffler.close_round(int(number))
                return released.num_reports.to_bytes(4, "little") + released.mixed
            case ["", "rounds", number, "forget"] if _is_number(number):
                shuffler.forget_round(int(number))
            case _:
                raise UnknownRoundError("no such request")
        return b""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        if body:  # an answer of 204 has no length
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: who sent when is not written down."""


def _is_number(text: str) -> bool:
    """Tells whether a text is a number of few digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 12


class FarShuffler:
    """A client's or the server's view of a :class:`ShufflerService` elsewhere.

    Args:
        url: ``https://host:port``. ``http://`` is taken for this machine alone.
        secret: The client's, or the server's.
        certificate: File of the certificates to trust; by default the system's.
        timeout: Seconds to wait for an answer.
        attempts: How often to ask where the network fails or the shuffler has no place free: a
            report that came twice is taken once.
    """

    simulated, predictable = False, ()
    """It is a process of its own, and its randomness is not seen from here."""

    def __init__(
        self,
        url: str,
        secret: str,
        *,
        certificate: str | Path | None = None,
        timeout: float = 60.0,
        attempts: int = 4,
    ) -> None:
        parts = urllib.parse.urlsplit(instance_of("url", url, (str,)))
        far = parts.scheme == "https"
        if not (far and parts.hostname) and not (
            parts.scheme == "http" and parts.hostname in _HERE
        ):
            raise ValueError(
                f"url must begin with https://, got {url!r}: else whoever is on the way sees who "
                "reports"
            )
        self.url, self._secret = url.rstrip("/"), checked_secret("secret", secret)
        self.attempts, self._path = integer("attempts", attempts), parts.path.rstrip("/")
        address = {"host": parts.hostname, "port": parts.port}
        options: dict[str, Any] = {**address, "timeout": positive("timeout", timeout)}
        connection: Any = http.client.HTTPConnection
        if far:
            try:
                options["context"] = ssl.create_default_context(cafile=certificate)
            except OSError as error:
                raise ValueError(
                    f"certificate={str(certificate)!r} cannot be used: {error}"
                ) from None
            connection = http.client.HTTPSConnection
        # No redirection is followed and no proxy asked: the secret is for one shuffler.
        self._connect = functools.partial(connection, **options)

    def submit(self, report: bytes) -> None:
        """Sends this client's report.

        Raises:
            RefusedReportError: If it is not taken.
        """
        self._ask("/report", report, refused=RefusedReportError)

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Begins to take reports of a round; see :meth:`Shuffler.open_round`."""
        self._ask(f"/rounds/{number}/open", fingerprint)

    def close_round(self, number: int) -> Released:
        """Gets a round; see :meth:`Shuffler.close_round`."""
        content = self._ask(f"/rounds/{number}/close")
        return Released(number, int.from_bytes(content[:4], "little"), content[4:])

    def forget_round(self, number: int) -> None:
        """Has the service destroy what it handed over; see :meth:`Shuffler.forget_round`."""
        self._ask(f"/rounds/{number}/forget")

    def _ask(self, path: str, body: bytes = b"", refused: type[ValueError] = ValueError) -> bytes:
        """Sends a request, each time over a connection of its own, and returns the answer."""
        for attempts_left in reversed(range(self.attempts)):
            try:
                with contextlib.closing(self._connect()) as connection:
                    shown = {"Authorization": f"Bearer {self._secret}"}
                    connection.request("POST", self._path + path, body, shown)
                    answer = connection.getresponse()
                    content = answer.read()
                break
            except (OSError, http.client.HTTPException) as error:
                if not attempts_left:
                    raise ConnectionError(
                        f"no shuffler at {self.url} after {self.attempts} attempts: {error!r}"
                    ) from error
                time.sleep(random.SystemRandom().uniform(0.1, 1.0))  # not all clients at once again
        if answer.status not in (200, 204):
            kind = UnknownRoundError if answer.status == 404 else refused
            raise kind(f"the shuffler answers {answer.status}: {content.decode(errors='replace')}")
        return content
