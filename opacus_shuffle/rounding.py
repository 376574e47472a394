"""Numbers as text, never below the number.

>>> round_up(0.00140628), round_up(634.201), round_up(123456.1), round_up(0.0)
('0.001407', '634.3', '123457', '0')
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal


def round_up(value: float, digits: int = 4) -> str:
    """A finite number in ``digits`` significant digits, or as a whole number if that takes more."""
    exact = Decimal(value)
    places = max(digits - 1 - exact.adjusted(), 0) if exact else 0
    return f"{exact.quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING):f}"
