"""What every picture keeps: all of it on its canvas, and no legend or title on the curves."""

from __future__ import annotations

from typing import Any


def check_layout(figure: Any) -> None:
    """Draws a figure, and looks at the boxes of its axes, titles and legends."""
    figure.canvas.draw()
    canvas = figure.bbox.padded(1)  # of rounding to pixels
    for axes in figure.axes:
        inside = axes.get_tightbbox()
        assert canvas.x0 <= inside.x0 < inside.x1 <= canvas.x1
        assert canvas.y0 <= inside.y0 < inside.y1 <= canvas.y1
        frame = axes.get_window_extent()
        assert frame.width > figure.bbox.width / 3 / len(figure.axes)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, axes.get_legend()):
            if text is not None:
                assert not frame.padded(-1).overlaps(text.get_window_extent())
