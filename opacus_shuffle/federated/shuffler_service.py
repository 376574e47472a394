r"""A shuffler in a process of its own, behind a small network interface: HTTP, with TLS unless it is told otherwise.

* ``POST /report``: from a client, one report. 204, or 400 and why it is not taken.
* ``POST /rounds/R/open``: from the server, the fingerprint of its format (8 bytes). 204, or 400 and
  why not.
* ``POST /rounds/R/close``: from the server. 200, and how many reports (4 bytes) in how many parts
  (4 bytes), then of each part the length (8 bytes) and the content; 404 if there is no such round.
* ``POST /rounds/R/forget``: from the server. 204.

Numbers are little-endian. Everyone shows a secret of its own, ``Authorization: Bearer SECRET``: a
client's says who it is, to the shuffler alone, which keeps hashes of them; the server's opens and
closes rounds, and takes no part in any. Who shows no such secret is answered before any content is
read: 401 without one, 403 with nobody's or another party's, 413 for more than a report. A
connection is for one request, which must have come within a deadline. There are so many at most:
the next one takes the place of the oldest that has shown no secret, else is closed at once. Of one
party's only the latest is waited for.

The process is started by ``python -m opacus_shuffle.federated.serve``, whose ``--help`` names the
files it reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import random
import socket
import ssl
import struct
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
_COUNTS, _LENGTH = struct.Struct("<II"), struct.Struct("<Q")
SHORTEST_SECRET = 16
"""Characters of a secret, at least."""
_LONGEST_NUMBER = 12
"""Digits of a number in a request."""
_SERVER = "the server"
"""What the server is called among the parties; clients are called by their numbers."""


def checked_secret(name: str, secret: Any) -> str:
    """A secret as it travels, without white space around it; the message of a refusal does not show it."""
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


@dataclasses.dataclass
class _Place:
    """An open connection: since when it is open, whose secret it has shown, and whether its request has come."""

    since: float
    party: str | None = None
    heard: bool = False


class ShufflerService(ThreadingHTTPServer):
    """Serves one shuffler until :meth:`shutdown`.

    Args:
        shuffler: What reports go to.
        clients: The clients' secrets, one each: no more than the format has users, no fewer than a
            round needs.
        server: The server's secret.
        host: Where to listen.
        port: 0 for any free one; :attr:`url` says which.
        certificate: File of a TLS certificate; None for a connection that anyone on its way can
            read, which is for one machine.
        key: File of its key.
        deadline: Seconds for a whole request to come, from the first byte of the connection to the
            last of the content.
        most_connections: More are not open at once.

    Raises:
        ValueError: If a secret is unfit or is two parties', there are too many or too few clients,
            there is only one of certificate and key, or none of them where other machines can reach
            the service.
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
        deadline: float = 30.0,
        most_connections: int = 512,
    ) -> None:
        self.deadline, self.most_connections = (
            positive("deadline", deadline),
            integer("most_connections", most_connections),
        )
        self._places: dict[socket.socket, _Place] = {}  # in the order in which they came
        self._lock = threading.RLock()
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
        if not format.fewest_reports <= count <= format.num_users:
            raise ValueError(
                f"clients must be {format.fewest_reports} to {format.num_users} secrets, as the "
                "format says (min_reports, "
                f"num_users), got {count}: more clients may hold more dishonest ones than are "
                "accounted for"
            )
        if (certificate is None) != (key is None):
            raise ValueError(
                f"certificate={certificate!r} and key={key!r} go together: pass both, or neither "
                "on one machine"
            )
        if certificate is None and host not in _HERE:
            raise ValueError(
                f"host={host!r} takes a certificate: else whoever is on the way sees who reports; "
                f"or use {_HERE[0]}"
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
        self._parties = {_hash(secret): str(number) for number, secret in enumerate(secrets)}
        self._parties[_hash(secrets[-1])] = _SERVER
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

    def party(self, secret: str) -> str | None:
        """Names the party that has this secret; None if nobody has."""
        return self._parties.get(_hash(secret))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread of its own, if there is a place for it."""
        with self._lock:
            if len(self._places) >= self.most_connections:
                # Strangers leave in the order in which they came. So whoever floods the service
                # has to open this many connections while an honest client shows its secret.
                stranger = next(
                    (one for one, place in self._places.items() if place.party is None), None
                )
                if stranger is None:
                    return self.shutdown_request(request)
                self._hang_up(stranger)
            self._places[request] = _Place(time.monotonic())
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Hangs up, twice a second or more often, on those whose request has not come in time."""
        latest = time.monotonic() - self.deadline
        with self._lock:
            for late in [
                one
                for one, place in self._places.items()
                if not place.heard and place.since < latest
            ]:
                self._hang_up(late)

    def shutdown_request(self, request: Any) -> None:
        """Gives up the place of a connection that has ended."""
        with self._lock:
            self._places.pop(request, None)
        super().shutdown_request(request)

    def known(self, request: socket.socket, party: str) -> None:
        """Notes whose secret a connection has shown, and ends older ones of the party whose requests have not come."""
        with self._lock:
            if request in self._places:
                self._places[request].party = party
            waiting = [
                one
                for one, place in self._places.items()
                if place.party == party and not place.heard
            ]
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
            socket.socket.shutdown(
                request, socket.SHUT_RDWR
            )  # of TLS, too, in which its thread may be reading

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Names an error that is this program's, and not who sent what when."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            print(f"a request failed: {type(error).__name__}", file=sys.stderr)


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
            return self._refuse(
                413, f"say by Content-Length how long the content is; a report is {longest} bytes"
            )
        kind, _, secret = self.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer":
            return self._refuse(401, "show your secret: Authorization: Bearer ...")
        party = self.server.party(secret)
        if party is None or (party == _SERVER) == (self.path == "/report"):
            who = (
                "a client, who reports"
                if self.path == "/report"
                else "the server, whose rounds are"
            )
            return self._refuse(403, f"this is not the secret of {who}")
        self.server.known(self.connection, party)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            return None  # it was cut off
        self.server.heard(self.connection)
        try:
            content = self._act(party, body)
        except UnknownRoundError as error:
            return self._answer(404, str(error).encode())
        except ValueError as error:
            return self._answer(400, str(error).encode())
        return self._answer(200, content) if content else self._answer(204)

    def _act(self, party: str, body: bytes) -> bytes:
        """Has the shuffler do what the request asks for, and returns the content of the answer."""
        shuffler = self.server.shuffler
        match self.path.split("/"):
            case ["", "report"]:
                shuffler.submit(party, body)
            case ["", "rounds", number, "open"] if _is_number(number):
                shuffler.open_round(int(number), body)
            case ["", "rounds", number, "close"] if _is_number(number):
                return packed(shuffler.close_round(int(number)))
            case ["", "rounds", number, "forget"] if _is_number(number):
                shuffler.forget_round(int(number))
            case _:
                raise UnknownRoundError("no such request")
        return b""

    def _refuse(self, status: int, why: str) -> None:
        """Answers before the content has come, and throws that away, lest the answer be lost with the connection."""
        self._answer(status, why.encode())
        socket.socket.shutdown(self.connection, socket.SHUT_WR)
        left = self.server.shuffler.format.report_size + 65536
        while left > 0 and (thrown := self.rfile.read1(min(left, 65536))):
            left -= len(thrown)

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
    parts = [_LENGTH.pack(len(part)) + part for part in released.mixed]
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
        raise ValueError(
            f"the shuffler's answer of {len(content)} bytes was cut off: ask again"
        ) from None
    if place != len(content):
        raise ValueError(
            f"the shuffler's answer has {len(content)} bytes, {place} were announced: ask again"
        )
    return Released(number, reports, tuple(parts))


class FarShuffler:
    """A shuffler that is a :class:`ShufflerService`, seen from a client or from the server.

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
        self.timeout, self.attempts = positive("timeout", timeout), integer("attempts", attempts)
        self._place, self._context = parts, None
        if far:
            try:
                self._context = ssl.create_default_context(cafile=certificate)
            except OSError as error:
                raise ValueError(
                    f"certificate={str(certificate)!r} cannot be used: {error}"
                ) from None

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
        return unpacked(
            number, self._ask(f"/rounds/{number}/close", errors={404: UnknownRoundError})
        )

    def forget_round(self, number: int) -> None:
        """Has what was handed over destroyed; see :meth:`Shuffler.forget_round`."""
        self._ask(f"/rounds/{number}/forget")

    def _ask(
        self, path: str, body: bytes = b"", errors: dict[int, type[ValueError]] | None = None
    ) -> bytes:
        for attempts_left in reversed(range(self.attempts)):
            try:
                status, content = self._post(path, body)
                break
            except (OSError, http.client.HTTPException) as error:
                if not attempts_left:
                    raise ConnectionError(
                        f"no shuffler at {self.url} after {self.attempts} attempts: {error!r}"
                    ) from error
                time.sleep(random.SystemRandom().uniform(0.1, 1.0))  # not all clients at once again
        if status not in (200, 204):
            kind = (errors or {}).get(status, ValueError)
            raise kind(f"the shuffler answers {status}: {content.decode(errors='replace')}")
        return content

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Sends one request over a connection of its own, and returns the answer's status and content.

        No redirection is followed and no proxy asked: the secret is for one shuffler.
        """
        place, timeout = self._place, self.timeout
        if self._context is None:
            connection = http.client.HTTPConnection(
                place.hostname or "", place.port, timeout=timeout
            )
        else:
            connection = http.client.HTTPSConnection(
                place.hostname or "", place.port, timeout=timeout, context=self._context
            )
        with contextlib.closing(connection):
            connection.request(
                "POST",
                place.path.rstrip("/") + path,
                body,
                {"Authorization": f"Bearer {self._secret}"},
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
