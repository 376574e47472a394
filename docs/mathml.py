"""Formulas as MathML, which browsers typeset themselves: no page needs a script from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)


def to_mathml(node: nodes.math | nodes.math_block, *, as_block: bool = False) -> str:
    """Returns a formula as MathML, or as typed, with a warning, where a word is unknown."""
    tex = node.astext().replace(r"\dots", r"\ldots")  # the first one docutils does not know
    try:
        return str(tex2mathml(tex, as_block=as_block))
    except (SyntaxError, ValueError) as error:  # in docutils before 0.22, and from then on
        logger.warning("%s in the formula %s", error, tex, location=node)
        return f"<code>{escape(tex)}</code>"


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Writes a formula within a line."""
    translator.body.append(to_mathml(node))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Writes a formula on lines of its own."""
    translator.body.append(f'<div class="math">{to_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the renderer, which conf.py chooses."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
