"""Numbers as text, rounded up (or down where the name says so).

>>> round_up(0.00140628), round_up(634.201), round_up(123456.1), round_up(0.0), round_up(1.2345e28)
('0.001407', '634.3', '123457', '0', '1.235E+28')
>>> plural(1, "round"), plural(2000, "round")
('1 round', '2,000 rounds')
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def round_up(value: float, digits: int = 4) -> str:
    """Returns a finite number as text with so many significant digits, rounded up.

    Large numbers keep all digits before the decimal point; extreme ones have an exponent.
    """
    exact = Decimal(value)
    if not exact:
        return "0"
    if not -9 <= exact.adjusted() < 16:
        return str(Context(prec=digits, rounding=ROUND_CEILING).plus(exact))
    places = max(digits - 1 - exact.adjusted(), 0)
    return f"{exact.quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING):f}"


def round_down(value: float, digits: int = 4) -> str:
    """Returns a finite number as text with so many significant digits, rounded down."""
    return f"{Context(prec=digits, rounding=ROUND_FLOOR).plus(Decimal(value)):f}" if value else "0"


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun, in the singular or plural."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
