"""Federated training: clients noise their own reports, and a shuffler mixes them for the server.

The parts know nothing of any framework: ``BitSums``, ``SecretReports`` and ``GaussianReports`` say
what clients send, ``Reporter`` is a client, ``Shuffler`` the party that mixes (in this process, or
behind a network interface), ``Ledger`` the server's book of rounds. Where nobody may see a report,
``SharedBitSums`` splits it into shares, each of which goes to an ``Aggregator`` of its own.
"""

from __future__ import annotations

from opacus_shuffle.federated.far_shuffler import FarShuffler
from opacus_shuffle.federated.ledger import Ledger
from opacus_shuffle.federated.report_formats import (
    BitSums,
    GaussianReports,
    ReportFormat,
    SecretReports,
)
from opacus_shuffle.federated.reporter import FileBook, Reporter
from opacus_shuffle.federated.secret_shares import Aggregation, Aggregator, SharedBitSums
from opacus_shuffle.federated.shuffler import RefusedReportError, Released, Shuffler
from opacus_shuffle.federated.shuffler_service import ShufflerService

__all__ = [
    "Aggregation",
    "Aggregator",
    "BitSums",
    "FarShuffler",
    "FileBook",
    "GaussianReports",
    "Ledger",
    "RefusedReportError",
    "Released",
    "ReportFormat",
    "Reporter",
    "SecretReports",
    "SharedBitSums",
    "Shuffler",
    "ShufflerService",
]
