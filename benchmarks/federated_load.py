"""Measures the load on shuffler processes over HTTP, with and without attackers.

Run ``python benchmarks/federated_load.py``, some minutes. 2,000 clients, each with its own secret
and connection, report to ``python -m opacus_shuffle.federated.serve`` running as 1, 4 and 16
processes; the first process has the others as its ``--shards``. ``CPU`` is the CPU time of all
processes for a report, by Linux's process clocks. ``x one`` is this time divided by that of one
process in the same run. For ``reports/s`` the clients use the same cores. The benchmark compares
the result of every round with the sum of the reports that were sent.

``--tls ec`` and ``--tls rsa`` use a certificate of that type, ``--dimension`` and ``--clients`` set
other sizes, and ``--at-once`` sets how many clients report at a time. ``--attack`` adds attackers:
``silent`` opens 500 connections that send nothing, ``strangers`` runs 40 senders without a secret
that send continuously, and ``slow`` sends 400 request bodies of 200 clients a byte at a time. An
attacker whose connection is closed reconnects. ``--in-process`` runs a round of the same clients
without HTTP, and ``--secrets`` a service with the same number of secrets. ``--versions FOLDER ...``
compares versions of the package in folders such as those created by ``git worktree add``.

>>> shard_of(20, 50, processes=2, number=0)[0].num_reports
10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import re
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from opacus_shuffle.federated import RemoteShuffler, ShuffledSumReports, Shuffler, ShufflerService

ROUND = 1
SERVER = "the-secret-of-the-server"
KINDS = {"rsa": ["rsa:2048"], "ec": ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]}
SAMPLES = 64
"""Number of different reports, which the clients send in turn."""
PIECES = {"strangers": 65_536, "slow": 1}
"""Bytes that an attacker sends at a time: the first every 10 ms, the second every second."""
ATTACKERS = {"silent": 500, "strangers": 40, "slow": 400}


def sums_of(clients: int, dimension: int, others: int = 0) -> ShuffledSumReports:
    """Returns the format for the reporting clients and for others that may report."""
    common: dict[str, Any] = {"max_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-6}
    sizes = {"num_users": clients + others, "min_reports": clients, "dimension": dimension}
    return ShuffledSumReports(**sizes, sample_rate=0.1, rounds=100, **common)


def drawn_reports(reports: ShuffledSumReports) -> tuple[list[bytes], np.ndarray]:
    """Returns reports of random counts, and the counts, shape (SAMPLES, d)."""
    header = reports.encode(ROUND, None)[: reports.report_size - reports.bytes_per_report]
    counts = np.random.default_rng(0).integers(
        0, reports.bits + 1, (SAMPLES, reports.dimension), dtype=np.int64
    )
    size = reports.bytes_per_report // reports.dimension
    return [header + each.astype(f"<u{size}").tobytes() for each in counts], counts


def check_sum(reports: ShuffledSumReports, released: Any, counts: np.ndarray, senders: int) -> None:
    """Compares the result with the reports that were sent."""
    times = np.bincount(np.arange(senders) % SAMPLES, minlength=SAMPLES)
    assert released.num_reports == senders, released.num_reports
    assert np.array_equal(np.frombuffer(released.mixed, "<i8"), times @ counts), "another sum"


def secret_of(number: int) -> str:
    """Returns the credential of a client in this benchmark."""
    return f"the-secret-of-number-{number:08d}"


def of_process(process: int) -> dict[str, float]:
    """Returns the CPU seconds and the MiB of a process."""
    peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return {
        "cpu": time.clock_gettime(~process << 3 | 2),  # the result of clock_getcpuclockid
        "memory": int(peak[1]) / 1024 if peak else 0.0,
    }


def certificate_of(kind: str, folder: Path) -> str:
    """Returns the file of a certificate for this machine; the file of its key ends with .key."""
    file = str(folder / f"{kind}.crt")
    made = ["openssl", "req", "-x509", "-newkey", *KINDS[kind], "-nodes", "-subj", "/CN=me"]
    files = ["-keyout", f"{file}.key", "-out", file, "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, *files], check=True, capture_output=True)
    return file


@contextlib.contextmanager
def serving(
    reports: ShuffledSumReports, processes: int, tls: str | None
) -> Iterator[dict[str, Any]]:
    """Runs processes that share the clients; the first one has the others as its shards."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ended:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(reports.settings))
        certificate = certificate_of(tls, folder) if tls else None
        options = ["--settings", str(folder / "settings.json"), "--port", "0"]
        if certificate:
            options += ["--certificate", certificate, "--key", f"{certificate}.key"]

        def started(number: int, *more: str) -> subprocess.Popen[str]:
            mine = (secret_of(each) for each in range(number, reports.num_users, processes))
            (folder / f"clients{number}").write_text("\n".join(mine))
            (folder / f"server{number}").write_text(SERVER + str(number))
            shown = ["--secrets", f"{folder}/clients{number}"]
            shown += ["--server-secret", f"{folder}/server{number}"]
            command = [sys.executable, "-m", "opacus_shuffle.federated.serve"]
            process = subprocess.Popen(
                [*command, *options, *shown, *more],
                cwd=name,  # otherwise Python would import modules from this folder
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            ended.callback(process.wait)
            ended.callback(process.terminate)
            return process

        def url_of(process: subprocess.Popen[str]) -> str:
            return process.stdout.readline().split()[-1]  # type: ignore[union-attr]

        start = time.perf_counter()
        parts = [started(number, "--shard") for number in range(1, processes)]
        urls = [url_of(part) for part in parts]
        if parts:
            shard_of = [
                {"url": url, "secret-file": f"{folder}/server{number}", "certificate": certificate}
                for number, url in enumerate(urls, 1)
            ]
            (folder / "shards.json").write_text(json.dumps(shard_of))
        lead = started(0, *(["--shards", f"{folder}/shards.json"] if parts else []))
        urls.insert(0, url_of(lead))
        yield {
            "urls": urls,
            "pids": [lead.pid, *(part.pid for part in parts)],
            "certificate": certificate,
            "server": RemoteShuffler(urls[0], SERVER + "0", certificate=certificate),
            "start": time.perf_counter() - start,
        }


async def ask(url: str, tls: Any, secret: str, body: bytes) -> bytes:
    """Sends a report over its own connection and returns the first line of the response."""
    address = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=tls)
    try:
        head = f"POST /report HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Authorization: Bearer {secret}\r\n\r\n".encode() + body)
        return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def report_all(
    urls: list[str], tls: Any, sent: list[bytes], clients: range, at_once: int
) -> dict[str, Any]:
    """Every client's report, so many at a time; seconds of each, and how many asked again."""
    numbers = iter(clients)
    seconds, again = [], 0

    async def some() -> None:
        nonlocal again
        for number in numbers:
            start = time.perf_counter()
            url, body = urls[number % len(urls)], sent[number % SAMPLES]
            for attempts_left in (3, 2, 1, 0):  # as RemoteShuffler does
                answer = b""
                with contextlib.suppress(OSError):
                    answer = await asyncio.wait_for(ask(url, tls, secret_of(number), body), 60)
                if b" 204 " in answer:
                    break
                assert attempts_left, f"client {number} was answered {answer!r}"
                again += 1
                await asyncio.sleep(random.uniform(0.1, 1.0))
            seconds.append(time.perf_counter() - start)

    await asyncio.gather(*(some() for _ in range(at_once)))
    return {"seconds": seconds, "again": again}


def attack(
    kind: str, url: str, certificate: str | None, reports: ShuffledSumReports, ready: Any
) -> None:
    """Attacks a shuffler until this process is terminated."""
    tls = ssl.create_default_context(cafile=certificate) if certificate else None
    address = urllib.parse.urlsplit(url)

    async def one(number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                # A silent attacker does not start a TLS handshake, either.
                context = None if kind == "silent" else tls
                reader, writer = await asyncio.open_connection(
                    address.hostname, address.port, ssl=context
                )
                shown = secret_of(reports.min_reports + number // 2)
                secret = shown if kind == "slow" else "nobody's-secret-at-all"
                size = f"Content-Length: {reports.report_size}"
                head = f"POST /report HTTP/1.1\r\nHost: me\r\n{size}\r\n"
                if kind != "silent":
                    writer.write(f"{head}Authorization: Bearer {secret}\r\n\r\n".encode())
                try:
                    while not (writer.is_closing() or reader.at_eof()):
                        await asyncio.sleep(0.01 if kind == "strangers" else 1)
                        writer.write(b"" if kind == "silent" else bytes(PIECES[kind]))
                        await writer.drain()
                finally:
                    writer.close()
            await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        attackers = [asyncio.create_task(one(number)) for number in range(ATTACKERS[kind])]
        await asyncio.sleep(2)
        ready.set()
        await asyncio.gather(*attackers)

    asyncio.run(all_of_them())


def load(
    reports: ShuffledSumReports,
    processes: int,
    *,
    tls: str | None = None,
    at_once: int = 200,
    attacked_by: str | None = None,
) -> dict[str, float]:
    """Runs one round over HTTP; returns its seconds and the shufflers' CPU time and memory."""
    sent, counts = drawn_reports(reports)
    clients = reports.min_reports
    with serving(reports, processes, tls) as served, contextlib.ExitStack() as ended:
        served["server"].open_round(ROUND, reports.fingerprint)
        trusting = ssl.create_default_context(cafile=served["certificate"]) if tls else None
        if attacked_by:
            context = multiprocessing.get_context("spawn")
            ready = context.Event()
            given = (attacked_by, served["urls"][0], served["certificate"], reports, ready)
            attacker = context.Process(target=attack, args=given)
            attacker.start()
            ended.callback(attacker.terminate)
            ready.wait()
        before = [of_process(each) for each in served["pids"]]
        mine = time.process_time()
        start = time.perf_counter()
        found = asyncio.run(report_all(served["urls"], trusting, sent, range(clients), at_once))
        taken = time.perf_counter() - start
        mine = time.process_time() - mine
        after = [of_process(each) for each in served["pids"]]
        closing = time.perf_counter()
        released = served["server"].close_round(ROUND)
        closing = time.perf_counter() - closing
        check_sum(reports, released, counts, clients)
        seconds = np.array(found["seconds"])
        return {
            "reports": released.num_reports,
            "start": served["start"],
            "rate": clients / taken,
            "cpu": sum(b["cpu"] - a["cpu"] for a, b in zip(before, after, strict=True)) / clients,
            "client": mine / clients,
            "memory": max(each["memory"] for each in after),
            "median": float(np.median(seconds)),
            "slowest": float(seconds.max()),
            "round": taken,
            "closed": closing,
            "again": found["again"],
        }


def serve_alone(format: ShuffledSumReports, certificate: str | None, url: Any) -> None:
    """Serves a shuffler in this process until it is terminated."""
    secrets = [secret_of(number) for number in range(format.num_users)]
    files = {"certificate": certificate, "key": certificate and f"{certificate}.key"}
    service = ShufflerService(Shuffler(format), clients=secrets, server=SERVER, **files)
    url.put(service.url)
    service.serve_forever()


def take_turns(clients: int, cases: list[tuple[int, str | None]]) -> None:
    """Lets 100 more clients report for each input line, a case's number; prints CPU per report."""
    context = multiprocessing.get_context("fork")  # every process imports the package once
    ready = []
    for dimension, certificate in cases:
        reports, url = sums_of(clients, dimension), context.Queue()
        given = (reports, certificate, url)
        process = context.Process(target=serve_alone, args=given, daemon=True)
        process.start()
        trusting = ssl.create_default_context(cafile=certificate) if certificate else None
        ready.append([process.pid, [url.get()], trusting, drawn_reports(reports)[0], 0])
        server = RemoteShuffler(ready[-1][1][0], SERVER, certificate=certificate)
        server.open_round(ROUND, reports.fingerprint)
    for line in sys.stdin:
        process, urls, trusting, sent, first = case = ready[int(line)]
        before = of_process(process)["cpu"]
        asyncio.run(report_all(urls, trusting, sent, range(first, first + 100), at_once=50))
        print((of_process(process)["cpu"] - before) / 100, flush=True)
        case[-1] += 100


def by_turns(versions: list[str], clients: int) -> None:
    """Compares versions of the package, whose services alternately take a hundred reports each."""
    with tempfile.TemporaryDirectory() as folder:
        certificates = [None, *(certificate_of(kind, Path(folder)) for kind in KINDS)]
        cases = [(dimension, each) for dimension in (1_000, 100_000) for each in certificates]
        children = {
            version: subprocess.Popen(
                [sys.executable, __file__, "--clients", str(clients), "--cases", json.dumps(cases)],
                env={**os.environ, "PYTHONPATH": version},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for version in versions
        }
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _turn in range(clients // 100):
            for number in range(len(cases)):
                for version, child in children.items():
                    print(number, file=child.stdin, flush=True)
                    said = child.stdout.readline()  # type: ignore[union-attr]
                    seconds[version, number].append(1e3 * float(said))
        for child in children.values():
            child.communicate()
    print(f"CPU of a report by turns, ms {'d':>7} {'tls':4} {'least':>6} {'median':>6}")
    for (version, number), found in seconds.items():
        dimension, file = cases[number]
        name, tls = Path(version).name, Path(file).stem if file else "-"
        print(f"{name:28} {dimension:>7,} {tls:4} {min(found):>6.3f} {np.median(found):>6.3f}")


class Done:
    """A shard whose clients have reported in another process."""

    simulated = True
    predictable: tuple[str, ...] = ()

    def __init__(self, released: Any) -> None:
        self.released = released

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Does nothing."""

    def forget_round(self, number: int) -> None:
        """Does nothing."""

    def close_round(self, number: int) -> Any:
        """Returns the shard's mixed result."""
        return self.released


def shard_of(clients: int, dimension: int, processes: int, number: int) -> tuple[Any, float, float]:
    """Runs the round of one shard's clients in this process; returns seconds and MiB."""
    reports = sums_of(clients, dimension)
    sent, _ = drawn_reports(reports)
    before = of_process(os.getpid())["memory"]
    start = time.process_time()
    shuffler = Shuffler(reports, is_shard=True)
    shuffler.open_round(ROUND)
    for each in range(number, clients, processes):
        shuffler.submit(str(each), sent[each % SAMPLES])
    released = shuffler.close_round(ROUND)
    memory = of_process(os.getpid())["memory"] - before
    return released, time.process_time() - start, memory


def without_http(clients: int, dimension: int, processes: int) -> str:
    """Runs one round of all clients in the given number of processes."""
    reports = sums_of(clients, dimension)
    with multiprocessing.get_context("spawn").Pool(min(processes, os.cpu_count() or 1)) as pool:
        start = time.perf_counter()
        made = functools.partial(shard_of, clients, dimension, processes)
        parts = pool.map(made, range(processes), chunksize=1)
        taken = time.perf_counter() - start
    lead = Shuffler(reports, shards=[Done(released) for released, _, _ in parts])
    lead.open_round(ROUND)
    start = time.perf_counter()
    released = lead.close_round(ROUND)
    check_sum(reports, released, drawn_reports(reports)[1], clients)
    closed = time.perf_counter() - start
    cpu, memory = sum(part[1] for part in parts), max(part[2] for part in parts)
    return (
        f"{processes:>3} processes: {1e6 * cpu / clients:.1f} us of CPU a report, "
        f"{memory:,.0f} MiB each, {taken:.0f} s with starts, closed in {1e3 * closed:.0f} ms"
    )


def with_secrets(reports: ShuffledSumReports) -> str:
    """Measures seconds and MiB to start a service with all clients' secrets, and of a round."""
    secrets = [secret_of(number) for number in range(reports.num_users)]
    said, report = [], reports.encode(ROUND, None)
    shuffler = Shuffler(reports)

    def note(name: str, start: float, memory: float) -> None:
        grown = resident() - memory
        said.append(f"{name}: {time.process_time() - start:.1f} s, {grown:,.0f} MiB")

    start, memory = time.process_time(), resident()
    service = ShufflerService(shuffler, clients=secrets, server=SERVER)
    note("start", start, memory)
    shuffler.open_round(ROUND)
    start, memory = time.process_time(), resident()
    for party in range(reports.num_users):
        shuffler.submit(str(party), report)
    note("a round's reports", start, memory)
    start, memory = time.process_time(), resident()
    shuffler.close_round(ROUND)
    note("its end", start, memory)
    service.shutdown()
    return "; ".join(said)


def resident() -> float:
    """Returns the memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=2_000)
    parser.add_argument("--dimension", type=int, default=1_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--tls", choices=KINDS, nargs="*", default=[])
    parser.add_argument("--attack", choices=ATTACKERS, nargs="*", default=[])
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--secrets", action="store_true")
    parser.add_argument("--cases", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--versions", nargs="*", help="folders with the package, to compare")
    options = parser.parse_args()
    reports = sums_of(
        options.clients, options.dimension, ATTACKERS["slow"] if options.attack else 0
    )
    if options.cases:
        return take_turns(options.clients, options.cases)
    if options.versions:
        return by_turns(options.versions, options.clients)
    print(f"{options.clients:,} clients, d = {reports.dimension:,}, {reports.report_size:,} bytes")
    if options.secrets:
        print(with_secrets(reports))
        return
    if options.in_process:
        for processes in options.processes:
            print(without_http(options.clients, options.dimension, processes), flush=True)
        return
    heads = ("reports/s", "CPU", "x one", "client", "memory", "start", "median", "slowest")
    print(
        f"{'processes':>9} {'tls':4}{'attack':9}"
        + "".join(f"{head:>10}" for head in (*heads, "round", "closed", "again"))
    )
    for tls in options.tls or [None]:
        first = None
        for processes, attacker in itertools.product(options.processes, [None, *options.attack]):
            row = load(reports, processes, tls=tls, at_once=options.at_once, attacked_by=attacker)
            first = first or row
            print(
                f"{processes:>9} {tls or '-':4}{attacker or '-':9}{row['rate']:>10,.0f}"
                f"{1e3 * row['cpu']:>7.3f} ms{row['cpu'] / first['cpu']:>10.2f}"
                f"{1e3 * row['client']:>7.3f} ms{row['memory']:>6,.0f} MiB{row['start']:>8.1f} s"
                f"{1e3 * row['median']:>7,.0f} ms{1e3 * row['slowest']:>7,.0f} ms"
                f"{row['round']:>8.1f} s{1e3 * row['closed']:>7.0f} ms{row['again']:>10}",
                flush=True,
            )


if __name__ == "__main__":
    main()
