"""``FarShuffler``: a client's or the server's view of a shuffler in another process.

It asks a :class:`~opacus_shuffle.federated.shuffler_service.ShufflerService` over HTTP by the
standard library alone, and raises what a shuffler in this process would raise.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import random
import ssl
import time
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
        timeout: Seconds to wait for an answer.
        attempts: How often to ask where the network fails or the shuffler has no place free: a
            report that came twice is taken once.
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
        timeout: float = 60.0,
        attempts: int = 4,
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
        address = {"host": parts.hostname, "port": parts.port}
        options: dict[str, Any] = {**address, "timeout": positive("timeout", timeout)}
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
        return self._ask(f"/rounds/{number}/tags")

    def close_round(self, number: int, chosen: bytes = b"") -> Released:
        """Gets a round; see :meth:`Shuffler.close_round` and :meth:`Aggregator.close_round`."""
        content = self._ask(f"/rounds/{number}/close", chosen)
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
                if answer.status != 503 or not attempts_left:  # else there is no place free now
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
