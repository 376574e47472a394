"""``FarShuffler``: a client's or the server's view of a shuffler in another process.

It asks a :class:`~opacus_shuffle.federated.shuffler_service.ShufflerService` over HTTP by the
standard library alone, and raises what a shuffler in this process would raise.
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
from opacus_shuffle.federated.shuffler import RefusedReportError, Released, UnknownRoundError


class FarShuffler:
    """A client's or the server's view of a :class:`ShufflerService` elsewhere.

    Args:
        url: ``https://host:port``. ``http://`` is taken for this machine alone.
        secret: The client's, or the server's.
        certificate: File of the certificates to trust; by default the system's.
        own_certificate: File of the certificate and key to show, where the service asks for one.
        timeout: Seconds for a call with all of its attempts, even if the answer arrives slowly.
        attempts: How often to ask where the network fails or the shuffler has no place free: a
            report that came twice is taken once.
        most_bytes: The most bytes of an answer that holds a round or its tags. All others are
            limited to 64 KiB.
    """

    # It is a process of its own, and its randomness is not seen from here.
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
        far = parts.scheme == "https"
        if not (far and parts.hostname) and not (
            parts.scheme == "http" and parts.hostname in LOOPBACK
        ):
            raise ValueError(
                f"url must begin with https://, got {url!r}: else whoever is on the way sees who "
                "reports"
            )
        self.url, self._secret = url.rstrip("/"), checked_secret("secret", secret)
        self.attempts, self._path = integer("attempts", attempts), parts.path.rstrip("/")
        self.timeout, self.most_bytes = (
            positive("timeout", timeout),
            integer("most_bytes", most_bytes),
        )
        options: dict[str, Any] = {"host": parts.hostname, "port": parts.port}
        connection: Any = http.client.HTTPConnection
        if far:
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

    def tags(self, number: int) -> bytes:
        """Asks an aggregator what it has; see :meth:`Aggregator.tags`."""
        return self._ask(f"/rounds/{number}/tags", most=self.most_bytes)

    def close_round(self, number: int, chosen: bytes = b"") -> Released:
        """Gets a round; see :meth:`Shuffler.close_round` and :meth:`Aggregator.close_round`."""
        content = self._ask(f"/rounds/{number}/close", chosen, most=self.most_bytes)
        return Released(number, int.from_bytes(content[:4], "little"), content[4:])

    def forget_round(self, number: int) -> None:
        """Has the service destroy what it handed over; see :meth:`Shuffler.forget_round`."""
        self._ask(f"/rounds/{number}/forget")

    def _ask(
        self,
        path: str,
        body: bytes = b"",
        refused: type[ValueError] = ValueError,
        most: int = 65536,
    ) -> bytes:
        """Sends a request, each time over a connection of its own, and returns the answer."""
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
                    received, chunk = io.BytesIO(), b"the first"
                    # http.client would wait anew for every byte, and read any number of them.
                    while chunk and received.tell() <= most and time.monotonic() < deadline:
                        connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
                        chunk = connection.sock.recv(65536)
                        received.write(chunk)
                if received.tell() > most:
                    raise ValueError(
                        f"the answer of {self.url} is longer than {most} bytes: raise "
                        f"most_bytes={self.most_bytes} if a round has more"
                    )
                whole = types.SimpleNamespace(makefile=lambda _, got=received: got.seek(0) or got)
                answer = http.client.HTTPResponse(whole, method="POST")  # type: ignore[arg-type]
                answer.begin()
                content = answer.read()
                if answer.status != 503 or not attempts_left:  # else there is no place free now
                    break
            except (OSError, http.client.HTTPException) as error:
                if not attempts_left or time.monotonic() >= deadline:
                    raise ConnectionError(
                        f"no shuffler at {self.url} after {self.attempts - attempts_left} attempts "
                        f"in timeout={self.timeout} seconds: {error!r}"
                    ) from error
            # Clients must not all ask again at once, nor beyond the deadline.
            time.sleep(
                random.SystemRandom().uniform(0.1, 1.0)
                * min(1.0, max(0.0, deadline - time.monotonic()))
            )
        if answer.status not in (200, 204):
            kind = UnknownRoundError if answer.status == 404 else refused
            raise kind(f"the shuffler answers {answer.status}: {content.decode(errors='replace')}")
        return content
