"""``RemoteShuffler``: a client's or the server's connection to a shuffler in another process.

It sends HTTP requests to a :class:`~opacus_shuffle.federated.shuffler_service.ShufflerService` and
raises the errors that a local shuffler would raise. It uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import random
import ssl
import time
import types
import urllib.parse
from pathlib import Path
from typing import Any

from opacus_shuffle.core.validation import instance_of, integer, positive
from opacus_shuffle.federated.credentials import LOOPBACK, checked_secret
from opacus_shuffle.federated.shuffler import RefusedReportError, ReleasedRound, UnknownRoundError


class RemoteShuffler:
    """A client's or the server's connection to a :class:`ShufflerService` in another process.

    Args:
        url: ``https://host:port``; ``http://`` is allowed for this machine alone.
        secret: The secret of the client or the server.
        certificate: File of the certificates to trust; by default the system's.
        own_certificate: File of the certificate and key to present if the service requires one.
        timeout: Seconds for a call with all of its attempts, even if the answer arrives slowly.
        attempts: The number of attempts if the network fails or the shuffler is busy. A report that
            arrives twice is counted once.
        most_bytes: The largest size of an answer with a round or its tags. Other answers are
            limited to 64 KiB.
    """

    # The shuffler runs in another process, whose randomness cannot be inspected from here.
    simulated: bool = False
    predictable: tuple[str, ...] = ()

    def __init__(
        self,
        url: str,
        secret: str,
        *,
        certificate: str | Path | None = None,
        own_certificate: str | Path | None = None,
        timeout: float = 240.0,
        attempts: int = 4,
        most_bytes: int = 2**32,
    ) -> None:
        parts = urllib.parse.urlsplit(instance_of("url", url, (str,)))
        encrypted = parts.scheme == "https"
        local = parts.scheme == "http" and parts.hostname in LOOPBACK
        if not (encrypted and parts.hostname) and not local:
            raise ValueError(
                f"url must begin with https://, got {url!r}: without TLS the network "
                "sees who reports"
            )
        self.url, self._secret = url.rstrip("/"), checked_secret("secret", secret)
        self.attempts, self._path = integer("attempts", attempts), parts.path.rstrip("/")
        self.timeout, self.most_bytes = (
            positive("timeout", timeout),
            integer("most_bytes", most_bytes),
        )
        options: dict[str, Any] = {"host": parts.hostname, "port": parts.port}
        connection: Any = http.client.HTTPConnection
        if encrypted:
            try:
                options["context"] = ssl.create_default_context(cafile=certificate)
                if own_certificate is not None:
                    options["context"].load_cert_chain(own_certificate)
            except OSError as error:
                raise ValueError(
                    f"certificate={str(certificate)!r} and own_certificate="
                    f"{str(own_certificate)!r} cannot be used: {error}"
                ) from None
            connection = http.client.HTTPSConnection
        # Redirections and proxies are not followed: the secret is for one shuffler only.
        self._connect = functools.partial(connection, **options)

    def submit(self, report: bytes) -> None:
        """Sends this client's report.

        Raises:
            RefusedReportError: If the shuffler refuses it.
        """
        self._post("/report", report, refused=RefusedReportError)

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Opens a round for reports; see :meth:`Shuffler.open_round`."""
        self._post(f"/rounds/{number}/open", fingerprint)

    def tags(self, number: int) -> bytes:
        """Returns the tags of an aggregator's shares; see :meth:`Aggregator.tags`."""
        return self._post(f"/rounds/{number}/tags", most=self.most_bytes)

    def close_round(self, number: int, chosen: bytes = b"") -> ReleasedRound:
        """Closes a round; see :meth:`Shuffler.close_round` and :meth:`Aggregator.close_round`."""
        content = self._post(f"/rounds/{number}/close", chosen, most=self.most_bytes)
        return ReleasedRound(number, int.from_bytes(content[:4], "little"), content[4:])

    def forget_round(self, number: int) -> None:
        """Destroys the stored output of a round; see :meth:`Shuffler.forget_round`."""
        self._post(f"/rounds/{number}/forget")

    def _post(
        self,
        path: str,
        body: bytes = b"",
        refused: type[ValueError] = ValueError,
        most: int = 65536,
    ) -> bytes:
        """Sends a request, with a new connection for each attempt, and returns the answer."""
        deadline = time.monotonic() + self.timeout
        for attempts_left in reversed(range(self.attempts)):
            try:
                with contextlib.closing(
                    self._connect(timeout=max(0.001, deadline - time.monotonic()))
                ) as connection:
                    connection.request(
                        "POST",
                        self._path + path,
                        body,
                        {"Authorization": f"Bearer {self._secret}", "Connection": "close"},
                    )
                    received, chunk = io.BytesIO(), b"first"
                    # http.client restarts its timeout at every byte, and reads without limit.
                    while chunk and received.tell() <= most and time.monotonic() < deadline:
                        connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
                        chunk = connection.sock.recv(65536)
                        received.write(chunk)
                if received.tell() > most:
                    raise ValueError(
                        f"the answer of {self.url} is longer than {most} bytes: raise "
                        f"most_bytes={self.most_bytes} if a round is larger"
                    )
                # HTTPResponse parses a socket; this object gives it the bytes received.
                socket = types.SimpleNamespace(makefile=lambda _, got=received: got.seek(0) or got)
                answer = http.client.HTTPResponse(socket, method="POST")  # type: ignore[arg-type]
                answer.begin()
                content = answer.read()
                if answer.status != 503 or not attempts_left:  # The shuffler is busy.
                    break
            except (OSError, http.client.HTTPException) as error:
                if not attempts_left or time.monotonic() >= deadline:
                    raise ConnectionError(
                        f"no shuffler at {self.url} after {self.attempts - attempts_left} attempts "
                        f"in timeout={self.timeout} seconds: {error!r}"
                    ) from error
            # A random pause, so that clients do not retry all at once; not beyond the deadline.
            time.sleep(
                random.SystemRandom().uniform(0.1, 1.0)
                * min(1.0, max(0.0, deadline - time.monotonic()))
            )
        if answer.status not in (200, 204):
            error_type = UnknownRoundError if answer.status == 404 else refused
            raise error_type(f"shuffler: {answer.status}: {content.decode(errors='replace')}")
        return content
