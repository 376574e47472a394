"""A thousand virtual clients train one network in this process, some seconds a round.

python tutorials/federated/simulate.py --clients 1000 --rounds 30

With --ray clients are in processes of Flower's own simulation, which takes most of a minute a round
for a thousand of them:

python tutorials/federated/simulate.py --ray --clients 20 --rounds 2
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from local_grid import LocalGrid
from shuffled_app.task import DELTA, Network, accuracy, as_record, report_format, trained

from opacus_shuffle.federated import Ledger, RemoteShuffler, ReportFormat, Shuffler, ShufflerService
from opacus_shuffle.federated.flower import ReportMod, ShuffledStrategy

NOISE = {"shuffled_sum_reports": 3.0, "secret_reports": 0.4}


def client_app(
    reports: ReportFormat, submit: Callable[[Context, bytes], None], *, clients: int, rounds: int
) -> ClientApp:
    """What every client runs."""
    # Only a simulation needs no book on a disk, and nobody watches how long its clients take.
    app = ClientApp(
        mods=[ReportMod(reports, submit, max_rounds=rounds, book=None, always_train=False)]
    )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = trained(
            message.content["arrays"], int(context.node_config["partition-id"]), clients
        )
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    return app


def main() -> None:
    """Train, and say what came out and what it cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--reports", choices=list(NOISE), default="shuffled_sum_reports", help="what clients send"
    )
    parser.add_argument(
        "--noise-multiplier",
        type=float,
        help="over the clipping norm: of the sum of bits (3.0), of each secret report (0.4)",
    )
    parser.add_argument("--learning-rate", type=float, default=1.0, help="of the server")
    parser.add_argument(
        "--book", help="file that the server's book of rounds is kept in, to go on from"
    )
    parser.add_argument(
        "--ray", action="store_true", help="clients in Ray's processes, the shuffler behind HTTP"
    )
    options = parser.parse_args()

    reports = report_format(
        kind=options.reports,
        num_users=options.clients,
        rounds=options.rounds,
        noise_multiplier=options.noise_multiplier or NOISE[options.reports],
    )
    shuffler = Shuffler(reports)
    ledger = Ledger(reports, shuffler, delta=DELTA, path=options.book)

    def serve(grid: Grid) -> None:
        result = ShuffledStrategy(
            ledger, learning_rate=options.learning_rate, min_nodes=options.clients
        ).start(
            grid=grid,
            initial_arrays=as_record(Network()),
            num_rounds=options.rounds,
            evaluate_fn=lambda number, arrays: MetricRecord({"accuracy": accuracy(arrays)}),
        )
        print(
            f"{options.clients} clients, {ledger.round} rounds, accuracy "
            f"{accuracy(result.arrays):.1%}"
        )
        print(ledger.report(), flush=True)

    sizes = {"clients": options.clients, "rounds": options.rounds}
    if not options.ray:
        app = client_app(
            reports, lambda context, report: shuffler.submit(str(context.node_id), report), **sizes
        )
        return serve(LocalGrid(app, options.clients))

    from flwr.simulation import run_simulation

    tokens = [secrets.token_hex() for _ in range(options.clients)]
    with ShufflerService(shuffler, clients=tokens, server=secrets.token_hex()).start() as service:
        url, server = service.url, ServerApp()

        def submit(context: Context, report: bytes) -> None:
            RemoteShuffler(url, tokens[int(context.node_config["partition-id"])]).submit(report)

        @server.main()
        def _(grid: Grid, context: Context) -> None:
            serve(grid)

        run_simulation(server, client_app(reports, submit, **sizes), options.clients)
        service.shutdown()


if __name__ == "__main__":
    main()
