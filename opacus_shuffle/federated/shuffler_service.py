r"""``ShufflerService``: serves a shuffler over HTTP from its own process, with TLS or locally.

* ``POST /report``: from a client, one report. 204, or 400 with the reason for the refusal.
* ``POST /rounds/R/open``: from the server, the fingerprint of its format (8 bytes). 204, or 400
  with the reason for the refusal.
* ``POST /rounds/R/close``: from the server. 200 with the number of clients that reported (4 bytes,
  little-endian) and the mixed reports; 404 if there is no such round.
* ``POST /rounds/R/forget``: from the server. 204.
* ``POST /rounds/R/tags``: from the server, to an aggregator of shares. 200 with the tags of its
  shares; the server sends the tags of the sum when it closes the round.
* ``GET /health``: from anyone. 200.
* ``GET /metrics``: from this machine. 200 with the number of requests by status, the number of
  refusals by reason, and the memory of the process, in the format of Prometheus.

Each party authenticates with a secret of its own, ``Authorization: Bearer SECRET``. A client's
secret identifies it to the shuffler alone, which stores hashes of the secrets. The server's secret
opens and closes rounds, and is not valid for reports. A request with no valid secret is answered
403 before any of its body is stored. A request that announces more than a report is answered 413,
and too many requests are answered 429.

uvicorn implements HTTP and TLS. Two limits are added where connections are accepted, so they apply
from the first byte on, including TLS's handshake. If there are too many unauthenticated
connections, a new one replaces the oldest. Every request has a deadline by which all of it must
have arrived.

Start the process with ``python -m opacus_shuffle.federated.serve``; its ``--help`` lists the files
that it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

from opacus_shuffle.core import imports
from opacus_shuffle.core.validation import boolean, instance_of, integer, positive
from opacus_shuffle.federated.credentials import LOOPBACK, checked_secret, hash_of
from opacus_shuffle.federated.reporter import ClientBook
from opacus_shuffle.federated.secret_shares import TAG_BYTES, Aggregator
from opacus_shuffle.federated.shuffler import Shuffler, UnknownRoundError, log

_SERVER = "the server"
"""The name of the server among the parties; clients are named by their numbers."""
_REQUESTS_PER_ROUND = 100
"""The number of requests that a client may send in a round."""
_CONCURRENT_REQUESTS = 2
"""The number of requests of one client that may be in progress at a time."""
_BACKLOG = 4096
"""The number of connections that wait to be accepted: all clients may report at the same time."""
_ACCEPTED_AT_ONCE = 32
"""The number of connections that are accepted before the event loop runs other tasks."""
_LONGEST_HEAD = 8192
"""The largest size in bytes of a request without its body."""


class ConnectionLimiter(socket.socket):
    """A listening socket that closes the oldest of too many connections, and slow ones.

    An event loop accepts connections from it.

    Args:
        host: The address to listen at.
        port: The port, or 0 for any free one.
        most_connections: The number of unauthenticated connections that may be open.
        seconds: The time a connection has to authenticate, and again to send its request.
    """

    def __init__(self, host: str, port: int, *, most_connections: int, seconds: float) -> None:
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.most_connections, self.seconds = most_connections, seconds
        # Unauthenticated connections by their addresses, oldest first, with their deadlines.
        self._unauthenticated: dict[Any, tuple[socket.socket, asyncio.TimerHandle]] = {}
        self._accepted_in_a_row = 0
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind((host, port))
        self.listen(_BACKLOG)  # before the server runs, so that no early client is refused

    @property
    def unauthenticated(self) -> int:
        """The number of connections that have not authenticated."""
        return len(self._unauthenticated)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection. If there are too many, it replaces the oldest unauthenticated one.

        Raises:
            BlockingIOError: If there is none, or the event loop first has to release the closed
                connections, as this process could otherwise run out of file descriptors.
        """
        if self._accepted_in_a_row >= _ACCEPTED_AT_ONCE:
            raise BlockingIOError
        connection, address = super().accept()
        if not self._accepted_in_a_row:
            asyncio.get_running_loop().call_soon(self._reset)
        self._accepted_in_a_row += 1
        sender = address[:2]
        if sender in self._unauthenticated:  # That connection has ended: its port is reused.
            self.close_connection(sender)
        if self.unauthenticated >= self.most_connections:
            self.close_connection(next(iter(self._unauthenticated)))
        deadline = asyncio.get_running_loop().call_later(
            self.seconds, self.close_connection, sender
        )
        self._unauthenticated[sender] = connection, deadline
        return connection, address

    def _reset(self) -> None:
        self._accepted_in_a_row = 0

    def close_connection(self, sender: tuple[str, int]) -> None:
        """Closes an unauthenticated connection."""
        _shut_down(self._pop(sender))

    def authenticate(self, sender: tuple[str, int]) -> tuple[socket.socket, asyncio.TimerHandle]:
        """Marks a connection as authenticated, and gives it a new deadline.

        Returns:
            The connection, and the timer that closes it.

        Raises:
            KeyError: If the connection is closed.
        """
        connection, loop = self._pop(sender), asyncio.get_running_loop()
        return connection, loop.call_later(self.seconds, _shut_down, connection)

    def _pop(self, sender: tuple[str, int]) -> socket.socket:
        connection, deadline = self._unauthenticated.pop(sender)
        deadline.cancel()
        return connection


def _shut_down(connection: socket.socket) -> None:
    """Closes a connection below TLS, which takes effect at once and lets uvicorn forget it."""
    with contextlib.suppress(OSError):  # It is closed already.
        connection.shutdown(socket.SHUT_RDWR)


class RefusedRequestError(Exception):
    """A request is refused with a status and a message before its body is read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ShufflerService:
    """Serves one shuffler over HTTP until :meth:`shutdown`; it is an ASGI application.

    Args:
        shuffler: The shuffler that gets the reports.
        clients: The clients' secrets, one each. There must be at least as many as a round needs and
            at most as many as the format has users.
        server: The server's secret.
        host: The address to listen at.
        port: The port, or 0 for any free one (see :attr:`url`).
        certificate: File of a TLS certificate. None disables encryption, and is allowed on the
            loopback interface alone.
        key: File of the certificate's private key; None if ``certificate`` contains it.
        client_certificates: File of CA certificates. Clients and server then need a certificate
            signed by one of them, besides their secrets. None requires none.
        most_connections: The number of unauthenticated connections that may be open, and the number
            of authenticated requests that may be in progress. If there are more, the next request
            ends a party's second request, or else the oldest request whose body is incomplete. Each
            adds at most a report and 700 kB to the memory.
        seconds: The time a sender has to authenticate, and again to send its report.
        metrics: Whether ``GET /metrics`` is answered, to this machine alone. Pass False behind a
            proxy on this machine: every request would seem to come from here.

    Raises:
        ModuleNotFoundError: If uvicorn is not installed.
        ValueError: If a secret is invalid or used twice, there are too many or too few clients, an
            aggregator's book is in memory, the process may not open so many connections, or a
            certificate is missing where there is a key or other machines can reach the service.
    """

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
        client_certificates: str | Path | None = None,
        most_connections: int = 512,
        seconds: float = 20.0,
        metrics: bool = True,
    ) -> None:
        try:
            import uvicorn
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                imports.missing_extra("ShufflerService", "uvicorn", "federated")
            ) from error
        self.shuffler = instance_of("shuffler", shuffler, (Shuffler,))
        if type(getattr(shuffler, "book", None)) is ClientBook:
            raise ValueError(
                "shuffler must be Aggregator(format, book=FileBook(...)): its book is in memory, "
                "so after a restart it could release a second sum of the same round"
            )
        secrets = [
            *(checked_secret("each of clients", secret) for secret in clients),
            checked_secret("server", server),
        ]
        if len(set(secrets)) < len(secrets):
            raise ValueError(
                "clients and server must have a secret each, no two the same: generate one for "
                "each party"
            )
        format, count = shuffler.format, len(secrets) - 1
        fewest = 0 if shuffler.shards else shuffler.min_reports
        if not fewest <= count <= format.num_users:
            raise ValueError(
                f"clients must be {fewest} to {format.num_users} secrets (the format's min_reports "
                f"to num_users), got {count}: pass one secret for each client of the format"
            )
        if certificate is None and (
            key is not None or client_certificates is not None or host not in LOOPBACK
        ):
            raise ValueError(
                f"host={host!r} with key={key!r} and client_certificates={client_certificates!r} "
                "requires a certificate: without TLS the network sees who reports; without a "
                f"certificate use host={LOOPBACK[0]!r} and no key"
            )
        self.parties = {
            hash_of(secret.encode()): str(number) for number, secret in enumerate(secrets)
        }
        self.parties[hash_of(secrets[-1].encode())] = _SERVER
        _check_descriptors(2 * integer("most_connections", most_connections))
        self._config = uvicorn.Config(
            self,
            loop="asyncio",  # which calls ConnectionLimiter.accept
            http="h11",  # which refuses contradictory lengths and long heads
            h11_max_incomplete_event_size=_LONGEST_HEAD,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,  # it would record who sent when
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=30,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ssl_ca_certs=None if client_certificates is None else str(client_certificates),
            ssl_cert_reqs=ssl.CERT_NONE if client_certificates is None else ssl.CERT_REQUIRED,
        )
        try:
            self._config.load()
        except OSError as error:
            raise ValueError(
                f"certificate={str(certificate)!r}, key={str(key)!r} and client_certificates="
                f"{str(client_certificates)!r} cannot be used: {error}"
            ) from None
        if self._config.ssl is not None:
            # A RemoteShuffler resumes no session, so tickets would cost time for nothing.
            self._config.ssl.num_tickets = 0
        self._listener = ConnectionLimiter(
            instance_of("host", host, (str,)),
            integer("port", port, minimum=0, maximum=65535),
            most_connections=most_connections,
            seconds=positive("seconds", seconds),
        )
        self.server_address = self._listener.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if certificate is None else 'https'}://{name}:{self.server_address[1]}"
        self.metrics = boolean("metrics", metrics)
        self._server = uvicorn.Server(self._config)
        self._thread: threading.Thread | None = None
        self._shuffler_lock = asyncio.Lock()
        self._requests: Counter[str] = Counter()  # by client, in this round
        self._in_progress: Counter[str] = Counter()  # by party
        # Requests with incomplete bodies, oldest first: the party, and whether it had another one.
        self._incomplete: dict[socket.socket, tuple[str, bool]] = {}
        self._answered: Counter[int] = Counter()  # by status
        self._refused: Counter[str] = Counter()  # by reason

    def serve_forever(self) -> None:
        """Serves until SIGTERM, SIGINT or :meth:`shutdown`, and answers the requests received."""
        self._server.run(sockets=[self._listener])

    def start(self) -> ShufflerService:
        """Starts serving in a thread of this process."""
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()
        return self

    def shutdown(self) -> None:
        """Answers the requests received, and stops."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._listener.close()

    def __enter__(self) -> ShufflerService:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answers one request (the ASGI interface)."""
        with contextlib.ExitStack() as cleanup:
            await self._serve(scope, receive, send, cleanup)

    async def _serve(
        self,
        scope: MutableMapping[str, Any],
        receive: Any,
        send: Any,
        cleanup: contextlib.ExitStack,
    ) -> None:
        unread = False
        # asyncio would log malformed chunks that arrive after the answer, so they are not read.
        chunked = b"transfer-encoding" in dict(scope["headers"])
        try:
            content = await self._answer(scope, receive, cleanup)
            status = 200 if content else 204
        except RefusedRequestError as error:
            status, content, unread = error.status, str(error).encode(), not chunked
        except UnknownRoundError as error:
            status, content = 404, str(error).encode()
        except ValueError as error:
            self._refused[getattr(error, "reason", "invalid request")] += 1
            status, content = 400, str(error).encode()
        except Exception as error:  # A bug: its message could contain a report.
            log.error(json.dumps({"event": "request failed", "error": type(error).__name__}))
            status, content = 500, b"internal error"
        self._answered[status] += 1
        headers = [(b"connection", b"close")]  # one request per connection
        if content:  # A 204 response must not have a length.
            headers.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": unread})
        if unread:
            # Discards the rest of the body: closing at once could lose the answer.
            await _receive(receive, self.shuffler.format.report_size + 65536, keep=False)
            await send({"type": "http.response.body"})

    async def _answer(
        self, scope: MutableMapping[str, Any], receive: Any, cleanup: contextlib.ExitStack
    ) -> bytes:
        """Returns the content of the answer, or raises the error to answer with."""
        path, reads = scope["path"], scope["method"] == "GET"
        if reads and path == "/health":
            return b"ok\n"
        if reads and path == "/metrics" and self.metrics and scope["client"][0] in LOOPBACK:
            return self._metrics().encode()
        headers = dict(scope["headers"])
        party = self.parties.get(hash_of(headers.get(b"authorization", b"")[len(b"Bearer ") :]))
        if reads or party is None or (party == _SERVER) == (path == "/report"):
            raise RefusedRequestError(
                403, "forbidden: clients may report, the server may open and close rounds"
            )
        format = self.shuffler.format
        longest = format.report_size + (party == _SERVER) * TAG_BYTES * format.num_users
        length = headers.get(b"content-length", b"0").decode("latin-1")
        if b"transfer-encoding" in headers or not _is_number(length) or int(length) > longest:
            raise RefusedRequestError(
                413, f"Content-Length must not exceed {longest} bytes, the size of a report"
            )
        # The server may repeat a request while reports are being mixed.
        concurrent = 0 if party == _SERVER else self._in_progress[party]
        if self._requests[party] >= _REQUESTS_PER_ROUND or concurrent >= _CONCURRENT_REQUESTS:
            raise RefusedRequestError(429, "too many requests in this round or at the same time")
        if self._in_progress.total() >= self._listener.most_connections:
            if concurrent or not self._incomplete:
                raise RefusedRequestError(503, "server busy; retry")
            # The first second request of a party that still has another one; else the oldest
            # request, as max returns the first of equal ones.
            replaced = max(
                self._incomplete,
                key=lambda each: (
                    self._incomplete[each][1] and self._in_progress[self._incomplete[each][0]] > 1
                ),
            )
            del self._incomplete[replaced]
            _shut_down(replaced)
        try:
            connection, timer = self._listener.authenticate(scope["client"])
        except KeyError:
            raise RefusedRequestError(503, "connection timed out; retry") from None
        # Over TLS a sender that never closes would keep its connection open beyond all limits.
        cleanup.callback(_shut_down, connection)
        cleanup.callback(timer.cancel)
        self._incomplete[connection] = party, concurrent > 0
        self._in_progress[party] += 1
        self._requests[party] += party != _SERVER  # Incomplete requests count, too.
        try:
            body = await _receive(receive, longest)
            self._incomplete.pop(connection, None)
            if len(body) < int(length):
                raise RefusedRequestError(400, "incomplete body")
            if party == _SERVER:  # Its answers are large and take longer than the deadline.
                cleanup.pop_all()
                timer.cancel()
            # A request that waits for the lock holds a report in memory, so it counts as in
            # progress.
            async with self._shuffler_lock:
                return await self._act(party, path, body)
        finally:
            self._in_progress[party] -= 1
            self._in_progress += Counter()  # removes parties with zero requests

    async def _act(self, party: str, path: str, body: bytes) -> bytes:
        """Passes a request to the shuffler, and returns the content of the answer."""
        shuffler: Any = self.shuffler
        shares = isinstance(shuffler, Aggregator)
        match path.split("/"):
            case ["", "report"]:
                shuffler.submit(party, body)
            case ["", "rounds", number, "open"] if _is_number(number):
                # Other shufflers and mixing take long; other requests are served meanwhile.
                await asyncio.to_thread(shuffler.open_round, int(number), body)
                self._requests.clear()
                _note("opened", int(number))
            case ["", "rounds", number, "tags"] if shares and _is_number(number):
                return await asyncio.to_thread(shuffler.tags, int(number))
            case ["", "rounds", number, "close"] if _is_number(number):
                chosen = [body] if shares else []
                released = await asyncio.to_thread(shuffler.close_round, int(number), *chosen)
                event = "dropped" if released.dropped else "closed"
                _note(event, released.round, reports=released.num_reports)
                return released.num_reports.to_bytes(4, "little") + released.mixed
            case ["", "rounds", number, "forget"] if _is_number(number):
                await asyncio.to_thread(shuffler.forget_round, int(number))
                _note("forgotten", int(number))
            case _:
                raise UnknownRoundError("no such request")
        return b""

    def _metrics(self) -> str:
        """Returns the metrics in the format of Prometheus: totals, and nothing about one client."""
        lines = [
            "# TYPE opacus_shuffle_requests_total counter",
            *(
                f'opacus_shuffle_requests_total{{status="{status}"}} {count}'
                for status, count in sorted(self._answered.items())
            ),
            "# TYPE opacus_shuffle_unauthenticated_connections gauge",
            f"opacus_shuffle_unauthenticated_connections {self._listener.unauthenticated}",
            "# TYPE opacus_shuffle_requests_in_progress gauge",
            f"opacus_shuffle_requests_in_progress {self._in_progress.total()}",
            "# TYPE opacus_shuffle_refused_total counter",
            *(
                f'opacus_shuffle_refused_total{{reason="{reason}"}} {count}'
                for reason, count in sorted(self._refused.items())
            ),
        ]
        with contextlib.suppress(OSError):  # not on Linux
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            lines.append("# TYPE process_resident_memory_bytes gauge")
            lines.append(f"process_resident_memory_bytes {pages * mmap.PAGESIZE}")
        return "\n".join(lines) + "\n"


async def _receive(receive: Any, most: int, *, keep: bool = True) -> bytes:
    """Receives at most ``most`` bytes of a body, and returns them if ``keep``."""
    body, received, more = bytearray(), 0, True
    while more and received < most:
        message = await receive()
        chunk, more = message.get("body", b""), message.get("more_body", False)
        received += len(chunk)
        if keep:
            body += chunk
    return bytes(body)


def _note(event: str, number: int, **numbers: int) -> None:
    log.info(json.dumps({"event": event, "round": number, **numbers}))


def _is_number(text: str) -> bool:
    """Whether a text is a whole number of at most 12 digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 12


def _check_descriptors(connections: int) -> None:
    """Raises the limit of open files for this many connections, or raises an error."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit.
        return
    needed = connections + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"most_connections={connections // 2} requires {needed} open files, and this process "
            f"may have {hard}: raise its limit (ulimit -n), or lower most_connections"
        ) from error
