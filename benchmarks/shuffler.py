"""Measures reports a second and memory of the shuffler, a client and the server by format.

Run ``python benchmarks/shuffler.py``, some five minutes; ``--clients 1000 --dimension 26010``
selects one size. Each row is a fresh process in which all clients of one round report, one after
the other. ``taken`` is the time that the shuffler needs to check, digest and store a report,
``closed`` the time to mix the round, ``server`` the time of the estimate, and ``client`` the time
of a client's clipping, noise and packing. The baseline adds the same number of vectors of 32-bit
floats in NumPy, as a server without privacy does; ``ratio`` is the shuffler's time for the round,
divided by the baseline. Memory is that of the round, without the imports. Finally, clients send
their reports to a shuffler in another process over HTTP on the loopback device, from eight threads.

>>> run("counts", clients=20, dimension=50)["bytes"]
100
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from opacus_shuffle.federated import (
    GaussianReports,
    RemoteShuffler,
    ReportFormat,
    SecretReports,
    ShuffledSumReports,
    Shuffler,
    ShufflerService,
)

SIZES = [
    (1_000, 26_010),
    (10_000, 26_010),
    (100_000, 26_010),
    (1_000_000, 1_000),
    (1_000, 1_000_000),
]
MOST = 3e9
"""Largest size of a round's reports in bytes; larger rounds are skipped."""
SAMPLES = 16
"""Number of different reports, which the clients send in turn."""


def format_of(kind: str, *, clients: int, dimension: int) -> ReportFormat:
    """Returns the format, with a tenth of the clients participating."""
    common: dict[str, Any] = {
        "dimension": dimension,
        "max_norm": 1.0,
        "num_users": clients,
        "sample_rate": 0.1,
    }
    if kind == "gaussian":
        return GaussianReports(**common, noise_multiplier=1.0)
    if kind == "secret":
        return SecretReports(**common, noise_multiplier=1.0)
    return ShuffledSumReports(**common, noise_multiplier=2.0, delta=1e-6, rounds=100)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of a call and its result."""
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def run(kind: str, *, clients: int, dimension: int) -> dict[str, float]:
    """Runs one round of all clients in this process and returns seconds, bytes and MiB."""
    reports = format_of(kind, clients=clients, dimension=dimension)
    vector = torch.randn(dimension, generator=torch.Generator().manual_seed(0))
    drawn = clients // 10  # which clients participate
    client, sent = timed(lambda: [reports.encode(1, vector) for _ in range(SAMPLES)])
    absent = reports.encode(1, None)
    summands = [np.frombuffer(bytes(4 * dimension), "<f4") for _ in range(SAMPLES)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shuffler = Shuffler(reports)
    shuffler.open_round(1)

    def take() -> None:
        for number in range(clients):
            shuffler.submit(str(number), sent[number % SAMPLES] if number < drawn else absent)

    taken, _ = timed(take)
    closed, released = timed(lambda: shuffler.close_round(1))
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    server, _ = timed(lambda: reports.estimate(released.mixed, released.num_reports))
    total = np.zeros(dimension)
    adding, _ = timed(
        lambda: [np.add(total, summands[number % SAMPLES], out=total) for number in range(clients)]
    )
    return {
        "bytes": reports.bytes_per_report,
        "client": client / SAMPLES,
        "taken": taken / clients,
        "closed": closed,
        "server": server,
        "ratio": (taken + closed) / adding,
        "memory": memory,
    }


def serve(kind: str, clients: int, dimension: int, url: Any) -> None:
    """Serves a shuffler over HTTP until the process is terminated."""
    service = ShufflerService(
        Shuffler(format_of(kind, clients=clients, dimension=dimension)),
        clients=[secret_of(number) for number in range(clients)],
        server=secret_of(clients),
    )
    url.put(service.url)
    service.serve_forever()


def secret_of(number: int) -> str:
    """Returns the credential of a client in this benchmark."""
    return f"the-secret-of-number-{number}"


def over_http(kind: str, *, clients: int, dimension: int) -> float:
    """Returns the seconds of a report from a client's call to the response, eight at a time."""
    context = multiprocessing.get_context("spawn")
    urls = context.Queue()
    process = context.Process(target=serve, args=(kind, clients, dimension, urls), daemon=True)
    process.start()
    url = urls.get(timeout=120)
    server_format = format_of(kind, clients=clients, dimension=dimension)
    report = server_format.encode(1, torch.ones(dimension))
    server = RemoteShuffler(url, secret_of(clients))
    server.open_round(1, server_format.fingerprint)
    with ThreadPoolExecutor(8) as pool:
        seconds, _ = timed(
            lambda: list(
                pool.map(
                    lambda number: RemoteShuffler(url, secret_of(number)).submit(report),
                    range(clients),
                )
            )
        )
    assert server.close_round(1).num_reports == clients
    process.terminate()
    return seconds / clients


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int)
    parser.add_argument("--dimension", type=int)
    parser.add_argument("--only-http", action="store_true")
    options = parser.parse_args()
    sizes = (
        []
        if options.only_http
        else SIZES
        if options.clients is None
        else [(options.clients, options.dimension or 26_010)]
    )
    context = multiprocessing.get_context("spawn")
    heads = ("client", "taken", "reports/s", "closed", "server", "ratio", "memory")
    print(
        f"{'clients':>9}{'dimension':>10} {'format':9}{'bytes':>9}"
        + "".join(f"{each:>10}" for each in heads)
    )
    for clients, dimension in sizes:
        for kind in ("counts", "gaussian", "secret"):
            if kind != "counts" and 0.4 * clients * dimension > MOST:
                continue
            with context.Pool(1) as pool:
                row = pool.apply(run, (kind,), {"clients": clients, "dimension": dimension})
            print(
                f"{clients:>9,}{dimension:>10,} "
                f"{kind:9}{row['bytes']:>9,.0f}{1e3 * row['client']:>7.1f} ms"
                f"{1e6 * row['taken']:>7.0f} us{1 / row['taken']:>10,.0f}{row['closed']:>8.2f} "
                f"s{1e3 * row['server']:>7.1f} ms"
                f"{row['ratio']:>10.1f}{row['memory']:>6,.0f} MiB",
                flush=True,
            )
    for kind in ("counts", "gaussian", "secret"):
        seconds = over_http(kind, clients=1_000, dimension=26_010)
        print(
            f"over HTTP {1_000:>9,}{26_010:>10,} {kind:9}{1e6 * seconds:>7.0f} us a report, "
            f"{1 / seconds:,.0f} a second"
        )


if __name__ == "__main__":
    main()
