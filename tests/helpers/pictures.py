"""What every picture keeps: all of it is seen, and no word lies on a curve or on another word."""

import itertools
from typing import Any
from unittest import mock


def check_layout(figure: Any) -> None:
    """Draws a figure, and looks at the boxes of its axes, bars, curves, legends and words."""
    from matplotlib.transforms import Bbox

    words = words_of(figure)
    assert max(figure.get_size_inches()) <= 10, "a page or a notebook does not show it whole"
    frames, canvas = [axes.get_window_extent() for axes in figure.axes], figure.bbox
    panels, area = Bbox.union(frames), canvas.width * canvas.height
    filled = min(panels.width / canvas.width, panels.height / canvas.height)
    assert filled > 0.6, "a third of the picture is blank"
    assert sum(frame.width * frame.height for frame in frames) > 0.4 * area, "panels are slivers"
    for word, box in words:
        # One pixel more, of rounding.
        assert canvas.padded(1).count_contains(box.get_points()) == 2, f"{word} is cut off"
    for (word, box), (other, its_box) in itertools.combinations(words, 2):
        assert not box.overlaps(its_box), f"{word} lies on {other}"
    for axes, frame in zip(figure.axes, frames, strict=True):
        assert not (axes.patches and "log" in f"{axes.get_xscale()} {axes.get_yscale()}"), (
            "bars have no length on a logarithmic axis"
        )
        for word, box in words:
            belongs = word is axes.get_legend() or word in axes.texts
            assert belongs or not box.overlaps(frame.padded(-1)), f"{word} lies on axes"
            # A legend in a frame of its own hides the grid, which numbers beside curves do not.
            grid = (*axes.get_xgridlines(), *axes.get_ygridlines()) if word in axes.texts else ()
            for mark in (*axes.lines, *axes.patches, *grid) if belongs else ():
                if mark.get_visible() and box.overlaps(frame):
                    path = mark.get_transform().transform_path(mark.get_path())
                    assert not path.intersects_bbox(box, filled=mark in axes.patches), (
                        f"{word} lies on {mark}"
                    )


def words_of(figure: Any) -> list[tuple[Any, Any]]:
    """Draws a figure, and returns its legends and all words outside of them, with their boxes."""
    from matplotlib.text import Text

    drawn: list[Any] = []
    # What is drawn is asked of the drawing: axes keep labels of ticks out of sight, too.
    with mock.patch.object(Text, "draw", lambda text, renderer: drawn.append(text)):
        figure.draw_without_rendering()
    written = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    smallest = min(text.get_fontsize() * figure.dpi / 72 for text in written)
    assert smallest >= 8, f"letters of {smallest:.1f} pixels"
    legends = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    inside = {text for legend in legends for text in legend.findobj(Text)}
    words = [*legends, *(text for text in written if text not in inside)]
    return [(word, word.get_window_extent()) for word in words]
