"""What every picture keeps: all of it is seen, and no word lies on a curve or on another word."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from matplotlib.transforms import Bbox

WIDEST = 10.0  # inches: a notebook shows it whole
SMALLEST = 8.0  # pixels: the size of the smallest letters that are read without a glass


def check_layout(figure: Any) -> None:
    """Draws a figure, and looks at the boxes of its axes, bars, curves, legends and words."""
    from matplotlib.transforms import Bbox

    words = words_of(figure)
    assert max(figure.get_size_inches()) <= WIDEST, "the picture fits no page"
    frames = [axes.get_window_extent() for axes in figure.axes]
    panels, canvas = Bbox.union(frames), figure.bbox
    assert panels.width > 0.6 * canvas.width, "a third of the width is blank"
    assert panels.height > 0.6 * canvas.height, "a third of the height is blank"
    share = sum(frame.width * frame.height for frame in frames) / canvas.width / canvas.height
    assert share > 0.4, "the panels are slivers"
    for word, box in words:
        # A pixel more, of rounding.
        assert canvas.padded(1).count_contains(box.get_points()) == 2, f"{word} is cut off"
    for (word, box), (other, its_box) in itertools.combinations(words, 2):
        assert not box.overlaps(its_box), f"{word} lies on {other}"
    for axes, frame in zip(figure.axes, frames, strict=True):
        scales = {axes.get_xscale(), axes.get_yscale()}
        assert not (axes.patches and "log" in scales), "bars have no length on a logarithmic axis"
        grid = [*axes.get_xgridlines(), *axes.get_ygridlines()]
        for word, box in words:
            belongs = word is axes.get_legend() or word in axes.texts
            assert belongs or not box.overlaps(frame.padded(-1)), f"{word} lies on axes"
            # A legend in a frame of its own hides the grid, which numbers beside curves do not.
            marks = (*axes.lines, *axes.patches, *(grid if word in axes.texts else ()))
            for mark in marks if belongs and box.overlaps(frame) else ():
                path = mark.get_transform().transform_path(mark.get_path())
                on_it = path.intersects_bbox(box, filled=mark in axes.patches)
                assert not (mark.get_visible() and on_it), f"{word} lies on {mark}"


def words_of(figure: Any) -> list[tuple[Any, Bbox]]:
    """Draws a figure, and returns its legends and all words outside of them, with their boxes."""
    from matplotlib.text import Text

    drawn: list[Any] = []
    # What is drawn is asked of the drawing: axes keep labels of ticks out of sight, too.
    with mock.patch.object(Text, "draw", lambda text, renderer: drawn.append(text)):
        figure.draw_without_rendering()
    written = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    smallest = min(text.get_fontsize() for text in written) * figure.dpi / 72
    assert smallest >= SMALLEST, f"letters of {smallest:.1f} pixels"
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    inside = {text for legend in legends for text in legend.findobj(Text)}
    words = [*legends, *(text for text in written if text not in inside)]
    return [(word, word.get_window_extent()) for word in words]
