"""Run by IPython when a notebook's kernel starts: it looks at every picture that is shown.

A picture that is not right is an error of its cell, as one of its assertions is.
"""


def check_every_picture() -> None:
    """Has matplotlib check a picture's layout before it writes it."""
    import sys
    from pathlib import Path

    from matplotlib.backend_bases import FigureCanvasBase

    sys.path.append(str(Path(__file__).parent.parent))
    from helpers.pictures import check_layout

    written = FigureCanvasBase.print_figure

    def print_figure(canvas, *arguments, **keywords):
        check_layout(canvas.figure)
        return written(canvas, *arguments, **keywords)

    FigureCanvasBase.print_figure = print_figure


check_every_picture()
del check_every_picture  # a notebook has its own names alone
