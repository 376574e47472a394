"""The colours and line styles of all pictures: a bound looks the same in each of them.

The colours are those of Okabe and Ito, which are distinguishable with colour blindness. Every bound
also has its own dash pattern, marker or width, for printing in grey. The values are keyword
arguments of matplotlib's lines; this module does not import matplotlib.

>>> BOUND_STYLES["certified"]["color"] == TRUST_COLOURS["shuffler"]
True
"""

from __future__ import annotations

from typing import Any

BOUND_STYLES: dict[str, dict[str, Any]] = {
    "local": {"color": "#D55E00", "linestyle": (0, (1, 1))},
    "certified": {"color": "#0072B2", "linestyle": "-", "marker": "s"},
    "published": {"color": "#CC79A7", "linestyle": "-.", "marker": "^"},
    "pair": {"color": "#000000", "linestyle": "-", "marker": "o"},
    "shuffled_batches": {"color": "#E69F00", "linestyle": (0, (1, 2))},
    # Wide bands, visible on both sides of a curve that coincides with them, as the pair's often
    # does. Each is wider than the ones drawn above it.
    "composition": {"color": "#D55E00", "linestyle": "-", "linewidth": 4.0, "zorder": 1.6},
    "secure_aggregation": {"color": "#009E73", "linestyle": "-", "linewidth": 3.5, "zorder": 1.6},
    "central": {"color": "#999999", "linestyle": "-", "linewidth": 6.0, "zorder": 1.5},
    "poisson": {"color": "#BBBBBB", "linestyle": "-", "linewidth": 5.0, "zorder": 1.5},
}
"""The style of a bound's curve, by the name of the bound."""

TRUST_COLOURS = {
    "nobody": BOUND_STYLES["local"]["color"],
    "shuffler": BOUND_STYLES["certified"]["color"],
    "aggregation": BOUND_STYLES["secure_aggregation"]["color"],
    "server": BOUND_STYLES["central"]["color"],
}
"""The colour for each trusted party, by the last word of its name."""
