"""Federated training: clients add noise to their own reports, and a shuffler mixes the reports.

``ShuffledSumReports``, ``SecretReports`` and ``GaussianReports`` define what clients send.
``Reporter`` is a client, ``Shuffler`` mixes the reports (in this process, or as a service), and
``Ledger`` is the server's account of the rounds. With ``SharedSumReports`` no party sees a report:
each is split into shares for several ``Aggregator`` services. None of this depends on a federated
learning framework.
"""

from __future__ import annotations

from opacus_shuffle.federated.ledger import Ledger
from opacus_shuffle.federated.remote_shuffler import RemoteShuffler
from opacus_shuffle.federated.report_formats import (
    GaussianReports,
    ReportFormat,
    SecretReports,
    ShuffledSumReports,
)
from opacus_shuffle.federated.reporter import FileBook, Reporter
from opacus_shuffle.federated.secret_shares import Aggregation, Aggregator, SharedSumReports
from opacus_shuffle.federated.shuffler import RefusedReportError, ReleasedRound, Shuffler
from opacus_shuffle.federated.shuffler_service import ShufflerService

__all__ = [
    "Aggregation",
    "Aggregator",
    "FileBook",
    "GaussianReports",
    "Ledger",
    "RefusedReportError",
    "ReleasedRound",
    "RemoteShuffler",
    "ReportFormat",
    "Reporter",
    "SecretReports",
    "SharedSumReports",
    "ShuffledSumReports",
    "Shuffler",
    "ShufflerService",
]
