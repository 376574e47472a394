"""The same training with Flower's SecAgg+ in the place of a shuffler: sums of bits at the same epsilon.

python tutorials/federated/secure_aggregation.py --clients 20 --rounds 2
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow
from shuffled_app.task import DELTA, Network, accuracy, as_record, report_format, trained

from opacus_shuffle.federated import Ledger
from opacus_shuffle.federated.flower import LocalGrid
from opacus_shuffle.federated.flower.secure_sums import (
    Arrays,
    SecureSumClient,
    SecureSums,
    SecureSumStrategy,
)


def main() -> None:
    """Train, and say what came out and what it cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--missing", type=int, default=2, help="clients that need not be there")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--noise-multiplier", type=float, default=3.0, help="of the sum, over the clipping norm"
    )
    options = parser.parse_args()

    reports = report_format(
        num_users=options.clients,
        rounds=options.rounds,
        noise_multiplier=options.noise_multiplier,
        min_reports=options.clients - options.missing,
    )
    # No coordinate of the sum of all updates is larger than 5 clipping norms; a larger one would
    # wrap around.
    sums = SecureSums(reports, largest_coordinate=5 * reports.max_norm, simulated=True)
    initial = as_record(Network())
    names = list(initial.keys())

    def client(context: Context) -> Client:
        def train(weights: Arrays) -> Arrays:
            arrays = ArrayRecord(dict(zip(names, map(Array, weights), strict=True)))
            return trained(
                arrays, int(context.node_config["partition-id"]), options.clients
            ).to_numpy_ndarrays()

        # Only a simulation needs no book on a disk, and nobody watches how long its clients take.
        return SecureSumClient(
            sums, context, train, max_rounds=options.rounds, book=None, always_train=False
        ).to_client()

    ledger = Ledger(reports, sums, delta=DELTA)
    strategy = SecureSumStrategy(ledger, initial.to_numpy_ndarrays())
    context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
    config = ServerConfig(num_rounds=ledger.affordable(options.rounds))
    server = LegacyContext(context, config, strategy)
    grid = LocalGrid(ClientApp(client_fn=client, mods=[sums.mod]), options.clients)
    DefaultWorkflow(fit_workflow=sums.workflow())(grid, server)
    final = ArrayRecord(dict(zip(names, map(Array, strategy.weights), strict=True)))
    print(
        f"{options.clients} clients, {ledger.round} rounds, accuracy {accuracy(final):.1%}, "
        f"modulus {sums.modulus}"
    )
    print(ledger.report())


if __name__ == "__main__":
    main()
