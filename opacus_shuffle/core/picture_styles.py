"""The colours and lines of all pictures, in one table: a bound looks the same wherever it is drawn.

The colours are Okabe and Ito's, which the colour-blind can tell apart. Every bound has a dash
pattern, a marker or a width of its own besides, for those who print in grey. Nothing is imported
here that draws: values are what matplotlib takes as keywords of a line.

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
    # Bands, which show on both sides of a curve that lies on them, as the pair's often does: each
    # is wider than the ones above it.
    "composition": {"color": "#D55E00", "linestyle": "-", "linewidth": 4.0, "zorder": 1.6},
    "secure_aggregation": {"color": "#009E73", "linestyle": "-", "linewidth": 3.5, "zorder": 1.6},
    "central": {"color": "#999999", "linestyle": "-", "linewidth": 6.0, "zorder": 1.5},
    "poisson": {"color": "#BBBBBB", "linestyle": "-", "linewidth": 5.0, "zorder": 1.5},
}
"""How a bound's curve is drawn, by the name of the bound."""

TRUST_COLOURS = {
    "nobody": BOUND_STYLES["local"]["color"],
    "shuffler": BOUND_STYLES["certified"]["color"],
    "aggregation": BOUND_STYLES["secure_aggregation"]["color"],
    "server": BOUND_STYLES["central"]["color"],
}
"""The colour of everything about one kind of trust, by the last word of who is trusted."""
