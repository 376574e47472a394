r"""A shuffler in a process of its own, behind a small network interface: HTTP, with TLS unless it is told otherwise.

* ``POST /report``: from a client, one report. 204, or 400 and why it is not taken.
* ``POST /rounds/R/open``: from the server. 204.
* ``POST /rounds/R/close``: from the server. 200, and how many reports (4 bytes) in how many parts (4 bytes), then of each part
  the length (8 bytes) and the content; 404 if there is no such round.
* ``POST /rounds/R/forget``: from the server. 204.

Numbers are little-endian. Everyone shows a secret of its own, ``Authorization: Bearer SECRET``: a client's says who it is, to
the shuffler alone, which keeps hashes of them; the server's opens and closes rounds, and takes no part in any.

The process is started by ``python -m opacus_shuffle.federated.shuffler_service``, whose ``--help`` names the files it reads.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import random
import ssl
import struct
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
from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.shuffler import RefusedReportError, Released, Shuffler, UnknownRoundError

_COUNTS, _LENGTH = struct.Struct("<II"), struct.Struct("<Q")
SHORTEST_SECRET = 16
"""Characters of a secret, at least."""


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class ShufflerService(ThreadingHTTPServer):
    """Serves one shuffler until :meth:`shutdown`.

    Args:
        shuffler: What reports go to.
        clients: The clients' secrets, one each.
        server: The server's secret.
        host: Where to listen.
        port: 0 for any free one; :attr:`url` says which.
        certificate: File of a TLS certificate; None for a connection that anyone on its way can read, which is for one machine.
        key: File of its key.

    Raises:
        ValueError: If a secret is too short or is two parties', or there is only one of certificate and key.
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
    ) -> None:
        secrets = [*clients, instance_of("server", server, (str,))]
        if any(len(each) < SHORTEST_SECRET for each in secrets) or len(set(secrets)) < len(secrets):
            raise ValueError(
                f"secrets must have {SHORTEST_SECRET} characters at least and be one party's each: make them with "
                "python -c 'import secrets; print(secrets.token_hex())'"
            )
        if (certificate is None) != (key is None):
            raise ValueError(f"certificate={certificate!r} and key={key!r} go together: pass both, or neither on one machine")
        self.shuffler, self._server = shuffler, _hash(server)
        self._clients = {_hash(each): str(number) for number, each in enumerate(secrets[:-1])}
        super().__init__((host, port), _Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
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

    def is_server(self, secret: str) -> bool:
        """Whether the server shows this secret."""
        return hmac.compare_digest(_hash(secret), self._server)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: ShufflerService
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a client may say nothing

    def do_POST(self) -> None:
        """Answers; see the table above."""
        longest = 16 + self.server.shuffler.format.bytes_per_report
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > longest:
            self.close_connection = True
            return self._answer(413, f"a report is {longest} bytes".encode())
        body = self.rfile.read(int(length))
        kind, _, secret = self.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer":
            return self._answer(401, b"show your secret: Authorization: Bearer ...")
        if self.path == "/report":
            return self._take(secret, body)
        if not self.server.is_server(secret):
            return self._answer(403, b"rounds are the server's")
        match self.path.split("/"):
            case ["", "rounds", number, act] if number.isdecimal() and act in ("open", "close", "forget"):
                return self._round(int(number), act)
        return self._answer(404, b"no such request")

    def _take(self, secret: str, report: bytes) -> None:
        sender = self.server.sender(secret)
        if sender is None:
            return self._answer(403, b"reports are the clients'")
        try:
            self.server.shuffler.submit(sender, report)
        except RefusedReportError as error:
            return self._answer(400, str(error).encode())
        return self._answer(204)

    def _round(self, number: int, act: str) -> None:
        shuffler = self.server.shuffler
        try:
            if act == "close":
                return self._answer(200, packed(shuffler.close_round(number)))
            (shuffler.open_round if act == "open" else shuffler.forget_round)(number)
        except UnknownRoundError as error:
            return self._answer(404, str(error).encode())
        except ValueError as error:
            return self._answer(400, str(error).encode())
        return self._answer(204)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: who sent when is not written down."""


def packed(released: Released) -> bytes:
    """A round on its way to the server."""
    parts = [_LENGTH.pack(len(each)) + each for each in released.mixed]
    return _COUNTS.pack(released.num_reports, len(released.mixed)) + b"".join(parts)


def unpacked(number: int, content: bytes) -> Released:
    """The reverse of :func:`packed`.

    Raises:
        ValueError: If the content was cut off.
    """
    reports, count = _COUNTS.unpack_from(content)
    parts, place = [], _COUNTS.size
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(content, place)
        place += _LENGTH.size + length
        parts.append(content[place - length : place])
    if place != len(content):
        raise ValueError(f"the shuffler's answer has {len(content)} bytes, {place} were announced: ask again")
    return Released(number, reports, tuple(parts))


class FarShuffler:
    """A shuffler that is a :class:`ShufflerService`, seen from a client or from the server.

    Args:
        url: ``https://host:port``. ``http://`` is taken for this machine alone.
        secret: The client's, or the server's.
        certificate: File of the certificates to trust; by default the system's.
        timeout: Seconds to wait for an answer.
        attempts: How often to ask where the network fails: a report that came twice is taken once.
    """

    simulated = False
    """It is a process of its own."""

    def __init__(
        self, url: str, secret: str, *, certificate: str | Path | None = None, timeout: float = 60.0, attempts: int = 4
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        far = parts.scheme == "https"
        if not far and (parts.scheme, parts.hostname) not in (("http", "127.0.0.1"), ("http", "localhost")):
            raise ValueError(f"url must begin with https://, got {url!r}: else whoever is on the way sees who reports")
        self.url, self._secret, self.timeout = url.rstrip("/"), secret, positive("timeout", timeout)
        self.attempts = integer("attempts", attempts)
        if far:
            handler = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificate))
            self._opener = urllib.request.build_opener(handler)
        else:  # what stays on this machine goes through no proxy
            self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def submit(self, report: bytes) -> None:
        """Sends this client's report.

        Raises:
            RefusedReportError: If it is not taken.
        """
        self._ask("/report", report, {400: RefusedReportError})

    def open_round(self, number: int) -> None:
        """Begins to take reports of a round; see :meth:`Shuffler.open_round`."""
        self._ask(f"/rounds/{number}/open")

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
                    return content
            except urllib.error.HTTPError as error:
                kind = (errors or {}).get(error.code, ValueError)
                raise kind(f"the shuffler answers {error.code}: {error.read().decode(errors='replace')}") from None
            except OSError:
                if not left:
                    raise
                time.sleep(random.SystemRandom().uniform(0.1, 1.0))  # not all clients at once again
        raise AssertionError("there is a last attempt")


def main(arguments: list[str] | None = None) -> None:
    """Serve a shuffler until the process is ended."""
    parser = argparse.ArgumentParser(description="Take reports from clients, and hand them to the server mixed.")
    parser.add_argument("--settings", required=True, help="JSON file with the reports' format, the same for everyone")
    parser.add_argument("--secrets", required=True, help="file with the clients' secrets, one a line")
    parser.add_argument("--server-secret", required=True, help="file with the server's secret")
    parser.add_argument("--certificate", help="file of a TLS certificate")
    parser.add_argument("--key", help="file of its key")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9095)
    options = parser.parse_args(arguments)
    service = ShufflerService(
        Shuffler(ReportFormat.of_settings(json.loads(Path(options.settings).read_text()))),
        clients=Path(options.secrets).read_text().split(),
        server=Path(options.server_secret).read_text().strip(),
        host=options.host,
        port=options.port,
        certificate=options.certificate,
        key=options.key,
    )
    print(f"shuffler at {service.url}", flush=True)
    service.serve_forever()


if __name__ == "__main__":
    main()
