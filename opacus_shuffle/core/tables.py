r"""Tables, wrapped paragraphs and suggestions as text, for printed results and messages.

>>> rows = [("certified", "0.25"), ("pair", "12.5")]
>>> print("\n".join(text_table(("bound", "epsilon"), rows, right=("epsilon",))))
bound      epsilon
---------  -------
certified     0.25
pair          12.5
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Collection, Mapping, Sequence

WIDTH = 80
"""Characters of a printed line."""


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()
) -> list[str]:
    """Returns the lines of a table: a head, a rule and the rows, with columns two spaces apart.

    Args:
        head: The names of the columns.
        rows: The cells of each row.
        right: Names of the columns that are aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def paragraph(text: str, *, term: str = "", indent: int = 0) -> list[str]:
    """Returns wrapped lines of at most ``WIDTH`` characters.

    With a ``term`` they form a glossary entry: the text is indented by ``indent``.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{term:<{indent}}",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def did_you_mean(word: str, corrections: Mapping[str, str], *, similarity: float = 0.6) -> str:
    """Returns a suggestion for a misspelt word, or an empty text if no word is similar.

    Args:
        word: The misspelt word.
        corrections: Maps each valid word, in lower case, to the text to suggest.
        similarity: The least ratio of matching letters, from 0 to 1 (that of :mod:`difflib`).
    """
    close = difflib.get_close_matches(word.lower(), corrections, 1, similarity)
    return f" (did you mean {corrections[close[0]]}?)" if close else ""
