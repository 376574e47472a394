"""Federated training on Flower's Message API: ``pip install -e ".[federated]"``.

``ReportMod`` is a client's, ``ShuffledStrategy`` the server's, ``AccountedStrategy`` and
``AccountedMod`` account for Flower's own differential privacy, and ``LocalGrid`` runs a
``ClientApp`` for thousands of virtual clients in this process, without Ray.
"""

from __future__ import annotations

from opacus_shuffle.core import extras

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError(
        extras.missing("opacus_shuffle.federated.flower", "flwr", "federated")
    ) from error

from opacus_shuffle.federated.flower.accounted import AccountedMod, AccountedStrategy
from opacus_shuffle.federated.flower.local_grid import LocalGrid
from opacus_shuffle.federated.flower.shuffled_training import ReportMod, ShuffledStrategy

__all__ = ["AccountedMod", "AccountedStrategy", "LocalGrid", "ReportMod", "ShuffledStrategy"]
