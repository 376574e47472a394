"""Runs a shuffler as a process: ``python -m opacus_shuffle.federated.serve --help``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from opacus_shuffle.core.validation import reject_unknown
from opacus_shuffle.federated import (
    Aggregator,
    FarShuffler,
    FileBook,
    ReportFormat,
    SharedBitSums,
    Shuffler,
    ShufflerService,
)
from opacus_shuffle.federated.shuffler import log

_KEYS_OF_A_PART = ("url", "secret-file", "certificate", "own-certificate")


def _read_json(path: str) -> Any:
    """Returns what is in a JSON file.

    Raises:
        ValueError: If it is none.
    """
    try:
        return json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error


def _part_of(settings: dict[str, Any]) -> FarShuffler:
    """Returns one of the other shufflers.

    Raises:
        ValueError: If it has a key that none has.
    """
    unknown = {name: value for name, value in settings.items() if name not in _KEYS_OF_A_PART}
    reject_unknown("each of parts", unknown, _KEYS_OF_A_PART)
    return FarShuffler(
        settings["url"],
        Path(settings["secret-file"]).read_text(),
        certificate=settings.get("certificate"),
        own_certificate=settings.get("own-certificate"),
    )


def main(arguments: list[str] | None = None) -> None:
    """Serves a shuffler until the process is ended."""
    parser = argparse.ArgumentParser(
        prog="python -m opacus_shuffle.federated.serve",
        description="Take reports from clients over HTTP(S), and hand them to the server mixed.",
    )
    parser.add_argument(
        "--settings",
        required=True,
        help="JSON file with the reports' format, the same for everyone",
    )
    parser.add_argument(
        "--secrets", required=True, help="file with the clients' secrets, one a line"
    )
    parser.add_argument("--server-secret", required=True, help="file with the server's secret")
    parser.add_argument(
        "--parts",
        metavar="FILE",
        help="JSON file with other shufflers, to whom the rest of the clients report: a list of "
        '{"url": ..., "secret-file": ..., "certificate": ..., "own-certificate": ...}',
    )
    parser.add_argument(
        "--part",
        action="store_true",
        help="be one of those: --server-secret is the other shuffler's then, never the server's",
    )
    parser.add_argument(
        "--book",
        metavar="FILE",
        help="where an aggregator of shared_bit_sums notes which rounds it has handed over",
    )
    parser.add_argument(
        "--certificate",
        help="file of a TLS certificate; without one the service is for this machine alone",
    )
    parser.add_argument("--key", help="file of its key")
    parser.add_argument(
        "--client-certificates",
        help="file of the certificates that have signed those which clients and server must show",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=9095, help="(default: %(default)s)")
    parser.add_argument(
        "--most-connections",
        type=int,
        default=512,
        metavar="COUNT",
        help="whose senders have not shown a secret yet (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="that a request may take to come (default: %(default)s)",
    )
    parser.add_argument(
        "--no-metrics",
        action="store_true",
        help="do not answer /metrics: behind a proxy on this machine everyone could read them",
    )
    options = parser.parse_args(arguments)
    try:
        reports = ReportFormat.of_settings(_read_json(options.settings))
        parts = [_part_of(part) for part in (_read_json(options.parts) if options.parts else [])]
        shuffler: Shuffler
        if isinstance(reports, SharedBitSums) and not (parts or options.part):
            if options.book is None:
                parser.error("--book is missing: an aggregator needs a file of its own")
            shuffler = Aggregator(reports, book=FileBook(options.book))
        else:
            if options.book is not None:
                parser.error(
                    "--book is for an aggregator of shared_bit_sums: a shuffler keeps none"
                )
            shuffler = Shuffler(reports, parts=parts, is_part=options.part)
        service = ShufflerService(
            shuffler,
            clients=Path(options.secrets).read_text().split(),
            server=Path(options.server_secret).read_text(),
            host=options.host,
            port=options.port,
            certificate=options.certificate,
            key=options.key,
            client_certificates=options.client_certificates,
            most_connections=options.most_connections,
            seconds=options.seconds,
            metrics=not options.no_metrics,
        )
    except (AttributeError, KeyError, TypeError):
        parser.error(f"{options.parts} must be a list of shufflers, each with url and secret-file")
    except (OSError, ValueError) as error:  # a file is missing or wrong, or a port is taken
        parser.error(str(error))
    # What becomes of rounds. Opacus has set up the root logger, for warnings alone.
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    log.propagate = False
    print(f"shuffler at {service.url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        service.serve_forever()


if __name__ == "__main__":
    main()
