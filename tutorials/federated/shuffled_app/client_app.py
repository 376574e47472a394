"""A client of the deployment: it trains on its own records, and sends its report to the shuffler alone."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from opacus_shuffle.federated import RemoteShuffler
from opacus_shuffle.federated.flower import ReportMod
from shuffled_app.task import SETTINGS, report_format, trained

# What this client agrees to is in its own program: no server changes it.
CLIENTS, ROUNDS = SETTINGS["num_users"], SETTINGS["rounds"]


def submit(context: Context, report: bytes) -> None:
    """Sends a report, with the secret in this node's file: a command line is seen by everyone."""
    settings = context.node_config
    certificate = str(settings.get("certificate", "")) or None
    secret = Path(str(settings["secret-file"])).read_text()
    RemoteShuffler(str(settings["shuffler"]), secret, certificate=certificate).submit(report)


def book(context: Context) -> str:
    """Where this node notes which rounds it has answered."""
    return str(context.node_config["book"])


app = ClientApp(mods=[ReportMod(report_format(), submit, max_rounds=ROUNDS, book=book)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains; the mod makes a report of what comes out."""
    arrays = trained(message.content["arrays"], int(context.node_config["partition-id"]), CLIENTS)
    return Message(RecordDict({"arrays": arrays}), reply_to=message)
