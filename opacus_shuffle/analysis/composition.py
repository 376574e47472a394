r"""Converts the RDP of many rounds to one (ε, δ), over an adaptive grid of Rényi orders.

The conversion is Opacus's (Canonne et al. 2020), which is Lemma 2 of Liew and Takahashi's shuffle
Gaussian mechanism (SG). As a function of the order ε falls and then rises, so the grid of orders
grows until the minimum is inside. At SG's Table 1 setting orders up to 30 give no more than the
conversion's floor at order 30:

>>> from opacus_shuffle.analysis import composition, mean_ratio
>>> def one_round(orders):
...     return mean_ratio.compute_rdp(noise_multiplier=9.48, num_users=60_000, orders=orders)
>>> composition.epsilon_from_rdp(one_round, delta=1 / 60_000, orders=range(2, 31))[0].__round__(5)
0.2282
>>> epsilon, order = composition.epsilon_from_rdp(one_round, delta=1 / 60_000)
>>> round(epsilon, 8), order
(0.00140629, 1976.0)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable

import numpy as np

from opacus_shuffle.analysis.mean_ratio import MAX_ORDER, Vector
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.validation import renyi_orders

RELATIVE_ERROR = 1e-9
"""Every ε is enlarged by this fraction.

That is above the numerical error of the RDP (1e-10), so the ε shown is never too small.
"""

_LOW_ORDERS = 1 + np.exp2(-np.arange(20, 0, -0.25))
"""Orders in (1, 2), for a budget already so large that the best order lies close to 1."""

_FIRST_TOP = 64
"""The first grid ends here; each further one is twice as long."""


class OrderCapWarning(UserWarning):
    """The best Rényi order exceeds the largest computed one, so ε is valid but not smallest."""


def epsilon_from_rdp(
    rdp: Callable[[Vector], Vector], *, delta: float, orders: Iterable[float] | None = None
) -> tuple[float, float]:
    """Returns the smallest ε that the RDP curve gives at δ, and the order that gives it.

    Args:
        rdp: Maps an array of orders to the composed RDP at them, same shape; may not return NaN.
        delta: δ in (0, 1).
        orders: Fixed orders in (1, 16384] (then the best of them is taken, inside or at the edge).
            By default the grid grows until the best order is inside it, up to 16384.

    Returns:
        ``(epsilon, order)``, ε rounded up and never negative. ``inf`` never appears.

    Raises:
        ValueError: If an argument is out of range or the RDP is not finite.

    Source: SG ICLR Lemma 2, as :func:`opacus.accountants.analysis.rdp.get_privacy_spent` has it.
    """
    if orders is not None:
        return _convert(rdp, renyi_orders(orders, maximum=MAX_ORDER), delta)
    top = _FIRST_TOP
    while True:
        epsilon, order = _convert(
            rdp, np.concatenate([_LOW_ORDERS, np.arange(2.0, top + 1)]), delta
        )
        if order < top:
            return epsilon, order
        if top >= MAX_ORDER:
            warnings.warn(
                f"the best Rényi order lies beyond the largest computed, {MAX_ORDER}: "
                f"epsilon={round_up(epsilon)} is valid, a smaller one may hold (it is close to the "
                "conversion's floor, log(1/delta)/order)",
                OrderCapWarning,
                stacklevel=3,
            )
            return epsilon, order
        top = min(2 * top, MAX_ORDER)


def _convert(rdp: Callable[[Vector], Vector], orders: Vector, delta: float) -> tuple[float, float]:
    """Returns the smallest ε over fixed orders, rounded up, and its order."""
    values = np.asarray(rdp(orders), dtype=np.float64)
    if not np.all(np.isfinite(values)):
        raise ValueError(
            f"the RDP is not finite at order {orders[~np.isfinite(values)][0]:g}; use a larger "
            "noise_multiplier"
        )
    converted = (
        values - (math.log(delta) + np.log(orders)) / (orders - 1) + np.log((orders - 1) / orders)
    )
    best = int(np.argmin(converted))
    epsilon, order = float(converted[best]), float(orders[best])
    return (math.nextafter(epsilon * (1 + RELATIVE_ERROR), math.inf) if epsilon > 0 else 0.0), order
