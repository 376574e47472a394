"""A thousand virtual clients train one network in this process, some seconds a round.

python tutorials/federated/simulate.py --clients 1000 --rounds 30
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from shuffled_app.task import DELTA, Network, accuracy, as_record, report_format, trained

from opacus_shuffle.federated import Ledger, Shuffler
from opacus_shuffle.federated.flower import LocalGrid, ReportMod, ShuffledStrategy


def main() -> None:
    """Train, and say what came out and what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--noise-multiplier", type=float, default=3.0, help="of the sum, over the clipping norm")
    parser.add_argument("--learning-rate", type=float, default=1.0, help="of the server")
    parser.add_argument("--book", help="file that the server's book of rounds is kept in, to go on from")
    options = parser.parse_args()

    reports = report_format(num_users=options.clients, rounds=options.rounds, noise_multiplier=options.noise_multiplier)
    shuffler = Shuffler(reports)
    mod = ReportMod(
        reports,
        lambda context, report: shuffler.submit(str(context.node_id), report),
        max_rounds=options.rounds,
        always_train=False,  # nobody watches how long a client of a simulation takes
    )
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = trained(message.content["arrays"], context.node_config["partition-id"], options.clients)
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    ledger = Ledger(reports, shuffler, delta=DELTA, path=options.book)
    result = ShuffledStrategy(ledger, learning_rate=options.learning_rate).start(
        grid=LocalGrid(app, options.clients),
        initial_arrays=as_record(Network()),
        num_rounds=options.rounds,
        evaluate_fn=lambda number, arrays: MetricRecord({"accuracy": accuracy(arrays)}),
    )
    print(f"{options.clients} clients, {ledger.round} rounds, accuracy {accuracy(result.arrays):.1%}")
    print(ledger.report())


if __name__ == "__main__":
    main()
