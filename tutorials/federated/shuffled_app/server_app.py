"""The server of the deployment: it asks nodes to train, and gets rounds from the shuffler."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from opacus_shuffle.federated import Ledger, RemoteShuffler
from opacus_shuffle.federated.flower import ShuffledStrategy
from shuffled_app.client_app import CLIENTS, ROUNDS
from shuffled_app.task import DELTA, Network, accuracy, as_record, report_format

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains, and writes down what came out and what it cost."""
    settings = context.run_config
    certificate = str(settings["certificate"]) or None
    secret = Path(str(settings["secret-file"])).read_text()
    shuffler = RemoteShuffler(str(settings["shuffler"]), secret, certificate=certificate)
    ledger = Ledger(report_format(), shuffler, delta=DELTA, path=str(settings["book"]) or None)
    result = ShuffledStrategy(ledger, min_nodes=CLIENTS).start(
        grid=grid,
        initial_arrays=as_record(Network()),
        num_rounds=ROUNDS - ledger.round + ledger.begun,  # what a process that ended has left
        evaluate_fn=lambda number, arrays: MetricRecord({"accuracy": accuracy(arrays)}),
    )
    print(f"{ledger.round} rounds, accuracy {accuracy(result.arrays):.1%}", flush=True)
    print(ledger.report(), flush=True)
