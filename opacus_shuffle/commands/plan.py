"""``opacus-shuffle plan``: what noise a budget costs with each kind of trust, before training."""

from __future__ import annotations

from typing import Any

from opacus_shuffle.accountants.plan import plan


def print_plan(options: dict[str, Any]) -> tuple[dict[str, Any], object]:
    """Returns the table of what a budget costs with each kind of trust."""
    found = plan(**options)
    return found.to_dict(), found
