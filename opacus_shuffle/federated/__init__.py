"""Federated training in the shuffle model: clients that noise their own reports, and a shuffler between them and the server.

The parts know nothing of any framework: ``GaussianReports`` and ``BitSums`` say what clients send,
``Reporter`` is a client, ``Shuffler`` the party that mixes (in this process, or behind a network
interface), ``Ledger`` the server's book of rounds.
"""

from __future__ import annotations

from opacus_shuffle.federated.bit_sums import BitSums
from opacus_shuffle.federated.gaussian_reports import GaussianReports
from opacus_shuffle.federated.ledger import Ledger
from opacus_shuffle.federated.report_format import ReportFormat
from opacus_shuffle.federated.reporter import FileBook, Reporter
from opacus_shuffle.federated.shuffler import RefusedReportError, Released, Shuffler
from opacus_shuffle.federated.shuffler_service import FarShuffler, ShufflerService

__all__ = [
    "BitSums",
    "FarShuffler",
    "FileBook",
    "GaussianReports",
    "Ledger",
    "RefusedReportError",
    "Released",
    "ReportFormat",
    "Reporter",
    "Shuffler",
    "ShufflerService",
]
