r"""``ShufflerService``: a shuffler in a process of its own, behind HTTP with TLS or local.

* ``POST /report``: from a client, one report. 204, or 400 and why it is not taken.
* ``POST /rounds/R/open``: from the server, the fingerprint of its format (8 bytes). 204, or 400 and
  why not.
* ``POST /rounds/R/close``: from the server. 200, and how many clients reported (4 bytes,
  little-endian), then what was mixed; 404 if there is no such round.
* ``POST /rounds/R/forget``: from the server. 204.
* ``POST /rounds/R/tags``: from the server, of an aggregator of shares. 200, and the tags that it
  has; to close the round the server sends those of the sum.
* ``GET /health``: from anyone. 200.
* ``GET /metrics``: from this machine. 200, and how many requests were answered how, why any were
  refused, and how much memory the process has, as Prometheus reads it.

Everyone shows a secret of its own, ``Authorization: Bearer SECRET``: a client's says who it is, to
the shuffler alone, which keeps hashes of them; the server's opens and closes rounds, and takes no
part in any. Who shows no such secret, or another party's, is answered 403 before anything of the
request's body is kept, who announces more than a report 413, and who asks too often 429.

uvicorn speaks HTTP and TLS. Two things are added to it, both where connections are accepted, so
that they hold from the first byte on, TLS's handshake included: a connection whose sender has not
shown a secret gives up its place to a new one if there are too many, and every request has a time
by which all of it must have come, however often another byte of it does.

The process is started by ``python -m opacus_shuffle.federated.serve``, whose ``--help`` names the
files it reads.
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

from opacus_shuffle.core import extras
from opacus_shuffle.core.validation import boolean, instance_of, integer, positive
from opacus_shuffle.federated.credentials import LOOPBACK, checked_secret, hash_of
from opacus_shuffle.federated.reporter import ClientBook
from opacus_shuffle.federated.secret_shares import TAG_BYTES, Aggregator
from opacus_shuffle.federated.shuffler import Shuffler, UnknownRoundError, log

_SERVER = "the server"
"""What the server is called among the parties; clients are called by their numbers."""
_MOST_REQUESTS = 100
"""So often a client may ask within a round."""
_MOST_AT_ONCE = 2
"""So many requests of one client may be under way at once."""
_WAITING_AT_THE_DOOR = 4096
"""So many connections wait to be accepted, as all clients of a round may come at once."""
_MOST_IN_A_ROW = 32
"""So many are accepted before the loop does something else."""
_LONGEST_HEAD = 8192
"""Bytes of a request before its body, at most."""


class Door(socket.socket):
    """A listening socket that hangs up on the oldest of too many connections, and on slow ones.

    Args:
        host: Where to listen.
        port: 0 for any free one.
        most_connections: So many may be open whose senders have not shown a secret.
        seconds: So long they may take for that, and as long again for what they send.

    An event loop accepts from it.
    """

    def __init__(self, host: str, port: int, *, most_connections: int, seconds: float) -> None:
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.most_connections, self.seconds = most_connections, seconds
        # Of strangers, the oldest first: their connections, and the timers that end them.
        self._strangers: dict[Any, tuple[socket.socket, asyncio.TimerHandle]] = {}
        self._just_accepted = 0
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind((host, port))
        self.listen(_WAITING_AT_THE_DOOR)  # from now on, so that nobody comes too early

    @property
    def waiting(self) -> int:
        """How many connections there are whose senders are not known."""
        return len(self._strangers)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection, in the place of the oldest stranger's if there are too many.

        Raises:
            BlockingIOError: If there is none, or so many have just come that the loop has to close
                those which were hung up on first, lest this process run out of open files.
        """
        if self._just_accepted >= _MOST_IN_A_ROW:
            raise BlockingIOError
        connection, address = super().accept()
        if not self._just_accepted:
            asyncio.get_running_loop().call_soon(self._rest)
        self._just_accepted += 1
        name = address[:2]
        if name in self._strangers:  # that one has ended
            self.hang_up(name)
        if self.waiting >= self.most_connections:
            self.hang_up(next(iter(self._strangers)))
        timer = asyncio.get_running_loop().call_later(self.seconds, self.hang_up, name)
        self._strangers[name] = connection, timer
        return connection, address

    def _rest(self) -> None:
        self._just_accepted = 0

    def hang_up(self, name: tuple[str, int]) -> None:
        """Ends a stranger's connection."""
        _end(self._admitted(name))

    def admit(self, name: tuple[str, int]) -> tuple[socket.socket, asyncio.TimerHandle]:
        """Makes a stranger a known sender.

        Returns:
            Its connection, and the timer that ends it.

        Raises:
            KeyError: If the connection has been ended.
        """
        connection = self._admitted(name)
        return connection, asyncio.get_running_loop().call_later(self.seconds, _end, connection)

    def _admitted(self, name: tuple[str, int]) -> socket.socket:
        connection, timer = self._strangers.pop(name)
        timer.cancel()
        return connection


def _end(connection: socket.socket) -> None:
    """Ends a connection below TLS, so that it takes effect at once; uvicorn then forgets it."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


class RefusedRequestError(Exception):
    """A request is answered with a status and a sentence before its body is read."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class ShufflerService:
    """Serves one shuffler over HTTP until :meth:`shutdown`.

    It is an ASGI application, too.

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
        client_certificates: File of the certificates that have signed those which clients and
            server must show, besides their secrets; None if they need none.
        most_connections: So many may be open whose senders have not shown a secret, and so many
            others' requests may be under way. The next request ends a party's second request, or
            else the oldest one whose body is not complete. Memory grows by at most a report and
            700 kB for each.
        seconds: So long may a sender take to show its secret, and as long again for its report.
        metrics: Whether ``GET /metrics`` is answered. It is for this machine alone, but behind a
            proxy that runs on this machine everyone seems to be here: pass False there.

    Raises:
        ModuleNotFoundError: If uvicorn is not installed.
        ValueError: If a secret is unfit or is two parties', there are too many or too few clients,
            an aggregator's book is in memory, this process may not open so many connections, or
            there is no certificate where there is a key or other machines can reach the service.
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
                extras.missing("ShufflerService", "uvicorn", "federated")
            ) from error
        self.shuffler = instance_of("shuffler", shuffler, (Shuffler,))
        if type(getattr(shuffler, "book", None)) is ClientBook:
            raise ValueError(
                "shuffler must be Aggregator(format, book=FileBook(...)): its book is in memory, "
                "and started anew it would hand over another sum of a round for which clients send "
                "their reports again"
            )
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
        fewest = 0 if shuffler.parts else shuffler.min_reports
        if not fewest <= count <= format.num_users:
            raise ValueError(
                f"clients must be {fewest} to {format.num_users} secrets, as the "
                "format says (min_reports, "
                f"num_users), got {count}: more clients may hold more dishonest ones than are "
                "accounted for"
            )
        if certificate is None and (
            key is not None or client_certificates is not None or host not in LOOPBACK
        ):
            raise ValueError(
                f"host={host!r} with key={key!r} and client_certificates={client_certificates!r} "
                "takes a certificate: else whoever is on the way sees who reports; without all of "
                f"them the host is {LOOPBACK[0]}"
            )
        self.parties = {
            hash_of(secret.encode()): str(number) for number, secret in enumerate(secrets)
        }
        self.parties[hash_of(secrets[-1].encode())] = _SERVER
        _check_descriptors(2 * integer("most_connections", most_connections))
        self._config = uvicorn.Config(
            self,
            loop="asyncio",  # which accepts by the Door's own method
            http="h11",  # which refuses two lengths, and long heads
            h11_max_incomplete_event_size=_LONGEST_HEAD,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,  # who sent when is not written down
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=_WAITING_AT_THE_DOOR,
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
            # A FarShuffler resumes no session: tickets for that would take time and a packet each.
            self._config.ssl.num_tickets = 0
        self._door = Door(
            instance_of("host", host, (str,)),
            integer("port", port, minimum=0, maximum=65535),
            most_connections=most_connections,
            seconds=positive("seconds", seconds),
        )
        self.server_address = self._door.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if certificate is None else 'https'}://{name}:{self.server_address[1]}"
        self.metrics = boolean("metrics", metrics)
        self._server = uvicorn.Server(self._config)
        self._thread: threading.Thread | None = None
        self._turn = asyncio.Lock()
        self._asked: Counter[str] = Counter()  # of each client, in this round
        self._under_way: Counter[str] = Counter()  # of each party
        # Requests with incomplete bodies, oldest first: the party, and if it had another request.
        self._coming: dict[socket.socket, tuple[str, bool]] = {}
        self._answered: Counter[int] = Counter()  # by status
        self._refused: Counter[str] = Counter()  # by reason

    def serve_forever(self) -> None:
        """Serves until the process is told to end, or :meth:`shutdown`.

        Requests that have come by then are answered.
        """
        self._server.run(sockets=[self._door])

    def start(self) -> ShufflerService:
        """Serves in a thread of this process."""
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()
        return self

    def shutdown(self) -> None:
        """Answers the requests that have come, and ends."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._door.close()

    def __enter__(self) -> ShufflerService:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answers one request, as ASGI has it."""
        with contextlib.ExitStack() as at_the_end:
            await self._serve(scope, receive, send, at_the_end)

    async def _serve(
        self,
        scope: MutableMapping[str, Any],
        receive: Any,
        send: Any,
        at_the_end: contextlib.ExitStack,
    ) -> None:
        unread = False
        # What is wrong in chunks that come after an answer would be written down by asyncio.
        chunked = b"transfer-encoding" in dict(scope["headers"])
        try:
            content = await self._answer(scope, receive, at_the_end)
            status = 200 if content else 204
        except RefusedRequestError as error:
            status, content, unread = error.status, str(error).encode(), not chunked
        except UnknownRoundError as error:
            status, content = 404, str(error).encode()
        except ValueError as error:
            self._refused[getattr(error, "reason", "asked wrongly")] += 1
            status, content = 400, str(error).encode()
        except Exception as error:  # of this program: what was sent is not written down
            log.error(json.dumps({"event": "a request failed", "error": type(error).__name__}))
            status, content = 500, b"the shuffler failed"
        self._answered[status] += 1
        headers = [(b"connection", b"close")]  # a connection is for one request
        if content:  # an answer of 204 has no length
            headers.append((b"content-length", b"%d" % len(content)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": unread})
        if unread:
            # What still comes is thrown away, lest the answer be lost with the connection.
            await _receive(receive, self.shuffler.format.report_size + 65536, kept=False)
            await send({"type": "http.response.body"})

    async def _answer(
        self, scope: MutableMapping[str, Any], receive: Any, at_the_end: contextlib.ExitStack
    ) -> bytes:
        """Returns an answer's content, or raises why there is none."""
        path, reads = scope["path"], scope["method"] == "GET"
        if reads and path == "/health":
            return b"ok\n"
        if reads and path == "/metrics" and self.metrics and scope["client"][0] in LOOPBACK:
            return self._metrics().encode()
        headers = dict(scope["headers"])
        party = self.parties.get(hash_of(headers.get(b"authorization", b"")[len(b"Bearer ") :]))
        if reads or party is None or (party == _SERVER) == (path == "/report"):
            said = "clients report, and the server has rounds; show your secret"
            raise RefusedRequestError(403, said)
        format = self.shuffler.format
        longest = format.report_size + (party == _SERVER) * TAG_BYTES * format.num_users
        length = headers.get(b"content-length", b"0").decode("latin-1")
        if b"transfer-encoding" in headers or not _is_number(length) or int(length) > longest:
            said = f"Content-Length must be that of a report at most, {longest}"
            raise RefusedRequestError(413, said)
        at_once = 0 if party == _SERVER else self._under_way[party]  # it may ask anew while we mix
        if self._asked[party] >= _MOST_REQUESTS or at_once >= _MOST_AT_ONCE:
            raise RefusedRequestError(429, "that is too often for one round, or too much at once")
        if self._under_way.total() >= self._door.most_connections:
            if at_once or not self._coming:
                raise RefusedRequestError(503, "all places are taken: ask again")
            # The first request that came while its party had another one that is still open; else
            # the oldest, as max takes the first of equal ones.
            ended = max(
                self._coming,
                key=lambda each: (
                    self._coming[each][1] and self._under_way[self._coming[each][0]] > 1
                ),
            )
            self._coming.pop(ended), _end(ended)  # type: ignore[func-returns-value]
        try:
            connection, timer = self._door.admit(scope["client"])
        except KeyError:
            raise RefusedRequestError(503, "the connection's time has ended") from None
        # Over TLS a sender that does not close would hold it open, beside all places.
        at_the_end.callback(_end, connection)
        at_the_end.callback(timer.cancel)
        self._coming[connection] = party, at_once > 0
        self._under_way[party] += 1
        self._asked[party] += party != _SERVER  # also incomplete requests
        try:
            body = await _receive(receive, longest)
            self._coming.pop(connection, None)
            if len(body) < int(length):
                raise RefusedRequestError(400, "the request was cut off")
            if party == _SERVER:  # whose answers take long, and are still on their way at the end
                at_the_end.pop_all()
                timer.cancel()
            # Whoever waits for its turn holds its report meanwhile, and so is under way still.
            async with self._turn:
                return await self._act(party, path, body)
        finally:
            self._under_way[party] -= 1
            self._under_way += Counter()  # forgets those that are zero

    async def _act(self, party: str, path: str, body: bytes) -> bytes:
        """Does what the request asks of the shuffler, and returns the answer's content."""
        shuffler: Any = self.shuffler
        shares = isinstance(shuffler, Aggregator)
        match path.split("/"):
            case ["", "report"]:
                shuffler.submit(party, body)
            case ["", "rounds", number, "open"] if _is_number(number):
                # It may ask parts, and mixing takes long: meanwhile others are to be heard.
                await asyncio.to_thread(shuffler.open_round, int(number), body)
                self._asked.clear()
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
        """Returns what a collector of metrics reads: numbers of all, and nobody's own."""
        lines = [
            "# TYPE opacus_shuffle_requests_total counter",
            *(
                f'opacus_shuffle_requests_total{{status="{status}"}} {count}'
                for status, count in sorted(self._answered.items())
            ),
            "# TYPE opacus_shuffle_unknown_connections gauge",
            f"opacus_shuffle_unknown_connections {self._door.waiting}",
            "# TYPE opacus_shuffle_requests_under_way gauge",
            f"opacus_shuffle_requests_under_way {self._under_way.total()}",
            "# TYPE opacus_shuffle_refused_total counter",
            *(
                f'opacus_shuffle_refused_total{{reason="{reason}"}} {count}'
                for reason, count in sorted(self._refused.items())
            ),
        ]
        with contextlib.suppress(OSError):  # of a system without /proc
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            lines.append("# TYPE process_resident_memory_bytes gauge")
            lines.append(f"process_resident_memory_bytes {pages * mmap.PAGESIZE}")
        return "\n".join(lines) + "\n"


async def _receive(receive: Any, most: int, *, kept: bool = True) -> bytes:
    """Receives a request's body, at most so many bytes of it; returns it if it is kept."""
    body, left, more = bytearray(), most, True
    while more and left > 0:
        message = await receive()
        part, more = message.get("body", b""), message.get("more_body", False)
        left -= len(part)
        if kept:
            body += part
    return bytes(body)


def _note(event: str, number: int, **numbers: int) -> None:
    log.info(json.dumps({"event": event, "round": number, **numbers}))


def _is_number(text: str) -> bool:
    """Tells whether a text is a number of few digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 12


def _check_descriptors(connections: int) -> None:
    """Lets this process open so many connections, or refuses them."""
    try:
        import resource
    except ModuleNotFoundError:  # no limit of this kind, as on Windows
        return
    needed = connections + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"most_connections={connections // 2} takes {needed} open files, and this process may "
            f"have {hard}: raise its limit (ulimit -n), or let fewer wait"
        ) from error
