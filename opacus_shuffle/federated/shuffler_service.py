r"""A shuffler in a process of its own, behind a small network interface: HTTP, with TLS unless it is told otherwise.

* ``POST /report``: from a client, one report. 204, or 400 and why it is not taken.
* ``POST /rounds/R/open``: from the server, the fingerprint of its format (8 bytes). 204, or 400 and why not.
* ``POST /rounds/R/close``: from the server. 200, and how many reports (4 bytes) in how many parts (4 bytes), then of each part
  the length (8 bytes) and the content; 404 if there is no such round.
* ``POST /rounds/R/forget``: from the server. 204.

Numbers are little-endian. Everyone shows a secret of its own, ``Authorization: Bearer SECRET``: a client's says who it is, to
the shuffler alone, which keeps hashes of them; the server's opens and closes rounds, and takes no part in any. Who shows no
such secret is answered before any content is read: 401 without one, 403 with nobody's or another party's, 413 for more than a
report. A connection is for one request, which must have come within a deadline. There are so many at most: the next one takes
the place of the oldest that has shown no secret for a second, else hears 503. Of one party's only the latest is waited for.

The process is started by ``python -m opacus_shuffle.federated.serve``, whose ``--help`` names the files it reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import random
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opacus_shuffle.core.validation import instance_of, integer, positive
from opacus_shuffle.federated.shuffler import RefusedReportError, Released, Shuffler, UnknownRoundError

_HERE = ("127.0.0.1", "localhost")
_COUNTS, _LENGTH = struct.Struct("<II"), struct.Struct("<Q")
SHORTEST_SECRET = 16
"""Characters of a secret, at least."""
_LONGEST_NUMBER = 12
"""Digits of a number in a request."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


def checked_secret(name: str, secret: Any) -> str:
    """A secret as it travels, without white space around it; the message of a refusal does not show it."""
    stripped: str = instance_of(name, secret, (str,)).strip()
    if len(stripped) < SHORTEST_SECRET or not stripped.isascii() or not stripped.isprintable() or " " in stripped:
        raise ValueError(
            f"{name} must be a secret of {SHORTEST_SECRET} letters and digits at least, in one line: make it with "
            "python -c 'import secrets; print(secrets.token_hex())'"
        )
    return stripped


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


@dataclasses.dataclass
class _Place:
    """An open connection: since when it is open, the hash of the secret that it has shown, and whether its request has come."""

    since: float
    party: bytes | None = None
    heard: bool = False


class ShufflerService(ThreadingHTTPServer):
    """Serves one shuffler until :meth:`shutdown`.

    Args:
        shuffler: What reports go to.
        clients: The clients' secrets, one each: no more than the format has users, no fewer than a round needs.
        server: The server's secret.
        host: Where to listen.
        port: 0 for any free one; :attr:`url` says which.
        certificate: File of a TLS certificate; None for a connection that anyone on its way can read, which is for one machine.
        key: File of its key.
        deadline: Seconds for a whole request to come, from the first byte of the connection to the last of the content.
        most_connections: More are not open at once.

    Raises:
        ValueError: If a secret is unfit or is two parties', there are too many or too few clients, there is only one of
            certificate and key, or none of them where other machines can reach the service.
    """

    daemon_threads = True
    request_queue_size = 4096  # all clients of a round may come at once
    grace = 1.0  # seconds in which nobody takes the place of a connection that has shown no secret

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
        deadline: float = 30.0,
        most_connections: int = 512,
    ) -> None:
        self.deadline, self.most_connections = positive("deadline", deadline), integer("most_connections", most_connections)
        self._places: dict[socket.socket, _Place] = {}  # in the order in which they came
        self._lock = threading.RLock()
        self.shuffler = instance_of("shuffler", shuffler, (Shuffler,))
        secrets = [*(checked_secret("each of clients", each) for each in clients), checked_secret("server", server)]
        if len(set(secrets)) < len(secrets):
            raise ValueError("clients and server must have a secret each, and no two the same one: make as many as there are")
        format, count = shuffler.format, len(secrets) - 1
        if not format.fewest_reports <= count <= format.num_users:
            raise ValueError(
                f"clients must be {format.fewest_reports} to {format.num_users} secrets, as the format says (min_reports, "
                f"num_users), got {count}: more clients may hold more dishonest ones than are accounted for"
            )
        if (certificate is None) != (key is None):
            raise ValueError(f"certificate={certificate!r} and key={key!r} go together: pass both, or neither on one machine")
        if certificate is None and host not in _HERE:
            raise ValueError(
                f"host={host!r} takes a certificate: else whoever is on the way sees who reports; or use {_HERE[0]}"
            )
        context = None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                context.load_cert_chain(certificate, key)
            except OSError as error:
                raise ValueError(f"certificate={str(certificate)!r} and key={str(key)!r} cannot be used: {error}") from None
        self._server = _hash(secrets[-1])
        self._clients = {_hash(each): str(number) for number, each in enumerate(secrets[:-1])}
        super().__init__((instance_of("host", host, (str,)), integer("port", port, minimum=0, maximum=65535)), _Handler)
        if context is not None:
            # The handshake waits for the thread of its request, so that a client that says nothing holds up nobody.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'http' if certificate is None else 'https'}://{host}:{self.server_address[1]}"

    def start(self) -> ShufflerService:
        """Serves in a thread of this process."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def sender(self, secret: str) -> str | None:
        """Which client shows this secret."""
        return self._clients.get(_hash(secret))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own, if there is a place for it."""
        now = time.monotonic()
        with self._lock:
            full = len(self._places) >= self.most_connections
            oldest = next((one for one, place in self._places.items() if place.party is None), None)
            if full and (oldest is None or now - self._places[oldest].since < self.grace):
                with contextlib.suppress(OSError):
                    if not isinstance(request, ssl.SSLSocket):  # whose client hears nothing before its handshake
                        request.setblocking(False)
                        request.send(_FULL)
                return self.shutdown_request(request)
            if full and oldest is not None:
                self._hang_up(oldest)
            self._places[request] = _Place(now)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hangs up, twice a second or more often, on those whose request has not come in time."""
        latest = time.monotonic() - self.deadline
        with self._lock:
            for each in [one for one, place in self._places.items() if not place.heard and place.since < latest]:
                self._hang_up(each)

    def shutdown_request(self, request: Any) -> None:
        """Gives up the place of a connection that has ended."""
        with self._lock:
            self._places.pop(request, None)
        super().shutdown_request(request)

    def known(self, request: socket.socket, secret: str) -> None:
        """Notes that a connection has shown a party's secret, and ends older ones of it whose requests have not come."""
        party = _hash(secret)
        with self._lock:
            if request in self._places:
                self._places[request].party = party
            waiting = [each for each, place in self._places.items() if place.party == party and not place.heard]
            for older in waiting[:-1]:
                self._hang_up(older)

    def heard(self, request: socket.socket) -> None:
        """Notes that a connection's request has come: the time that its answer takes is the shuffler's own."""
        if (place := self._places.get(request)) is not None:
            place.heard = True

    def _hang_up(self, request: socket.socket) -> None:
        """Ends a connection; its thread finds that out by itself."""
        del self._places[request]
        with contextlib.suppress(OSError):  # it has ended already
            socket.socket.shutdown(request, socket.SHUT_RDWR)  # of TLS, too, in which its thread may be reading

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Names an error that is this program's, and not who sent what when."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            print(f"a request failed: {type(error).__name__}", file=sys.stderr)

    def is_server(self, secret: str) -> bool:
        """Whether the server shows this secret."""
        return hmac.compare_digest(_hash(secret), self._server)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: ShufflerService
    protocol_version = "HTTP/1.1"
    timeout = 20  # seconds that a client may say nothing

    def do_POST(self) -> None:
        """Answers; see the table above."""
        self.close_connection = True
        longest = self.server.shuffler.format.report_size
        length = self.headers.get("Content-Length", "")
        if not _is_number(length) or int(length) > longest:
            return self._refuse(413, f"say by Content-Length how long the content is; a report is {longest} bytes")
        kind, _, secret = self.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer":
            return self._refuse(401, "show your secret: Authorization: Bearer ...")
        sender = self.server.sender(secret) if self.path == "/report" else None
        if self.path == "/report" and sender is None:
            return self._refuse(403, "this is the secret of no client")
        if sender is None and not self.server.is_server(secret):
            return self._refuse(403, "this is not the secret of the server, whose rounds are")
        self.server.known(self.connection, secret)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            return None  # it was cut off
        self.server.heard(self.connection)
        if sender is not None:
            return self._take(sender, body)
        match self.path.split("/"):
            case ["", "rounds", number, act] if _is_number(number) and act in ("open", "close", "forget"):
                return self._round(int(number), act, body)
        return self._answer(404, b"no such request")

    def _take(self, sender: str, report: bytes) -> None:
        try:
            self.server.shuffler.submit(sender, report)
        except RefusedReportError as error:
            return self._answer(400, str(error).encode())
        return self._answer(204)

    def _refuse(self, status: int, why: str) -> None:
        """Answers before the content has come, and throws that away, lest the answer be lost with the connection."""
        self._answer(status, why.encode())
        socket.socket.shutdown(self.connection, socket.SHUT_WR)
        left = self.server.shuffler.format.report_size + 65536
        while left > 0 and (thrown := self.rfile.read1(min(left, 65536))):
            left -= len(thrown)

    def _round(self, number: int, act: str, body: bytes) -> None:
        shuffler = self.server.shuffler
        try:
            if act == "close":
                return self._answer(200, packed(shuffler.close_round(number)))
            if act == "open":
                shuffler.open_round(number, body)
            else:
                shuffler.forget_round(number)
        except UnknownRoundError as error:
            return self._answer(404, str(error).encode())
        except ValueError as error:
            return self._answer(400, str(error).encode())
        return self._answer(204)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: who sent when is not written down."""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER


def packed(released: Released) -> bytes:
    """A round on its way to the server."""
    parts = [_LENGTH.pack(len(each)) + each for each in released.mixed]
    return _COUNTS.pack(released.num_reports, len(released.mixed)) + b"".join(parts)


def unpacked(number: int, content: bytes) -> Released:
    """The reverse of :func:`packed`.

    Raises:
        ValueError: If the content was cut off.
    """
    try:
        reports, count = _COUNTS.unpack_from(content)
        parts, place = [], _COUNTS.size
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(content, place)
            place += _LENGTH.size + length
            parts.append(content[place - length : place])
    except struct.error:
        raise ValueError(f"the shuffler's answer of {len(content)} bytes was cut off: ask again") from None
    if place != len(content):
        raise ValueError(f"the shuffler's answer has {len(content)} bytes, {place} were announced: ask again")
    return Released(number, reports, tuple(parts))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: the secret is for one shuffler."""

    def redirect_request(self, *args: Any, **keywords: Any) -> None:
        """Leaves the answer as the error that it is."""


class FarShuffler:
    """A shuffler that is a :class:`ShufflerService`, seen from a client or from the server.

    Args:
        url: ``https://host:port``. ``http://`` is taken for this machine alone.
        secret: The client's, or the server's.
        certificate: File of the certificates to trust; by default the system's.
        timeout: Seconds to wait for an answer.
        attempts: How often to ask where the network fails or no place is free (503): a report that came twice is taken once.
    """

    simulated, predictable = False, ()
    """It is a process of its own, and its randomness is not seen from here."""

    def __init__(
        self, url: str, secret: str, *, certificate: str | Path | None = None, timeout: float = 60.0, attempts: int = 4
    ) -> None:
        parts = urllib.parse.urlsplit(instance_of("url", url, (str,)))
        far = parts.scheme == "https"
        if not (far and parts.hostname) and not (parts.scheme == "http" and parts.hostname in _HERE):
            raise ValueError(f"url must begin with https://, got {url!r}: else whoever is on the way sees who reports")
        self.url, self._secret = url.rstrip("/"), checked_secret("secret", secret)
        self.timeout, self.attempts = positive("timeout", timeout), integer("attempts", attempts)
        if far:
            try:
                context = ssl.create_default_context(cafile=certificate)
            except OSError as error:
                raise ValueError(f"certificate={str(certificate)!r} cannot be used: {error}") from None
            self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))
        else:  # what stays on this machine goes through no proxy
            self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))

    def submit(self, report: bytes) -> None:
        """Sends this client's report.

        Raises:
            RefusedReportError: If it is not taken.
        """
        self._ask("/report", report, {400: RefusedReportError})

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Begins to take reports of a round; see :meth:`Shuffler.open_round`."""
        self._ask(f"/rounds/{number}/open", fingerprint)

    def close_round(self, number: int) -> Released:
        """Gets a round; see :meth:`Shuffler.close_round`."""
        return unpacked(number, self._ask(f"/rounds/{number}/close", errors={404: UnknownRoundError}))

    def forget_round(self, number: int) -> None:
        """Has what was handed over destroyed; see :meth:`Shuffler.forget_round`."""
        self._ask(f"/rounds/{number}/forget")

    def _ask(self, path: str, body: bytes = b"", errors: dict[int, type[ValueError]] | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"Authorization": f"Bearer {self._secret}"}, method="POST")
        for left in reversed(range(self.attempts)):
            try:
                with self._opener.open(request, timeout=self.timeout) as answer:
                    content: bytes = answer.read()
                    if answer.status not in (200, 204):
                        raise ValueError(f"{self.url} answers {answer.status}, as no shuffler does: is it one?")
                    return content
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code != 503:
                    kind = (errors or {}).get(error.code, ValueError)
                    with contextlib.suppress(OSError, http.client.HTTPException):  # the code says enough
                        raise kind(f"the shuffler answers {error.code}: {error.read().decode(errors='replace')}") from None
                    raise kind(f"the shuffler answers {error.code}, and no more of it came") from None
                if not left:
                    raise ConnectionError(f"no shuffler at {self.url} after {self.attempts} attempts: {error!r}") from error
                time.sleep(random.SystemRandom().uniform(0.1, 1.0))  # not all clients at once again
        raise AssertionError("there is a last attempt")
