"""Federated training on Flower's Message API: ``pip install -e ".[federated]"``.

Clients use ``ReportMod`` and the server uses ``ShuffledStrategy``. ``AccountedStrategy`` and
``AccountedMod`` account for Flower's own differential privacy.
"""

from __future__ import annotations

from opacus_shuffle.core import imports

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError(
        imports.missing_extra("opacus_shuffle.federated.flower", "flwr", "federated")
    ) from error

from opacus_shuffle.federated.flower.accounted import AccountedMod, AccountedStrategy
from opacus_shuffle.federated.flower.shuffled_training import ReportMod, ShuffledStrategy

__all__ = ["AccountedMod", "AccountedStrategy", "ReportMod", "ShuffledStrategy"]
