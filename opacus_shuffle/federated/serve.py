"""Runs a shuffler in a process: ``python -m opacus_shuffle.federated.serve --help``."""

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
    FileBook,
    RemoteShuffler,
    ReportFormat,
    SharedSumReports,
    Shuffler,
    ShufflerService,
)
from opacus_shuffle.federated.shuffler import log

_SHARD_KEYS = ("url", "secret-file", "certificate", "own-certificate")


def _read_json(path: str) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: If its content is not JSON.
    """
    try:
        return json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from error


def _shard(settings: dict[str, Any]) -> RemoteShuffler:
    """Connects to one of the shards.

    Raises:
        ValueError: If the settings have an unknown key.
    """
    unknown = {name: value for name, value in settings.items() if name not in _SHARD_KEYS}
    reject_unknown("each of shards", unknown, _SHARD_KEYS)
    return RemoteShuffler(
        settings["url"],
        Path(settings["secret-file"]).read_text(),
        certificate=settings.get("certificate"),
        own_certificate=settings.get("own-certificate"),
    )


def main(arguments: list[str] | None = None) -> None:
    """Serves a shuffler until the process is stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m opacus_shuffle.federated.serve",
        description="Receive reports of clients over HTTP(S), and release them mixed.",
    )
    parser.add_argument(
        "--settings",
        required=True,
        help="JSON file with the format of the reports, the same for all parties",
    )
    parser.add_argument(
        "--secrets", required=True, help="file with the clients' secrets, one per line"
    )
    parser.add_argument("--server-secret", required=True, help="file with the server's secret")
    parser.add_argument(
        "--shards",
        metavar="FILE",
        help="JSON file with other shufflers that receive the reports of other clients: a list of "
        '{"url": ..., "secret-file": ..., "certificate": ..., "own-certificate": ...}',
    )
    parser.add_argument(
        "--shard",
        action="store_true",
        help="run as a shard: --server-secret is that of the main shuffler, never the server's",
    )
    parser.add_argument(
        "--book",
        metavar="FILE",
        help="file in which an aggregator of shared_sum_reports records the rounds it has released",
    )
    parser.add_argument(
        "--certificate",
        help="file of a TLS certificate; without one, only this machine can connect",
    )
    parser.add_argument("--key", help="file of the certificate's private key")
    parser.add_argument(
        "--client-certificates",
        help="file of CA certificates that must have signed the certificates of clients and server",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=9095, help="(default: %(default)s)")
    parser.add_argument(
        "--most-connections",
        type=int,
        default=512,
        metavar="COUNT",
        help="unauthenticated connections that may be open (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="time for a request to arrive (default: %(default)s)",
    )
    parser.add_argument(
        "--no-metrics",
        action="store_true",
        help="do not answer /metrics; use it behind a proxy on this machine",
    )
    options = parser.parse_args(arguments)
    try:
        reports = ReportFormat.of_settings(_read_json(options.settings))
        shards = [_shard(each) for each in (_read_json(options.shards) if options.shards else [])]
        shuffler: Shuffler
        if isinstance(reports, SharedSumReports) and not (shards or options.shard):
            if options.book is None:
                parser.error(
                    "--book is missing: an aggregator records its released rounds in a file"
                )
            shuffler = Aggregator(reports, book=FileBook(options.book))
        else:
            if options.book is not None:
                parser.error(
                    "--book is for an aggregator of shared_sum_reports: a shuffler has no book"
                )
            shuffler = Shuffler(reports, shards=shards, is_shard=options.shard)
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
        parser.error(f"{options.shards} must be a list of shufflers, each with url and secret-file")
    except (OSError, ValueError) as error:  # A file is missing or invalid, or the port is in use.
        parser.error(str(error))
    # Opacus configures the root logger for warnings only; events of rounds need a handler here.
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
    log.propagate = False
    print(f"shuffler at {service.url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        service.serve_forever()


if __name__ == "__main__":
    main()
