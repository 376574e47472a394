"""Small formats of reports, the secrets of clients and server, and rounds in which all report."""

import torch

from opacus_shuffle.federated import (
    GaussianReports,
    Ledger,
    SecretReports,
    ShuffledSumReports,
    Shuffler,
)

GAUSSIAN = GaussianReports(dimension=3, max_norm=1.0, noise_multiplier=1.0, num_users=6)
SUMS = ShuffledSumReports(
    dimension=3,
    max_norm=1.0,
    noise_multiplier=2.0,
    num_users=20,
    sample_rate=0.3,
    delta=1e-6,
    min_reports=10,
)
SECRET = SecretReports(
    dimension=3, max_norm=1.0, noise_multiplier=1.0, num_users=20, sample_rate=0.3
)
CLIENTS = [f"the-secret-of-client-{number}" for number in range(20)]
SERVER = "the-secret-of-the-server"


def all_report(
    shuffler: Shuffler, number: int, count: int | None = None, *, start: int = 0
) -> None:
    for sender in range(shuffler.format.num_users if count is None else count):
        shuffler.submit(str(start + sender), shuffler.format.encode(number, torch.zeros(3)))


def ledger_of(reports, shuffler=None, **options) -> Ledger:
    return Ledger(reports, shuffler or Shuffler(reports), **{"delta": 1e-5, **options})


def run_once(ledger: Ledger) -> None:
    ledger.run(lambda number: all_report(ledger.shuffler, number), lambda total: {"sum": total})
